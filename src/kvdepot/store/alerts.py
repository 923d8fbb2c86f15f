"""Derives the faults of a store from `stats`, each with an action."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.core.units import format_bytes

_QUEUE_OLD_S: Final = 60.0
_SLOW_SHARE: Final = 0.5
_NEARLY_ALL: Final = 0.9
_LOOKUPS_ENOUGH: Final = 1000
_FIRST_TOKENS_ENOUGH: Final = 20
_LATER: Final = 1.1
Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alert:
    """A fault or fact for the operator."""

    level: str
    """`bad`: something is lost or stopped. `warn`: it may be soon. `info`: no fault."""
    what: str
    do: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def alerts(stats: Stats) -> list[Alert]:
    """Return the present faults, the worst first."""
    found = [*_audits(stats), *_drives(stats), *_queues(stats), *_counted(stats)]
    found += _traffic(stats)
    found += _first_tokens(stats)
    return sorted(found, key=lambda one: ("bad", "warn", "info").index(one.level))


def _drives(stats: Stats) -> Iterator[Alert]:
    for tier, facts in stats.get("tiers", {}).items():
        for drive in facts.get("drives", ()):
            path = drive.get("path", "")
            if drive.get("drained"):
                yield Alert("info", f"{tier}: {path} is drained", "it can be removed")
            elif drive.get("draining"):
                left = format_bytes(drive.get("used_bytes", 0))
                yield Alert("info", f"{tier}: {path} is being drained, {left} left", "wait")
            elif not drive.get("healthy", True):
                reason = drive.get("reason") or "no reason known"
                yield Alert(
                    "bad",
                    f"{tier}: {path} is down: {reason}",
                    f"check the drive; it is retried automatically. To give it up: "
                    f"kvdepot tiers drain {tier} {path}",
                )
            elif drive.get("full"):
                yield Alert(
                    "warn",
                    f"{tier}: the file system of {path} is full; new blocks are not written to it",
                    f"free space on the file system, or lower {tier}.capacity; it is retried "
                    "automatically",
                )
            elif (share := drive.get("of_profile")) and share < _SLOW_SHARE:
                yield Alert(
                    "warn",
                    f"{tier}: {path} reads at {share:.0%} of its measured speed",
                    "find what else uses the drive; replace it if it stays slow",
                )
            yield from _wear(tier, path, drive.get("written") or {})


def _wear(tier: str, path: str, written: Mapping[str, Any]) -> Iterator[Alert]:
    if "daily_bytes" in written and written.get("level_bytes", 1) <= 0:
        daily = format_bytes(written["daily_bytes"])
        yield Alert(
            "warn",
            f"{tier}: {path} has used up its write budget ({daily} a day)",
            f"new blocks are not written to it for now; raise {tier}.writes_per_day "
            "if the drive allows it",
        )


def _queues(stats: Stats) -> Iterator[Alert]:
    for tier, facts in stats.get("tiers", {}).items():
        oldest_s = facts.get("write_queue", {}).get("oldest_s", 0.0)
        if oldest_s > _QUEUE_OLD_S:
            waiting = format_bytes(facts["write_queue"]["bytes"])
            yield Alert(
                "warn",
                f"{tier}: {waiting} wait to be written, the oldest for {oldest_s:.0f} s",
                "the drives do not keep up: add one (kvdepot tiers add), or write less "
                "(write_mode)",
            )
        if facts.get("thrashing"):
            yield Alert(
                "warn",
                f"{tier}: promoted blocks evict blocks that would be hit",
                f"the tier is too small: raise {tier}.capacity or add a drive",
            )
    limit = stats.get("dirty_limit_bytes", 0)
    if limit and stats.get("dirty_bytes", 0) > _NEARLY_ALL * limit:
        yield Alert(
            "warn",
            "the write queue is full: new blocks are written later, or stay in memory",
            "add drives, raise dram.capacity or writeback.dirty_limit",
        )


def _counted(stats: Stats) -> Iterator[Alert]:
    counters = stats.get("counters", {})
    if corrupt := counters.get("quarantined"):
        yield Alert(
            "bad",
            f"corrupt copies dropped since the start: {corrupt:,}; none was served",
            "run kvdepot check to find the drive; check its log, and test the machine's memory",
        )
    if failed := counters.get("write_failed"):
        yield Alert(
            "warn",
            f"blocks that could not be written since the start: {failed:,}",
            "they are in memory only: check the drives and the daemon's log",
        )
    if unrecorded := counters.get("removal_unrecorded"):
        yield Alert(
            "bad",
            f"removals that could not be recorded since the start: {unrecorded:,}",
            "remove the blocks again before the next restart, or they may come back",
        )


def _audits(stats: Stats) -> Iterator[Alert]:
    for one in stats.get("audit", {}).get("quarantined", ()):
        yield Alert(
            "bad",
            f"namespace {one['namespace']} is in quarantine: a block computed again was off by "
            f"{one['error']:.3g} (tolerance {one['tolerance']:.3g}); its blocks are not served",
            "kvdepot audit list names the producer; kvdepot audit purge NAMESPACE removes its "
            "blocks, lift serves them again",
        )


def _traffic(stats: Stats) -> Iterator[Alert]:
    counters = stats.get("counters", {})
    if not stats.get("blocks") and not counters.get("put_stored") and stats.get("daemon"):
        attached = len(stats["daemon"].get("sessions", ()))
        if not attached:
            yield Alert("info", "no engine is attached", "docs/start.md says how to attach one")
    asked = stats.get("traffic", {}).get("lookups", {}).get("match", {})
    if asked.get("none", 0) >= _LOOKUPS_ENOUGH and not asked.get("found_blocks"):
        yield Alert(
            "warn",
            f"{asked['none']:,} lookups found nothing",
            "prompts do not repeat, or the model, its settings or the tenant's secret change "
            "between runs",
        )


def _first_tokens(stats: Stats) -> Iterator[Alert]:
    first = stats.get("first_tokens", {})
    count = first.get("compared", 0)
    if count < _FIRST_TOKENS_ENOUGH or first["seconds"] <= _LATER * first["recompute_seconds"]:
        return
    found, computed = first["seconds"] / count, first["recompute_seconds"] / count
    yield Alert(
        "warn",
        f"first tokens take {found:.3g} s; computing the whole prompts would take {computed:.3g} s",
        "a tier has become slow: check the measured speed of the drives and what else uses "
        "them; docs/troubleshoot.md, it was slow at 9:00",
    )
