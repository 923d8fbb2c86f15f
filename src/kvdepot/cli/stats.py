"""`kvdepot stats`: what a running daemon has done so far, and how it is, once.

`kvdepot top` shows the same again and again.
"""

import argparse
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Final

import kvdepot
from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, open_daemon
from kvdepot.core.units import format_bytes, format_count
from kvdepot.errors import DaemonError
from kvdepot.store.alerts import alerts
from kvdepot.store.metrics import derived, gpu_seconds_saved, hit_ratio, served_tokens, values

WIDTH_MIN: Final = 40
BAR: Final = 20
Stats = Mapping[str, Any]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "stats",
        description="What a running daemon has done since its start, and how it is. "
        "docs/metrics.md explains every number.",
    )
    add_daemon(parser)
    parser.add_argument(
        "--prometheus",
        action="store_true",
        help="print the metrics as Prometheus text; needs the extra http",
    )
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with open_daemon(args) as store:
        stats = answered(store.stats())
        text = kvdepot.metrics(store) if args.prometheus else ""
    if args.prometheus:
        output.data(text.rstrip())
    elif args.json:
        output.document(document(stats))
    else:
        for line in lines(stats, {}, width()):
            output.data(line)
    return 0


def answered(stats: dict[str, Any]) -> dict[str, Any]:
    """What the daemon said, or DaemonError where it said nothing."""
    if "tiers" not in stats:
        raise DaemonError("daemon", "does not answer", hint="look at its log; kvdepot serve")
    return stats


def document(stats: Stats) -> dict[str, Any]:
    """For --json: all there is, and what is derived from it."""
    return {
        **stats,
        "metrics": values(stats),
        "alerts": [alert.as_dict() for alert in alerts(stats)],
        "derived": derived(stats),
    }


def width() -> int:
    return max(WIDTH_MIN, shutil.get_terminal_size((80, 24)).columns)


def lines(stats: Stats, flows: Mapping[str, float], columns: int) -> Iterator[str]:
    """The whole screen; `flows` are bytes a second that each tier gives, where they are known."""
    for line in (
        *_head(stats),
        "",
        *_tiers(stats, flows),
        "",
        *_drives(stats),
        *_sessions(stats),
        *_prefixes(stats),
        *_alerts(stats),
    ):
        yield line if len(line) <= columns else line[: columns - 1] + "…"


def _head(stats: Stats) -> Iterator[str]:
    daemon = stats.get("daemon", {})
    clients, uptime = len(daemon.get("sessions", ())), duration(daemon.get("uptime_s", 0.0))
    yield (
        f"kvdepot {daemon.get('version', '')}, up {uptime}, {format_count(clients, 'client')}, "
        f"{format_count(stats['blocks'], 'block')}, {stats['leased']:,} leased"
    )
    ratio = hit_ratio(stats)
    hits = "no lookups yet" if ratio is None else f"hit ratio {ratio:.1%}"
    saved = f"{served_tokens(stats):,.0f} tokens given back"
    seconds = gpu_seconds_saved(stats)
    if seconds is not None:
        saved += f", {duration(seconds)} of GPU time saved"
    yield f"{hits}, {saved}"
    told = stats.get("first_tokens", {})
    if count := told.get("compared"):
        found, computed = told["seconds"] / count, told["recompute_seconds"] / count
        yield (
            f"first token after {found:.3g} s, {computed:.3g} s if all were computed "
            f"({format_count(count, 'prompt')})"
        )


def _tiers(stats: Stats, flows: Mapping[str, float]) -> Iterator[str]:
    counters, traffic = stats["counters"], stats.get("traffic", {})
    yield f"{'tier':7}{'fill':{BAR + 7}}{'used':>10}{'room':>10}{'given':>10}{'blocks':>11}"
    for name, tier in stats["tiers"].items():
        share = tier["used_bytes"] / max(1, tier["capacity_bytes"])
        bar = ("#" * round(BAR * share)).ljust(BAR, ".")
        given = format_bytes(traffic.get("served_bytes", {}).get(name, 0))
        if name in flows:
            given = output.rate(flows[name])
        yield (
            f"{name:7}{bar}{share:>5.0%}  {format_bytes(tier['used_bytes']):>10}"
            f"{format_bytes(tier['capacity_bytes']):>10}{given:>10}{tier['blocks']:>11,}"
        )
    got = ", ".join(f"{name} {counters.get(f'get_{name}', 0):,}" for name in stats["tiers"])
    yield f"blocks given back: {got}; missed {counters['get_miss']:,}"
    yield (
        f"stored {counters['put_stored']:,}, present {counters['put_present']:,}, "
        f"throttled {counters['put_throttled']:,}; {format_bytes(stats['dirty_bytes'])} wait "
        "to be written"
    )
    audit = stats.get("audit", {})
    if audit.get("compared") or audit.get("quarantined"):
        yield (
            f"audited {audit['compared']:,}, mismatched {audit['mismatched']:,}; "
            f"{format_count(len(audit['quarantined']), 'namespace')} in quarantine"
        )


def _drives(stats: Stats) -> Iterator[str]:
    found = [(n, drive) for n, tier in stats["tiers"].items() for drive in tier.get("drives", ())]
    for tier, drive in found:
        state = "ok" if drive.get("healthy", True) else f"DOWN: {drive.get('reason', '')}"
        state = "drained" if drive.get("drained") else state
        written = format_bytes((drive.get("written") or {}).get("bytes", 0))
        yield f"{tier} {drive.get('path', '')}: {state}, {written} written"
    if found:
        yield ""


def _sessions(stats: Stats) -> Iterator[str]:
    shown = stats.get("sessions_shown", {})
    if not shown.get("busy"):
        return
    yield f"{'session':32}{'turns':>7}{'blocks':>8}{'idle':>9}  tiers"
    busy, cold = shown["busy"], shown.get("cold", ())
    known = {(one["namespace"], one["name"]) for one in busy}
    for one in (*busy, *(each for each in cold if (each["namespace"], each["name"]) not in known)):
        held = " ".join(f"{tier} {blocks}" for tier, blocks in one["tiers"].items())
        idle, name = duration(one["idle_s"]), one["name"][:30]
        yield f"{name:32}{one['turns']:>7,}{one['blocks']:>8,}{idle:>9}  {held}"
    yield ""


def _prefixes(stats: Stats) -> Iterator[str]:
    shown = stats.get("prefixes_shown", ())
    if not shown:
        return
    yield f"{'shared prefix':20}{'sessions':>9}{'tokens':>10}{'bytes':>10}{'idle':>9}  tiers"
    for one in shown:
        held = " ".join(f"{tier} {blocks}" for tier, blocks in one["tiers"].items())
        size = format_bytes(max(one["bytes"].values(), default=0))
        yield (
            f"{one['prefix']:20}{one['sessions']:>9,}{one['tokens']:>10,}{size:>10}"
            f"{duration(one['idle_s']):>9}  {held or 'gone'}"
        )
    yield ""


def _alerts(stats: Stats) -> Iterator[str]:
    found = alerts(stats)
    if not found:
        yield "nothing is wrong"
    for alert in found:
        yield f"{alert.level}: {alert.what}"
        yield f"  do: {alert.do}"


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3.5 h, 2.1 d."""
    for limit, unit, size in ((100, "s", 1), (6000, "min", 60), (360000, "h", 3600)):
        if seconds < limit:
            shown = f"{seconds / size:.1f}" if unit == "h" else f"{seconds / size:.0f}"
            return f"{shown} {unit}"
    return f"{seconds / 86400:.1f} d"
