"""Clocks, which tests and the simulator replace, and stamps.

A stamp orders puts and removals over all volumes and nodes. A block gets its stamp when it is put;
moves, other nodes and archives keep it. A tombstone has a stamp too: it deletes every older record
of its key on every volume, even one that is attached later.
"""

import threading
import time
from typing import Final, Protocol

STAMP_MAX: Final = (1 << 62) - 1
"""The greatest valid stamp."""
_AHEAD_MAX: Final = 1 << 52
"""Stamps that are further ahead of this machine's clock (142 years) are not credible."""
OPENING_GAP: Final = 1 << 13
"""Stamps that are skipped when a store is opened, because a power cut may have lost records with
them and the wall clock may have been set back since. 8 ms, less than the time to open a store:
stamps must not run ahead of the clock, which orders records of drives that were used apart."""


class Clock(Protocol):
    """A source of time in seconds."""

    def now(self) -> float:
        """Monotonic seconds."""


class WallClock:
    """The time of day, which continues across restarts and may be set back."""

    now = staticmethod(time.time)


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class StampClock:
    """Makes stamps: the wall clock in microseconds, or one more than the last. Thread-safe."""

    def __init__(self, wall: Clock) -> None:
        self._wall = wall
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return a stamp that is greater than all stamps made or observed."""
        with self._lock:
            self._last = max(self._last + 1, int(self._wall.now() * 1e6))
            return self._last

    def observe(self, stamp: int) -> None:
        """Make later stamps greater than this one, which was found on a volume or another node."""
        if stamp <= STAMP_MAX:
            with self._lock:
                self._last = max(self._last, stamp)

    def is_credible(self, stamp: int) -> bool:
        """False for a stamp so far ahead that no stamps would be left after it."""
        with self._lock:
            return stamp <= max(self._last, int(self._wall.now() * 1e6)) + _AHEAD_MAX

    def open(self, opened: int) -> int:
        """Begin to write. `opened` is the result of the last call, or 0.

        Returns a number that must be stored durably before the first use of `next`.
        """
        self.observe(opened + OPENING_GAP if opened else 0)
        return self.next()
