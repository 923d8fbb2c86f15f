"""Offloading.

Copy a block into a memory slot, checksummed in the same pass, and queue it for the disk.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.codec.record import (
    HEAD_BYTES,
    TABLE_OFFSET,
    Kind,
    chunk_count,
    record_bytes,
    write_head,
)
from kvdepot.core.block import BlockKey, Put
from kvdepot.index.table import NONE
from kvdepot.native import FILL, chunk_checksums
from kvdepot.store.state.state import Stock
from kvdepot.store.write.memory_eviction import Room
from kvdepot.tiers.memory.copy_ops import transfers

_WAVE_BYTES: Final = 64 << 20
_NO_LIMIT: Final = 1 << 62
_PART: Final = 32
"""Blocks reserved or sealed at a time: a lookup may have to wait for as many, not for all."""
_ZEROS: Final = bytes(4096)


@dataclass(slots=True)
class Offer:
    """One block offered by a caller."""

    key: BlockKey
    source: int
    payload_bytes: int
    chunk_bytes: int
    row: int = NONE
    slot: int = NONE


def _parts(offers: Sequence[Offer]) -> Iterator[range]:
    """Indices of offers, some at a time; between them others get their turn."""
    for start in range(0, len(offers), _PART):
        if start:
            time.sleep(0)
        yield range(start, min(start + _PART, len(offers)))


class Putter:
    """Serves `put`."""

    def __init__(self, stock: Stock, room: Room) -> None:
        self._stock = stock
        self._room = room

    def store(self, offers: Sequence[Offer], timeout_s: float) -> list[Put]:
        """Take in each offer or say why not.

        Waits for room until `timeout_s` has passed, no longer.
        """
        stock = self._stock
        deadline = stock.clock.now() + timeout_s
        results: list[Put] = []
        while len(results) < len(offers):
            wave: list[Offer] = []
            with stock.changed:
                self._admit(offers, results, wave, deadline, _WAVE_BYTES, patient=True)
            if wave:
                filled = False
                try:
                    self._copy(wave)
                    self._head(wave)
                    filled = True
                finally:
                    with stock.changed:
                        self._seal(wave) if filled else self._abandon(wave)
        with stock.changed:
            self._count(zip(offers, results, strict=True))
        return results

    def reserve(self, offers: Sequence[Offer], timeout_s: float) -> list[Put]:
        """Find slots for offers, to be filled by the caller, then `finish`ed or `abandon`ed.

        Takes what fits at once and waits for the first one only: what waits may need these slots.
        """
        results = self.admit(offers, timeout_s)
        left = [(offer, Put.THROTTLED) for offer in offers[len(results) :]]
        with self._stock.changed:
            self._count(left)
        return results + [put for _, put in left]

    def admit(self, offers: Sequence[Offer], timeout_s: float) -> list[Put]:
        """`reserve` without an answer for offers after the first that does not fit beside those
        before it: these were not tried.
        """
        stock = self._stock
        deadline = stock.clock.now() + timeout_s
        results: list[Put] = []
        wave: list[Offer] = []
        for part in _parts(offers):
            with stock.changed:
                self._admit(offers[: part.stop], results, wave, deadline, _NO_LIMIT)
            if len(results) < part.stop:
                break
        with stock.changed:
            answers = zip(offers, results, strict=False)
            self._count((offer, put) for offer, put in answers if put is not Put.STORED)
        return results

    def payload(self, offer: Offer) -> memoryview:
        """A reserved slot, to be filled."""
        end = HEAD_BYTES + offer.payload_bytes
        return self._stock.arena.image(offer.slot, end)[HEAD_BYTES:]

    def finish(self, wave: list[Offer], *, summed: bool = False) -> None:
        """Make blocks of slots that were filled. `summed`: their checksums are in place too."""
        sealed = False
        try:
            if not summed:
                self._checksum(wave)
            self._head(wave)
            sealed = True
        finally:
            for part in _parts(wave):
                some = wave[part.start : part.stop]
                with self._stock.changed:
                    self._seal(some) if sealed else self._abandon(some)
                    self._count((offer, Put.STORED) for offer in some if sealed)

    def abandon(self, wave: list[Offer]) -> None:
        """Give slots back that were reserved."""
        with self._stock.changed:
            self._abandon(wave)
            self._stock.changed.notify_all()

    def _admit(
        self,
        offers: Sequence[Offer],
        results: list[Put],
        wave: list[Offer],
        deadline: float,
        limit_bytes: int,
        *,
        patient: bool = False,
    ) -> None:
        """Find slots for the next offers.

        Lock held; waits for room only while the wave is empty. `patient`: rather than let a block
        go that could be kept in a slower memory.
        """
        stock = self._stock
        total = sum(record_bytes(offer.payload_bytes) for offer in wave)
        while len(results) < len(offers) and total < limit_bytes:
            offer = offers[len(results)]
            outcome = self._try(offer, pending_bytes=total, patient=patient)
            if outcome is Put.THROTTLED:
                if wave:
                    return
                wait_s = deadline - stock.clock.now()
                if wait_s > 0:
                    stock.changed.wait(wait_s)
                    continue
                if patient:
                    patient = False
                    continue
            results.append(outcome)
            if outcome is Put.STORED:
                wave.append(offer)
                total += record_bytes(offer.payload_bytes)

    def _try(self, offer: Offer, pending_bytes: int, *, patient: bool) -> Put:
        """Reserve a slot. THROTTLED may change with time, REFUSED will not."""
        stock, catalog = self._stock, self._stock.catalog
        row = catalog.row(offer.key)
        if row != NONE and catalog.memory.absent(row):
            stock.drop_unreadable(row)
        if row != NONE and not all(copies.absent(row) for copies in catalog.tiers):
            catalog.use([row])
            return Put.PRESENT
        nbytes = record_bytes(offer.payload_bytes)
        if not stock.arena.chunks_for(nbytes):
            return Put.REFUSED
        waiting = stock.dirty_bytes + pending_bytes
        if stock.writers and waiting and waiting + nbytes > stock.dirty_limit_bytes:
            return Put.THROTTLED
        slot = self._room.slot(nbytes, NONE, patient=patient)
        if slot is None:
            return Put.THROTTLED
        row = catalog.ensure(offer.key, offer.payload_bytes)
        stock.arena.set_owner(slot, row)
        catalog.memory.reserve(row, slot)
        catalog.lease([row])
        offer.row, offer.slot = row, slot
        return Put.STORED

    def _checksum(self, wave: list[Offer]) -> None:
        """Checksum what the caller has put into slots."""
        for offer in wave:
            payload = self.payload(offer)
            chunks = chunk_count(offer.payload_bytes, offer.chunk_bytes)
            head = self._stock.arena.image(offer.slot, HEAD_BYTES)
            table = head[TABLE_OFFSET : TABLE_OFFSET + 8 * chunks]
            chunk_checksums(payload, offer.chunk_bytes, table)

    def _copy(self, wave: list[Offer]) -> None:
        """Copy and checksum, without the lock: nobody else sees a slot that is being filled."""
        base = self._stock.arena.address
        rows: list[tuple[Any, ...]] = []
        for offer in wave:
            slot = base + offer.slot
            rows.append(
                (
                    0,
                    offer.source,
                    slot + HEAD_BYTES,
                    offer.payload_bytes,
                    offer.chunk_bytes,
                    slot + TABLE_OFFSET,
                    FILL,
                )
            )
        transfers(rows)

    def _head(self, wave: list[Offer]) -> None:
        """Write the head of each record, and zeros after its payload."""
        for offer in wave:
            nbytes = record_bytes(offer.payload_bytes)
            image = self._stock.arena.image(offer.slot, nbytes)
            write_head(image, Kind.BLOCK, offer.key, offer.payload_bytes, offer.chunk_bytes)
            end = HEAD_BYTES + offer.payload_bytes
            if end != nbytes:
                image[end:] = _ZEROS[: nbytes - end]

    def _seal(self, wave: list[Offer]) -> None:
        """Make the blocks visible and queue them for the disk. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        rows = [offer.row for offer in wave]
        for offer in wave:
            catalog.memory.seal(offer.row)
            catalog.leaves.enter(offer.row, record_bytes(offer.payload_bytes))
            stock.write_down(offer.row)
        catalog.use(rows, hit=False)
        stock.unlease(rows)
        if stock.dirty_bytes:
            stock.work.notify_all()

    def _abandon(self, wave: list[Offer]) -> None:
        """Give the slots back. Lock held."""
        stock = self._stock
        for offer in wave:
            stock.arena.free(stock.catalog.memory.drop(offer.row))
        stock.unlease([offer.row for offer in wave])

    def _count(self, answers: Iterable[tuple[Offer, Put]]) -> None:
        counters = self._stock.counters
        for offer, outcome in answers:
            if outcome is Put.STORED:
                counters.put_stored += 1
                counters.put_bytes += offer.payload_bytes
            elif outcome is Put.PRESENT:
                counters.put_present += 1
            elif outcome is Put.THROTTLED:
                counters.put_throttled += 1
            else:
                counters.put_refused += 1
