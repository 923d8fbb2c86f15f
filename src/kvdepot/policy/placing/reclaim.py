"""Which segment makes room on a log-structured tier, and what of it is worth writing again.

Pure functions of facts, shared with the simulator. This is the default; others to compare with are
in reclaim_rules.py.
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
_LOST_SHARE_MAX: Final = 8.0
"""A segment is spared if it would take more than so many times its size along from elsewhere."""
_CLOSED_SHARE_MIN: Final = 0.75
"""Of a segment's live bytes that belong to closed sessions, for it to go before its turn."""


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
    """Index of the segment that hardly anybody will come back for, whatever the rule; or None."""
    shares = [one.closed_bytes / max(1, int(one.sizes.sum())) for one in segments]
    most = max(range(len(shares)), key=shares.__getitem__, default=None)
    return most if most is not None and shares[most] >= _CLOSED_SHARE_MIN else None


def coldest(segments: Sequence[SegmentFacts]) -> int:
    """Index of the segment to reclaim; they are given oldest first.

    The oldest, unless very much hangs on what it would drop, as on the head of a prompt that fills
    the drive; then the next. If that is so with all of them, the one that takes least along.
    """
    lost = [_lost_share(facts) for facts in segments]
    for at, share in enumerate(lost):
        if share <= _LOST_SHARE_MAX:
            return at
    return min(range(len(lost)), key=lost.__getitem__)


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
