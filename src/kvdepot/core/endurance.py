"""The write budget of a drive that wears out: a token bucket of bytes.

The bucket holds the budget of an hour. It is filled with the daily budget less one full bucket, so
that the writes of any 24 hours stay within the budget.
"""

from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Time whose budget the bucket holds."""


@dataclass(slots=True)
class Endurance:
    """The write budget of one drive."""

    daily_bytes: int
    level_bytes: float
    """Below 0 after unavoidable writes; other writes wait until it is above 0."""
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
        """Add the budget of the time since `at_s`. A clock that was set back adds nothing."""
        if now_s > self.at_s:
            filled = self.level_bytes + (now_s - self.at_s) * self.bytes_per_s
            self.level_bytes, self.at_s = min(self.bucket_bytes, filled), now_s

    def spend(self, nbytes: int, now_s: float) -> None:
        self.fill(now_s)
        self.level_bytes -= nbytes
