"""What happens when: a simulated clock and the events still to come."""

import heapq
from collections.abc import Callable
from math import isfinite

from kvdepot.errors import StateError


class EventQueue:
    """Events in the order of their times; equal times in the order in which they were noted."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Note an event. Raises StateError for a time that is past, or is none."""
        if not isfinite(time_s) or time_s < self.now_s:
            raise StateError(f"an event at {time_s} s cannot be noted at {self.now_s} s")
        heapq.heappush(self._coming, (time_s, self._noted, action))
        self._noted += 1

    def next(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._coming:
            return False
        self.now_s, _, action = heapq.heappop(self._coming)
        action()
        return True
