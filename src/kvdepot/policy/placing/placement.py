"""Which of two blocks has the faster place: the one that is expected back sooner.

The rule of chapter 9.7 of the seed guide, for each block: the tier whose latency matches its
expected reuse interval. What a place costs is what the block that must leave for it would have
brought, so a block goes where the next to leave is expected later than itself. Pure.
"""

from dataclasses import dataclass
from typing import Final

PROMOTE_MARGIN: Final = 2.0
"""How many times sooner a block must be expected to be brought up: that costs two copies."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a block is expected to be used again."""

    chance: float
    """That it is used again at all."""
    interval: float
    """Until then, if so, counted in uses of blocks."""

    @property
    def rate(self) -> float:
        """Reuses that its place brings, per use of any block."""
        return self.chance / max(1.0, self.interval)


def is_kept(leaving: Outlook, incumbent: Outlook) -> bool:
    """Whether a block that leaves a tier belongs in the next one, instead of one that is there.

    Where nothing is known of either, the one that was used last stays.
    """
    return leaving.rate >= incumbent.rate


def is_promoted(used: Outlook, incumbent: Outlook) -> bool:
    """Whether a block that was used belongs in the faster tier, instead of one that is there."""
    return used.rate > PROMOTE_MARGIN * incumbent.rate
