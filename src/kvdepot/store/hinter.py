"""Prefetch: blocks that will be wanted soon come to memory in the background.

One thread, the most urgent hint first, a few blocks at a time with a rest while others read. What
may wait is bounded; a hint that does not fit is not taken, and nobody is the worse for it. What
comes from a hard drive goes to the SSDs as well, as after any other read. A block for which there
is no room in memory is not read.
"""

import math
import threading
from collections import deque
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.core import order
from kvdepot.errors import ConfigError
from kvdepot.store.errand import Want
from kvdepot.store.pace import rest_s
from kvdepot.store.reader import Reader
from kvdepot.store.stock import Stock

_STEP_BYTES: Final = 32 << 20
_MEMORY_SHARE: Final = 0.25
"""Of the memory that hints may fill before they are used."""
_HINTS_MAX: Final = 4096
_STEP_S_MAX: Final = 60.0
"""A drive that takes longer for one step is too late for any deadline."""


def checked_deadline(deadline_s: float) -> float:
    """Seconds from now, or ConfigError."""
    if math.isnan(deadline_s) or deadline_s < 0:
        raise ConfigError("deadline_s", f"must be a number of seconds from now, not {deadline_s!r}")
    return float(deadline_s)


class Hint:
    """Answer to `Store.hint`: what it is about to bring, to be awaited or called off."""

    def __init__(
        self, wants: list[Want], deadline_s: float, state: order.Hint = order.Hint.NONE
    ) -> None:
        self.deadline_s = deadline_s
        """By the store's clock."""
        self.wanted = len(wants)
        """Blocks that it is to bring; others are in memory, unknown, or too many."""
        self.brought = 0
        """Blocks that are in memory because of it."""
        self.state = state
        self._lock = threading.Lock()
        self._left = deque(wants)
        self._ended = threading.Event()
        self.nbytes = sum(record_bytes(want.payload_bytes) for want in wants)
        """What is still to come."""
        if not wants:
            self._ended.set()

    def cancel(self) -> None:
        """Bring no more; what is under way still arrives. May be called twice."""
        with self._lock:
            self._left.clear()
            self.nbytes = 0
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be."""
        return self._ended.wait(timeout_s)

    def take(self, limit_bytes: int) -> list[Want]:
        """The next blocks; at least one as long as there are any."""
        step: list[Want] = []
        with self._lock:
            while self._left and limit_bytes > 0:
                step.append(self._left.popleft())
                nbytes = record_bytes(step[-1].payload_bytes)
                limit_bytes -= nbytes
                self.nbytes -= nbytes
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

    def take(
        self, wants: list[Want], deadline_s: float, state: order.Hint = order.Hint.NONE
    ) -> Hint:
        """Begin to bring blocks within so many seconds, as far as there is room for them.

        `state` is what the session is in that they belong to.
        """
        stock = self._stock
        due_s = stock.clock.now() + deadline_s
        with stock.changed:
            waiting = sum(hint.nbytes for hint in self._hints)
            room = int(stock.arena.capacity_bytes * _MEMORY_SHARE) - waiting
            fitting: list[Want] = []
            for want in wants:
                room -= record_bytes(want.payload_bytes)
                if room < 0 or len(self._hints) >= _HINTS_MAX or stock.closing:
                    break
                fitting.append(want)
            hint = Hint(fitting, due_s, state)
            if fitting:
                self._hints.append(hint)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="kvdepot-hinter", daemon=True
                    )
                    self._thread.start()
        return hint

    def close(self, timeout_s: float) -> bool:
        """Call everything off and wait for the thread. False: it still reads."""
        with self._stock.changed:
            for hint in self._hints:
                hint.cancel()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        stock = self._stock
        while hint := self._most_urgent():
            started_s = stock.clock.now()
            wants = hint.take(_STEP_BYTES)
            timeout_s = min(_STEP_S_MAX, max(0.0, hint.deadline_s - started_s))
            answers = self._reader.fetch(wants, timeout_s, ahead=True)
            with stock.changed:
                brought = [
                    want
                    for want, answer in zip(wants, answers, strict=True)
                    if answer and answer.tier != "dram"
                ]
                hint.brought += len(brought)
                stock.counters.hinted += len(brought)
                self._pass_on(brought, hint.state)
            hint.end_if_done()
            self._rest(hint, started_s)

    def _pass_on(self, wants: list[Want], state: order.Hint) -> None:
        """Blocks that have just come to memory are in the state of their session. Lock held."""
        if state is order.Hint.NONE:
            return
        catalog = self._stock.catalog
        rows = catalog.rows([want.key for want in wants])
        here = [row for row in rows if row >= 0 and catalog.memory.ready(row)]
        catalog.leaves.hint(here, state)

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
