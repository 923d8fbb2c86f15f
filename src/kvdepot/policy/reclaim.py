"""Which segment makes room on a log-structured tier, and what of it is worth writing again.

Pure functions of facts, shared with the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

KEEP_SHARE_MAX: Final = 0.5
"""At most this share of a segment is written again, so that reclaiming always gains room."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What the choice depends on: the live blocks of one sealed segment."""

    capacity_bytes: int
    sizes: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    orphaned_bytes: int = 0
    """What continues these blocks elsewhere on the drive, and would be dropped with them."""

    @property
    def warm_bytes(self) -> int:
        return int(self.sizes[self.hits > 0].sum())


def coldest(segments: Sequence[SegmentFacts], now: int) -> int:
    """Index of the segment to reclaim.

    Most room for what is written again or lost, old blocks first.
    """
    scores = [_score(segment, now) for segment in segments]
    return max(range(len(scores)), key=scores.__getitem__)


def _score(segment: SegmentFacts, now: int) -> float:
    if not len(segment.sizes):
        return float("inf")
    again = min(segment.warm_bytes / segment.capacity_bytes, KEEP_SHARE_MAX)
    lost = segment.orphaned_bytes / segment.capacity_bytes
    age = now - float(segment.stamps.mean()) + 1.0
    return (1.0 - again) * age / (1.0 + again + lost)


def keep(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts] = ()) -> Bools:
    """Which blocks move on instead of being dropped.

    `forced` ones always do (leased, or above a leased one). Of the others those that were used
    since they were written, warmest first, up to KEEP_SHARE_MAX of the segment.
    """
    return fill(facts, forced, facts.hits > 0, facts.stamps)


def fill(facts: SegmentFacts, forced: Bools, wanted: Bools, worth: Ints) -> Bools:
    """`forced`, and of those wanted the most worthy first, up to KEEP_SHARE_MAX of the segment."""
    kept = forced.copy()
    budget = facts.capacity_bytes * KEEP_SHARE_MAX - int(facts.sizes[kept].sum())
    chosen = np.flatnonzero(wanted & ~kept)
    chosen = chosen[np.argsort(-worth[chosen], kind="stable")]
    fits = np.cumsum(facts.sizes[chosen]) <= budget
    kept[chosen[fits]] = True
    return kept
