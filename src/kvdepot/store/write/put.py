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
from kvdepot.core.keys import Keys
from kvdepot.core.requests import BLOCK_DTYPE, Array
from kvdepot.format.copy_ops import checksum_slot
from kvdepot.format.record import set_stamps, write_heads
from kvdepot.index.table import NONE
from kvdepot.native import copy_in
from kvdepot.store.events import Counted, Took
from kvdepot.store.state.memory_tier import SlotAllocator
from kvdepot.store.state.state import StoreState

_WAVE_BYTES: Final = 64 << 20
_NO_LIMIT: Final = 1 << 62
_AT_ONCE: Final = -math.inf
"""Deadline of a put that does not wait for writes: the block may be evicted unwritten."""
_PART: Final = 32
"""Most blocks reserved or sealed while the lock is held, so that lookups wait only briefly."""


@dataclass(slots=True)
class NewBlock:
    """A block of a put."""

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
        """Store those of `blocks` that are offered. Returns a result for each offer. Blocks for
        `timeout_s` at most for room.
        """
        state = self._state
        began_s = state.clock.now()
        deadline = began_s + timeout_s if timeout_s > 0 else _AT_ONCE
        results: list[PutResult] = []
        while len(results) < len(offers):
            wave: list[NewBlock] = []
            with state.lock:
                self._admit(blocks, offers, results, wave, deadline, _WAVE_BYTES, may_wait=True)
            if wave:
                filled = False
                try:
                    some = blocks
                    if len(wave) < len(blocks):
                        some = blocks[[offer.index for offer in wave]]
                    images = np.array([offer.slot for offer in wave]) + self._arena.address
                    copy_in(some, images)
                    write_heads(images, some, [offer.tokens for offer in wave])
                    filled = True
                finally:
                    with state.lock:
                        self._seal(wave) if filled else self._abandon(wave)
        if results.count(PutResult.STORED) < len(results):
            self._count_others(results)
        state.events.emit(Took("put", "", state.clock.now() - began_s))
        return results

    def reserve(
        self, blocks: Array, offers: Sequence[NewBlock], timeout_s: float
    ) -> list[PutResult]:
        """Reserve slots, which the caller fills and then passes to `finish` or `abandon`.

        Only waits for a slot for the first block: other waiting calls may need these slots.
        """
        results = self.admit(blocks, offers, timeout_s)
        left = [PutResult.THROTTLED] * (len(offers) - len(results))
        self._count_others(left)
        return results + left

    def admit(self, blocks: Array, offers: Sequence[NewBlock], timeout_s: float) -> list[PutResult]:
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
                self._admit(blocks, offers[: part.stop], results, wave, deadline, _NO_LIMIT)
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
            rows = np.array([offer.row for offer in wave], np.int64)
            blocks = np.zeros(len(wave), BLOCK_DTYPE)
            blocks["key"] = self._state.catalog.table.words(rows)
            blocks["payload_bytes"] = [offer.payload_bytes for offer in wave]
            blocks["chunk_bytes"] = [offer.chunk_bytes for offer in wave]
            blocks["producer"] = [offer.producer for offer in wave]
            images = np.array([offer.slot for offer in wave], np.int64) + self._arena.address
            write_heads(images, blocks, [offer.tokens for offer in wave])
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
        blocks: Array,
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
        words = blocks["key"]
        if len(offers) < len(blocks):
            words = words[[offer.index for offer in offers]]
        total = sum([offer.nbytes for offer in wave])
        queue_room = state.writes.room_bytes()
        while len(results) < len(offers) and total < limit_bytes:
            at = len(results)
            most_bytes = min(limit_bytes, queue_room) - total
            new = self._admit_new(words, offers, at, most_bytes, may_wait=may_wait)
            if new:
                results += [PutResult.STORED] * len(new)
                wave += new
                total += len(new) * new[0].nbytes
                continue
            offer, key = offers[at], BlockKey(words[at].tobytes())
            room = queue_room - total if wave or state.writes.dirty_bytes else _NO_LIMIT
            self._hold_before(offer, key)
            outcome = self._try(offer, key, room, may_wait=may_wait)
            if outcome is PutResult.THROTTLED and offer.before != NONE:
                self._let_go(offer)  # memory may be full of this prompt
                outcome = self._try(offer, key, room, may_wait=may_wait)
            if outcome is PutResult.THROTTLED:
                wait_s = deadline - state.clock.now()
                if wave and wait_s > 0:
                    return
                if wait_s > 0:
                    state.lock.room.wait(wait_s)
                    queue_room = state.writes.room_bytes()
                    continue
                at_once = deadline == _AT_ONCE and state.writes.written_through() is None
                over = _NO_LIMIT if at_once else room
                outcome = self._take_anyway(offer, key, room, over)
                if wave and outcome is PutResult.THROTTLED:
                    return
            results.append(outcome)
            if outcome is PutResult.STORED:
                wave.append(offer)
                total += offer.nbytes
            else:
                self._let_go(offer)

    def _admit_new(
        self, words: Keys, offers: Sequence[NewBlock], at: int, most_bytes: int, *, may_wait: bool
    ) -> list[NewBlock]:
        """Reserve slots for the offers from `at` on: those in a row that are unknown, of one size,
        and have at most `most_bytes`. Returns those that have a slot.
        """
        catalog, nbytes = self._state.catalog, offers[at].nbytes
        count = min(len(offers) - at, max(0, most_bytes) // nbytes)
        words = words[at : at + count]
        known = catalog.table.find_many(words) != NONE
        if known.any():
            words = words[: known.argmax()]
        some = offers[at : at + len(words)]
        same = [offer.payload_bytes == offers[at].payload_bytes for offer in some]
        some = some[: same.index(False)] if False in same else some
        if not some or len({*words[:, 2].tolist()}) < len(words):
            return []
        words = words[: len(some)]
        starts = [0, *(1 + np.flatnonzero(words[1:, 1] != words[:-1, 2])).tolist()]
        for index in starts:
            if words[index, 1]:
                self._hold_before(some[index], BlockKey(words[index].tobytes()))
        rows = catalog.add_all(words, offers[at].payload_bytes)
        slots = self._arena.allocate_all(nbytes, rows)
        memory = self._state.memory_tiers[0]
        if len(slots) < len(rows) or memory.spare_bytes:
            slots += self.slots.allocate_more(nbytes, rows[len(slots) :], may_wait=may_wait)
        for index in range(len(rows) - 1, len(slots) - 1, -1):
            self._let_go(some[index])
            catalog.forget_if_gone(rows[index])
        some, rows = some[: len(slots)], rows[: len(slots)]
        catalog.memory.reserve_all(rows, slots)
        catalog.lease(rows)
        for offer, row, slot in zip(some, rows, slots, strict=True):
            offer.row, offer.slot = row, slot
        return list(some)

    def _hold_before(self, offer: NewBlock, key: BlockKey) -> None:
        """Lease the block before this one, which keeps all earlier blocks of
        the prompt in memory.
        """
        catalog = self._state.catalog
        row = catalog.table.find_before(key)
        if row != NONE and catalog.memory.ready(row):
            offer.before = row
            catalog.lease([row])

    def _let_go(self, offer: NewBlock) -> None:
        """Undo `_hold_before` before the lock is released. Waiting calls are not woken, since no
        room was gained."""
        if offer.before != NONE:
            self._state.catalog.unlease([offer.before])
            offer.before = NONE

    def _take_anyway(self, offer: NewBlock, key: BlockKey, room: int, over: int) -> PutResult:
        """Accept a block after the deadline if it has at most `over` bytes; above `room` its write
        is deferred, and it may be evicted unwritten.
        """
        outcome = self._try(offer, key, over, may_wait=False)
        late = offer.nbytes > room
        offer.deferred = late and outcome is PutResult.STORED
        return outcome

    def _try(self, offer: NewBlock, key: BlockKey, dirty_room: int, *, may_wait: bool) -> PutResult:
        """Reserve a slot. THROTTLED: try again later. REFUSED: the block can never fit."""
        state, catalog = self._state, self._state.catalog
        row, below = catalog.table.find(key), False
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
            slot = self.slots.allocate(nbytes, NONE, may_wait=may_wait)
        if slot is None and below:
            catalog.use([row])
            return PutResult.PRESENT
        if slot is None:
            return PutResult.THROTTLED
        row = catalog.ensure(key, offer.payload_bytes)  # the eviction may have freed the row
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

    def _seal(self, wave: list[NewBlock]) -> None:
        """Make blocks visible and queue new ones for write-back. With the lock."""
        assert self._state.lock.held()
        state, catalog = self._state, self._state.catalog
        rows = [offer.row for offer in wave]
        below = catalog.residency.array[rows] != 0
        stamp = state.stamps.next()  # with the lock held: orders it with removals
        set_stamps(np.array([offer.slot for offer in wave]) + self._arena.address, stamp)
        catalog.enter_memory(rows, [offer.nbytes for offer in wave])
        new = rows
        if below.any():
            self._seal_returned(np.array(rows)[below].tolist())
            new = np.array(rows)[~below].tolist()
        deferred = {offer.row for offer in wave if offer.deferred}
        state.writes.add_new([row for row in new if row not in deferred] if deferred else new)
        if deferred:
            state.writes.add_new([row for row in new if row in deferred], later=True)
        catalog.use(new, hit=False)
        state.unlease(_leased(wave))
        state.events.emit(Counted("put_stored", len(wave)))
        put_bytes = sum([offer.payload_bytes for offer in wave])
        state.events.emit(Counted("put_bytes", put_bytes))
        if new and state.lower_tiers:
            state.lock.work.notify_all()

    def _seal_returned(self, rows: list[int]) -> None:
        """Handle blocks that a lower tier has: they count as used, and may be promoted."""
        state = self._state
        state.catalog.use(rows)
        sample = state.catalog.table.key(rows[-1])[-1]
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
