"""Puts: a block is copied into a memory slot, checksummed in the same pass, and queued for
write-back. With a `Reservation` the caller fills the slot.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.requests import Array
from kvdepot.format.copy_ops import checksum_slot
from kvdepot.format.record import HEAD_BYTES, Kind, set_stamp, write_head
from kvdepot.index.table import NONE
from kvdepot.native import copy_in
from kvdepot.store.events import Took
from kvdepot.store.state.memory_tier import SlotAllocator
from kvdepot.store.state.state import StoreState

_WAVE_BYTES: Final = 64 << 20
_NO_LIMIT: Final = 1 << 62
_AT_ONCE: Final = -math.inf
"""Deadline of a put that does not wait for writes: the block may be evicted unwritten."""
_PART: Final = 32
"""Most blocks reserved or sealed while the lock is held, so that lookups wait only briefly."""
_ZEROS: Final = bytes(4096)


@dataclass(slots=True)
class NewBlock:
    """A block of a put."""

    key: BlockKey
    index: int
    """Its index in the call."""
    payload_bytes: int
    chunk_bytes: int
    nbytes: int
    """Bytes of its record."""
    row: int = NONE
    slot: int = NONE
    before: int = NONE
    """Row of the block before it in memory, leased until this one is sealed so that it is not
    evicted to make room."""
    deferred: bool = False
    """True if it was accepted while the write queue was full."""
    tokens: bytes | memoryview = b""
    """Its token ids, little-endian u32; empty if unknown."""
    producer: int = 0
    """Number of the software that computed it; 0 if unknown."""


def _leased(wave: Sequence[NewBlock]) -> list[int]:
    rows = [offer.row for offer in wave]
    return rows + [offer.before for offer in wave if offer.before != NONE]


def _parts(offers: Sequence[NewBlock]) -> Iterator[range]:
    """Split the indices of offers into parts of _PART; other threads can run between two."""
    for start in range(0, len(offers), _PART):
        if start:
            time.sleep(0)
        yield range(start, min(start + _PART, len(offers)))


class Putter:
    """Serves puts and reservations."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._arena = state.arena
        self.slots = SlotAllocator(state, state.memory_tiers[0])

    def store(self, blocks: Array, offers: Sequence[NewBlock], timeout_s: float) -> list[PutResult]:
        """Store those of `blocks` that are offered. Returns a result for each. Blocks for
        `timeout_s` at most for room.
        """
        state = self._state
        began_s = state.clock.now()
        deadline = began_s + timeout_s if timeout_s > 0 else _AT_ONCE
        results: list[PutResult] = []
        while len(results) < len(offers):
            wave: list[NewBlock] = []
            with state.lock:
                self._admit(offers, results, wave, deadline, _WAVE_BYTES, may_wait=True)
            if wave:
                filled = False
                try:
                    some = blocks
                    if len(wave) < len(blocks):
                        some = blocks[[offer.index for offer in wave]]
                    slots = np.array([offer.slot for offer in wave])
                    copy_in(some, slots + self._arena.address)
                    self._head(wave)
                    filled = True
                finally:
                    with state.lock:
                        self._seal(wave) if filled else self._abandon(wave)
        self._count_others(results)
        state.events.emit(Took("put", "", state.clock.now() - began_s))
        return results

    def reserve(self, offers: Sequence[NewBlock], timeout_s: float) -> list[PutResult]:
        """Reserve slots, which the caller fills and then passes to `finish` or `abandon`.

        Only waits for a slot for the first block: other waiting calls may need these slots.
        """
        results = self.admit(offers, timeout_s)
        left = [PutResult.THROTTLED] * (len(offers) - len(results))
        self._count_others(left)
        return results + left

    def admit(self, offers: Sequence[NewBlock], timeout_s: float) -> list[PutResult]:
        """`reserve` without results for the blocks that were not tried: those after the first
        without room.
        """
        state = self._state
        began_s = state.clock.now()
        deadline = began_s + timeout_s if timeout_s > 0 else _AT_ONCE
        results: list[PutResult] = []
        wave: list[NewBlock] = []
        for part in _parts(offers):
            with state.lock:
                self._admit(offers[: part.stop], results, wave, deadline, _NO_LIMIT)
            if len(results) < part.stop:
                break
        self._count_others(results)
        state.events.emit(Took("reserve", "", state.clock.now() - began_s))
        return results

    def finish(self, wave: list[NewBlock], *, summed: bool = False) -> None:
        """Make filled slots visible as blocks. `summed`: their checksums are written already."""
        sealed = False
        try:
            if not summed:
                for offer in wave:
                    image = self._arena.image(offer.slot, offer.nbytes)
                    checksum_slot(image, offer.payload_bytes, offer.chunk_bytes)
            self._head(wave)
            sealed = True
        finally:
            for part in _parts(wave):
                some = wave[part.start : part.stop]
                with self._state.lock:
                    self._seal(some) if sealed else self._abandon(some)

    def abandon(self, wave: list[NewBlock]) -> None:
        """Free reserved slots."""
        with self._state.lock:
            self._abandon(wave)
            self._state.lock.room.notify_all()

    def _admit(
        self,
        offers: Sequence[NewBlock],
        results: list[PutResult],
        wave: list[NewBlock],
        deadline: float,
        limit_bytes: int,
        *,
        may_wait: bool = False,
    ) -> None:
        """Find slots for the next blocks. Waits for room only while the wave is empty.

        `may_wait`: wait rather than evict a block that could move to a slower memory tier.
        """
        state = self._state
        assert state.lock.held()
        total = sum([offer.nbytes for offer in wave])
        dirty_room = self._dirty_room()
        while len(results) < len(offers) and total < limit_bytes:
            offer = offers[len(results)]
            room = dirty_room - total if wave or state.writes.dirty_bytes else _NO_LIMIT
            ahead = min(len(offers) - len(results), _PART) - 1
            if not wave or wave[-1].key[16:24] != offer.key[8:16]:
                self._hold_before(offer)
            outcome = self._try(offer, room, ahead, may_wait=may_wait)
            if outcome is PutResult.THROTTLED and offer.before != NONE:
                self._let_go(offer)  # memory may be full of this prompt
                outcome = self._try(offer, room, ahead, may_wait=may_wait)
            if outcome is PutResult.THROTTLED:
                wait_s = deadline - state.clock.now()
                if wave and wait_s > 0:
                    return
                if wait_s > 0:
                    state.lock.room.wait(wait_s)
                    dirty_room = self._dirty_room()
                    continue
                at_once = deadline == _AT_ONCE and state.writes.written_through() is None
                over = _NO_LIMIT if at_once else room
                outcome = self._take_anyway(offer, room, over, ahead)
                if wave and outcome is PutResult.THROTTLED:
                    return
            results.append(outcome)
            if outcome is PutResult.STORED:
                wave.append(offer)
                total += offer.nbytes
            else:
                self._let_go(offer)

    def _hold_before(self, offer: NewBlock) -> None:
        """Lease the block before this one, which keeps all earlier blocks of
        the prompt in memory.
        """
        catalog = self._state.catalog
        row = catalog.table.find_before(offer.key)
        if row != NONE and catalog.memory.ready(row):
            offer.before = row
            catalog.lease([row])

    def _let_go(self, offer: NewBlock) -> None:
        """Undo `_hold_before` before the lock is released. Waiting calls are not woken, since no
        room was gained."""
        if offer.before != NONE:
            self._state.catalog.unlease([offer.before])
            offer.before = NONE

    def _take_anyway(self, offer: NewBlock, room: int, over: int, ahead: int) -> PutResult:
        """Accept a block after the deadline if it has at most `over` bytes; above `room` its write
        is deferred, and it may be evicted unwritten.
        """
        outcome = self._try(offer, over, ahead, may_wait=False)
        late = offer.nbytes > room
        offer.deferred = late and outcome is PutResult.STORED
        return outcome

    def _dirty_room(self) -> int:
        """The bytes that may still be queued for writing."""
        writes = self._state.writes
        return writes.dirty_limit_bytes - writes.dirty_bytes if writes.writes_back else _NO_LIMIT

    def _try(self, offer: NewBlock, dirty_room: int, ahead: int, *, may_wait: bool) -> PutResult:
        """Reserve a slot. `ahead` more blocks follow. THROTTLED: try again later. REFUSED: the
        block can never fit.
        """
        state, catalog = self._state, self._state.catalog
        row, below = catalog.row(offer.key), False
        if row != NONE:
            if catalog.memory.absent(row):
                state.drop_unreadable(row)
            below = self._is_below(row)
            if not below and not catalog.is_absent(row):
                catalog.use([row])
                return PutResult.PRESENT
        nbytes = offer.nbytes
        if not self._arena.chunks_for(nbytes):
            return PutResult.REFUSED
        slot = None
        if below or nbytes <= dirty_room:
            slot = self.slots.allocate(nbytes, NONE, ahead=ahead, may_wait=may_wait)
        if slot is None and below:
            catalog.use([row])
            return PutResult.PRESENT
        if slot is None:
            return PutResult.THROTTLED
        if row == NONE:
            row = catalog.add(offer.key, offer.payload_bytes)
        else:  # the row may have been freed by the eviction
            row = catalog.ensure(offer.key, offer.payload_bytes)
        self._arena.set_owner(slot, row)
        catalog.memory.reserve(row, slot)
        catalog.lease([row])
        offer.row, offer.slot = row, slot
        return PutResult.STORED

    def _is_below(self, row: int) -> bool:
        """True if only lower tiers have the block, so that a put copies it to memory again."""
        state = self._state
        here = any(not memory.copies.absent(row) for memory in state.memory_tiers)
        return not here and bool(state.catalog.residency.view[row])

    def _head(self, wave: list[NewBlock]) -> None:
        """Write the head of each record, and zeros after its payload."""
        for offer in wave:
            nbytes = offer.nbytes
            image = self._arena.image(offer.slot, nbytes)
            sizes = (offer.payload_bytes, offer.chunk_bytes)
            write_head(image, Kind.BLOCK, offer.key, *sizes, offer.tokens, offer.producer)
            end = HEAD_BYTES + offer.payload_bytes
            if end != nbytes:
                image[end:] = _ZEROS[: nbytes - end]

    def _seal(self, wave: list[NewBlock]) -> None:
        """Make blocks visible and queue new ones for write-back. With the lock."""
        assert self._state.lock.held()
        state, catalog = self._state, self._state.catalog
        rows = [offer.row for offer in wave]
        below = {row for row in rows if catalog.residency.view[row]}
        stamp = state.stamps.next()  # with the lock held: orders it with removals
        for offer in wave:
            set_stamp(self._arena.image(offer.slot, HEAD_BYTES), stamp)
            catalog.memory.seal(offer.row)
            catalog.leaves.enter(offer.row, offer.nbytes)
        new = rows
        if below:
            self._seal_returned([row for row in rows if row in below], wave[-1].key[-1])
            new = [row for row in rows if row not in below]
        deferred = {offer.row for offer in wave if offer.deferred}
        state.writes.add_new([row for row in new if row not in deferred] if deferred else new)
        if deferred:
            state.writes.add_new([row for row in new if row in deferred], later=True)
        catalog.use(new, hit=False)
        state.unlease(_leased(wave))
        state.events.count("put_stored", len(wave))
        state.events.count("put_bytes", sum([offer.payload_bytes for offer in wave]))
        if state.writes.dirty_bytes:
            state.lock.work.notify_all()

    def _seal_returned(self, rows: list[int], sample: int) -> None:
        """Handle blocks that a lower tier has: they count as used, and may be promoted."""
        state = self._state
        state.catalog.use(rows)
        for row in rows:
            source = state.source(row)
            if source is not None and state.writes.promotes_from(source):
                state.writes.promote(row, source, sample)

    def _abandon(self, wave: list[NewBlock]) -> None:
        """Free the slots. With the lock."""
        assert self._state.lock.held()
        state = self._state
        for offer in wave:
            self._arena.free(state.catalog.memory.drop(offer.row))
        state.unlease(_leased(wave))

    def _count_others(self, outcomes: list[PutResult]) -> None:
        """Count the results other than STORED, which is counted by `_seal`."""
        for outcome in set(outcomes) - {PutResult.STORED}:
            self._state.events.count(f"put_{outcome.value}", outcomes.count(outcome))
