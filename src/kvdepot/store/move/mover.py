"""Copies blocks to volumes of lower tiers.

Write-back, demotion, draining and reclaiming choose the blocks and the target (`CopyJob`). The
mover claims the blocks, reads them, appends them, enters them into the index, records removals that
were made meanwhile, and releases the blocks.

A record keeps its stamp. A removed block that is still leased can be moved: the tombstone covers
the new record too, and is recorded again, because it is dropped with the segments of its time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import Tombstone
from kvdepot.core.volume import (
    NO_PLACE,
    READ_DTYPE,
    RECORD_DTYPE,
    VOLUME_SHIFT,
    Array,
    Outcome,
    Priority,
    Purpose,
    place_of,
    volume_of,
)
from kvdepot.format.record import record_bytes, record_sizes, stamps_of
from kvdepot.native import COPY, TRANSFER_DTYPE, transfer
from kvdepot.store.events import Counted, Took
from kvdepot.store.state.background_throttle import FLASH_SHARE, HEAD_SHARE, ChunkSizer, backoff_s
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import TEMPORARY, StoreState

PIECE_BYTES: Final = 4 << 20
"""Most bytes copied in one batch, so that a concurrent read waits only briefly."""
_TRIES_MAX: Final = 8
"""Most attempts to make room for an append: other threads may use the room first."""
_STAGING_S: Final = 1.0
"""Longest wait for staging memory."""
_TOMBSTONE_PAUSE_S: Final = 0.01
_TOMBSTONE_WAIT_S: Final = 1.0
READS_END_S: Final = 60.0
_log = RateLimitedLog("kvdepot.store")

MakeRoom = Callable[[LowerTier, int, int], bool]
"""Makes room for an append, given tier, volume and bytes. False: that is not possible."""


class CopyJob(ABC):
    """Chooses the rows to copy and their target. Methods are called with the store's lock held."""

    purpose = Purpose.BLOCK
    in_place = False
    """Append directly from the memory tier; else from a copy in staging."""
    counter = ""
    """Name of the counter of copied blocks; empty: they are counted as moved within the tier."""
    from_memory = True
    """Use a copy in memory if there is one; else always read and verify the
    record from its volume."""

    def __init__(self, target: LowerTier) -> None:
        self.target = target

    def is_wanted(self, row: int) -> bool:
        """True if a row should still be copied."""
        return True

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        """Return the tier and location of a row that is not in memory; None if
        it cannot be read.
        """
        return None

    def claim(self, rows: list[int]) -> None:
        """Called before rows are copied."""
        self.target.moving.update(rows)

    @abstractmethod
    def enter(self, rows: list[int], locations: list[int]) -> None:
        """Called when rows were written: enter their new locations into the index."""

    def give_up(self, row: int) -> None:
        """Called when a row could not be read or written."""
        return None

    def release(self, rows: list[int]) -> None:
        """Called when rows are no longer being copied."""
        self.target.end_moving(rows)


@dataclass(slots=True)
class CopyBatch:
    """Blocks that are copied in one batch, all leased."""

    rows: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    """Address of each record, or of the memory to read it into."""
    nbytes: int = 0
    """Bytes of the records."""
    slots: dict[int, int] = field(default_factory=dict)
    """Staging slots by row."""
    sources: dict[int, tuple[LowerTier, int] | None] = field(default_factory=dict)
    """Tier and location of each row that is not in memory."""


