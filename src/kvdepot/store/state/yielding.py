"""Background I/O takes what foreground reads leave."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from kvdepot.core.clock import Clock

FLASH_SHARE: Final = 0.05
HEAD_SHARE: Final = 0.01
"""Of a tier's time that background work may have while it is read from. Where there is a disk
head, every piece of work costs a reader two seeks."""
REST_S_MAX: Final = 5.0
PIECE_S: Final = 0.05
"""A read that comes during background work should not wait longer than that for it."""


class ForegroundReads:
    """Knows when a tier was last read from by a caller that waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = 0
        self._last_s = -1.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While a caller waits for a read."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        with self._lock:
            self._reading += 1

    def end(self) -> None:
        with self._lock:
            self._reading -= 1
            self._last_s = self._clock.now()

    def busy_since(self, moment_s: float) -> bool:
        """Whether a caller has waited for a read since then."""
        with self._lock:
            return self._reading > 0 or self._last_s >= moment_s


def rest_s(spent_s: float, share: float = FLASH_SHARE) -> float:
    """How long background work rests after a piece that took `spent_s` beside foreground reads."""
    return min(REST_S_MAX, spent_s * (1.0 - share) / share)


class PieceSize:
    """How much background work does in one go: what takes `seconds`, `most_bytes` at most."""

    def __init__(self, most_bytes: int, seconds: float = PIECE_S) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self.nbytes = most_bytes

    def learn(self, nbytes: int, spent_s: float) -> None:
        """A piece of this size took so long."""
        fitting = int(nbytes / max(spent_s, 1e-6) * self._seconds)
        self.nbytes = max(1, min(self._most_bytes, fitting))
