"""Chooses the space to reclaim when a tier is full: a segment of a log, a slab of the arena. Pure.

A rule for log-structured tiers picks a segment and the blocks of it that are rewritten, which costs
drive writes. Segments are given oldest first. Rules other than the default exist for comparison;
they follow the orders of the same names (policy/eviction) as far as a log can. The simulator uses
the same functions.
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
"""Upper limit of the share of a segment that is rewritten, so that reclaiming frees space."""
_LOST_SHARE_MAX: Final = 8.0
"""A segment is spared if reclaiming it would drop more than this many times its size elsewhere."""
_CLOSED_SHARE_MIN: Final = 0.75
"""A segment goes before others if closed sessions have at least this share of its live bytes."""
FREE: Final = -1
HELD: Final = int(np.iinfo(np.int64).max)
"""Stamps of arena chunks that are free, and of those that must not be emptied."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """The live blocks of one sealed segment."""

    capacity_bytes: int
    sizes: Ints
    stamps: Ints
    """The last use of each block or of its descendants in other segments."""
    hits: Ints
    """Number of requests for each block since it was written."""
    below: Ints
    """Bytes of each block's descendants in other segments, which would be dropped with it."""
    closed_bytes: int = 0
    """Bytes of blocks whose session is closed."""


def abandoned(segments: Sequence[SegmentFacts]) -> int | None:
    """Index of the segment with the largest share of closed sessions; None if that is too small.

    It is reclaimed first with every rule.
    """
    shares = [one.closed_bytes / max(1, int(one.sizes.sum())) for one in segments]
    most = max(range(len(shares)), key=shares.__getitem__, default=None)
    return most if most is not None and shares[most] >= _CLOSED_SHARE_MIN else None


def most_garbage(live_bytes: Ints, segment_bytes: int) -> int | None:
    """Index of the segment with the fewest live bytes; None if all are more than half live.

    It is reclaimed first with every rule, and its live blocks are rewritten: nothing is evicted
    while removing garbage makes room.
    """
    if not len(live_bytes) or live_bytes.min() > segment_bytes * KEEP_SHARE_MAX:
        return None
    return int(live_bytes.argmin())


def coldest(segments: Sequence[SegmentFacts]) -> int:
    """Index of the segment to reclaim; they are given oldest first.

    The oldest one that would drop at most _LOST_SHARE_MAX times its size in other segments (the
    head of a prompt that fills the drive would drop more). If all would, the one that drops least.
    """
    lost = [_lost_share(facts) for facts in segments]
    candidates = (number for number, share in enumerate(lost) if share <= _LOST_SHARE_MAX)
    return next(candidates, min(range(len(lost)), key=lost.__getitem__))


def keep(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts] = ()) -> Bools:
    """True for each block to rewrite instead of dropping it.

    `forced` blocks always (leased, or an ancestor of a leased one); then blocks that were used
    since they were written, the latest first, up to KEEP_SHARE_MAX of the segment.
    """
    del others  # the default rule does not compare with other segments
    return fill(facts, forced, facts.hits > 0, facts.stamps)


def fill(facts: SegmentFacts, forced: Bools, wanted: Bools, worth: Ints) -> Bools:
    """`forced`, then `wanted` blocks by `worth`, up to KEEP_SHARE_MAX of the segment."""
    kept = forced.copy()
    budget = facts.capacity_bytes * KEEP_SHARE_MAX - int(facts.sizes[kept].sum())
    chosen = np.flatnonzero(wanted & ~kept)
    chosen = chosen[np.argsort(-worth[chosen], kind="stable")]
    fits = np.cumsum(facts.sizes[chosen]) <= budget
    kept[chosen[fits]] = True
    return kept


def _lost_share(facts: SegmentFacts) -> float:
    """Bytes that would be dropped in other segments, relative to the segment's size."""
    dropped = ~keep(facts, np.zeros(len(facts.sizes), dtype=bool))
    return float(facts.below[dropped].sum()) / facts.capacity_bytes


Pick = Callable[[Sequence[SegmentFacts]], int]
"""Returns the index of the segment to reclaim; segments are not empty, oldest first."""
Keep = Callable[[SegmentFacts, Bools, Sequence[SegmentFacts]], Bools]
"""Returns the blocks of a segment to rewrite, the forced ones included. The last argument has some
of the other segments."""


@dataclass(frozen=True, slots=True)
class ReclaimRule:
    """The choice of segments to reclaim and of blocks to keep."""

    coldest: Pick
    keep: Keep


def _keep_above_mean(values: Callable[[SegmentFacts], Ints]) -> Keep:
    """Keep the blocks with a value above the mean of other segments, largest first."""

    def keep_above(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts]) -> Bools:
        mean = float("inf")
        if any(len(other.sizes) for other in others):
            mean = float(np.concatenate([values(other) for other in others]).mean())
        return fill(facts, forced, values(facts) > mean, values(facts))

    return keep_above


def _smallest_mean(values: Callable[[SegmentFacts], Ints]) -> Pick:
    """Pick the segment with the smallest mean value; an empty one first."""

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
    """ConfigError if no rule has this name."""
    if name not in RULES:
        raise ConfigError("policy", f"{name!r} is not an eviction order", hint=" | ".join(RULES))
    return RULES[name]


def coldest_stretch(stamps: npt.NDArray[np.int64], chunks: int) -> int | None:
    """Start of the stretch of `chunks` whose newest stamp is the oldest; None if all are held.

    `stamps` has for each chunk FREE, HELD, or the newest stamp of the blocks in its slab.
    """
    if len(stamps) < chunks:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(stamps, chunks)
    hottest = windows.max(axis=1)
    start = int(hottest.argmin())
    return None if hottest[start] == HELD else start
