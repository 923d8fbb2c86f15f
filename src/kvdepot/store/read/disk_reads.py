"""What one call reads from one drive, in waves."""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from kvdepot.core.tier import Load, Outcome, Pending
from kvdepot.store.state.lower_tier import Level

_WAVES_A_DRIVE: Final = 4
_WAVES_AHEAD: Final = 2
"""Have their memory already, and start at once when one that is being read is through."""

Loaded = tuple[list[Outcome], Pending | None]


@dataclass(slots=True)
class Step:
    """One block of a wave: its load and the slot it is read into."""

    index: int
    load: Load
    slot: int
    promote: bool
    hedged: bool = False
    """Another drive has it too: this one is given half the time there is."""


class Flight:
    """What one errand reads from one drive: waves that are planned, and those under way."""

    def __init__(self, level: Level, drive: int) -> None:
        self.level = level
        self.drive = drive
        self.waiting: deque[int] = deque()
        self.flying: deque[tuple[list[Step], Future[Loaded]]] = deque()
        self.queued_bytes = 0
        self.turns = threading.Semaphore(_WAVES_A_DRIVE)
        """Waves that are read at the same time."""

    def has_room(self) -> bool:
        return bool(self.waiting) and len(self.flying) < _WAVES_A_DRIVE + _WAVES_AHEAD


Flights = dict[tuple[Level, int], Flight]
