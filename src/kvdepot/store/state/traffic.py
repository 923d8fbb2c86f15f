"""What was asked of a store and how long it took, counted on the way: the source of its metrics."""

from collections import defaultdict, deque
from math import isfinite
from typing import Any, Final

from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.core.volume import TIER_NAMES

_BUCKETS: Final = 28
"""Of a histogram: the last one begins at 67 s."""
_LATEST: Final = 20
"""Decisions that `stats` shows one by one."""


class LatencyHistogram:
    """How long something took, in buckets of powers of two microseconds."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        """counts[n]: less than 2**n microseconds, and not less than 2**(n-1)."""
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        bucket = int(seconds * 1e6).bit_length()
        self.counts[bucket if bucket < _BUCKETS else -1] += 1
        self.total_s += seconds

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "total_s": self.total_s}


class LookupCounts:
    """Calls that ask how much of a prompt is there."""

    __slots__ = ("asked_blocks", "found_blocks", "full", "none", "partial", "tiers")

    def __init__(self) -> None:
        self.full = 0
        """Calls that found every block asked for."""
        self.partial = 0
        self.none = 0
        self.asked_blocks = 0
        self.found_blocks = 0
        self.tiers = [0] * len(TIER_NAMES)
        """Blocks by the fastest tier that has them, in the order of TIER_NAMES."""

    def add(self, asked: int, found: int) -> None:
        self.asked_blocks += asked
        self.found_blocks += found
        if found == asked:
            self.full += 1
        elif found:
            self.partial += 1
        else:
            self.none += 1

    def add_found(self, tiers: bytes | tuple[str, ...]) -> None:
        """The fastest tier of each block that was found: names, or places in TIER_NAMES."""
        left, places = len(tiers), isinstance(tiers, bytes)
        for place, name in enumerate(TIER_NAMES):
            if not left:
                return
            count = tiers.count(place if places else name)  # type: ignore[arg-type]
            left -= count
            self.tiers[place] += count

    def as_dict(self) -> dict[str, int]:
        names = ("full", "partial", "none", "asked_blocks", "found_blocks")
        return {name: getattr(self, name) for name in names}

    def by_tier(self) -> dict[str, int]:
        pairs = zip(TIER_NAMES, self.tiers, strict=True)
        return {name: count for name, count in pairs if count}


class FirstTokens:
    """What engines told of first tokens, and the latest decisions. Needs the store's lock."""

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
        """For `stats`: the newest decision first; what is not known is null."""
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


class StoreTraffic:
    """What was asked of a store, and how long it took, since it was opened.

    Counted with plain additions: the interpreter does not change threads inside one, so that
    lookups, which take no lock, are counted too.
    """

    def __init__(self) -> None:
        self.match = LookupCounts()
        self.lease = LookupCounts()
        self.served_bytes: defaultdict[str, int] = defaultdict(int)
        """By tier."""
        self.drained_away: defaultdict[str, int] = defaultdict(int)
        """Blocks that were dropped because their drive was drained and no other took them."""
        self.get = LatencyHistogram()
        """Of calls that get blocks."""
        self.stages: dict[tuple[str, str], LatencyHistogram] = {}
        """Other latencies, by stage, and tier or request."""
        self.first_tokens = FirstTokens()

    def answered(self, first: FirstToken, at_s: float) -> None:
        """An engine told of a first token. Lock held."""
        self.first_tokens.add(first, at_s)
        self.took("first_token", first.seconds)

    def took(self, stage: str, seconds: float, what: str = "") -> None:
        """A stage of a call took so long; `what` is the tier or the request."""
        latency = self.stages.get((stage, what))
        if latency is None:
            latency = self.stages.setdefault((stage, what), LatencyHistogram())
        latency.observe(seconds)

    def describe(self) -> dict[str, Any]:
        """For `stats`."""
        timed = [(("get", ""), self.get), *list(self.stages.items())]
        return {
            "lookups": {"match": self.match.as_dict(), "lease": self.lease.as_dict()},
            "matched": self.match.by_tier(),
            "served_bytes": dict(self.served_bytes),
            "drained_away": dict(self.drained_away),
            "latencies": [
                {"stage": stage, "what": what, **latency.as_dict()}
                for (stage, what), latency in timed
                if any(latency.counts)
            ],
        }
