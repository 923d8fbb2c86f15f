"""Reads blocks: from memory in one batch, then from volumes in waves.

A call is a set of columns with a row for each block. Blocks in memory are leased, verified and
copied by one native call. The others are read in waves, planned while earlier ones are running. A
wave is read into slots of memory (promotion) or, if memory is in use, into staging. The volume
verifies each block and copies it to its target. A corrupt, failed or late block is a miss.
"""

import os
import queue
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvdepot.core.block import ANSWERS, TAG_BYTES, CopyState
from kvdepot.core.depot import MEMORY_TIERS
from kvdepot.core.keys import as_keys
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.requests import Array, Arrived
from kvdepot.core.volume import (
    READ_DTYPE,
    VOLUME_SHIFT,
    Ints,
    Outcome,
    PendingRead,
    Priority,
    volume_of,
)
from kvdepot.errors import StoreClosedError
from kvdepot.format.copy_ops import spans
from kvdepot.format.record import record_sizes
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.native import copy_out
from kvdepot.store.events import BlocksServed, Counted, Took
from kvdepot.store.read.timed_out import LateRead, TimedOutIo
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.memory_tier import ArenaTier, SlotAllocator
from kvdepot.store.state.state import TEMPORARY, BlockLease, StoreState

_CODES: Final = {(answer.tier, answer.reason): code for code, answer in enumerate(ANSWERS)}
ABSENT, _CORRUPT, _FAILED, _LATE, _BUSY = (
    _CODES[None, reason] for reason in ("absent", "corrupt", "failed", "late", "busy")
)
VOLUME_CODES: Final = [
    code for (tier, _), code in _CODES.items() if tier is not None and tier not in MEMORY_TIERS
]
"""Answer codes for blocks that were read from a volume, by tier."""
_REASONS: Final = {Outcome.CORRUPT: _CORRUPT, Outcome.FAILED: _FAILED, Outcome.LATE: _LATE}
_READY, _FILLING = int(CopyState.READY), int(CopyState.FILLING)
_PLACES: Final = (1 << VOLUME_SHIFT) - 1
_CACHED_BYTES: Final = 16 << 20
"""Bytes verified in one batch before the sink reads them: about the size of a processor cache."""
_CHECKS_MAX: Final = 4
"""Most calls whose blocks are verified concurrently; further ones wait."""
_CHECK_THREADS_MAX: Final = 8
_WAIT_SHARE: Final = 0.5
"""Share of a call's time for which it waits for blocks that another call is reading."""
_WAVES_A_VOLUME: Final = 3
"""Waves of a call that are running or queued on a volume, so that it always has work."""
_WAVE_BLOCKS_MAX: Final = 256
_FIRST_BLOCKS_MAX: Final = 64
"""Most blocks of the first wave, so that the first of many small blocks arrive early."""
_MOVES_MAX: Final = 16
"""Most attempts to read a block that a reclaim moves meanwhile."""
_LOOK_AGAIN_S: Final = 0.5
_WAIT_MAX_S: Final = 60.0
_log = RateLimitedLog("kvdepot.store")
Sink = Callable[[Arrived], None]
"""Called with blocks as they arrive. Its exceptions are passed on."""


@dataclass(slots=True, eq=False)
class ReadCall:
    """A read call: columns with a row for each block that the caller may use."""

    blocks: Array
    """Rows of BLOCK_DTYPE. A block without an address is passed to the sink in place."""
    places: Ints
    """Their indices in the caller's request, for the sink."""
    deadline_s: float
    verify: bool
    """Verify blocks in memory. Blocks of volumes are always verified."""
    sink: Sink | None
    keep: BlockLease | None = None
    """Lease for blocks that were passed to the sink and stay in memory."""
    is_prefetch: bool = False
    """True for a prefetch: it does not count as a use, and reads only into memory slots."""
    concurrently: bool = False
    """True: the sink gets blocks in memory while they are being verified."""
    waits_for_others: bool = True
    """True: wait some time for blocks that another call is reading into memory."""
    leased: Rows | None = None
    """For a delivery, the row that the lease has for each block, NONE for those beyond it. Only
    blocks in these rows stay in memory after the call."""
    rows: Rows = field(init=False)
    addresses: Ints = field(init=False)
    """Addresses of records in memory; 0 for blocks that are not in memory."""
    codes: Array = field(init=False)
    """The answer for each block, an index into ANSWERS."""
    kept: list[int] = field(default_factory=list)
    """Rows whose leases went from the call to `keep`."""
    left_to_others: list[int] = field(default_factory=list)

    def hand_over(self, indices: Ints, addresses: Ints, lasting: Bools, *, verified: bool) -> None:
        """Pass records to the sink in place."""
        if self.sink is None or not len(indices):
            return
        if self.leased is not None:
            lasting = lasting & (self.leased[indices] == self.rows[indices])
        if self.keep is not None:
            kept = self.rows[indices[lasting]].tolist()
            self.kept += kept
            self.keep.rows += kept
        self.sink(Arrived(self.places[indices], addresses, lasting, verified))


