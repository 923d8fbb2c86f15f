"""Takes care of I/O that outlived its deadline.

When the kernel has let go of the slots, what was read into the arena and is as it should be becomes
a block of the memory tier: late for who asked, there for who asks next. The other slots are freed.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.codec.record import parse_head, payload_intact
from kvdepot.core.block import BlockKey
from kvdepot.core.tier import Pending
from kvdepot.index.table import NONE
from kvdepot.store.state.state import Stock

_SLICE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LateRead:
    """A slot that the kernel may still fill."""

    slot: int
    key: BlockKey
    nbytes: int
    in_arena: bool
    """Else in staging, where nothing is kept."""


class Drainer:
    """A thread that exists only while something is late."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._work: queue.SimpleQueue[tuple[Pending, Sequence[LateRead]]] = queue.SimpleQueue()
        self._busy = 0

    def take(self, pending: Pending, reads: Sequence[LateRead]) -> None:
        """Keep or free what was read when `pending` has ended. Does not block."""
        with self._stock.changed:
            self._work.put((pending, reads))
            self._busy += 1
            if self._busy == 1:
                threading.Thread(target=self._run, name="kvdepot-drainer", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """True once nothing is late any more."""
        with self._stock.changed:
            return self._stock.changed.wait_for(lambda: not self._busy, timeout_s)

    def _run(self) -> None:
        stock = self._stock
        while True:
            pending, reads = self._work.get()
            while not pending.wait(_SLICE_S):
                pass
            good = [self._is_good(read) for read in reads]
            with stock.changed:
                for read, intact in zip(reads, good, strict=True):
                    if not (intact and self._keep(read)):
                        (stock.arena if read.in_arena else stock.staging).free(read.slot)
                self._busy -= 1
                stock.changed.notify_all()
                if not self._busy:
                    return

    def _is_good(self, read: LateRead) -> bool:
        """Whether the slot holds the whole block."""
        if not read.in_arena:
            return False
        image = self._stock.arena.image(read.slot, read.nbytes)
        head = parse_head(image)
        return head is not None and head.key == read.key and payload_intact(image, head)

    def _keep(self, read: LateRead) -> bool:
        """Make it a block of the memory tier, unless it is one, or is gone. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        row = catalog.row(read.key)
        if row == NONE or not catalog.is_live(row) or not catalog.memory.absent(row):
            return False
        stock.arena.set_owner(read.slot, row)
        catalog.memory.reserve(row, read.slot)
        catalog.memory.seal(row)
        catalog.leaves.enter(row, stock.arena.slot_bytes(read.nbytes))
        stock.counters.promoted += 1
        return True
