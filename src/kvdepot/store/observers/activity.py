"""Counts lookups, blocks and latencies of a store: the source of its metrics."""

from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import Any, Final

from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.core.volume import TIER_NAMES
from kvdepot.store.events import (
    BlocksServed,
    Counted,
    Event,
    FirstTokenReported,
    LookedUp,
    Lost,
    Took,
)

LOWER_TIERS: Final = tuple(name for name in TIER_NAMES if name not in ("dram", "cxl"))
COUNTERS: Final = (
    "put_stored",
    "put_present",
    "put_throttled",
    "put_refused",
    # Stored blocks that were accepted while the write queue was full.
    "put_deferred",
    "put_bytes",
    *(f"get_{tier}" for tier in TIER_NAMES),
    "get_miss",
    "get_bytes",
    "promoted",
    # Read into memory because of a hint.
    "hinted",
    # Copied to a slower tier.
    "demoted",
    "written",
    "written_bytes",
    # Given up by write-back: in memory only.
    "write_failed",
    # Owed to a tier that was away: written when it worked again, or not at all.
    "owed_written",
    "owed_given_up",
    *(f"evicted_{tier}" for tier in TIER_NAMES),
    # Evicted blocks that no other drive accepted when theirs was drained.
    *(f"drained_{tier}" for tier in LOWER_TIERS),
    # Written again because their segment was reclaimed.
    *(f"moved_{tier}" for tier in LOWER_TIERS),
    # Not worth the wear of an SSD.
    "bypassed",
    # Not promoted to the SSDs because these thrash.
    "held_below",
    "reclaimed_segments",
    # Copies dropped because their checksum or identity did not match.
    "quarantined",
    "read_failed",
    "read_late",
    "removed",
    # Removals that could not be recorded: the blocks may come back after a restart.
    "removal_unrecorded",
    "events_lost",
)
"""All counters. They count blocks, unless the name says otherwise."""
_BUCKETS: Final = 28
"""Number of buckets of a histogram: the last begins at 67 s."""
_LATEST: Final = 20
"""Number of latest decisions in `stats`."""


class LatencyHistogram:
    """Durations in buckets of powers of two microseconds."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        """counts[n]: durations of at least 2**(n-1) and less than 2**n microseconds."""
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        bucket = int(seconds * 1e6).bit_length()
        self.counts[bucket if bucket < _BUCKETS else -1] += 1
        self.total_s += seconds

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "total_s": self.total_s}


class LookupCounts:
    """Counts lookups of prompts and their results."""

    def __init__(self) -> None:
        self.full = 0
        """Calls that found every block asked for."""
        self.partial = 0
        self.none = 0
        self.asked_blocks = 0
        self.found_blocks = 0
        self.tiers = [0] * len(TIER_NAMES)
        """Blocks by the fastest tier that has them, in the order of TIER_NAMES."""

    def add(self, asked: int, found: bytes) -> None:
        """`found`: the fastest tier of each found block, as an index in TIER_NAMES."""
        self.asked_blocks += asked
        self.found_blocks += len(found)
        if len(found) == asked:
            self.full += 1
        elif found:
            self.partial += 1
        else:
            self.none += 1
        for place in set(found):
            self.tiers[place] += found.count(place)

    def as_dict(self) -> dict[str, int]:
        names = ("full", "partial", "none", "asked_blocks", "found_blocks")
        return {name: getattr(self, name) for name in names}

    def by_tier(self) -> dict[str, int]:
        pairs = zip(TIER_NAMES, self.tiers, strict=True)
        return {name: count for name, count in pairs if count}


class FirstTokens:
    """Times to first tokens as engines reported them, and the latest decisions."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Reason, 0)
        self._latest: deque[tuple[float, FirstToken]] = deque(maxlen=_LATEST)
        self._compared = 0
        self._seconds = self._predicted_s = self._recompute_s = 0.0

    def add(self, first: FirstToken, at_s: float) -> None:
        self._counts[first.reason] += 1
        self._latest.append((at_s, first))
        if isfinite(first.recompute_s) and isfinite(first.predicted_s):
            self._compared += 1
            self._seconds += first.seconds
            self._predicted_s += first.predicted_s
            self._recompute_s += first.recompute_s

    def describe(self, now_s: float) -> dict[str, Any]:
        """The values for `stats`, newest decision first; unknown values are None."""
        return {
            "decisions": {why.name.lower(): count for why, count in self._counts.items() if count},
            "compared": self._compared,
            "seconds": self._seconds,
            "predicted_seconds": self._predicted_s,
            "recompute_seconds": self._recompute_s,
            "latest": [
                {
                    "ago_s": round(max(0.0, now_s - at_s), 1),
                    "decision": first.reason.name.lower(),
                    "why": first.reason.value,
                    "prompt_tokens": first.prompt_tokens,
                    "fetched_tokens": first.fetched_tokens,
                    "seconds": first.seconds,
                    "predicted_s": first.predicted_s if isfinite(first.predicted_s) else None,
                    "recompute_s": first.recompute_s if isfinite(first.recompute_s) else None,
                }
                for at_s, first in reversed(self._latest)
            ],
        }


class Activity:
    """Counters, lookups and latencies of one store since it was opened."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._lookups = {False: LookupCounts(), True: LookupCounts()}
        """Counts of matches (False) and of leases (True)."""
        self._served_bytes: dict[str, int] = {}
        self._stages: dict[tuple[str, str], LatencyHistogram] = {}
        self._first_tokens = FirstTokens()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Counted):
                self.counters[event.name] += event.count
            elif isinstance(event, Took):
                self._took(event.stage, event.what, event.seconds)
            elif isinstance(event, LookedUp):
                self._lookups[event.is_lease].add(len(event.keys), event.found)
            elif isinstance(event, BlocksServed):
                self.counters[f"get_{event.tier}"] += event.blocks
                self.counters["get_bytes"] += event.nbytes
                served = self._served_bytes
                served[event.tier] = served.get(event.tier, 0) + event.nbytes
            elif isinstance(event, FirstTokenReported):
                self._first_tokens.add(event.first, event.at_s)
                self._took("first_token", "", event.first.seconds)
            elif isinstance(event, Lost):
                self.counters["events_lost"] += event.count

    def describe(self, now_s: float) -> dict[str, Any]:
        """The values for `stats`."""
        match, lease = self._lookups[False], self._lookups[True]
        return {
            "counters": dict(self.counters),
            "first_tokens": self._first_tokens.describe(now_s),
            "traffic": {
                "lookups": {"match": match.as_dict(), "lease": lease.as_dict()},
                "matched": match.by_tier(),
                "served_bytes": dict(self._served_bytes),
                "latencies": [
                    {"stage": stage, "what": what, **latency.as_dict()}
                    for (stage, what), latency in list(self._stages.items())
                ],
            },
        }

    def _took(self, stage: str, what: str, seconds: float) -> None:
        latency = self._stages.get((stage, what))
        if latency is None:
            latency = self._stages[stage, what] = LatencyHistogram()
        latency.observe(seconds)
