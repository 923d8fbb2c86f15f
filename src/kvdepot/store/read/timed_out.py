"""Handles reads that did not end before their deadline.

When the kernel has released the slots, intact blocks in memory slots become blocks of the memory
tier, for later calls. Other slots are freed.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.core.block import BlockKey
from kvdepot.core.volume import PendingRead
from kvdepot.format.record import parse_head, payload_intact
from kvdepot.index.table import NONE
from kvdepot.store.state.state import StoreState

_SLICE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LateRead:
    """A slot that the kernel may still write to."""

    slot: int
    key: BlockKey
    nbytes: int
    in_arena: bool
    """True if the slot is in the memory tier; else it is in staging and will be freed."""


class TimedOutIo:
    """Waits for late reads in a thread that exists only while there are any."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._work: queue.SimpleQueue[tuple[PendingRead, Sequence[LateRead]]] = queue.SimpleQueue()
        self._busy = 0

    def add(self, pending: PendingRead, reads: Sequence[LateRead]) -> None:
        """Keep or free the slots when `pending` has ended. Does not block."""
        with self._state.lock:
            self._work.put((pending, reads))
            self._busy += 1
            if self._busy == 1:
                threading.Thread(target=self._run, name="kvdepot-late-reads", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no read is late any more. False after `timeout_s`."""
        with self._state.lock:
            return self._state.lock.idle.wait_for(lambda: not self._busy, timeout_s)

    def _run(self) -> None:
        state = self._state
        while True:
            pending, reads = self._work.get()
            while not pending.released(_SLICE_S):
                pass
            good = [self._is_good(read) for read in reads]
            with state.lock:
                for read, intact in zip(reads, good, strict=True):
                    if not (intact and self._keep(read)):
                        (state.arena if read.in_arena else state.staging).free(read.slot)
                self._busy -= 1
                state.lock.room.notify_all()
                state.lock.idle.notify_all()
                if not self._busy:
                    return

    def _is_good(self, read: LateRead) -> bool:
        """True if the slot is in the memory tier and holds the intact block."""
        if not read.in_arena:
            return False
        image = self._state.arena.image(read.slot, read.nbytes)
        head = parse_head(image)
        return head is not None and head.key == read.key and payload_intact(image, head)

    def _keep(self, read: LateRead) -> bool:
        """Make the slot a block of the memory tier. False if the block was removed, or is in
        memory.
        """
        assert self._state.lock.held()
        state, catalog = self._state, self._state.catalog
        row = catalog.table.find(read.key)
        if row == NONE or not catalog.is_live(row) or not catalog.memory.absent(row):
            return False
        state.arena.set_owner(read.slot, row)
        catalog.memory.reserve(row, read.slot)
        state.memory_tiers[0].seal(row)
        state.events.count("promoted")
        return True
