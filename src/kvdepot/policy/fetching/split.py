"""Recomputing a part of the prefix while what lies behind it is fetched. Pure.

What is fetched is a head, and a tail that ends at the cut; the hole between them is recomputed. The
tail's blocks are the dearest to recompute, since they attend to everything before them, so it is
the head of a slow stretch that is recomputed and its tail that is fetched.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvdepot.policy.fetching.tier_model import TierPace
from kvdepot.policy.fetching.timetable import Floats, Run, Timetable


@dataclass(frozen=True, slots=True)
class Plan:
    """Fetch the blocks before `cut` without those of the hole.

    `fetch_s`: when all of them are there; `busy_s`: until when the engine has other things to do
    than to wait for them; `finish_s`: the first token.
    """

    cut: int
    hole_start: int
    hole_stop: int
    fetch_s: float
    busy_s: float
    finish_s: float


class Holes:
    """The times of plans with a hole."""

    def __init__(
        self, table: Timetable, runs: Sequence[Run], paces: Mapping[str, TierPace], fetch_s: Floats
    ) -> None:
        self._table = table
        self._fetch_s: list[float] = fetch_s.tolist()
        self._suffix_s: list[float] = table.suffix_s.tolist()
        self._parts: list[tuple[int, int, float, int]] = []
        tiers = list(dict.fromkeys(run.tier for run in runs))
        self._waits = [paces[tier].wait_s for tier in tiers]
        start = 0
        for run in runs:
            stop = start + run.blocks
            block_s = paces[run.tier].byte_s * run.size_bytes / max(run.blocks, 1)
            self._parts.append((start, stop, block_s, tiers.index(run.tier)))
            start = stop

    def best(self, cuts: Iterable[int], otherwise: Plan) -> Plan:
        """The fastest plan with one of these cuts and a hole from a border between tiers on.

        `otherwise` is the fastest without, and stays if none is faster.
        """
        best = otherwise
        for cut in cuts:
            for start, *_ in self._parts:
                begin_s = max(self._table.queue_s, self._fetch_s[start])
                if start < cut and begin_s + self._suffix_s[cut] < best.finish_s:
                    best = min(best, self._balanced(start, cut), key=lambda plan: plan.finish_s)
        return best

    def _balanced(self, start: int, cut: int) -> Plan:
        """The hole that is computed just when the tail behind it is there."""

        def computed_first(stop: int) -> bool:
            return self._busy_s(start, stop) >= self._tail_s(start, stop, cut)

        stop = bisect_left(range(start, cut), True, key=computed_first) + start
        plans = [self._plan(start, near, cut) for near in (stop - 1, stop) if start < near < cut]
        return min(plans, key=lambda plan: plan.finish_s, default=self._without(start))

    def _plan(self, start: int, stop: int, cut: int) -> Plan:
        fetch_s, busy_s = self._tail_s(start, stop, cut), self._busy_s(start, stop)
        finish_s = max(fetch_s, busy_s) + self._suffix_s[cut]
        return Plan(cut, start, stop, fetch_s, busy_s, finish_s)

    def _without(self, cut: int) -> Plan:
        fetch_s, busy_s = self._fetch_s[cut], self._table.queue_s
        return Plan(cut, 0, 0, fetch_s, busy_s, max(fetch_s, busy_s) + self._suffix_s[cut])

    def _busy_s(self, start: int, stop: int) -> float:
        begin_s = max(self._table.queue_s, self._fetch_s[start])
        return begin_s + self._table.stretch_s(start, stop)

    def _tail_s(self, start: int, stop: int, cut: int) -> float:
        """When the head before the hole and the tail behind it are there."""
        until = [0.0] * len(self._waits)
        for first, last, block_s, tier in self._parts:
            blocks = last - first if last <= start else min(last, cut) - max(first, stop)
            if blocks > 0:
                until[tier] = (until[tier] or self._waits[tier]) + blocks * block_s
        return max(until)
