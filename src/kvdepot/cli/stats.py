"""`kvdepot stats`: counters and health of a running daemon, once. `kvdepot top` shows them live."""

import argparse
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Final

import kvdepot
from kvdepot.cli import output
from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.tables import Table
from kvdepot.core.units import format_bytes, format_count, format_duration
from kvdepot.depot import Depot
from kvdepot.errors import DaemonError
from kvdepot.store.alerts import alerts
from kvdepot.store.metrics import derived, gpu_seconds_saved, hit_ratio, served_tokens, values

WIDTH_MIN: Final = 40
BAR: Final = 20
_NAME_WIDTH: Final = 30
Stats = Mapping[str, Any]


def run(store: Depot, args: argparse.Namespace) -> Answer | int:
    stats = read_stats(store)
    if args.prometheus:
        output.data(kvdepot.metrics(store).rstrip())
        return 0
    return Answer(document(stats), screen(stats))


def read_stats(store: Depot) -> dict[str, Any]:
    """The answer of the daemon, or DaemonError if it gave none."""
    stats = store.stats()
    if "tiers" not in stats:
        raise DaemonError("daemon", "does not answer", hint="see the log of kvdepot serve")
    return stats


def document(stats: Stats) -> dict[str, Any]:
    """The answer for --json: the stats, and the values that are derived from them."""
    return {
        **stats,
        "metrics": values(stats),
        "alerts": [alert.as_dict() for alert in alerts(stats)],
        "derived": derived(stats),
    }


def screen(stats: Stats, flows: Mapping[str, float] | None = None, columns: int = 0) -> str:
    """The stats as text, cut at `columns` (by default those of the terminal).

    `flows` are bytes a second that each tier serves; without them the totals are shown.
    """
    columns = columns or max(WIDTH_MIN, shutil.get_terminal_size((80, 24)).columns)
    tables = (tier_table(stats, flows or {}), session_table(stats))
    tiers, *others = (table.text(width=1 << 20) if table.rows else "" for table in tables)
    parts = [
        "\n".join(head(stats)),
        "\n".join([tiers, *counters(stats)]),
        "\n".join(drive_lines(stats)),
        *others,
        "\n".join(alert_lines(stats)),
    ]
    whole = "\n\n".join(filter(None, parts)).splitlines()
    return "\n".join(x if len(x) <= columns else x[: columns - 1] + "…" for x in whole)


def head(stats: Stats) -> Iterator[str]:
    daemon = stats.get("daemon", {})
    clients = format_count(len(daemon.get("sessions", ())), "client")
    yield (
        f"kvdepot {daemon.get('version', '')}, up {format_duration(daemon.get('uptime_s', 0.0))}, "
        f"{clients}, {format_count(stats['blocks'], 'block')}, {stats['leased']:,} leased"
    )
    ratio = hit_ratio(stats)
    hits = "no lookups yet" if ratio is None else f"hit ratio {ratio:.1%}"
    saved = f"{served_tokens(stats):,.0f} tokens given back"
    seconds = gpu_seconds_saved(stats)
    if seconds is not None:
        saved += f", {format_duration(seconds)} of GPU time saved"
    yield f"{hits}, {saved}"
    first = stats.get("first_tokens", {})
    if count := first.get("compared"):
        found, computed = first["seconds"] / count, first["recompute_seconds"] / count
        yield (
            f"first token after {found:.3g} s, {computed:.3g} s if all were computed "
            f"({format_count(count, 'prompt')})"
        )


def tier_table(stats: Stats, flows: Mapping[str, float]) -> Table:
    served = stats.get("traffic", {}).get("served_bytes", {})

    def fill(tier: Any) -> str:
        share = tier["used_bytes"] / max(1, tier["capacity_bytes"])
        return f"{'#' * round(BAR * share):.<{BAR}}{share:>5.0%}"

    def flow(tier: Any) -> str:
        name = tier["name"]
        return output.rate(flows[name]) if flows else format_bytes(served.get(name, 0))

    return Table.of(
        [{"name": name, **tier} for name, tier in stats["tiers"].items()],
        {
            "tier": "name",
            "fill": fill,
            "used": lambda tier: format_bytes(tier["used_bytes"]),
            "capacity": lambda tier: format_bytes(tier["capacity_bytes"]),
            "served": flow,
            "blocks": "blocks",
        },
    )


def counters(stats: Stats) -> Iterator[str]:
    counted, audit = stats["counters"], stats.get("audit", {})
    got = ", ".join(f"{name} {counted.get(f'get_{name}', 0):,}" for name in stats["tiers"])
    yield f"blocks given back: {got}; missed {counted['get_miss']:,}"
    yield (
        f"stored {counted['put_stored']:,}, present {counted['put_present']:,}, "
        f"throttled {counted['put_throttled']:,}; {format_bytes(stats['dirty_bytes'])} to be "
        "written"
    )
    if audit.get("compared") or audit.get("quarantined"):
        yield (
            f"audited {audit['compared']:,}, mismatched {audit['mismatched']:,}; "
            f"{format_count(len(audit['quarantined']), 'namespace')} in quarantine"
        )


def drive_lines(stats: Stats) -> Iterator[str]:
    for name, tier in stats["tiers"].items():
        for drive in tier.get("drives", ()):
            state = "ok" if drive.get("healthy", True) else f"DOWN: {drive.get('reason', '')}"
            state = "drained" if drive.get("drained") else state
            written = format_bytes((drive.get("written") or {}).get("bytes", 0))
            yield f"{name} {drive.get('path', '')}: {state}, {written} written"


def blocks_by_tier(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{tier} {blocks:,}" for tier, blocks in row["tiers"].items()) or "gone"


def session_table(stats: Stats) -> Table:
    """The busiest sessions, then those that were used longest ago."""
    shown = stats.get("sessions_shown", {})
    every = [*shown.get("busy", ()), *shown.get("cold", ())]
    once = {(row["namespace"], row["name"]): row for row in every}
    return Table.of(
        once.values(),
        {
            "session": lambda row: row["name"][:_NAME_WIDTH],
            "turns": "turns",
            "blocks": "blocks",
            "idle": lambda row: format_duration(row["idle_s"]),
            "tiers": blocks_by_tier,
        },
    )


def alert_lines(stats: Stats) -> Iterator[str]:
    found = alerts(stats)
    if not found:
        yield "no alerts"
    for alert in found:
        yield f"{alert.level}: {alert.what}"
        yield f"  do: {alert.do}"


COMMAND = Command(
    more="Counts since the start of the daemon. docs/metrics.md describes every number.",
    options=f"""
    --prometheus    print the metrics as Prometheus text; needs the extra http
    {DAEMON}
    """,
    run=on_daemon(run),
)
