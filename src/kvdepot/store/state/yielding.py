"""Background I/O takes what foreground reads leave."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from kvdepot.core.clock import Clock

FLASH_SHARE: Final = 0.05
HEAD_SHARE: Final = 0.01
"""Of a tier's time that background work may have while somebody reads from it. Where there is a
head, every piece of work costs a reader two seeks: few enough may meet one."""
REST_S_MAX: Final = 5.0
STRIDE_S: Final = 0.05
"""A reader who meets background work should not wait longer than that for it."""


class Pace:
    """Knows when a tier was last read from for somebody who waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = 0
        self._last_s = -1.0

    @contextlib.contextmanager
    def foreground(self) -> Iterator[None]:
        """While somebody waits for a read."""
        with self._lock:
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                self._last_s = self._clock.now()

    def busy_since(self, moment_s: float) -> bool:
        """Whether somebody has waited for a read since then."""
        with self._lock:
            return self._reading > 0 or self._last_s >= moment_s


def rest_s(spent_s: float, share: float = FLASH_SHARE) -> float:
    """How long background work rests after a piece that took `spent_s` beside foreground reads."""
    return min(REST_S_MAX, spent_s * (1.0 - share) / share)


class Stride:
    """How much background work does in one go: what takes `seconds`, `most_bytes` at most."""

    def __init__(self, most_bytes: int, seconds: float = STRIDE_S) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self.nbytes = most_bytes

    def took(self, nbytes: int, spent_s: float) -> None:
        """So much was done in one go: the next one is as long as should be."""
        fitting = int(nbytes / max(spent_s, 1e-6) * self._seconds)
        self.nbytes = max(1, min(self._most_bytes, fitting))
