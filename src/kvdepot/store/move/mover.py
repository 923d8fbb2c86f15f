"""The one way in which blocks are copied to a drive of a lower tier.

Claim, read, append, enter, record removals that came meanwhile, release. Write-back, demotion,
draining and reclaiming only choose what goes where (`CopyJob`).

A record keeps its stamp. A removed block that is still leased can be moved: the tombstone covers
its new record too, and is recorded again, because it is dropped with the segments of its time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import Tombstone
from kvdepot.core.tier import MetaWritten, Purpose
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import parse_own, record_bytes, set_stamp
from kvdepot.native import COPY, address_of
from kvdepot.store.state.background_throttle import FLASH_SHARE, HEAD_SHARE, ChunkSizer, backoff_s
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import TEMPORARY, StoreState

PIECE_BYTES: Final = 4 << 20
"""Copied in one go at most: a read that comes meanwhile should not notice."""
_TRIES_MAX: Final = 8
"""Other threads may take the room that one has made."""
_STAGING_S: Final = 1.0
"""How long to wait for memory to read into."""
_TOMBSTONE_PAUSE_S: Final = 0.01
_TOMBSTONE_WAIT_S: Final = 1.0
_log = RateLimitedLog("kvdepot.store")

MakeRoom = Callable[[LowerTier, int, int], bool]
"""Tier, drive and bytes: do what lets a refused append succeed. False: nothing helps."""


class CopyJob(ABC):
    """What is copied, and where to. Methods are called with the store's lock held."""

    purpose = Purpose.BLOCK
    in_place = False
    """Append the image in memory itself; else a copy of it in staging."""
    renews = False
    """The copies get a new stamp: they count as put again."""
    from_memory = True
    """A copy in memory will do; else the record is read from where it lies, and verified."""

    def __init__(self, target: LowerTier) -> None:
        self.target = target

    def is_wanted(self, row: int) -> bool:
        """Whether a row should still be copied."""
        return True

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        """Where to read a row that is not in memory; None: it cannot be read."""
        return None

    def claim(self, row: int) -> None:
        """A row is about to be copied."""
        self.target.begin_moving([row])

    @abstractmethod
    def enter(self, row: int, location: int) -> None:
        """A row was written."""

    def give_up(self, row: int) -> None:
        """A row could not be read or written."""
        return None

    def release(self, rows: list[int]) -> None:
        """The rows are no longer being copied."""
        self.target.end_moving(rows)


