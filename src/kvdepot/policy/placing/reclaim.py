"""Which space is emptied when a tier is full: a segment of a log, a slab of the arena. Pure.

A rule of log-structured tiers picks a segment and says which of its blocks are written again; that
costs writes of the drive. Segments are given oldest first. The rules other than the default are
there to compare with, and follow the orders of the same names (policy/eviction) as far as a log
can. The simulator uses the same functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

KEEP_SHARE_MAX: Final = 0.5
"""At most this share of a segment is written again, so that reclaiming always gains room."""
_LOST_SHARE_MAX: Final = 8.0
"""A segment is spared if it would take more than so many times its size along from elsewhere."""
_CLOSED_SHARE_MIN: Final = 0.75
"""Of a segment's live bytes that belong to closed sessions, for it to go before others."""
FREE: Final = -1
HELD: Final = int(np.iinfo(np.int64).max)
"""Stamps of an arena's chunks that are free, or may not be emptied."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What the choice depends on: the live blocks of one sealed segment."""

    capacity_bytes: int
    sizes: Ints
    stamps: Ints
    """When each block, or what continues it elsewhere, was last used."""
    hits: Ints
    """How often each was asked for since it was written."""
    below: Ints
    """Bytes that continue each block elsewhere on the drive, and would be dropped with it."""
    closed_bytes: int = 0
    """Of blocks whose session will not come back."""


def abandoned(segments: Sequence[SegmentFacts]) -> int | None:
    """Index of the segment with most of closed sessions, if enough; it goes whatever the rule."""
    shares = [one.closed_bytes / max(1, int(one.sizes.sum())) for one in segments]
    most = max(range(len(shares)), key=shares.__getitem__, default=None)
    return most if most is not None and shares[most] >= _CLOSED_SHARE_MIN else None


def coldest(segments: Sequence[SegmentFacts]) -> int:
    """Index of the segment to reclaim; they are given oldest first.

    The oldest, unless very much hangs on what it would drop, as on the head of a prompt that fills
    the drive; then the next. If that is so with all of them, the one that takes least along.
    """
    lost = [_lost_share(facts) for facts in segments]
    candidates = (at for at, share in enumerate(lost) if share <= _LOST_SHARE_MAX)
    return next(candidates, min(range(len(lost)), key=lost.__getitem__))


def keep(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts] = ()) -> Bools:
    """Which blocks move on instead of being dropped.

    `forced` ones always do (leased, or above a leased one). Of the others those that were used
    since they were written, the latest first, up to KEEP_SHARE_MAX of the segment.
    """
    del others  # what was used once is kept, whatever there is elsewhere
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


def _lost_share(facts: SegmentFacts) -> float:
    """How much would be dropped elsewhere, in segments."""
    dropped = ~keep(facts, np.zeros(len(facts.sizes), dtype=bool))
    return float(facts.below[dropped].sum()) / facts.capacity_bytes


Pick = Callable[[Sequence[SegmentFacts]], int]
"""Index of the segment to empty, of at least one, oldest first."""
Keep = Callable[[SegmentFacts, Bools, Sequence[SegmentFacts]], Bools]
"""Which blocks of a segment are written again: the forced ones, and others by choice. The last
argument has the segments that stay, as far as they were looked at."""


@dataclass(frozen=True, slots=True)
class ReclaimRule:
    """How one tier makes room."""

    coldest: Pick
    keep: Keep


def _keep_above_mean(values: Callable[[SegmentFacts], Ints]) -> Keep:
    """Keep the blocks whose value is above the mean of those that stay elsewhere, largest first."""

    def keep_above(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts]) -> Bools:
        mean = float("inf")
        if any(len(other.sizes) for other in others):
            mean = float(np.concatenate([values(other) for other in others]).mean())
        return fill(facts, forced, values(facts) > mean, values(facts))

    return keep_above


def _smallest_mean(values: Callable[[SegmentFacts], Ints]) -> Pick:
    """Pick the segment whose blocks have the smallest mean; an empty one first."""

    def pick(segments: Sequence[SegmentFacts]) -> int:
        means = [float(values(facts).mean()) if len(facts.sizes) else -1.0 for facts in segments]
        return min(range(len(means)), key=means.__getitem__)

    return pick


RULES: Final[dict[str, ReclaimRule]] = {
    "default": ReclaimRule(coldest, keep),
    "lru": ReclaimRule(
        _smallest_mean(attrgetter("stamps")), _keep_above_mean(attrgetter("stamps"))
    ),
    "fifo": ReclaimRule(lambda segments: 0, lambda facts, forced, others: forced.copy()),
    "lfu": ReclaimRule(_smallest_mean(attrgetter("hits")), _keep_above_mean(attrgetter("hits"))),
    "s3fifo": ReclaimRule(lambda segments: 0, keep),
}


def rule_named(name: str) -> ReclaimRule:
    """Raises ConfigError for a name that is none."""
    if name not in RULES:
        raise ConfigError("policy", f"{name!r} is not an eviction order", hint=" | ".join(RULES))
    return RULES[name]


def coldest_stretch(stamps: npt.NDArray[np.int64], chunks: int) -> int | None:
    """Start of the stretch of `chunks` whose hottest block is the coldest, or None if all are held.

    `stamps` has a value a chunk: FREE, HELD, or the newest stamp of the blocks in its slab.
    """
    if len(stamps) < chunks:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(stamps, chunks)
    hottest = windows.max(axis=1)
    start = int(hottest.argmin())
    return None if hottest[start] == HELD else start
