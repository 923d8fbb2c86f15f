"""Budget of bytes written to a drive that wears out. Pure: time is an argument.

A token bucket of bytes that holds the budget of an hour. It fills a little slower than the day's
budget, by what it holds when full, so that no 24 hours exceed the budget.
"""

from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Unused time that is saved up for a burst."""


@dataclass(slots=True)
class Endurance:
    """The write budget of one drive."""

    daily_bytes: int
    level_bytes: float
    """Below 0 after writes that could not be left out; further writes wait until it is above."""
    at_s: float
    """Time of `level_bytes`, by a clock that continues across restarts."""

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
        """Add what the time since `at_s` brings. A clock that goes back adds nothing."""
        if now_s > self.at_s:
            filled = self.level_bytes + (now_s - self.at_s) * self.bytes_per_s
            self.level_bytes, self.at_s = min(self.bucket_bytes, filled), now_s

    def spend(self, nbytes: int, now_s: float) -> None:
        self.fill(now_s)
        self.level_bytes -= nbytes
