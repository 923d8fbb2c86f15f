"""How much may be written to a drive that wears out. Pure: time comes in as an argument.

A bucket of bytes that fills evenly and holds what an hour brings. It fills a little slower than
the day's budget, by what it holds when full: so no 24 hours see more than the budget.
"""

from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""As much unused time is saved up for a burst."""


@dataclass(slots=True)
class Endurance:
    """What may still be written to one drive."""

    daily_bytes: int
    level_bytes: float
    """Below 0 after writes that could not be left out: these are paid back before others."""
    at_s: float
    """When that was so, in seconds of a clock that goes on across restarts."""

    @classmethod
    def full(cls, daily_bytes: int, now_s: float) -> "Endurance":
        fresh = cls(daily_bytes, 0.0, now_s)
        fresh.level_bytes = fresh.bucket_bytes
        return fresh

    @property
    def bytes_per_s(self) -> float:
        return self.daily_bytes / (DAY_S + BURST_S)

    @property
    def bucket_bytes(self) -> float:
        return self.bytes_per_s * BURST_S

    def fill(self, now_s: float) -> None:
        """Time has passed. A clock that goes back fills nothing."""
        if now_s > self.at_s:
            filled = self.level_bytes + (now_s - self.at_s) * self.bytes_per_s
            self.level_bytes, self.at_s = min(self.bucket_bytes, filled), now_s

    def spend(self, nbytes: int, now_s: float) -> None:
        """Bytes were written."""
        self.fill(now_s)
        self.level_bytes -= nbytes
