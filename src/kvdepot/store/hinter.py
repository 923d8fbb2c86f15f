"""Prefetch: blocks that will be wanted soon come to memory in the background.

One thread, the most urgent hint first, a few blocks at a time with a rest while others read. What
may wait is bounded; a hint that does not fit is not taken, and nobody is the worse for it.
"""

import threading
from collections import deque
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.store.errand import Want
from kvdepot.store.pace import rest_s
from kvdepot.store.reader import Reader
from kvdepot.store.stock import Stock

_STEP_BYTES: Final = 32 << 20
_MEMORY_SHARE: Final = 0.25
"""Of the memory that hints may fill before they are used."""


class Hint:
    """Answer to `Store.hint`: what it is about to bring, to be awaited or called off."""

    def __init__(self, wants: list[Want], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.brought = 0
        """Blocks that are in memory because of it."""
        self._left = deque(wants)
        self._ended = threading.Event()
        if not wants:
            self._ended.set()

    @property
    def nbytes(self) -> int:
        """What is still to come."""
        return sum(record_bytes(want.payload_bytes) for want in self._left)

    def cancel(self) -> None:
        """Bring no more; what is under way still arrives."""
        self._left.clear()
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be."""
        return self._ended.wait(timeout_s)

    def take(self, limit_bytes: int) -> list[Want]:
        """The next blocks; at least one as long as there are any."""
        step: list[Want] = []
        while self._left and limit_bytes > 0:
            step.append(self._left.popleft())
            limit_bytes -= record_bytes(step[-1].payload_bytes)
        return step

    def end_if_done(self) -> None:
        if not self._left:
            self._ended.set()


class Hinter:
    """Serves `hint`."""

    def __init__(self, stock: Stock, reader: Reader) -> None:
        self._stock = stock
        self._reader = reader
        self._hints: list[Hint] = []
        self._thread: threading.Thread | None = None

    def take(self, wants: list[Want], deadline_s: float) -> Hint:
        """Begin to bring blocks, as far as there is room for them."""
        stock = self._stock
        with stock.changed:
            waiting = sum(hint.nbytes for hint in self._hints)
            room = int(stock.arena.capacity_bytes * _MEMORY_SHARE) - waiting
            fitting: list[Want] = []
            for want in wants:
                room -= record_bytes(want.payload_bytes)
                if room < 0:
                    break
                fitting.append(want)
            hint = Hint(fitting, deadline_s)
            if fitting:
                self._hints.append(hint)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="kvdepot-hinter", daemon=True
                    )
                    self._thread.start()
        return hint

    def close(self) -> None:
        """Call everything off and wait for the thread."""
        with self._stock.changed:
            for hint in self._hints:
                hint.cancel()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        stock = self._stock
        while hint := self._most_urgent():
            started_s = stock.clock.now()
            wants = hint.take(_STEP_BYTES)
            answers = self._reader.fetch(wants, hint.deadline_s - started_s, ahead=True)
            with stock.changed:
                brought = sum(bool(answer) and answer.tier != "dram" for answer in answers)
                hint.brought += brought
                stock.counters.hinted += brought
            hint.end_if_done()
            self._rest(hint, started_s)

    def _most_urgent(self) -> Hint | None:
        """The hint to go on with; those that are too late, or through, are forgotten."""
        with self._stock.changed:
            now_s = self._stock.clock.now()
            for hint in self._hints:
                if hint.deadline_s <= now_s:
                    hint.cancel()
            self._hints = [hint for hint in self._hints if not hint.wait(0.0)]
            if not self._hints:
                self._thread = None
                return None
            return min(self._hints, key=lambda hint: hint.deadline_s)

    def _rest(self, hint: Hint, since_s: float) -> None:
        """Leave the drives to those who wait for them, as far as the deadline allows."""
        stock = self._stock
        if hint.wait(0.0) or not any(level.pace.busy_since(since_s) for level in stock.levels):
            return
        now_s = stock.clock.now()
        pause_s = min(rest_s(now_s - since_s), max(0.0, hint.deadline_s - now_s) / 2)
        hint.wait(pause_s)
