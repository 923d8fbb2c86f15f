"""Time as an argument, so that tests and the simulator bring their own."""

import time
from typing import Protocol


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
