"""The rules by which a log-structured tier makes room, by name.

A rule picks a segment and says what of it is written again. Segments are given oldest first. What
is written again costs writes of the drive. The default is in reclaim.py; the others are there to
compare with, and follow the orders of the same names (policy/eviction) as far as a log can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.policy.placing import reclaim
from kvdepot.policy.placing.reclaim import Bools, Ints, SegmentFacts, fill


@dataclass(frozen=True, slots=True)
class Rule:
    """How one tier makes room."""

    coldest: Callable[[Sequence[SegmentFacts]], int]
    """Index of the segment that goes, of at least one, oldest first."""

    keep: Callable[[SegmentFacts, Bools, Sequence[SegmentFacts]], Bools]
    """Which of its blocks are written again: those that must, and some. Then come the segments that
    stay, as far as they were looked at."""


def _oldest(segments: Sequence[SegmentFacts]) -> int:
    return 0


def _nothing(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts]) -> Bools:
    return forced.copy()


def _least_recent(segments: Sequence[SegmentFacts]) -> int:
    return _smallest(segments, lambda facts: facts.stamps)


def _more_recent(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts]) -> Bools:
    """What was used later than the usual block that stays elsewhere, the latest first."""
    bar = _mean_elsewhere(others, lambda other: other.stamps)
    return fill(facts, forced, facts.stamps > bar, facts.stamps)


def _least_often(segments: Sequence[SegmentFacts]) -> int:
    return _smallest(segments, lambda facts: facts.hits)


def _more_often(facts: SegmentFacts, forced: Bools, others: Sequence[SegmentFacts]) -> Bools:
    """What was used more often than the usual block that stays elsewhere, most used first."""
    bar = _mean_elsewhere(others, lambda other: other.hits)
    return fill(facts, forced, facts.hits > bar, facts.hits)


def _smallest(segments: Sequence[SegmentFacts], values: Callable[[SegmentFacts], Ints]) -> int:
    """The segment whose blocks have the smallest mean; an empty one at once."""
    means = [float(values(facts).mean()) if len(facts.sizes) else -1.0 for facts in segments]
    return min(range(len(means)), key=means.__getitem__)


def _mean_elsewhere(
    others: Sequence[SegmentFacts], values: Callable[[SegmentFacts], Ints]
) -> float:
    """The mean over all blocks that stay; without any, nothing is above it."""
    if not any(len(other.sizes) for other in others):
        return float("inf")
    return float(np.concatenate([values(other) for other in others]).mean())


RULES: Final[dict[str, Rule]] = {
    "default": Rule(reclaim.coldest, reclaim.keep),
    "lru": Rule(_least_recent, _more_recent),
    "fifo": Rule(_oldest, _nothing),
    "lfu": Rule(_least_often, _more_often),
    "s3fifo": Rule(_oldest, reclaim.keep),
}


def rule_named(name: str) -> Rule:
    """Raises ConfigError for a name that is none."""
    if name not in RULES:
        raise ConfigError("policy", f"{name!r} is not an eviction order", hint=" | ".join(RULES))
    return RULES[name]
