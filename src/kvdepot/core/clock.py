"""Time as an argument, so that tests and the simulator bring their own; and stamps.

A stamp orders puts and removals over all volumes and nodes. A block gets its stamp when it is put;
moves, other nodes and archives keep it. A tombstone has one too: every record of its key that is
older is gone, wherever it lies and whenever it returns.
"""

import threading
import time
from typing import Final, Protocol

STAMP_MAX: Final = (1 << 62) - 1
"""A greater number is damage, not a stamp."""
OPENING_GAP: Final = 1 << 13
"""Stamps that are skipped when a store is opened: those before may have been given out and lost in
a power cut, and the wall clock may have been set back since. 8 ms, less than opening a store takes:
stamps must not run ahead of the clock, by which drives that are used apart are put in order."""


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float:
        """Monotonic seconds."""


class WallClock:
    """The time of day, which goes on across restarts; it may be set, also back."""

    def now(self) -> float:
        return time.time()


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class StampClock:
    """Gives out stamps: the wall clock in microseconds, or one more than the last. Thread-safe."""

    def __init__(self, wall: Clock) -> None:
        self._wall = wall
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """A stamp that is greater than every stamp given out or observed."""
        with self._lock:
            self._last = max(self._last + 1, int(self._wall.now() * 1e6))
            return self._last

    def observe(self, stamp: int) -> None:
        """Give out greater stamps than this one, which was found on a volume or another node."""
        if stamp <= STAMP_MAX:
            with self._lock:
                self._last = max(self._last, stamp)

    def open(self, opened: int) -> int:
        """Begin a time of writing. `opened` is what the last call returned, or 0.

        Returns the number to keep, durably, before any stamp is given out.
        """
        self.observe(opened + OPENING_GAP if opened else 0)
        return self.next()
