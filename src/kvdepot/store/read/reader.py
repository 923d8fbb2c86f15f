"""Onboarding: from memory at once, from disk in waves through memory, verified, within a deadline.

A wave of disk reads lands in arena slots (promotion) or, where memory is busy, in staging slots;
the native engine verifies each block and copies it to its target while the next ones are in flight.
A block that is corrupt, failed or late is a miss; the others are delivered.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final

from kvdepot.codec.record import HEAD_BYTES, record_bytes
from kvdepot.core.block import MISS, CopyState, Got
from kvdepot.core.depot import Arrival, Sink
from kvdepot.core.tier import Outcome, drive_of
from kvdepot.index.table import NONE
from kvdepot.native import COPY, address_of
from kvdepot.store.read.disk_reads import Flight, Flights, Loaded, Step
from kvdepot.store.read.drive_choice import drive_for, place_for
from kvdepot.store.read.late_reads import Drainer, LateRead
from kvdepot.store.read.request import Errand, Want
from kvdepot.store.read.shared_reads import await_arrival, is_coming
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.memory_tier import Pool
from kvdepot.store.state.state import TEMPORARY, Stock
from kvdepot.store.write.memory_eviction import Room
from kvdepot.tiers.memory.copy_ops import read_op, transfers

_READY: Final = int(CopyState.READY)
_CACHED_BYTES: Final = 16 << 20
_THREADS: Final = 8
_MOVES_MAX: Final = 16
"""How often a block that a reclaim has moved meanwhile is looked for at its new place."""
_LOOK_AGAIN_S: Final = 0.5
_REASONS: Final = {
    Outcome.CORRUPT: Got(None, "corrupt"),
    Outcome.FAILED: Got(None, "failed"),
    Outcome.LATE: Got(None, "late"),
}
_BUSY: Final = Got(None, "busy")


class Reader:
    """Serves `get`."""

    def __init__(self, stock: Stock, room: Room, drainer: Drainer) -> None:
        self._stock = stock
        self._room = room
        self._drainer = drainer
        self._threads: dict[tuple[Level, int], ThreadPoolExecutor] = {}
        """Of each drive, so that a slow one does not hold up the others."""
        self.follow: Callable[[Sequence[Want]], None] | None = None
        """Told of what somebody has read."""

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        for threads in self._threads.values():
            threads.shutdown()

    def fetch(
        self,
        wants: Sequence[Want],
        timeout_s: float,
        *,
        verify: bool | None = None,
        sink: Sink | None = None,
        ahead: bool = False,
    ) -> list[Got]:
        """Fill each want's target or say why not. Never raises for a fault of a tier.

        Wants without a target go to `sink` as they arrive; what it raises is passed on. `verify` is
        for what lies in memory (default: as configured); from disk everything is verified. `ahead`:
        nobody waits for it, and it does not count as a use.
        """
        stock, catalog = self._stock, self._stock.catalog
        if verify is None:
            verify = stock.config.dram.verify
        deadline = stock.clock.now() + timeout_s
        errand = Errand(wants, [MISS] * len(wants), deadline, verify, sink, ahead)
        hot: list[int] = []
        cold: list[int] = []
        held: list[int] = []
        with stock.changed:
            memory, residency = catalog.memory.state.view, catalog.residency.view
            for index, row in enumerate(catalog.rows([want.key for want in wants])):
                if row == NONE or not residency[row]:
                    continue
                wants[index].row = row
                held.append(row)
                (hot if memory[row] == _READY else cold).append(index)
            catalog.lease(held)
            if not ahead:
                catalog.use(held)
                stock.write_touched(held)
            slots = [catalog.memory.location.view[wants[index].row] for index in hot]
            warm = self._look_below(errand, cold) if len(stock.pools) > 1 else {}
        try:
            cold += self._from_memory(errand, stock.pools[0], hot, slots)
            if warm or (cold and len(stock.pools) > 1):
                cold = self._from_below(errand, warm, cold)
            if cold:
                self._from_drives(errand, cold)
        finally:
            with stock.changed:
                if not ahead:
                    self._count(wants, errand.results)
                    stock.counters.get_mirror += sum(
                        errand.results[index].tier is not None for index in errand.rescued
                    )
                stock.unlease(held)
        if self.follow is not None and not ahead:
            self.follow(wants)
        return errand.results

    def _look_below(self, errand: Errand, indices: list[int]) -> dict[int, int]:
        """Those of the wants that are in the slower memory, and where. Lock held."""
        upper, lower = self._stock.pools
        wants, copies = errand.wants, lower.copies
        found = {
            index: int(copies.location.view[wants[index].row])
            for index in indices
            if copies.ready(wants[index].row)
        }
        if found and not errand.ahead:
            upper.wish([wants[index].row for index in found])
        return found

    def _from_below(self, errand: Errand, warm: dict[int, int], left: list[int]) -> list[int]:
        """Serve what is in the slower memory, where it lies. Returns what is not, or is damaged."""
        damaged = [index for index in left if errand.results[index] is _REASONS[Outcome.CORRUPT]]
        if damaged:
            with self._stock.changed:
                warm |= self._look_below(errand, damaged)
        pool = self._stock.pools[1]
        bad = self._from_memory(errand, pool, list(warm), list(warm.values())) if warm else []
        return [index for index in left if index not in warm] + bad

    def _from_memory(
        self, errand: Errand, pool: Pool, hits: list[int], places: list[int]
    ) -> list[int]:
        """Serve hits in leased slots. Returns those that failed verification.

        What is verified and then read in place by the sink goes in small parts, so that the sink
        finds it in the processor's cache.
        """
        if not (errand.verify and errand.sink is not None and hits):
            return self._copy_out(errand, pool, hits, places)
        count = max(1, _CACHED_BYTES // max(errand.wants[index].payload_bytes for index in hits))
        starts = range(0, len(hits), count)
        parts = [(hits[at : at + count], places[at : at + count]) for at in starts]
        return [index for part in parts for index in self._copy_out(errand, pool, *part)]

    def _copy_out(
        self, errand: Errand, pool: Pool, hits: list[int], places: list[int]
    ) -> list[int]:
        """Verify and copy as asked. Returns the hits that failed verification."""
        base, served = pool.arena.address, pool.served
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
            errand.results[index] = served
            if index not in bad and not errand.wants[index].target:
                nbytes = record_bytes(errand.wants[index].payload_bytes)
                arrivals.append((index, pool.arena.image(place, nbytes), True))
        for index in bad:
            errand.results[index] = _REASONS[Outcome.CORRUPT]
        _hand_over(errand, arrivals)
        return [index for index in bad if self._quarantine(pool, errand.wants[index].row)]

    def _quarantine(self, pool: Pool, row: int) -> bool:
        """Drop a damaged copy in memory. True: a slower tier has another one."""
        stock, catalog = self._stock, self._stock.catalog
        with stock.changed:
            stock.counters.quarantined += 1
            below = stock.pools[stock.pools.index(pool) + 1 :]
            other = stock.source(row) or any(one.copies.ready(row) for one in below)
            idle = catalog.leases(row) == 1 and not stock.is_waiting(row)
            if other and idle and pool.copies.ready(row):
                pool.drop(row)
                return True
            catalog.doom(row)
            return False

    def _from_drives(self, errand: Errand, left: list[int]) -> None:
        """Read, but for what somebody else is reading: that is waited for first."""
        self._from_files(errand, left)
        if errand.later:
            came = await_arrival(self._stock, errand)
            hits, places = list(came), list(came.values())
            bad = self._from_memory(errand, self._stock.pools[0], hits, places)
            still = [*(errand.later - came.keys()), *bad]
            self._from_files(replace(errand, patient=False), still)

    def _from_files(self, errand: Errand, left: list[int]) -> None:
        """Read in waves, the next one planned and started while the last is under way."""
        flights: Flights = {}
        with self._stock.changed:
            if not errand.ahead:
                self._stock.admission.read([errand.wants[index].row for index in left])
            self._assign(errand, flights, left)
        try:
            self._fly(errand, flights)
        finally:
            # Only when the sink has raised: what is under way has slots to give back.
            lost = replace(errand, sink=None)
            for flight in flights.values():
                while flight.flying:
                    wave, loaded = flight.flying.popleft()
                    self._finish(lost, flight, wave, loaded.result())

    def _assign(self, errand: Errand, flights: Flights, indices: list[int]) -> None:
        """Choose the drive that each block is read from. Lock held."""
        drive = NONE
        queued = {name: flight.queued_bytes for name, flight in flights.items()}
        for index in indices:
            want = errand.wants[index]
            level = self._stock.source(want.row)
            if level is None:
                continue
            if level.mirrors is None:
                drive = drive_of(level.copies.location[want.row])
            else:
                drive = drive_for(errand, index, level, queued, drive)
            flight = flights.get((level, drive))
            if flight is None:
                flight = flights[level, drive] = Flight(level, drive)
            flight.waiting.append(index)
            flight.queued_bytes += want.payload_bytes
            queued[level, drive] = flight.queued_bytes

    def _fly(self, errand: Errand, flights: Flights) -> None:
        moves: Counter[int] = Counter()
        while busy := [one for one in flights.values() if one.waiting or one.flying]:
            if self._take_off(errand, busy):
                continue
            flying = [flight for flight in busy if flight.flying]
            if not flying and not self._await_room(errand, busy):
                for flight in busy:
                    for index in flight.waiting:
                        errand.results[index] = _BUSY
                return
            for flight in _landed(flying):
                wave, loaded = flight.flying.popleft()
                again = self._finish(errand, flight, wave, loaded.result())
                moves.update(again)
                for index in again:
                    errand.results[index] = _BUSY
                with self._stock.changed:
                    left = [index for index in again if moves[index] < _MOVES_MAX]
                    self._assign(errand, flights, left)

    def _take_off(self, errand: Errand, busy: list[Flight]) -> bool:
        """Start a wave of every tier that has one. False: there was no room for any."""
        started = False
        for flight in busy:
            if not flight.has_room():
                continue
            left = len(flight.waiting)
            with self._stock.changed:
                wave = self._plan(errand, flight)
            started = started or len(flight.waiting) < left
            if wave:
                alone = len(busy) == 1 and not flight.waiting and not flight.flying
                flight.flying.append((wave, self._start(wave, errand, flight, inline=alone)))
        return started

    def _await_room(self, errand: Errand, busy: list[Flight]) -> bool:
        """Wait for memory to read into and start. False: time is up."""
        stock = self._stock
        while not self._take_off(errand, busy):
            with stock.changed:
                wait_s = errand.deadline - stock.clock.now()
                if wait_s <= 0:
                    return False
                stock.changed.wait(min(wait_s, _LOOK_AGAIN_S))
        return True

    def _start(
        self, wave: "list[Step]", errand: Errand, flight: Flight, *, inline: bool
    ) -> "Future[Loaded]":
        """Begin to read a wave.

        Here and now if there is nothing to do meanwhile, else in a thread.
        """
        clock, tier = self._stock.clock, flight.level.tier
        loads = [step.load for step in wave]

        def load() -> Loaded:
            waited_for = (
                contextlib.nullcontext() if errand.ahead else flight.level.pace.foreground()
            )
            with flight.turns, waited_for:
                left_s = max(0.0, errand.deadline - clock.now())
                return tier.load(loads, left_s / 2 if wave[0].hedged else left_s)

        if not inline:
            return self._pool(flight).submit(load)
        done: Future[Loaded] = Future()
        done.set_result(load())
        return done

    def _pool(self, flight: Flight) -> ThreadPoolExecutor:
        name = (flight.level, flight.drive)
        with self._stock.changed:
            if name not in self._threads:
                prefix = f"kvdepot-{flight.level.name}-reader-{flight.drive}"
                self._threads[name] = ThreadPoolExecutor(_THREADS, thread_name_prefix=prefix)
            return self._threads[name]

    def _plan(self, errand: Errand, flight: Flight) -> "list[Step]":
        """The next wave: blocks for which there is memory to read into. Lock held.

        What nobody waits for is read only if it can stay in memory.
        """
        stock, catalog = self._stock, self._stock.catalog
        level, waiting = flight.level, flight.waiting
        limit = min(level.wave_bytes, max(1, stock.arena.capacity_bytes // 4))
        wave: list[Step] = []
        total = 0
        while waiting:
            index = waiting[0]
            want = errand.wants[index]
            nbytes = record_bytes(want.payload_bytes)
            location, hedged = level.copies.location[want.row], False
            if level.mirrors is not None:
                location, hedged = place_for(errand, index, level, flight.drive)
            if wave and (total + nbytes > limit or hedged != wave[0].hedged):
                break
            if errand.patient and not errand.ahead and is_coming(stock, want):
                errand.later.add(waiting.popleft())
                continue
            slot = None
            promote = level.config.promote or errand.ahead
            promote = promote and want.is_whole and catalog.memory.absent(want.row)
            if promote:
                slot = self._room.slot(nbytes, want.row)
            if slot is None and errand.ahead:
                errand.results[waiting.popleft()] = _BUSY
                continue
            arena = stock.arena
            if slot is None:
                promote, arena = False, stock.staging
                slot = arena.allocate(nbytes, TEMPORARY)
            if slot is None:
                break
            if promote:
                catalog.memory.reserve(want.row, slot)
            load = want.load(arena.image(slot, nbytes), location)
            wave.append(Step(index, load, slot, promote, hedged))
            waiting.popleft()
            total += nbytes
        return wave

    def _finish(
        self, errand: Errand, flight: Flight, wave: "list[Step]", loaded: Loaded
    ) -> list[int]:
        """Take in a wave that was read.

        Returns the wants to try again: their block moved meanwhile, or another tier has it.
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
        late: list[LateRead] = []
        try:
            _hand_over(errand, arrivals)
        finally:
            with self._stock.changed:
                for step, outcome in zip(wave, outcomes, strict=True):
                    flight.queued_bytes -= errand.wants[step.index].payload_bytes
                    if outcome is Outcome.LATE:
                        late.append(self._set_aside(step, errand.wants[step.index]))
                    if self._enter(errand, flight.level, step, outcome):
                        again.append(step.index)
                    if outcome is not Outcome.OK:
                        errand.results[step.index] = _REASONS[outcome]
                self._stock.changed.notify_all()
            if pending is not None:
                self._drainer.take(pending, late)
        return again

    def _enter(self, errand: Errand, level: Level, step: "Step", outcome: Outcome) -> bool:
        """Settle a block that was read. True: read it again, from elsewhere. Lock held."""
        row = errand.wants[step.index].row
        if outcome is not Outcome.OK:
            errand.tried.setdefault(step.index, set()).add(step.load.location)
        if outcome is Outcome.LATE:
            return step.hedged
        self._settle(step, row, outcome)
        if outcome is Outcome.OK and step.promote:
            self._stock.promote(row, level, errand.wants[-1].key[-1])
        if outcome is not Outcome.OK:
            return self._blame(errand, level, step, outcome)
        errand.results[step.index] = Got(level.name)
        return False

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

    def _set_aside(self, step: "Step", want: Want) -> LateRead:
        """The slot is busy until the kernel lets go of it; the block is not in memory meanwhile."""
        if step.promote:
            self._stock.catalog.memory.drop(want.row)
            self._stock.arena.set_owner(step.slot, TEMPORARY)
        self._stock.counters.read_late += 1
        return LateRead(step.slot, want.key, len(step.load.image), step.promote)

    def _blame(self, errand: Errand, level: Level, step: "Step", outcome: Outcome) -> bool:
        """Drop the copy that could not be read. True: there is another, or it only moved."""
        stock, location = self._stock, step.load.location
        row, places = errand.wants[step.index].row, level.places(errand.wants[step.index].row)
        if location in places:
            corrupt = outcome is Outcome.CORRUPT
            stock.counters.quarantined += corrupt
            stock.counters.read_failed += not corrupt
            if corrupt or level.works(location):
                level.lose(row, location, again=True)
            if len(places) > 1:
                errand.rescued.add(step.index)
        other = stock.source(row)
        if other is level:
            return not errand.tried[step.index].issuperset(level.places(row))
        return other is not None

    def _count(self, wants: Sequence[Want], results: Sequence[Got]) -> None:
        counters = self._stock.counters
        for want, got in zip(wants, results, strict=True):
            if got.tier is None:
                counters.get_miss += 1
                continue
            counters.add("get", got.tier)
            counters.get_bytes += want.stop - want.start


_NO_IMAGE: Final = memoryview(b"")


def _copy_op(slot: int, want: Want) -> tuple[int, ...]:
    """A plain copy of the wanted range out of the record image at address `slot`."""
    source = slot + HEAD_BYTES + want.start
    return (0, source, want.target, want.stop - want.start, 0, 0, COPY)


def _landed(flying: list[Flight]) -> list[Flight]:
    """Those whose oldest wave has been read; waits for the first."""
    if len(flying) > 1:
        oldest = {flight.flying[0][1]: flight for flight in flying}
        return [oldest[future] for future in wait(oldest, return_when=FIRST_COMPLETED).done]
    return flying


def _hand_over(errand: Errand, images: list[tuple[int, memoryview, bool]]) -> None:
    """Give the sink what can be read in place."""
    if errand.sink is None or not images:
        return
    arrivals = []
    for index, image, lasting in images:
        end = HEAD_BYTES + errand.wants[index].payload_bytes
        arrivals.append(Arrival(index, image[HEAD_BYTES:end].toreadonly(), lasting))
    errand.sink(arrivals)
