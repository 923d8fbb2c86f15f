"""Bytes written to a drive and, where it has a budget for a day, what may still be written.

The budget is kept in the drive's superblock, so that a store which restarts often does not begin
anew each time. Ahead of the writes: a part is taken out of what is kept, then written, then the
next part. After a crash what was taken and not written is lost; nothing is written twice.
"""

import threading
from dataclasses import replace
from typing import Any, Final

from kvdepot.core.clock import Clock
from kvdepot.core.endurance import DAY_S, Endurance
from kvdepot.io.breaker import Breaker
from kvdepot.volumes.log.medium import Medium, known_superblock

_PARTS: Final = 64
"""In how many parts a full bucket is taken, each with a write of the superblock."""


class Wear:
    """Of one drive. `take` and `keep` are called by one thread at a time, the rest by any."""

    def __init__(self, medium: Medium, breaker: Breaker, daily_bytes: int, wall: Clock) -> None:
        """`daily_bytes` may be written in a day, 0: no limit; `wall` goes on across restarts."""
        self.written_bytes = 0
        self._medium = medium
        self._breaker = breaker
        self._wall = wall
        self._opened_s = wall.now()
        self._lock = threading.Lock()
        self._budget = self._kept(daily_bytes) if daily_bytes else None
        self.limited = daily_bytes > 0
        self._taken_bytes = 0.0
        """Taken out of what the superblock says, and not written yet."""

    def _kept(self, daily_bytes: int) -> Endurance:
        """What the superblock says, where it does."""
        known = known_superblock(self._medium)
        if known is None or not known.budget_at_s:
            return Endurance.full(daily_bytes, self._opened_s)
        at_s = min(known.budget_at_s, self._opened_s)
        found = Endurance(daily_bytes, known.budget_bytes, at_s)
        found.fill(self._opened_s)
        return found

    @property
    def bucket_bytes(self) -> float:
        """What may be written at once at most."""
        return self._budget.bucket_bytes if self._budget else 0.0

    @property
    def level_bytes(self) -> float:
        """What may be written now; below 0 if too much was."""
        if self._budget is None:
            return 0.0
        with self._lock:
            self._budget.fill(self._wall.now())
            return self._budget.level_bytes

    @property
    def spent(self) -> bool:
        """Whether nothing may be written for now."""
        return self._budget is not None and self.level_bytes <= 0

    def take(self, nbytes: int) -> None:
        """Take bytes that are about to be written out of the budget."""
        if self._budget is None:
            return
        with self._lock:
            self._budget.spend(nbytes, self._wall.now())
        self._taken_bytes -= nbytes
        if self._taken_bytes < 0:
            self.keep(self._budget.bucket_bytes / _PARTS)

    def keep(self, taken_bytes: float = 0.0) -> None:
        """Write down what is left, less what is taken ahead."""
        if self._budget is None:
            return
        left_bytes = self.level_bytes - taken_bytes
        try:
            known = known_superblock(self._medium)
            if known is not None:
                at_s = self._budget.at_s
                kept = replace(known, budget_bytes=left_bytes, budget_at_s=at_s)
                self._medium.write_superblock(kept)
                self._taken_bytes = taken_bytes
        except OSError as error:
            self._breaker.failed(str(error.strerror))

    def take_over(self, before: "Wear") -> None:
        """Go on with the counts and the budget of the same drive before it was mounted again."""
        self.written_bytes += before.written_bytes
        self._opened_s = before._opened_s
        if self._budget is not None:
            self._budget.level_bytes = min(self._budget.level_bytes, before.level_bytes)

    def describe(self) -> dict[str, Any]:
        """In plain values, for stats."""
        day = max(self._wall.now() - self._opened_s, 1.0) / DAY_S
        facts = {"bytes": self.written_bytes, "bytes_per_day": round(self.written_bytes / day)}
        if self._budget is None:
            return facts
        budget = {"daily_bytes": self._budget.daily_bytes, "bucket_bytes": self.bucket_bytes}
        budget["level_bytes"] = self.level_bytes
        return {**facts, **{name: round(value) for name, value in budget.items()}}