@dataclass(slots=True)
class CopyBatch:
    """Blocks that are copied in one go, all of them leased."""

    rows: list[int] = field(default_factory=list)
    images: list[memoryview] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    """Slots of staging by row."""
    sources: dict[int, tuple[LowerTier, int] | None] = field(default_factory=dict)
    """Where the rows must be read from that are not in memory."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.images))


class BlockMover:
    """Copies blocks to drives. Threads may share it."""

    def __init__(self, state: StoreState, make_room: MakeRoom) -> None:
        self._state = state
        self._make_room = make_room
        self.tombstone_wait_s = _TOMBSTONE_WAIT_S
        """How long a removal waits for a drive, if none has recorded it."""

    def copy_all(
        self,
        job: CopyJob,
        rows: list[int],
        drives: Callable[[], Sequence[int]],
        *,
        size: ChunkSizer,
        rests: Sequence[LowerTier] = (),
    ) -> list[int]:
        """Copy rows piece by piece to the first of the drives that takes each.

        Returns the rows that were not tried: no drive took anything of the piece before them,
        memory is short, or the store closes. `rests`: after each piece, leave these tiers to
        foreground reads for a while.
        """
        state = self._state
        left = rows
        while left and not state.closing.is_set():
            started_s = state.clock.now()
            with state.lock:
                piece, left = self.claim(job, left, size.nbytes)
                while left and not piece.rows and not state.closing.is_set():
                    # Staging is full, perhaps of blocks that wait for the room this thread makes.
                    left_s = started_s + _STAGING_S - state.clock.now()
                    if left_s <= 0 or not state.room.wait(left_s):
                        return left
                    piece, left = self.claim(job, left, size.nbytes)
            if not piece.rows:
                return left
            if not self.copy(job, piece, drives(), self._make_room):
                return left
            size.learn(piece.nbytes, state.clock.now() - started_s)
            rest(state, rests, started_s)
        return left

    def claim(self, job: CopyJob, rows: list[int], limit_bytes: int) -> tuple[CopyBatch, list[int]]:
        """Lease as many wanted rows as fit, with an image for each. Returns also what is left."""
        state, catalog = self._state, self._state.catalog
        assert state.held()
        budget, in_staging = limit_bytes, max(1, state.staging.capacity_bytes // 4)
        piece = CopyBatch()
        left: list[int] = []
        for index, row in enumerate(rows):
            if not job.is_wanted(row):
                continue
            nbytes = record_bytes(catalog.nbytes[row])
            if piece.rows and (nbytes > budget or in_staging <= 0):
                left = rows[index:]
                break
            image = self._image(job, piece, row, nbytes)
            if image is None:
                left = rows[index:]
                break
            piece.rows.append(row)
            piece.images.append(image)
            budget -= nbytes
            in_staging -= nbytes if row in piece.slots else 0
            job.claim(row)
        catalog.lease(piece.rows)
        return piece, left

    def copy(
        self, job: CopyJob, piece: CopyBatch, drives: Sequence[int], make_room: MakeRoom | None
    ) -> bool:
        """Read a claimed piece and append it to the first of the drives that takes it.

        Afterwards every row is entered or given up, and released. False: there was something to
        write, and no drive took any of it.
        """
        left = readable = self._read(job, piece)
        for drive in drives:
            if not left:
                break
            left = self._append(job, piece, left, drive)
            for _ in range(_TRIES_MAX):
                if not left or make_room is None:
                    break
                if not make_room(job.target, drive, max(len(image) for _, image in left)):
                    break
                left = self._append(job, piece, left, drive)
        with self._state.lock:
            self._give_up(job, piece, [row for row, _ in left])
        return len(left) < len(readable) or not readable

    def record_tombstones(self, target: LowerTier, tombstones: Sequence[Tombstone]) -> None:
        """Record tombstones on every drive of a tier: older copies may lie on any. One drive is
        enough; if there is none, waits for the first, `tombstone_wait_s` at most.
        """
        state, tier = self._state, target.tier
        entries = [one.entry for one in tombstones]
        deadline_s = state.clock.now() + self.tombstone_wait_s
        written = tier.put_meta(entries) if entries else MetaWritten(0, 0)
        while written.should and not written.have and state.clock.now() < deadline_s:
            if state.closing.wait(_TOMBSTONE_PAUSE_S):
                break
            written = tier.put_meta(entries)
        if written.should and not written.have:
            with state.lock:
                state.counters.removal_unrecorded += 1
            _log.warning("%s: %d removals could not be recorded", target.name, len(tombstones))

    def _image(self, job: CopyJob, piece: CopyBatch, row: int, nbytes: int) -> memoryview | None:
        """Where the record of a row is, or goes: in memory if it can be appended from there, else
        in staging. None: there is no room in staging.
        """
        state, memory = self._state, self._state.catalog.memory
        in_memory = job.from_memory and memory.ready(row)
        if in_memory and job.in_place and not self.is_appended_elsewhere(row, job.target):
            return state.arena.image(memory.location[row], nbytes)
        slot = state.staging.allocate(nbytes, TEMPORARY)
        if slot is None:
            return None
        piece.slots[row] = slot
        if not in_memory:
            piece.sources[row] = job.source(row)
        return state.staging.image(slot, nbytes)

    def is_appended_elsewhere(self, row: int, target: LowerTier) -> bool:
        """Whether another tier appends the record in memory now, and so writes to its head."""
        others = [lower.copies for lower in self._state.lower_tiers if lower is not target]
        return any(not copies.absent(row) and not copies.ready(row) for copies in others)

    def _read(self, job: CopyJob, piece: CopyBatch) -> list[tuple[int, memoryview]]:
        """Bring the records into their images. Returns the intact ones; the others are given up."""
        state, catalog = self._state, self._state.catalog
        images = dict(zip(piece.rows, piece.images, strict=True))
        copied = [row for row in piece.slots if row not in piece.sources]
        if copied:
            base, location = state.arena.address, catalog.memory.location
            transfers(
                [(0, base + location[row], *address_of(images[row]), 0, 0, COPY) for row in copied]
            )
        if not piece.sources:
            return list(images.items())
        intact = set(piece.rows) - piece.sources.keys()
        by_tier: dict[LowerTier, dict[int, int]] = {}
        for row, source in piece.sources.items():
            if source is not None:
                by_tier.setdefault(source[0], {})[row] = source[1]
        for lower, places in by_tier.items():
            keys = [catalog.table.key(row) for row in places]
            good = lower.tier.read_records(
                keys, list(places.values()), [images[row] for row in places]
            )
            intact.update(row for row, fine in zip(places, good, strict=True) if fine)
        lost = [row for row in piece.rows if row not in intact]
        if lost:
            with state.lock:
                self._give_up(job, piece, lost)
        return [(row, image) for row, image in images.items() if row in intact]

    def _append(
        self,
        job: CopyJob,
        piece: CopyBatch,
        blocks: list[tuple[int, memoryview]],
        drive: int,
    ) -> list[tuple[int, memoryview]]:
        """Append to one drive; enter and release what was written. Returns what was not.

        What was written is entered before room is looked for: a segment that holds a block which
        is in no index cannot be reclaimed.
        """
        state, catalog, target = self._state, self._state.catalog, job.target
        with state.lock:
            mounts = target.mounts[drive]
        if job.renews:
            stamp = state.stamps.next()
            for _, image in blocks:
                set_stamp(image, stamp)
        began_s = state.clock.now()
        locations = target.tier.append(drive, [image for _, image in blocks], job.purpose)
        removed: list[Tombstone] = []
        written: list[int] = []
        left: list[tuple[int, memoryview]] = []
        with state.lock:
            state.traffic.took("write", state.clock.now() - began_s, target.name)
            # What was appended to a drive that was mounted anew meanwhile is gone.
            remounted = target.mounts[drive] != mounts
            for block, location in zip(blocks, locations, strict=True):
                if location is None or remounted:
                    left.append(block)
                    continue
                row = block[0]
                job.enter(row, location)
                written.append(row)
                if catalog.is_deleted(row):
                    # Up to this record only: the block may have been put again since.
                    below = parse_own(block[1])[2] + 1
                    removed.append(Tombstone(catalog.table.key(row), below, state.stamps.next()))
            if not removed:
                self._release(job, piece, written)
        if removed:
            self.record_tombstones(target, removed)
            with state.lock:
                self._release(job, piece, written)
        return left

    def _give_up(self, job: CopyJob, piece: CopyBatch, rows: list[int]) -> None:
        for row in rows:
            job.give_up(row)
        self._release(job, piece, rows)

    def _release(self, job: CopyJob, piece: CopyBatch, rows: list[int]) -> None:
        state = self._state
        assert state.held()
        for row in rows:
            slot = piece.slots.pop(row, None)
            if slot is not None:
                state.staging.free(slot)
        job.release(rows)
        state.unlease(rows)
        state.written.notify_all()


def rest(state: StoreState, tiers: Sequence[LowerTier], since_s: float) -> None:
    """Leave tiers that were worked on since then to foreground reads, if there are any."""
    busy = [lower for lower in tiers if lower.foreground.busy_since(since_s)]
    if busy:
        share = HEAD_SHARE if any(lower.contiguous_bytes for lower in busy) else FLASH_SHARE
        state.closing.wait(backoff_s(state.clock.now() - since_s, share))
