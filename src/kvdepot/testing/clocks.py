"""A clock that moves only when told to."""

import threading


class ManualClock:
    """Seconds that pass only by `sleep` and `advance`. Thread-safe."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let the time pass without waiting for it."""
        with self._lock:
            self._now_s += max(0.0, seconds)

    advance = sleep
