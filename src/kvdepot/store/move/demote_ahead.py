"""Copies what will leave a tier next to the tier below, before the room is needed.

A reclaim then finds its blocks in the slower tier already and has nothing to do but drop them.
"""

import threading
from typing import Final

from kvdepot.store.move.demote import Demoter
from kvdepot.store.state.state import Stock
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.segments import Segment

_LOOK_S: Final = 1.0
_FULL_SHARE: Final = 0.5
"""A drive that has used this much of its segments will need room."""
_AHEAD_SHARE: Final = 0.25
"""The oldest part of its segments, which is copied ahead."""


class Migrator:
    """The background thread of one pair of tiers."""

    def __init__(self, stock: Stock, demoter: Demoter) -> None:
        self._stock = stock
        self._demoter = demoter
        self._done: set[int] = set()
        """Segments, by id, that were looked at."""
        name = f"kvdepot-{demoter.upper.name}-migrator"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        stock = self._stock
        while not stock.closing:
            if self._demoter.lower.tier.is_up():
                self.look()
            with stock.changed:
                stock.changed.wait_for(lambda: stock.closing, _LOOK_S)

    def look(self) -> None:
        """Copy down what the drives will drop next."""
        for index, drive in enumerate(self._demoter.upper.tier.drives):
            for segment in self._next_to_go(drive):
                self._done.add(segment.segment_id)
                with self._stock.changed:
                    rows = self._demoter.upper.live(index, segment.slot).tolist()
                self._demoter.demote(rows, urgent=False)
                if self._stock.closing:
                    return

    def _next_to_go(self, drive: Drive) -> list[Segment]:
        slots = drive.settings.slots_max
        if drive.spare_slots() > slots * (1 - _FULL_SHARE) or not drive.breaker.closed:
            return []
        oldest = drive.sealed()[: max(1, int(slots * _AHEAD_SHARE))]
        return [segment for segment in oldest if segment.segment_id not in self._done]