@dataclass(slots=True, eq=False)
class Wave:
    """Blocks that are read from one volume in one batch: columns with a row for each."""

    indices: Ints
    """Their rows in the call."""
    locations: Ints
    slots: Ints
    promote: Bools
    """True if the slot is in the memory tier, where the block stays; else it is in staging."""
    reads: Array
    """Rows of READ_DTYPE."""
    reading: PendingRead | None = None
    began_s: float = 0.0


@dataclass(slots=True, eq=False)
class VolumeWaves:
    """The reads of one call from one volume."""

    lower: LowerTier
    volume: int
    waiting: Ints
    flying: list[Wave] = field(default_factory=list)


Volumes = dict[int, VolumeWaves]
Done = queue.SimpleQueue[tuple[VolumeWaves, Wave]]


class Reader:
    """Serves reads, deliveries and prefetches."""

    def __init__(self, state: StoreState, slots: SlotAllocator) -> None:
        self._state = state
        self.late = TimedOutIo(state)
        self._volumes = VolumeReads(state, slots, self.late)
        self._checks = ThreadPoolExecutor(_CHECKS_MAX, "kvdepot-check")
        self._check_threads = min(_CHECK_THREADS_MAX, os.cpu_count() or 1)
        self.after_read: Callable[[ReadCall], None] | None = None
        """Called after every read of a caller, for read-ahead."""

    def close(self, timeout_s: float) -> bool:
        """Stop the threads. No call may be running. False: late I/O still uses the memory."""
        self._checks.shutdown()
        return self.late.wait(timeout_s)

    def read(
        self,
        blocks: Array,
        wanted: Ints,
        timeout_s: float,
        *,
        sink: Sink | None = None,
        keep: BlockLease | None = None,
        leased: Rows | None = None,
        verify: bool | None = None,
        concurrently: bool = False,
        is_prefetch: bool = False,
    ) -> bytes:
        """Read blocks to their buffers or the sink. Returns an index into ANSWERS for each block
        that the caller may use.

        `wanted`: the indices of these blocks. `leased`: deliver blocks to their leases, which does
        not count as a use; see ReadCall.leased. See Engine.read.
        """
        state, catalog = self._state, self._state.catalog
        began_s = state.clock.now()
        if verify is None:
            verify = state.config.dram.verify
        if len(wanted) < len(blocks):
            blocks = blocks[wanted]
            leased = None if leased is None else leased[wanted]
        call = ReadCall(
            blocks, wanted, began_s + timeout_s, verify, sink, keep, is_prefetch, concurrently
        )
        call.leased = leased
        with state.lock:
            if state.closing.is_set() and not is_prefetch:
                raise StoreClosedError("the store is closed")
            held = self._look_up(call)
            state.using.active += 1
            catalog.lease(held)
            if leased is None and not is_prefetch:
                catalog.use(held)
            if state.writes.follows_uses and not is_prefetch:
                state.writes.note_use(held)
        try:
            left = self._from_memory(call)
            if len(left):
                self._from_volumes(call, left)
        finally:
            with state.lock:
                if not is_prefetch:
                    self._count(call)
                if call.kept:
                    state.leased += len(call.kept)
                    held = list((Counter(held) - Counter(call.kept)).elements())
                gone = catalog.unlease(held)
                if gone:
                    state.drop_unused(gone)
                state.lock.room.notify_all()
                state.using.active -= 1
                if state.closing.is_set():
                    state.lock.idle.notify_all()
        if not is_prefetch:
            if self.after_read is not None:
                self.after_read(call)
            state.events.emit(Took("get", "", state.clock.now() - began_s))
        return call.codes.tobytes()

    def _look_up(self, call: ReadCall) -> list[int]:
        """Find the rows, and the addresses of records in the fastest memory tier that has them.
        Returns the rows of known blocks.
        """
        assert self._state.lock.held()
        catalog = self._state.catalog
        rows = catalog.table.find_many(call.blocks["key"])
        residency = catalog.residency.array[rows]
        sizes = catalog.nbytes.array[rows]
        there = (sizes == call.blocks["payload_bytes"]) & (residency != 0)
        known = rows
        if np.count_nonzero(there) < len(rows):
            known = rows[there]
            rows, residency = np.where(there, rows, NONE), residency * there
        call.rows, call.addresses = rows, np.zeros(len(rows), np.int64)
        call.codes = np.empty(len(rows), np.uint8)
        call.codes.fill(ABSENT)
        for memory in reversed(self._state.memory_tiers):
            places = memory.copies.location.array[rows] + memory.address
            np.copyto(call.addresses, places, where=residency & memory.copies.bit != 0)
        if len(self._state.memory_tiers) > 1 and not call.is_prefetch:
            upper, lower = self._state.memory_tiers
            below = rows[lower.holds(call.addresses)].tolist()
            if below:
                upper.note_hits_below(below)
        held: list[int] = known.tolist()
        return held

    def _from_memory(self, call: ReadCall) -> Ints:
        """Serve blocks in memory. Returns those to read from volumes, also for damaged copies."""
        here = call.addresses.nonzero()[0]
        left: Ints = here[:0]
        if len(here) < len(call.rows):
            left = np.flatnonzero((call.rows != NONE) & (call.addresses == 0))
        tiers = self._state.memory_tiers
        for memory in tiers:
            mine = here if len(tiers) == 1 else here[memory.holds(call.addresses[here])]
            if len(mine):
                left = np.concatenate([left, self._serve(call, memory, mine)])
        return left

    def _serve(self, call: ReadCall, memory: ArenaTier, mine: Ints) -> Ints:
        """Serve blocks of one memory tier. Returns damaged ones that a volume has.

        A slot that holds another block is never served. Blocks that the sink reads in place are
        verified in small parts, so that they are still in the processor cache.
        """
        call.codes[mine] = _CODES[memory.name, ""]
        if call.sink is None or not call.verify:
            bad = self._copy_out(call, mine)
        elif call.concurrently:
            bad = self._verify_concurrently(call, mine)
        else:
            step = max(1, _CACHED_BYTES // int(call.blocks["payload_bytes"][mine].max()))
            parts = [mine[start : start + step] for start in range(0, len(mine), step)]
            bad = np.concatenate([self._copy_out(call, part) for part in parts])
        return self._drop_damaged(call, memory, bad) if len(bad) else bad

    def _copy_out(self, call: ReadCall, indices: Ints) -> Ints:
        """Verify blocks, copy them or pass them to the sink. Returns the damaged ones."""
        blocks, addresses = call.blocks, call.addresses
        if len(indices) < len(blocks):
            blocks, addresses = blocks[indices], addresses[indices]
        intact = copy_out(blocks, addresses, call.verify)
        if call.sink is not None:
            good = np.frombuffer(intact, bool) & (blocks["address"] == 0)
            self._hand_over(call, indices[good], verified=call.verify)
        bad: Ints = indices[:0] if 0 not in intact else indices[~np.frombuffer(intact, bool)]
        return bad

    def _verify_concurrently(self, call: ReadCall, indices: Ints) -> Ints:
        """Pass blocks to the sink while threads verify them. Returns the damaged ones."""
        blocks, addresses = call.blocks[indices], call.addresses[indices]
        same = np.frombuffer(copy_out(blocks, addresses, False), bool)
        check = self._checks.submit(
            copy_out, blocks[same], addresses[same], True, self._check_threads
        )
        try:
            self._hand_over(call, indices[same], verified=False)
        finally:  # the slots must stay leased until then
            intact = np.frombuffer(check.result(), bool)
        return np.concatenate([indices[~same], indices[same][~intact]])

    def _hand_over(self, call: ReadCall, indices: Ints, *, verified: bool) -> None:
        lasting = np.ones(len(indices), bool)
        call.hand_over(indices, call.addresses[indices], lasting, verified=verified)

    def _drop_damaged(self, call: ReadCall, memory: ArenaTier, bad: Ints) -> Ints:
        """Drop damaged copies. Returns the blocks that a volume has; a slower memory tier serves
        its own later.
        """
        state, catalog, left = self._state, self._state.catalog, []
        below = state.memory_tiers[state.memory_tiers.index(memory) + 1 :]
        call.codes[bad] = _CORRUPT
        state.events.count("quarantined", len(bad))
        with state.lock:
            for index, row in zip(bad.tolist(), call.rows[bad].tolist(), strict=True):
                call.addresses[index] = 0
                slower = next((one for one in below if one.copies.ready(row)), None)
                other = slower is not None or state.source(row) is not None
                idle = catalog.leases(row) == 1 and not state.writes.is_dirty(row)
                if not (other and idle and memory.copies.ready(row)):
                    catalog.mark_deleted(row)
                    continue
                memory.drop(row)
                if slower is not None:
                    call.addresses[index] = slower.address + slower.copies.location[row]
                else:
                    left.append(index)
        return np.array(left, np.int64)

    def _from_volumes(self, call: ReadCall, left: Ints) -> None:
        """Read blocks from volumes, after waiting for those that other calls are reading."""
        admission = self._state.writes.admission
        if admission.learns and not call.is_prefetch:
            with self._state.lock:
                admission.read(call.rows[left].tolist())
        self._volumes.read(call, left)
        if call.left_to_others:
            others = self._await_others(call)
            came = others[call.addresses[others] != 0]
            still = others[call.addresses[others] == 0]
            if len(came):
                bad = self._serve(call, self._state.memory_tiers[0], came)
                still = np.concatenate([still, bad])
            call.waits_for_others = False
            self._volumes.read(call, np.unique(still))

    def _await_others(self, call: ReadCall) -> Ints:
        """Wait a limited time for blocks that other calls read into memory. Leases those that have
        arrived and sets their addresses.
        """
        state, memory = self._state, self._state.memory_tiers[0]
        others = np.array(call.left_to_others, np.int64)
        rows = call.rows[others]
        with state.lock:
            wait_s = _WAIT_SHARE * max(0.0, call.deadline_s - state.clock.now())
            state.lock.arrived.wait_for(
                lambda: not (memory.copies.state.array[rows] == _FILLING).any(), wait_s
            )
            call.addresses[others] = np.where(
                memory.copies.state.array[rows] == _READY,
                memory.address + memory.copies.location.array[rows],
                0,
            )
        return others

    def _count(self, call: ReadCall) -> None:
        """Emit events for the served blocks of each tier and namespace, and count misses."""
        state, codes = self._state, call.codes.tobytes()
        tags = call.blocks["key"][:, 0]
        groups = set(zip(codes, tags.tolist(), strict=True))
        for code, tag in groups:
            tier = ANSWERS[code].tier
            blocks, rows = call.blocks, call.rows
            if len(groups) > 1:
                mine = (call.codes == code) & (tags == tag)
                blocks, rows = blocks[mine], rows[mine]
            if tier is None:
                state.events.emit(Counted("get_miss", len(blocks)))
                continue
            nbytes = sum(blocks["stop"].tolist()) - sum(blocks["start"].tolist())
            state.events.emit(
                BlocksServed(
                    tag.to_bytes(TAG_BYTES, "little"),
                    tier,
                    blocks=len(blocks),
                    nbytes=nbytes,
                    whole=nbytes / int(blocks["payload_bytes"][0]),
                    before=state.catalog.tree.depth(int(rows[0])) - 1,
                    last=int(blocks["key"][-1, 2]),
                )
            )


class VolumeReads:
    """Reads blocks from volumes, in waves."""

    def __init__(self, state: StoreState, slots: SlotAllocator, late: TimedOutIo) -> None:
        self._state = state
        self._memory = state.memory_tiers[0]
        self._arena = state.arena
        self._slots = slots
        self._late = late

    def read(self, call: ReadCall, indices: Ints) -> None:
        """Read blocks of a call."""
        volumes: Volumes = {}
        done: Done = queue.SimpleQueue()
        with self._state.lock:
            self._assign(call, volumes, indices)
        try:
            self._read_waves(call, volumes, done)
        except BaseException:  # of the sink: running reads must end first
            codes, call.codes, call.sink = call.codes, call.codes.copy(), None
            for reads in volumes.values():
                while reads.flying:
                    self._finish(call, reads, reads.flying[0])
            call.codes = codes
            raise

    def _assign(self, call: ReadCall, volumes: Volumes, indices: Ints) -> None:
        """Queue each block for the volume to read it from."""
        numbers = self._state.locations(call.rows[indices]) >> VOLUME_SHIFT
        for number in np.unique(numbers[numbers >= 0]).tolist():
            mine, reads = indices[numbers == number], volumes.get(number)
            if reads is None:
                volumes[number] = VolumeWaves(self._state.tier_of(number), number, mine)
            else:
                reads.waiting = np.concatenate([reads.waiting, mine])

    def _read_waves(self, call: ReadCall, volumes: Volumes, done: Done) -> None:
        moves: dict[int, int] = {}
        while busy := [one for one in volumes.values() if len(one.waiting) or one.flying]:
            if self._state.clock.now() >= call.deadline_s:
                self._stop(call, busy)
                return
            if self._start_waves(call, volumes, done):
                continue
            if not any(reads.flying for reads in busy):
                if self._await_room(call, volumes, done):
                    continue
                for reads in busy:
                    call.codes[reads.waiting] = _BUSY
                return
            wait_s = max(0.0, call.deadline_s - self._state.clock.now())
            try:
                reads, wave = done.get(timeout=min(wait_s, _WAIT_MAX_S))
            except queue.Empty:
                continue
            again = self._finish(call, reads, wave)
            if again:
                call.codes[again] = _BUSY
                moves.update((index, moves.get(index, 0) + 1) for index in again)
                left = [index for index in again if moves[index] < _MOVES_MAX]
                with self._state.lock:
                    self._assign(call, volumes, np.array(left, np.int64))

    def _stop(self, call: ReadCall, busy: list[VolumeWaves]) -> None:
        """At the deadline: cancel queued blocks and waves, and leave running
        waves to TimedOutIo.
        """
        for reads in busy:
            self._state.events.count("read_late", len(reads.waiting))
            call.codes[reads.waiting] = _LATE
            reads.waiting = reads.waiting[:0]
            for wave in [one for one in list(reads.flying) if not self._withdraw(call, reads, one)]:
                self._finish(call, reads, wave)

    def _withdraw(self, call: ReadCall, reads: VolumeWaves, wave: Wave) -> bool:
        """Cancel a wave that has not begun. False: it is running."""
        if wave.reading is None or not wave.reading.cancel():
            return False
        state = self._state
        reads.flying.remove(wave)
        state.events.count("read_late", len(wave.indices))
        call.codes[wave.indices] = _LATE
        with state.lock:
            if not call.is_prefetch:
                reads.lower.foreground_reads -= 1
                reads.lower.foreground_s = state.clock.now()
            for at in range(len(wave.indices)):
                self._give_back(call, wave, at)
            state.lock.arrived.notify_all()
            state.lock.room.notify_all()
        return True

    def _start_waves(self, call: ReadCall, volumes: Volumes, done: Done) -> bool:
        """Start a wave on every volume that can have one more. False: none was started."""
        progress = False
        for reads in list(volumes.values()):
            left = len(reads.waiting)
            if not left or len(reads.flying) >= _WAVES_A_VOLUME:
                continue
            with self._state.lock:
                wave = self._plan(call, volumes, reads)
                if len(wave.indices) and not call.is_prefetch:
                    reads.lower.foreground_reads += 1
            progress = progress or len(reads.waiting) < left
            if len(wave.indices):
                alone = not any(len(one.waiting) or one.flying for one in volumes.values())
                reads.flying.append(wave)
                wave.began_s = self._state.clock.now()
                left_s = max(0.0, call.deadline_s - wave.began_s)
                priority = Priority.PREFETCH if call.is_prefetch else Priority.FOREGROUND
                volume = self._state.volumes.entries[reads.volume].volume
                wave.reading = volume.read(wave.reads, priority, left_s)
                if alone:  # there is nothing else to do: read when the result is requested
                    done.put((reads, wave))
                else:
                    wave.reading.when_done(partial(done.put, (reads, wave)))
        return progress

    def _await_room(self, call: ReadCall, volumes: Volumes, done: Done) -> bool:
        """Wait for free memory, then start waves. False: the deadline has passed."""
        state = self._state
        while (wait_s := call.deadline_s - state.clock.now()) > 0:
            if self._start_waves(call, volumes, done):
                return True
            with state.lock:
                state.lock.room.wait(min(wait_s, _LOOK_AGAIN_S))
        return False

    def _plan(self, call: ReadCall, volumes: Volumes, reads: VolumeWaves) -> Wave:
        """Plan the next wave: blocks for which there is a slot. A prefetch uses no staging."""
        state = self._state
        assert state.lock.held()
        indices, promote = self._choose(call, volumes, reads)
        rows, slots = call.rows[indices], np.full(len(indices), NONE, np.int64)
        slots[promote] = self._reserve(rows[promote])
        promote &= slots != NONE
        rest = np.flatnonzero(~promote)
        if call.is_prefetch:
            call.codes[indices[rest]] = _BUSY
        elif len(rest):
            sizes = record_sizes(call.blocks["payload_bytes"][indices[rest]])
            slots[rest] = state.staging.allocate_many(sizes.tolist(), TEMPORARY)
            back = indices[slots == NONE]
            if len(back):
                reads.waiting = np.concatenate([back, reads.waiting])
        fits = slots != NONE
        if not fits.all():
            indices, slots, promote, rows = indices[fits], slots[fits], promote[fits], rows[fits]
        blocks = call.blocks[indices]
        locations = reads.lower.copies.location.array[rows]
        batch = np.zeros(len(indices), READ_DTYPE)
        for name in ("key", "payload_bytes", "chunk_bytes", "start", "stop"):
            batch[name] = blocks[name]
        batch["place"] = locations & _PLACES
        batch["image"] = slots + np.where(promote, self._arena.address, state.staging.address)
        batch["target"] = blocks["address"]
        if (blocks["stop"] - blocks["start"] != blocks["payload_bytes"]).any():
            batch["start"], batch["stop"], exact = spans(blocks)
            batch["target"] *= exact
        return Wave(indices, locations, slots, promote, batch)

    def _choose(self, call: ReadCall, volumes: Volumes, reads: VolumeWaves) -> tuple[Ints, Bools]:
        """Take the blocks of one wave off the queue. Returns them, and True for those to promote.

        A block that was moved since it was queued is queued for its present volume.
        """
        state, lower = self._state, reads.lower
        some = reads.waiting[: _WAVE_BLOCKS_MAX if reads.flying else _FIRST_BLOCKS_MAX]
        limit = min(lower.volumes.wave_bytes, max(1, self._arena.capacity_bytes // 4))
        sizes = np.cumsum(record_sizes(call.blocks["payload_bytes"][some]))
        some = some[: max(1, int(np.searchsorted(sizes, limit, "right")))]
        reads.waiting = reads.waiting[len(some) :]
        rows = call.rows[some]
        here = lower.copies.state.array[rows] == _READY
        here &= lower.copies.location.array[rows] >> VOLUME_SHIFT == reads.volume
        if not here.all():
            self._assign(call, volumes, some[~here])
            some, rows = some[here], rows[here]
        states = state.catalog.memory.state.array[rows]
        _, first = np.unique(rows, return_index=True)
        again = np.ones(len(rows), bool)
        again[first] = False
        if call.waits_for_others and not call.is_prefetch:
            others = again | (states == _FILLING)
            if others.any():
                call.left_to_others += some[others].tolist()
                some, states = some[~others], states[~others]
                again = again[~others]
        if not (lower.config.promote or call.is_prefetch):
            return some, np.zeros(len(some), bool)
        blocks = call.blocks[some]
        whole = blocks["stop"] - blocks["start"] == blocks["payload_bytes"]
        return some, whole & (states == int(CopyState.ABSENT)) & ~again

    def _reserve(self, rows: Rows) -> Ints:
        """Reserve memory slots to read blocks into; NONE for those without one."""
        state = self._state
        slots = np.full(len(rows), NONE, np.int64)
        sizes = record_sizes(state.catalog.nbytes.array[rows])
        for nbytes in np.unique(sizes).tolist():
            mine = np.flatnonzero(sizes == nbytes)
            owners = rows[mine].tolist()
            found = self._arena.allocate_all(nbytes, owners)
            if len(found) < len(owners) or self._memory.spare_bytes:
                found += self._slots.allocate_more(nbytes, owners[len(found) :])
            mine = mine[: len(found)]
            if found:
                state.catalog.memory.reserve_all(rows[mine].tolist(), found)
                slots[mine] = found
        return slots

    def _finish(self, call: ReadCall, reads: VolumeWaves, wave: Wave) -> list[int]:
        """Handle the outcomes of a wave. Returns the blocks to read again, because they were moved
        meanwhile or another tier has them.
        """
        if wave not in reads.flying or wave.reading is None:
            return []
        state, reading = self._state, wave.reading
        outcomes = reading.result()
        reads.flying.remove(wave)
        good = outcomes == Outcome.OK
        is_late = bool((outcomes == Outcome.LATE).any()) and not reading.released(0.0)
        images, targets = wave.reads["image"], call.blocks["address"][wave.indices]
        partial = np.flatnonzero(good & (targets != 0) & (wave.reads["target"] == 0))
        if len(partial):
            copy_out(call.blocks[wave.indices[partial]], images[partial], False)
        again: list[int] = []
        late: list[LateRead] = []
        try:
            if call.sink is not None:
                here = np.flatnonzero(good & (targets == 0))
                call.hand_over(wave.indices[here], images[here], wave.promote[here], verified=True)
        finally:
            state.events.emit(Took("read", reads.lower.name, state.clock.now() - wave.began_s))
            with state.lock:
                if not call.is_prefetch:
                    reads.lower.foreground_reads -= 1
                    reads.lower.foreground_s = state.clock.now()
                self._keep(call, reads.lower, wave, good)
                for at in np.flatnonzero(~good).tolist():
                    outcome, index = Outcome(int(outcomes[at])), int(wave.indices[at])
                    call.codes[index] = _REASONS[outcome]
                    if outcome is not Outcome.LATE:
                        self._give_back(call, wave, at)
                        if self._failed(reads.lower, call.rows[index], wave.locations[at], outcome):
                            again.append(index)
                        continue
                    state.events.count("read_late")
                    if is_late:
                        late.append(self._set_aside(call, wave, at))
                    else:
                        self._give_back(call, wave, at)
                state.lock.arrived.notify_all()
                state.lock.room.notify_all()
            if is_late:
                self._late.add(reading, late)
        return again

    def _keep(self, call: ReadCall, lower: LowerTier, wave: Wave, good: Bools) -> None:
        """Make intact promoted blocks visible in the memory tier; free all other slots."""
        state = self._state
        call.codes[wave.indices[good]] = _CODES[lower.name, ""]
        for slot in wave.slots[good & ~wave.promote].tolist():
            state.staging.free(slot)
        kept = good & wave.promote
        rows = call.rows[wave.indices[kept]].tolist()
        if rows:
            sizes = record_sizes(wave.reads["payload_bytes"][kept])
            state.catalog.enter_memory(rows, sizes.tolist())
            state.events.emit(Counted("promoted", len(rows)))
            if lower is not state.lower_tiers[0] and state.writes.promotes_from(lower):
                sample = int(call.blocks["key"][-1, 3]) >> 56
                for row in rows:
                    state.writes.promote(row, lower, sample)

    def _failed(self, lower: LowerTier, row: int, location: int, outcome: Outcome) -> bool:
        """Handle a block that could not be read. True: read it again from another place."""
        state = self._state
        if lower.place(row) == location != NONE:
            corrupt = outcome is Outcome.CORRUPT
            state.events.count("quarantined" if corrupt else "read_failed")
            if corrupt:
                _log.warning(
                    "%s: volume %d: a corrupt block was dropped", lower.name, volume_of(location)
                )
            if corrupt or state.volumes.is_up(location):
                lower.drop(row)
        other = state.source(row)
        return other is not None and (other is not lower or lower.place(row) != location)

    def _give_back(self, call: ReadCall, wave: Wave, at: int) -> None:
        """Free a slot whose block was not read."""
        state = self._state
        if wave.promote[at]:
            self._arena.free(state.catalog.memory.drop(int(call.rows[wave.indices[at]])))
        else:
            state.staging.free(int(wave.slots[at]))

    def _set_aside(self, call: ReadCall, wave: Wave, at: int) -> LateRead:
        """Keep the slot of a late read until the kernel has released it. The block is not in
        memory.
        """
        state, slot, index = self._state, int(wave.slots[at]), wave.indices[at]
        promote = bool(wave.promote[at])
        if promote:
            state.catalog.memory.drop(int(call.rows[index]))
            self._arena.set_owner(slot, TEMPORARY)
        (key,) = as_keys(call.blocks["key"][[index]])
        nbytes = int(record_sizes(call.blocks["payload_bytes"][[index]])[0])
        return LateRead(slot, key, nbytes, promote)
