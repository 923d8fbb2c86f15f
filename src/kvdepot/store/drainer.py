"""Takes care of I/O that outlived its deadline.

Frees its slots once the kernel has let go of them.
"""

import queue
import threading
from typing import Final

from kvdepot.core.tier import Pending
from kvdepot.store.stock import Stock

_SLICE_S: Final = 3600.0


class Drainer:
    """A thread that exists only while something is late."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._work: queue.SimpleQueue[tuple[Pending, list[tuple[bool, int]]]] = queue.SimpleQueue()
        self._busy = 0

    def take(self, pending: Pending, slots: list[tuple[bool, int]]) -> None:
        """Free `slots` (in the arena, else in staging) when `pending` has ended. Does not block."""
        with self._stock.changed:
            self._work.put((pending, slots))
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
            pending, slots = self._work.get()
            while not pending.wait(_SLICE_S):
                pass
            with stock.changed:
                for in_arena, slot in slots:
                    (stock.arena if in_arena else stock.staging).free(slot)
                self._busy -= 1
                stock.changed.notify_all()
                if not self._busy:
                    return
