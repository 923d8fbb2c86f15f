"""Reads from the volumes of lower tiers, in waves, planned while others are under way.

A wave lands in slots of memory (promotion) or, where memory is in use, in staging. The volume
verifies each block and copies it to its target while the next ones are in flight. A block that is
corrupt, failed or late is a miss; the others are delivered.
"""

import contextlib
import queue
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.block import BlockKey, CopyState, GetResult
from kvdepot.core.keys import as_words
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.requests import Array, Arrived
from kvdepot.core.volume import (
    READ_DTYPE,
    Outcome,
    PendingRead,
    Priority,
    place_of,
    volume_of,
)
from kvdepot.format.copy_ops import copy_op, transfers
from kvdepot.format.record import record_bytes
from kvdepot.index.table import NONE
from kvdepot.native import address_of
from kvdepot.store.read.timed_out import LateRead, TimedOutIo
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import TEMPORARY, StoreState
from kvdepot.store.write.memory_eviction import SlotAllocator, by_size

CORRUPT: Final = GetResult(None, "corrupt")
BUSY: Final = GetResult(None, "busy")
LATE: Final = GetResult(None, "late")
_REASONS: Final[dict[int, GetResult]] = {
    Outcome.CORRUPT: CORRUPT,
    Outcome.FAILED: GetResult(None, "failed"),
    Outcome.LATE: LATE,
}
_FILLING: Final = int(CopyState.FILLING)
_WAVES_A_VOLUME: Final = 3
"""Under way or queued, with their memory, so that the volume always has work."""
_WAVE_BLOCKS_MAX: Final = 256
_FIRST_BLOCKS_MAX: Final = 64
"""So that the first of many small blocks are read early."""
_MOVES_MAX: Final = 16
"""How often a block that a reclaim has moved meanwhile is looked for at its new place."""
_LOOK_AGAIN_S: Final = 0.5
_WAIT_MAX_S: Final = 60.0
_log = RateLimitedLog("kvdepot.store")
Sink = Callable[[Arrived], None]
"""Called with blocks as they come. What it raises is passed on."""


@dataclass(slots=True)
class BlockRead:
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


@dataclass(slots=True)
class ReadCall:
    """One call: what is wanted, and the sink for blocks that have no target of their own."""

    reads: Sequence[BlockRead]
    results: list[GetResult]
    deadline: float
    verify: bool
    sink: Sink | None = None
    is_prefetch: bool = False
    """No caller waits for it."""
    verify_concurrently: bool = False
    """The sink gets blocks in memory while they are verified."""
    waits_for_others: bool = True
    """What another call is reading into memory is left to it, for a while."""
    left_to_others: set[int] = field(default_factory=set)

    def hand_over(
        self, indices: Sequence[int], addresses: Array, is_lasting: Array, *, is_verified: bool
    ) -> None:
        """Give the sink records that can be read in place."""
        if self.sink is not None and len(indices):
            self.sink(Arrived(np.array(indices), addresses, is_lasting, is_verified))


@dataclass(slots=True)
class WaveBlock:
    """One block of a wave: where it is read from, and the slot it is read into."""

    index: int
    location: int
    image: memoryview
    target: int
    """0: what is read is looked at, or copied, where it is."""
    start: int
    stop: int
    slot: int
    promote: bool


@dataclass(slots=True, eq=False)
class Wave:
    """Blocks that are read from one volume in one go."""

    blocks: list[WaveBlock]
    reading: PendingRead | None = None
    began_s: float = 0.0


@dataclass(slots=True, eq=False)
class VolumeWaves:
    """What one call reads from one volume."""

    lower: LowerTier
    volume: int
    waiting: deque[int] = field(default_factory=deque)
    flying: list[Wave] = field(default_factory=list)


Volumes = dict[int, VolumeWaves]
Done = queue.SimpleQueue[tuple[VolumeWaves, Wave]]


