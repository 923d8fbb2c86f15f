"""What is written to a tier that wears out, and in which mode. Pure: time comes in as an argument.

A drive is bought with so many drive-writes a day. The budget is a bucket of bytes that fills at
that rate; what a burst may take at once is bounded. While the bucket is full everything may be
written; as it empties, blocks must promise more and more reuse to be worth their wear.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

DAY_S: Final = 86_400.0


class WriteMode(Enum):
    """What happens to a new block on its way to a slower tier."""

    BACK = "write-back"
    """Written down when it leaves the faster tier."""
    THROUGH = "write-through"
    """Written down at once."""
    SELECTIVE = "write-through-selective"
    """Written down at its second use, or at once if it promises to be used again."""
    AROUND = "pass-through"
    """Not written here but to the tier below; read from there without promotion."""


class Verdict(Enum):
    """May this block enter this tier now. True when it may."""

    ADMIT = "admit"
    LATER = "later"
    """Not yet: it was not used again, or it has not left the faster tier."""
    BYPASS = "bypass"
    """Not worth the wear that is left for today, or the mode leads around this tier."""

    def __bool__(self) -> bool:
        return self is Verdict.ADMIT


@dataclass(slots=True)
class EnduranceBudget:
    """Bytes that may be written to one drive, as a token bucket."""

    capacity_bytes: int
    writes_per_day: float
    burst_s: float = 3600.0
    """How much unused time may be saved up for a burst."""
    _level_bytes: float = -1.0
    _filled_s: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0 or self.writes_per_day <= 0 or self.burst_s <= 0:
            raise ValueError("capacity, writes per day and burst must be above 0")
        self._level_bytes = self.bucket_bytes

    @property
    def bytes_per_s(self) -> float:
        return self.capacity_bytes * self.writes_per_day / DAY_S

    @property
    def bucket_bytes(self) -> float:
        return self.bytes_per_s * self.burst_s

    def level(self, now_s: float) -> float:
        """How full the bucket is, from 0 to 1. A clock that goes back fills nothing."""
        passed_s = max(0.0, now_s - self._filled_s)
        self._filled_s = max(self._filled_s, now_s)
        filled = self._level_bytes + passed_s * self.bytes_per_s
        self._level_bytes = min(self.bucket_bytes, filled)
        return self._level_bytes / self.bucket_bytes

    def spend(self, nbytes: int, now_s: float) -> bool:
        """Take bytes for a write. False: there is not enough, and nothing was taken."""
        self.level(now_s)
        if nbytes > self._level_bytes:
            return False
        self._level_bytes -= nbytes
        return True


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that could be written to a tier."""

    nbytes: int
    reuse_chance: float
    """How likely it is asked for again while the tier would keep it, from 0 to 1."""
    uses: int = 0
    """How many times it was asked for since it was made."""
    leaving: bool = False
    """It is about to leave the faster tier."""


PROMISING: Final = 0.5
"""A block with at least this chance does not wait for its second use."""


def wanted(candidate: Candidate, mode: WriteMode) -> Verdict:
    """Whether the mode wants the block here now, budget aside."""
    if mode is WriteMode.AROUND:
        return Verdict.BYPASS
    if mode is WriteMode.BACK and not candidate.leaving:
        return Verdict.LATER
    if mode is WriteMode.SELECTIVE:
        earned = candidate.uses > 0 or candidate.reuse_chance >= PROMISING
        return Verdict.ADMIT if earned else Verdict.LATER
    return Verdict.ADMIT


def admit(candidate: Candidate, mode: WriteMode, budget: EnduranceBudget, now_s: float) -> Verdict:
    """Whether to write the block now; if so, its bytes are taken from the budget.

    The emptier the bucket, the more reuse a block must promise: with half of it left every block
    may be written, with a quarter those that are as likely reused as not, near the end only what
    is certain to come back.
    """
    verdict = wanted(candidate, mode)
    if verdict is not Verdict.ADMIT:
        return verdict
    if candidate.reuse_chance < price(budget.level(now_s)):
        return Verdict.BYPASS
    return Verdict.ADMIT if budget.spend(candidate.nbytes, now_s) else Verdict.BYPASS


def price(level: float) -> float:
    """The chance of reuse that a write must promise when the bucket is so full."""
    return min(1.0, max(0.0, 1.0 - 2.0 * level))
