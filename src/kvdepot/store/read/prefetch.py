"""Prefetch: blocks that will be wanted soon come to memory in the background.

One thread, the most urgent hint first, a few blocks at a time with a rest while others read. What
may wait is bounded; a hint that does not fit is not taken, and nobody is the worse for it. What
comes from a hard drive goes to the SSDs as well, as after any other read. A block for which there
is no room in memory is not read.
"""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.core.order import SessionState
from kvdepot.core.tier import drive_of
from kvdepot.errors import ConfigError
from kvdepot.index.table import NONE
from kvdepot.store.read.reader import Reader
from kvdepot.store.read.request import Want
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.store.state.yielding import FLASH_SHARE, HEAD_SHARE, Stride, rest_s

_STEP_BYTES: Final = 32 << 20
_LOOK_MAX: Final = 512
_FIRST_BYTES: Final = 1 << 20
_ALONE_S: Final = 0.15
"""How long somebody who comes to read may have to wait for a step that began before."""
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


Place = tuple[Level, int] | None
"""A drive of a tier; None: memory, or nowhere."""
Step = dict[Place, list[Want]]
"""Blocks to be read in one go."""


class Hint:
    """Answer to `Store.hint`: what it is about to bring, to be awaited or called off."""

    def __init__(
        self, wants: list[Want], deadline_s: float, state: SessionState = SessionState.NONE
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

    def take(self, places: Sequence[Place], limit_bytes: int, each_bytes: int) -> Step:
        """The next blocks, by the place they are read from; at least one while there are any.

        `places` are those of the first that are left. No more than `each_bytes` from one of them,
        but one block always.
        """
        step: Step = {}
        later: list[Want] = []
        with self._lock:
            for place in places[: len(self._left)]:
                want = self._left.popleft()
                nbytes = record_bytes(want.payload_bytes)
                mine = len(step.get(place, ()))
                if limit_bytes <= 0 or (mine and (mine + 1) * nbytes > each_bytes):
                    later.append(want)
                    continue
                step.setdefault(place, []).append(want)
                limit_bytes -= nbytes
                self.nbytes -= nbytes
            self._left.extendleft(reversed(later))
        return step

    def first(self, count: int) -> list[Want]:
        """The first that are left."""
        with self._lock:
            return list(islice(self._left, count))

    def end_if_done(self) -> None:
        if not self._left:
            self._ended.set()


class Hinter:
    """Serves `hint`."""

    def __init__(self, stock: Stock, reader: Reader) -> None:
        self._stock = stock
        self._reader = reader
        self._hints: list[Hint] = []
        self._stride = Stride(_STEP_BYTES, _ALONE_S)
        """What is read in one go while nobody else reads."""
        self._stride.nbytes = _FIRST_BYTES
        self._short_stride = Stride(_STEP_BYTES)
        """What one drive reads in one go while others read too."""
        self._thread: threading.Thread | None = None

    def take(
        self, wants: list[Want], deadline_s: float, state: SessionState = SessionState.NONE
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
        last_s = stock.clock.now()
        while hint := self._most_urgent():
            step = self._next_step(hint, last_s)
            wants = [want for part in step.values() for want in part]
            last_s = started_s = stock.clock.now()
            timeout_s = min(_STEP_S_MAX, max(0.0, hint.deadline_s - started_s))
            answers = self._reader.fetch(wants, timeout_s, ahead=True)
            with stock.changed:
                brought = [
                    want
                    for want, answer in zip(wants, answers, strict=True)
                    if answer and answer.tier not in ("dram", "cxl")
                ]
                hint.brought += len(brought)
                stock.counters.hinted += len(brought)
                self._pass_on(brought, hint.state)
            hint.end_if_done()
            self._learn(step, stock.clock.now() - started_s)
            self._rest(hint, step, started_s)

    def _next_step(self, hint: Hint, since_s: float) -> Step:
        """What to read next: much while nobody else reads there, else a little from each drive."""
        stock = self._stock
        some = hint.first(_LOOK_MAX)
        with stock.changed:
            places = [self._place(row) for row in stock.catalog.rows([want.key for want in some])]
        if self._busy(places, since_s):
            return hint.take(places, _STEP_BYTES, self._short_stride.nbytes)
        return hint.take(places, self._stride.nbytes, _STEP_BYTES)

    def _place(self, row: int) -> Place:
        """The drive a block is read from. Lock held."""
        level = self._stock.source(row) if row != NONE else None
        return (level, drive_of(level.copies.location[row])) if level is not None else None

    def _busy(self, places: Iterable[Place], since_s: float) -> list[Level]:
        """The tiers among those where somebody else has read since."""
        levels = {place[0] for place in places if place is not None}
        return [level for level in levels if level.pace.busy_since(since_s)]

    def _learn(self, step: Step, spent_s: float) -> None:
        """A step took so long."""
        sizes = [sum(record_bytes(want.payload_bytes) for want in part) for part in step.values()]
        if sizes:
            self._stride.took(sum(sizes), spent_s)
            self._short_stride.took(max(sizes), spent_s)

    def _pass_on(self, wants: list[Want], state: SessionState) -> None:
        """Blocks that have just come to memory are in the state of their session. Lock held."""
        if state is SessionState.NONE:
            return
        catalog = self._stock.catalog
        rows = catalog.rows([want.key for want in wants])
        here = [row for row in rows if row >= 0 and catalog.memory.ready(row)]
        catalog.leaves.session_changed(here, state)

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

    def _rest(self, hint: Hint, step: Step, since_s: float) -> None:
        """Leave the drives to those who wait for them, as far as the deadline allows."""
        busy = self._busy(step, since_s)
        if hint.wait(0.0) or not busy:
            return
        share = HEAD_SHARE if any(level.run_bytes for level in busy) else FLASH_SHARE
        now_s = self._stock.clock.now()
        pause_s = min(rest_s(now_s - since_s, share), max(0.0, hint.deadline_s - now_s) / 2)
        hint.wait(pause_s)