class BlockMover:
    """Copies blocks to volumes. Thread-safe."""

    def __init__(self, state: StoreState, make_room: MakeRoom) -> None:
        self._state = state
        self._make_room = make_room
        self.tombstone_wait_s = _TOMBSTONE_WAIT_S
        """Longest wait of a removal until a drive has recorded it."""

    def copy_all(
        self,
        job: CopyJob,
        rows: list[int],
        volumes: Callable[[], Sequence[int]],
        *,
        size: ChunkSizer,
        rests: Sequence[LowerTier] = (),
    ) -> list[int]:
        """Copy rows in batches, each to the first of the volumes that accepts it. Blocks.

        Returns the rows that were not tried, because no volume accepted the batch before them,
        there was no staging memory, or the store closes. `rests`: tiers whose foreground reads get
        a pause after each batch.
        """
        state = self._state
        left = rows
        while left and not state.closing.is_set():
            started_s = state.clock.now()
            with state.lock:
                piece, left = self.claim(job, left, size.nbytes)
                while left and not piece.rows and not state.closing.is_set():
                    # Staging may be full of blocks that wait for the room that this thread makes.
                    left_s = started_s + _STAGING_S - state.clock.now()
                    if left_s <= 0 or not state.lock.room.wait(left_s):
                        return left
                    piece, left = self.claim(job, left, size.nbytes)
            if not piece.rows:
                return left
            if not self.copy(job, piece, volumes(), self._make_room):
                return left
            size.learn(piece.nbytes, state.clock.now() - started_s)
            rest(state, rests, started_s)
        return left

    def claim(self, job: CopyJob, rows: list[int], limit_bytes: int) -> tuple[CopyBatch, list[int]]:
        """Lease rows and get memory for them, up to `limit_bytes`. Returns also
        the remaining rows.
        """
        state, catalog = self._state, self._state.catalog
        assert state.lock.held()
        in_staging = max(1, state.staging.capacity_bytes // 4)
        memory, base = catalog.memory, state.memory_tiers[0].address
        others = len(state.lower_tiers) > 1
        piece, left, claimed = CopyBatch(), rows[:0], set[int]()
        for index, row in enumerate(rows):
            if row in claimed or not job.is_wanted(row):
                continue
            nbytes = record_bytes(catalog.nbytes.view[row])
            if piece.rows and (piece.nbytes + nbytes > limit_bytes or in_staging <= 0):
                left = rows[index:]
                break
            in_memory = job.from_memory and memory.state.view[row] == CopyState.READY
            in_place = in_memory and job.in_place
            if in_place and not (others and self.is_appended_elsewhere(row, job.target)):
                address = base + memory.location.view[row]
            else:
                slot = state.staging.allocate(nbytes, TEMPORARY)
                if slot is None:
                    left = rows[index:]
                    break
                piece.slots[row] = slot
                in_staging -= nbytes
                address = state.staging.address + slot
                if not in_memory:
                    piece.sources[row] = job.source(row)
            claimed.add(row)
            piece.rows.append(row)
            piece.addresses.append(address)
            piece.nbytes += nbytes
        job.claim(piece.rows)
        catalog.lease(piece.rows)
        return piece, left

    def copy(
        self, job: CopyJob, piece: CopyBatch, volumes: Sequence[int], make_room: MakeRoom | None
    ) -> bool:
        """Read a claimed batch and append it to the first of the volumes that accepts it. Blocks.

        Afterwards every row is entered or given up, and released. False: no volume accepted any of
        the intact records.
        """
        readable = list(zip(piece.rows, piece.addresses, strict=True))
        if piece.slots:
            readable = self._read(job, piece)
        left = readable
        for volume in volumes:
            if not left:
                break
            left = self._append(job, piece, left, volume)
            for _ in range(_TRIES_MAX):
                if not left or make_room is None:
                    break
                rows = [row for row, _ in left]
                most = int(record_sizes(self._state.catalog.nbytes.array[rows]).max())
                if not make_room(job.target, volume, most):
                    break
                left = self._append(job, piece, left, volume)
        if left:
            with self._state.lock:
                self._give_up(job, piece, [row for row, _ in left])
        return len(left) < len(readable) or not readable

    def record_tombstones(self, tombstones: Sequence[Tombstone], *, to_others: bool = True) -> None:
        """Record tombstones on all volumes, since any may have older copies. If no volume can,
        waits for the first one, `tombstone_wait_s` at most.
        """
        state, volumes = self._state, self._state.volumes
        entries = [one.entry for one in tombstones]
        deadline_s = state.clock.now() + self.tombstone_wait_s
        written = volumes.metadata.put(entries, to_others=to_others)
        while written.should and not written.have and state.clock.now() < deadline_s:
            if state.closing.wait(_TOMBSTONE_PAUSE_S):
                break
            written = volumes.metadata.put(entries, to_others=to_others)
        if written.should and not written.have:
            state.events.count("removal_unrecorded")
            _log.warning("%d removals could not be recorded", len(tombstones))

    def is_appended_elsewhere(self, row: int, target: LowerTier) -> bool:
        """True if another tier is appending the record from memory, which writes to its head."""
        others = [lower.copies for lower in self._state.lower_tiers if lower is not target]
        return any(not copies.absent(row) and not copies.ready(row) for copies in others)

    def _read(self, job: CopyJob, piece: CopyBatch) -> list[tuple[int, int]]:
        """Read the records that are not used in place into staging. Returns the intact rows and
        their addresses; the others are given up.
        """
        state, catalog = self._state, self._state.catalog
        addresses = dict(zip(piece.rows, piece.addresses, strict=True))
        copied = [row for row in piece.slots if row not in piece.sources]
        if copied:
            copies = np.zeros(len(copied), TRANSFER_DTYPE)
            memory = state.memory_tiers[0].address
            copies["source"] = memory + catalog.memory.location.array[copied]
            copies["target"] = [addresses[row] for row in copied]
            copies["nbytes"] = record_sizes(catalog.nbytes.array[copied])
            copies["mode"] = COPY
            transfer(copies)
        intact = set(piece.rows) - piece.sources.keys()
        by_volume: dict[int, list[int]] = {}
        for row, source in piece.sources.items():
            if source is not None:
                by_volume.setdefault(volume_of(source[1]), []).append(row)
        for number, rows in by_volume.items():
            intact.update(self._read_from(number, rows, piece, addresses))
        lost = [row for row in piece.rows if row not in intact]
        if lost:
            with state.lock:
                self._give_up(job, piece, lost)
        return [(row, address) for row, address in addresses.items() if row in intact]

    def _read_from(
        self, number: int, rows: list[int], piece: CopyBatch, addresses: Mapping[int, int]
    ) -> list[int]:
        """Read and verify records of one volume. Returns the intact rows."""
        sources = [piece.sources[row] for row in rows]
        reads = whole_reads(
            self._state.catalog.table.words(np.array(rows)),
            [place_of(source[1]) for source in sources if source is not None],
            self._state.catalog.nbytes.array[rows],
            [addresses[row] for row in rows],
        )
        volume = self._state.volumes[number]
        timeout_s = max(source[0].config.write_timeout for source in sources if source is not None)
        reading = volume.read(reads, Priority.BACKGROUND, timeout_s)
        outcomes = reading.result()
        while not reading.released(READS_END_S):
            pass
        return [row for row, ok in zip(rows, outcomes == Outcome.OK, strict=True) if ok]

    def _append(
        self,
        job: CopyJob,
        piece: CopyBatch,
        blocks: list[tuple[int, int]],
        number: int,
    ) -> list[tuple[int, int]]:
        """Append to one volume; enter and release written blocks. Returns those not written.

        Written blocks are entered before room is made: a segment with a block that is not in the
        index cannot be reclaimed.
        """
        state, catalog, target = self._state, self._state.catalog, job.target
        entry = state.volumes.entries[number]
        with state.lock:
            mounts, volume = entry.mounts, entry.volume
            target.appending[number] += 1
        rows, addresses = np.array(blocks, np.int64).T
        records = np.zeros(len(blocks), RECORD_DTYPE)
        records["key"] = catalog.table.words(rows)
        records["payload_bytes"] = sizes = catalog.nbytes.array[rows]
        records["image"] = addresses
        records["stamp"] = stamps_of(addresses)
        began_s = state.clock.now()
        places = volume.append(records, job.purpose)
        with state.lock:
            now_s = state.clock.now()
            # Appends to a volume that was reopened meanwhile are lost.
            has_place = (places != NO_PLACE) & (entry.mounts == mounts)
            target.appending[number] -= 1
            written = rows[has_place].tolist()
            if written:
                job.enter(written, (places[has_place] | number << VOLUME_SHIFT).tolist())
            deleted = catalog.deleted(written)
            if deleted:
                # Cover these records only: the blocks may have been put again since.
                below = dict(zip(rows.tolist(), (records["stamp"] + 1).tolist(), strict=True))
                removed = [
                    Tombstone(catalog.table.key(row), below[row], state.stamps.next())
                    for row in deleted
                ]
            else:
                self._release(job, piece, written)
        events = state.events
        events.emit(Took("write", target.name, now_s - began_s))
        if written:
            events.emit(Counted(job.counter or f"moved_{target.name}", len(written)))
        if written and job.counter == "written":
            nbytes = int(record_sizes(sizes[has_place]).sum())
            events.emit(Counted("written_bytes", nbytes))
        if deleted:
            self.record_tombstones(removed)
            with state.lock:
                self._release(job, piece, written)
        return [blocks[index] for index in np.flatnonzero(~has_place).tolist()]

    def _give_up(self, job: CopyJob, piece: CopyBatch, rows: list[int]) -> None:
        for row in rows:
            job.give_up(row)
        self._release(job, piece, rows)

    def _release(self, job: CopyJob, piece: CopyBatch, rows: list[int]) -> None:
        state = self._state
        assert state.lock.held()
        for row in rows if piece.slots else ():
            if row in piece.slots:
                state.staging.free(piece.slots.pop(row))
        job.release(rows)
        state.unlease(rows)
        state.lock.written.notify_all()


def whole_reads(
    words: Array, places: Sequence[int], payload_bytes: Array, images: Sequence[int]
) -> Array:
    """READ_DTYPE rows for whole records, verified by the checksums in their heads."""
    reads = np.zeros(len(words), READ_DTYPE)
    reads["key"], reads["place"], reads["image"] = words, places, images
    reads["payload_bytes"] = reads["stop"] = payload_bytes
    return reads


def rest(state: StoreState, tiers: Sequence[LowerTier], since_s: float) -> None:
    """Pause after background work since `since_s`, if callers have read from these tiers since."""
    busy = [lower for lower in tiers if lower.is_read_since(since_s)]
    if busy:
        share = HEAD_SHARE if any(lower.volumes.contiguous_bytes for lower in busy) else FLASH_SHARE
        state.closing.wait(backoff_s(state.clock.now() - since_s, share))
