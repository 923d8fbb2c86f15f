"""A simulated clock and the events still to come."""

import heapq
from collections.abc import Callable
from math import isfinite

from kvdepot.errors import StateError


class EventQueue:
    """Events in the order of their times; equal times in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Add an event. Raises StateError for a time that is past or not finite."""
        if not isfinite(time_s) or time_s < self.now_s:
            raise StateError(f"an event at {time_s} s cannot be added at {self.now_s} s")
        heapq.heappush(self._coming, (time_s, self._added, action))
        self._added += 1

    def next(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._coming:
            return False
        self.now_s, _, action = heapq.heappop(self._coming)
        action()
        return True
