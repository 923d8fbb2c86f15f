"""Onboarding: from memory at once, from disk in waves through memory, verified, within a deadline.

A wave of disk reads lands in arena slots (promotion) or, where memory is busy, in staging slots;
the native engine verifies each block and copies it to its target while the next ones are in flight.
A block that is corrupt, failed or late is a miss; the others are delivered.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from kvdepot.codec.record import HEAD_BYTES, record_bytes
from kvdepot.core.block import MISS, BlockKey, CopyState, Got
from kvdepot.core.tier import Load, Outcome, Pending
from kvdepot.index.table import NONE
from kvdepot.native import COPY, address_of
from kvdepot.store.drainer import Drainer
from kvdepot.store.room import Room
from kvdepot.store.stock import TEMPORARY, Stock
from kvdepot.tiers.dram import read_op, transfers

_READY: Final = int(CopyState.READY)
_WAVE_BYTES: Final = 8 << 20
_CACHED_BYTES: Final = 8 << 20
_WAVES_A_DRIVE: Final = 4
_WAVES_AHEAD: Final = 2
"""Have their memory already, and start at once when one that is being read is through."""
_THREADS: Final = 8
_MOVES_MAX: Final = 16
"""How often a block that a reclaim has moved meanwhile is looked for at its new place."""
_FROM_MEMORY: Final = Got("dram")
_FROM_DISK: Final = Got("ssd")
_REASONS: Final = {
    Outcome.CORRUPT: Got(None, "corrupt"),
    Outcome.FAILED: Got(None, "failed"),
    Outcome.LATE: Got(None, "late"),
}
_BUSY: Final = Got(None, "busy")


@dataclass(slots=True)
class Want:
    """One block wanted by a caller: where to put it and which part of it."""

    key: BlockKey
    target: int
    """Address; 0: the caller looks at the block where it is."""
    payload_bytes: int
    chunk_bytes: int
    start: int
    """Of the payload, in bytes; need not be at a chunk's border."""
    stop: int
    row: int = NONE

    def load(self, image: memoryview, location: int) -> Load:
        """The load that covers the wanted range with whole chunks."""
        chunk = self.chunk_bytes
        start = self.start // chunk * chunk
        stop = min(-(-self.stop // chunk) * chunk, self.payload_bytes)
        whole = start == self.start and stop == self.stop
        return Load(
            self.key,
            location,
            self.payload_bytes,
            chunk,
            image,
            self.target if whole else 0,
            start,
            stop,
        )

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.payload_bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block that can be read in place."""

    index: int
    """Which of the blocks asked for."""
    view: memoryview
    """Its payload, read-only, at the start of a page."""
    lasting: bool
    """Whether the view is good until the lease ends; else until the sink returns."""


Sink = Callable[[list[Arrival]], None]
Loaded = tuple[list[Outcome], Pending | None]


@dataclass(frozen=True, slots=True)
class Errand:
    """One call: what is wanted, and who gets what has no target of its own."""

    wants: Sequence[Want]
    results: list[Got]
    deadline: float
    verify: bool
    sink: Sink | None = None
    waves_read: int = 1
    """Waves that are read at the same time."""
    turns: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", threading.Semaphore(self.waves_read))


class Reader:
    """Serves `get`."""

    def __init__(self, stock: Stock, room: Room, drainer: Drainer) -> None:
        self._stock = stock
        self._room = room
        self._drainer = drainer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvdepot-reader")

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._threads.shutdown()

    def fetch(
        self,
        wants: Sequence[Want],
        timeout_s: float,
        *,
        verify: bool | None = None,
        sink: Sink | None = None,
    ) -> list[Got]:
        """Fill each want's target or say why not. Never raises for a fault of a tier.

        Wants without a target go to `sink` as they arrive; what it raises is passed on. `verify` is
        for what lies in memory (default: as configured); from disk everything is verified.
        """
        stock, catalog = self._stock, self._stock.catalog
        if verify is None:
            verify = stock.config.dram.verify
        deadline = stock.clock.now() + timeout_s
        drives = 1 if stock.ssd is None else len(stock.ssd.drives)
        waves = _WAVES_A_DRIVE * drives
        errand = Errand(wants, [MISS] * len(wants), deadline, verify, sink, waves)
        hot: list[int] = []
        cold: list[int] = []
        held: list[int] = []
        with stock.changed:
            memory, disk = catalog.memory.state.view, catalog.disk.state.view
            for index, row in enumerate(catalog.rows([want.key for want in wants])):
                if row == NONE or (memory[row] != _READY and disk[row] != _READY):
                    continue
                wants[index].row = row
                held.append(row)
                (hot if memory[row] == _READY else cold).append(index)
            catalog.use(held)
            catalog.lease(held)
            slots = [catalog.memory.location.view[wants[index].row] for index in hot]
        try:
            cold += self._from_memory(errand, hot, slots)
            self._from_disk(errand, cold)
        finally:
            with stock.changed:
                self._count(wants, errand.results)
                stock.unlease(held)
        return errand.results

    def _from_memory(self, errand: Errand, hits: list[int], places: list[int]) -> list[int]:
        """Serve hits in leased slots. Returns those that failed verification.

        What is verified and then read in place by the sink goes in small parts, so that the sink
        finds it in the processor's cache.
        """
        if not (errand.verify and errand.sink is not None and hits):
            return self._copy_out(errand, hits, places)
        count = max(1, _CACHED_BYTES // max(errand.wants[index].payload_bytes for index in hits))
        starts = range(0, len(hits), count)
        parts = [(hits[at : at + count], places[at : at + count]) for at in starts]
        return [index for part in parts for index in self._copy_out(errand, *part)]

    def _copy_out(self, errand: Errand, hits: list[int], places: list[int]) -> list[int]:
        """Verify and copy as asked. Returns the hits that failed verification."""
        base = self._stock.arena.address
        ops = []
        partial = []
        asked = []
        for index, place in zip(hits, places, strict=True):
            want = errand.wants[index]
            slot = base + place
            load = want.load(_NO_IMAGE, place)
            if errand.verify:
                asked.append(index)
                ops.append(read_op(slot, load, load.copy_to))
            elif want.target:
                asked.append(index)
                ops.append(_copy_op(slot, want))
            if errand.verify and want.target and not load.copy_to:
                partial.append(_copy_op(slot, want))
        codes = dict(zip(asked, transfers(ops).tolist() if ops else [], strict=True))
        if partial:
            transfers(partial)
        bad = [index for index in hits if codes.get(index, 0)]
        arrivals = []
        for index, place in zip(hits, places, strict=True):
            errand.results[index] = _FROM_MEMORY
            if index not in bad and not errand.wants[index].target:
                nbytes = record_bytes(errand.wants[index].payload_bytes)
                arrivals.append((index, self._stock.arena.image(place, nbytes), True))
        for index in bad:
            errand.results[index] = _REASONS[Outcome.CORRUPT]
        _hand_over(errand, arrivals)
        return [index for index in bad if self._quarantine_memory(errand.wants[index].row)]

    def _quarantine_memory(self, row: int) -> bool:
        """Drop a damaged copy in memory. True: the disk has another one."""
        stock, catalog = self._stock, self._stock.catalog
        with stock.changed:
            stock.counters.quarantined += 1
            if catalog.disk.ready(row) and catalog.memory.ready(row) and catalog.leases(row) == 1:
                stock.drop_memory(row)
                return True
            catalog.doom(row)
            return False

    def _from_disk(self, errand: Errand, left: list[int]) -> None:
        """Read in waves, the next one planned and started while the last is under way."""
        flying: deque[tuple[list[Step], Future[Loaded]]] = deque()
        try:
            self._fly(errand, deque(left), flying)
        finally:
            # Only when the sink has raised: what is under way has slots to give back.
            lost = replace(errand, sink=None)
            while flying:
                wave, loaded = flying.popleft()
                self._finish(lost, wave, loaded.result())

    def _fly(
        self,
        errand: Errand,
        waiting: deque[int],
        flying: "deque[tuple[list[Step], Future[Loaded]]]",
    ) -> None:
        stock, results, deadline = self._stock, errand.results, errand.deadline
        moves: Counter[int] = Counter()
        while waiting or flying:
            if waiting and len(flying) < errand.waves_read + _WAVES_AHEAD:
                with stock.changed:
                    wave = self._plan(errand.wants, waiting)
                    while not wave and not flying and stock.clock.now() < deadline:
                        stock.changed.wait(deadline - stock.clock.now())
                        wave = self._plan(errand.wants, waiting)
                if wave:
                    inline = not waiting and not flying
                    flying.append((wave, self._start(wave, errand, inline=inline)))
                    continue
            if not flying:
                for index in waiting:
                    results[index] = _BUSY
                return
            wave, loaded = flying.popleft()
            again = self._finish(errand, wave, loaded.result())
            moves.update(again)
            for index in again:
                results[index] = _BUSY
            waiting.extend(index for index in again if moves[index] < _MOVES_MAX)

    def _start(self, wave: "list[Step]", errand: Errand, *, inline: bool) -> "Future[Loaded]":
        """Begin to read a wave.

        Here and now if there is nothing to do meanwhile, else in a thread.
        """
        ssd, clock = self._stock.ssd, self._stock.clock
        assert ssd is not None
        loads = [step.load for step in wave]

        def load() -> Loaded:
            with errand.turns:
                return ssd.load(loads, max(0.0, errand.deadline - clock.now()))

        if not inline:
            return self._threads.submit(load)
        done: Future[Loaded] = Future()
        done.set_result(load())
        return done

    def _plan(self, wants: Sequence[Want], waiting: deque[int]) -> "list[Step]":
        """The next wave: blocks for which there is memory to read into. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        limit = min(_WAVE_BYTES, max(1, stock.arena.capacity_bytes // 4))
        wave: list[Step] = []
        total = 0
        while waiting:
            index = waiting[0]
            want = wants[index]
            nbytes = record_bytes(want.payload_bytes)
            if wave and total + nbytes > limit:
                break
            slot = None
            promote = want.is_whole and self._may_promote(want.row)
            if promote:
                slot = self._room.slot(nbytes, want.row)
            arena = stock.arena
            if slot is None:
                promote, arena = False, stock.staging
                slot = arena.allocate(nbytes, TEMPORARY)
            if slot is None:
                break
            if promote:
                catalog.memory.reserve(want.row, slot)
            load = want.load(arena.image(slot, nbytes), catalog.disk.location[want.row])
            wave.append(Step(index, load, slot, promote))
            waiting.popleft()
            total += nbytes
        return wave

    def _may_promote(self, row: int) -> bool:
        ssd = self._stock.config.ssd
        return ssd is not None and ssd.promote and self._stock.catalog.memory.absent(row)

    def _finish(self, errand: Errand, wave: "list[Step]", loaded: Loaded) -> list[int]:
        """Take in a wave that was read.

        Returns the wants to try again: their block moved meanwhile.
        """
        outcomes, pending = loaded
        arrivals = []
        for step, outcome in zip(wave, outcomes, strict=True):
            want = errand.wants[step.index]
            if outcome is not Outcome.OK:
                continue
            if not want.target:
                arrivals.append((step.index, step.load.image, step.promote))
            elif not step.load.copy_to:
                transfers([_copy_op(address_of(step.load.image)[0], want)])
        again: list[int] = []
        late: list[tuple[bool, int]] = []
        try:
            _hand_over(errand, arrivals)
        finally:
            with self._stock.changed:
                self._enter(errand, wave, outcomes, again, late)
                self._stock.changed.notify_all()
            if pending is not None:
                self._drainer.take(pending, late)
        return again

    def _enter(
        self,
        errand: Errand,
        wave: "list[Step]",
        outcomes: list[Outcome],
        again: list[int],
        late: list[tuple[bool, int]],
    ) -> None:
        """Settle each block of a wave, collect what moved and what is late. Lock held."""
        for step, outcome in zip(wave, outcomes, strict=True):
            row = errand.wants[step.index].row
            errand.results[step.index] = _FROM_DISK if outcome is Outcome.OK else _REASONS[outcome]
            if outcome is Outcome.LATE:
                late.append(self._set_aside(step, row))
                continue
            self._settle(step, row, outcome)
            if outcome is not Outcome.OK and self._blame(step, row, outcome):
                again.append(step.index)

    def _settle(self, step: "Step", row: int, outcome: Outcome) -> None:
        """Make the slot a block of the memory tier, or give it back."""
        stock, catalog = self._stock, self._stock.catalog
        if not step.promote:
            stock.staging.free(step.slot)
        elif outcome is Outcome.OK:
            catalog.memory.seal(row)
            catalog.leaves.enter(row, stock.arena.slot_bytes(len(step.load.image)))
            stock.counters.promoted += 1
        else:
            stock.arena.free(catalog.memory.drop(row))

    def _set_aside(self, step: "Step", row: int) -> "tuple[bool, int]":
        """The slot is busy until the kernel lets go of it.

        The block is not being promoted any more.
        """
        if step.promote:
            self._stock.catalog.memory.drop(row)
            self._stock.arena.set_owner(step.slot, TEMPORARY)
        self._stock.counters.read_late += 1
        return step.promote, step.slot

    def _blame(self, step: "Step", row: int, outcome: Outcome) -> bool:
        """Drop the copy that could not be read. True: it only moved, read it again."""
        stock, disk = self._stock, self._stock.catalog.disk
        if not disk.ready(row):
            return False
        if disk.location[row] != step.load.location:
            return True
        if outcome is Outcome.CORRUPT:
            stock.counters.quarantined += 1
            stock.drop_disk(row)
        else:
            stock.counters.read_failed += 1
            if stock.disk_usable(step.load.location):
                stock.drop_disk(row)
        return False

    def _count(self, wants: Sequence[Want], results: Sequence[Got]) -> None:
        counters = self._stock.counters
        for want, got in zip(wants, results, strict=True):
            if got is _FROM_MEMORY:
                counters.get_dram += 1
            elif got is _FROM_DISK:
                counters.get_ssd += 1
            else:
                counters.get_miss += 1
                continue
            counters.get_bytes += want.stop - want.start


@dataclass(slots=True)
class Step:
    """One block of a wave: its load and the slot it is read into."""

    index: int
    load: Load
    slot: int
    promote: bool


_NO_IMAGE: Final = memoryview(b"")


def _copy_op(slot: int, want: Want) -> tuple[int, ...]:
    """A plain copy of the wanted range out of the record image at address `slot`."""
    source = slot + HEAD_BYTES + want.start
    return (0, source, want.target, want.stop - want.start, 0, 0, COPY)


def _hand_over(errand: Errand, images: list[tuple[int, memoryview, bool]]) -> None:
    """Give the sink what can be read in place."""
    if errand.sink is None or not images:
        return
    arrivals = []
    for index, image, lasting in images:
        end = HEAD_BYTES + errand.wants[index].payload_bytes
        arrivals.append(Arrival(index, image[HEAD_BYTES:end].toreadonly(), lasting))
    errand.sink(arrivals)