class DiskReads:
    """Reads blocks for calls that do not find them in memory."""

    def __init__(self, state: StoreState, slots: SlotAllocator, late: TimedOutIo) -> None:
        self._state = state
        self._slots = slots
        self._late = late

    def read(self, call: ReadCall, indices: list[int]) -> None:
        """Read blocks of a call; sets their results."""
        volumes: Volumes = {}
        done: Done = queue.SimpleQueue()
        with self._state.lock:
            if self._state.admission.learns and call.waits_for_others and not call.is_prefetch:
                self._state.admission.read([call.reads[index].row for index in indices])
            self._assign(call, volumes, indices)
        try:
            self._read_waves(call, volumes, done)
        finally:  # a sink has raised: what is in flight still has to land
            lost = ReadCall(call.reads, [BUSY] * len(call.reads), call.deadline, call.verify)
            for reads in volumes.values():
                while reads.flying:
                    self._finish(lost, reads, reads.flying[0])

    def _assign(self, call: ReadCall, volumes: Volumes, indices: list[int]) -> None:
        """Queue each block on the volume that it is read from."""
        state = self._state
        assert state.held()
        only = state.lower_tiers[0] if len(state.lower_tiers) == 1 else None
        for index in indices:
            read = call.reads[index]
            lower = only or state.source(read.row)
            if lower is None or not lower.copies.ready(read.row):
                continue
            volume = volume_of(lower.copies.location.view[read.row])
            reads = volumes.get(volume)
            if reads is None:
                reads = volumes[volume] = VolumeWaves(lower, volume)
            reads.waiting.append(index)

    def _read_waves(self, call: ReadCall, volumes: Volumes, done: Done) -> None:
        moves: Counter[int] = Counter()
        while busy := [reads for reads in volumes.values() if reads.waiting or reads.flying]:
            if self._state.clock.now() >= call.deadline:
                self._stop(call, busy)
                return
            if self._start_waves(call, volumes, done):
                continue
            if not any(reads.flying for reads in busy):
                if self._await_room(call, volumes, done):
                    continue
                for reads in busy:
                    for index in reads.waiting:
                        call.results[index] = BUSY
                return
            for reads, wave in self._landed(call, done):
                again = self._finish(call, reads, wave)
                if not again:
                    continue
                moves.update(again)
                for index in again:
                    call.results[index] = BUSY
                with self._state.lock:
                    left = [index for index in again if moves[index] < _MOVES_MAX]
                    self._assign(call, volumes, left)

    def _stop(self, call: ReadCall, busy: list[VolumeWaves]) -> None:
        """Time is up: nothing starts any more, and what is in flight is left behind."""
        with self._state.lock:
            self._state.counters.read_late += sum(len(reads.waiting) for reads in busy)
        for reads in busy:
            for index in reads.waiting:
                call.results[index] = LATE
            reads.waiting.clear()
            for wave in [wave for wave in reads.flying if not self._withdraw(call, reads, wave)]:
                self._finish(call, reads, wave)

    def _withdraw(self, call: ReadCall, reads: VolumeWaves, wave: Wave) -> bool:
        """Take back a wave whose turn has not come. False: it has begun."""
        if wave.reading is None or not wave.reading.cancel():
            return False
        if not call.is_prefetch:
            reads.lower.foreground.end()
        state = self._state
        reads.flying.remove(wave)
        with state.lock:
            state.counters.read_late += len(wave.blocks)
            for block in wave.blocks:
                call.results[block.index] = LATE
                self._give_back(block, call.reads[block.index].row)
            state.arrived.notify_all()
            state.room.notify_all()
        return True

    def _start_waves(self, call: ReadCall, volumes: Volumes, done: Done) -> bool:
        """Start a wave on every volume that has room for one. False: nothing was planned."""
        progress = False
        for reads in list(volumes.values()):
            if not reads.waiting or len(reads.flying) >= _WAVES_A_VOLUME:
                continue
            left = len(reads.waiting)
            with self._state.lock:
                wave = self._plan(call, volumes, reads)
            progress = progress or len(reads.waiting) < left
            if wave.blocks:
                alone = not any(one.waiting or one.flying for one in volumes.values())
                reads.flying.append(wave)
                self._start(call, reads, wave, done, inline=alone)
        return progress

    def _await_room(self, call: ReadCall, volumes: Volumes, done: Done) -> bool:
        """Wait for memory to read into and start. False: time is up."""
        state = self._state
        while (wait_s := call.deadline - state.clock.now()) > 0:
            if self._start_waves(call, volumes, done):
                return True
            with state.lock:
                state.room.wait(min(wait_s, _LOOK_AGAIN_S))
        return False

    def _start(
        self, call: ReadCall, reads: VolumeWaves, wave: Wave, done: Done, *, inline: bool
    ) -> None:
        """Begin to read a wave; in this thread, when its result is asked for, if there is nothing
        to do meanwhile.
        """
        lower, wave.began_s = reads.lower, self._state.clock.now()
        asked = [call.reads[block.index] for block in wave.blocks]
        batch = np.zeros(len(asked), READ_DTYPE)
        batch["key"] = as_words([read.key for read in asked])
        batch["payload_bytes"] = [read.payload_bytes for read in asked]
        batch["chunk_bytes"] = [read.chunk_bytes for read in asked]
        batch["place"] = [place_of(block.location) for block in wave.blocks]
        batch["image"] = [address_of(block.image)[0] for block in wave.blocks]
        batch["target"] = [block.target for block in wave.blocks]
        batch["start"] = [block.start for block in wave.blocks]
        batch["stop"] = [block.stop for block in wave.blocks]
        priority = Priority.PREFETCH if call.is_prefetch else Priority.FOREGROUND
        volume = self._state.volumes.entries[reads.volume].volume
        if not call.is_prefetch:
            lower.foreground.begin()
        wave.reading = volume.read(batch, priority, max(0.0, call.deadline - wave.began_s))
        if inline:
            done.put((reads, wave))
        else:
            wave.reading.when_done(lambda: done.put((reads, wave)))

    def _landed(self, call: ReadCall, done: Done) -> list[tuple[VolumeWaves, Wave]]:
        """Waves that were read; waits for the first, until the deadline."""
        found: list[tuple[VolumeWaves, Wave]] = []
        with contextlib.suppress(queue.Empty):
            wait_s = max(0.0, call.deadline - self._state.clock.now())
            found.append(done.get(timeout=min(wait_s, _WAIT_MAX_S)))
            while True:
                found.append(done.get_nowait())
        return found

    def _plan(self, call: ReadCall, volumes: Volumes, reads: VolumeWaves) -> Wave:
        """The next wave: blocks for which there is memory to read into.

        A prefetch reads only what can stay in memory.
        """
        state = self._state
        assert state.held()
        wave = Wave([])
        chosen = self._choose(call, volumes, reads)
        promoted = [call.reads[index].row for index, _, promote in chosen if promote]
        slots = self._reserve(promoted)
        back: list[int] = []
        for index, location, promote in chosen:
            read = call.reads[index]
            nbytes = record_bytes(read.payload_bytes)
            slot, arena = slots.get(read.row) if promote else None, state.arena
            if slot is None and call.is_prefetch:
                call.results[index] = BUSY
                continue
            if slot is None:
                promote, arena = False, state.staging
                slot = arena.allocate(nbytes, TEMPORARY)
            if slot is None:
                back.append(index)
                continue
            image = arena.image(slot, nbytes)
            span = _whole_chunks(read)
            wave.blocks.append(WaveBlock(index, location, image, *span, slot, promote))
        reads.waiting.extendleft(reversed(back))
        return wave

    def _choose(
        self, call: ReadCall, volumes: Volumes, reads: VolumeWaves
    ) -> list[tuple[int, int, bool]]:
        """Take blocks off the queue that go in one wave: index, location, whether to promote.

        A block that was moved since it was queued goes to the queue of its volume now.
        """
        state, lower, waiting = self._state, reads.lower, reads.waiting
        states, locations = state.catalog.memory.state.view, lower.copies.location.view
        limit = min(lower.volumes.wave_bytes, max(1, state.arena.capacity_bytes // 4))
        promotes = lower.config.promote or call.is_prefetch
        leaves = call.waits_for_others and not call.is_prefetch
        chosen: list[tuple[int, int, bool]] = []
        rows: set[int] = set()
        total = 0
        most = _WAVE_BLOCKS_MAX if reads.flying else _FIRST_BLOCKS_MAX
        while waiting and len(chosen) < most:
            index = waiting[0]
            read = call.reads[index]
            row, size = read.row, read.payload_bytes
            nbytes = record_bytes(size)
            if chosen and total + nbytes > limit:
                break
            waiting.popleft()
            if not lower.copies.ready(row) or volume_of(locations[row]) != reads.volume:
                self._assign(call, volumes, [index])
                continue
            filled = states[row] or (_FILLING if row in rows else 0)
            if leaves and filled == _FILLING:
                call.left_to_others.add(index)
                continue
            promote = promotes and not filled and read.stop - read.start == size
            if promote:
                rows.add(row)
            chosen.append((index, locations[row], promote))
            total += nbytes
        return chosen

    def _reserve(self, rows: list[int]) -> dict[int, int]:
        """Slots of memory that blocks are about to be read into, for as many as there are."""
        state = self._state
        found: dict[int, int] = {}
        for nbytes, some in by_size(state.catalog, rows).items():
            slots = self._slots.allocate_all(record_bytes(nbytes), some)
            if slots:
                state.catalog.memory.reserve_all(some[: len(slots)], slots)
            found.update(zip(some, slots, strict=False))
        return found

    def _finish(self, call: ReadCall, reads: VolumeWaves, wave: Wave) -> list[int]:
        """Take in a wave that was read.

        Returns the blocks to read again: they moved meanwhile, or another tier has them.
        """
        assert wave.reading is not None
        if wave not in reads.flying:
            return []
        reading = wave.reading
        outcomes = reading.result().tolist()
        if not call.is_prefetch:
            reads.lower.foreground.end()
        reads.flying.remove(wave)
        is_late = Outcome.LATE in outcomes and not reading.released(0.0)
        arrivals = []
        for block, outcome in zip(wave.blocks, outcomes, strict=True):
            read = call.reads[block.index]
            if outcome != Outcome.OK:
                continue
            if not read.target:
                arrivals.append((block.index, address_of(block.image)[0], block.promote))
            elif not block.target:
                slot = address_of(block.image)[0]
                transfers([copy_op(slot, read.target, read.start, read.stop)])
        again: list[int] = []
        late: list[LateRead] = []
        state = self._state
        try:
            indices, addresses, lasting = zip(*arrivals, strict=True) if arrivals else ((),) * 3
            call.hand_over(indices, np.array(addresses), np.array(lasting), is_verified=True)
        finally:
            with state.lock:
                state.traffic.took("read", state.clock.now() - wave.began_s, reads.lower.name)
                self._keep(call, reads.lower, wave, outcomes)
                for block, outcome in zip(wave.blocks, outcomes, strict=True):
                    read = call.reads[block.index]
                    if outcome == Outcome.OK:
                        continue
                    if outcome == Outcome.LATE:
                        state.counters.read_late += 1
                        if not is_late:
                            self._give_back(block, read.row)
                        else:
                            late.append(self._set_aside(block, read))
                    if self._failed(reads.lower, block, read.row, outcome):
                        again.append(block.index)
                    call.results[block.index] = _REASONS[outcome]
                state.arrived.notify_all()
                state.room.notify_all()
            if is_late:
                self._late.add(reading, late)
        return again

    def _keep(self, call: ReadCall, lower: LowerTier, wave: Wave, outcomes: Sequence[int]) -> None:
        """Make the slots of what was read blocks of the memory tier, or give them back."""
        state, got = self._state, GetResult(lower.name)
        rows: list[int] = []
        for block, outcome in zip(wave.blocks, outcomes, strict=True):
            if outcome != Outcome.OK:
                continue
            call.results[block.index] = got
            if block.promote:
                rows.append(call.reads[block.index].row)
            else:
                state.staging.free(block.slot)
        if rows:
            state.memory_tiers[0].seal_all(rows)
            state.counters.promoted += len(rows)
            if state.promotes_from(lower):
                for row in rows:
                    state.promote(row, lower, call.reads[-1].key[-1])

    def _failed(self, lower: LowerTier, block: WaveBlock, row: int, outcome: int) -> bool:
        """Settle a block that could not be read. True: read it again, from elsewhere."""
        if outcome == Outcome.LATE:
            return False
        state, location = self._state, block.location
        self._give_back(block, row)
        if lower.place(row) == location != NONE:
            corrupt = outcome == Outcome.CORRUPT
            state.counters.quarantined += corrupt
            state.counters.read_failed += not corrupt
            if corrupt:
                _log.warning(
                    "%s: volume %d: a corrupt block is dropped", lower.name, volume_of(location)
                )
            if corrupt or state.volumes.is_up(location):
                lower.drop(row)
        other = state.source(row)
        return other is not None and (other is not lower or lower.place(row) != location)

    def _give_back(self, block: WaveBlock, row: int) -> None:
        """Free a slot that nothing was read into."""
        if block.promote:
            self._state.arena.free(self._state.catalog.memory.drop(row))
        else:
            self._state.staging.free(block.slot)

    def _set_aside(self, block: WaveBlock, read: BlockRead) -> LateRead:
        """The slot is busy until the kernel lets go of it; the block is not in memory meanwhile."""
        state = self._state
        if block.promote:
            state.catalog.memory.drop(read.row)
            state.arena.set_owner(block.slot, TEMPORARY)
        return LateRead(block.slot, read.key, len(block.image), block.promote)


def _whole_chunks(read: BlockRead) -> tuple[int, int, int]:
    """Target, start and stop of the read that covers the wanted range with whole chunks."""
    size, chunk, start, stop = read.payload_bytes, read.chunk_bytes, read.start, read.stop
    if stop - start == size:
        return read.target, 0, size
    first = start // chunk * chunk
    last = min(-(-stop // chunk) * chunk, size)
    return (read.target if first == start and last == stop else 0), first, last
