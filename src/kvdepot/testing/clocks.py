"""A clock that moves only when a test moves it."""

import threading


class ManualClock:
    """A clock that only `sleep` and `advance` move. Thread-safe."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock without waiting."""
        with self._lock:
            self._now_s += max(0.0, seconds)

    advance = sleep
