"""The segments of a log volume: appends, seals, syncs and releases them.

Places are assigned one after the other; records are written without a lock, several batches in
parallel. Reads need no lock: every record has its segment id and checksums, so that a read that
races with the reuse of an extent fails its check.

Locks, in this order: `append_lock` (places in the log, new and released segments; held during
writes of single pages, and during the sync that makes a released segment unreadable),
`Syncer._lock` (one fsync at a time), `state_lock` (all fields; held briefly).
"""

import errno
import os
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kvdepot.core.keys import Keys
from kvdepot.core.metadata import MetaKind
from kvdepot.core.volume import NO_PLACE, SEGMENT_SHIFT, Array, Bools, Ints, Purpose
from kvdepot.format.record import PAGE, Kind, place_records, record_sizes
from kvdepot.format.segment import (
    ENTRY,
    Entries,
    SegmentHeader,
    close_segment,
    footer_bytes,
    pack_slots,
)
from kvdepot.io.files import Files, io_ops
from kvdepot.native import WRITE
from kvdepot.volumes.log.health import LogHealth
from kvdepot.volumes.log.medium import Mounted
from kvdepot.volumes.log.metadata import MetadataLog
from kvdepot.volumes.log.wear import Wear

_FOR_MOVES: Final = 2
"""Segments above those in use that a volume may have while it is shrunk: one to write moved blocks
to, and one to reclaim."""
_WRITES_END_S: Final = 60.0
_WORD: Final = 2
"""The word of a key that is random."""
_NEW_MAX: Final = 1 << 16
"""Most keys that were added since the others were sorted."""
_NO_WORDS: Final = np.zeros(0, np.uint64)


@dataclass(slots=True, eq=False)
class Segment:
    """One extent in use."""

    segment_id: int
    slot: int
    tail: int = PAGE
    sealed: bool = False
    live_bytes: int = 0
    live_count: int = 0
    entries: list[Entries] = field(default_factory=list)
    """Parts of the footer; empty once the segment is sealed."""
    count: int = 0
    writes: int = 0
    """Running writes. A full segment is sealed when they have ended."""
    extent: tuple[int, int] = (-1, 0)
    """Descriptor of the file, and the offset of the segment in it."""


@dataclass(frozen=True, slots=True)
class SegmentWrites:
    """Records that go into one segment: their indexes in the batch, and their offsets."""

    segment: Segment
    indexes: Ints
    offsets: Ints


class SegmentUsage(NamedTuple):
    """The use of the segments of a volume at one moment."""

    slots: int
    """Slots that exist, used or not."""
    spare: int
    """See `SegmentSet.spare_slots`."""
    surplus: int
    room_bytes: int
    """The largest record for which there is room without releasing a segment."""
    oldest: int
    """The lowest id of a segment that is in use or may still be on disk; 0: there is none."""
    writes: int
    """Running writes."""


@dataclass(slots=True)
class _Sorted:
    """The keys at one moment, sorted by the first search, and those added since."""

    words: Array
    is_sorted: bool = False
    new: "array[int]" = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True, slots=True)
class Search:
    """Looks keys up as they were held at one moment. Thread-safe."""

    held: _Sorted | None
    """None: any key may be held."""
    new: Array

    def may_hold(self, keys: Keys) -> Bools:
        """True for keys that may be held."""
        held = self.held
        if held is None:
            return np.ones(len(keys), bool)
        if not held.is_sorted:
            held.words = np.sort(held.words)
            held.is_sorted = True
        wanted = np.ascontiguousarray(keys[:, _WORD])
        sorted_words = held.words
        found = np.isin(wanted, self.new)
        if len(sorted_words):
            at = np.minimum(np.searchsorted(sorted_words, wanted), len(sorted_words) - 1)
            found |= sorted_words[at] == wanted
        return found


class HeldKeys:
    """The keys of the records that may lie on a volume, by slot, so that other keys need no
    tombstone. A key counts as one of its words: there may be keys too many, never too few. Not
    thread-safe.
    """

    def __init__(self, new_max: int = _NEW_MAX) -> None:
        self._new_max = new_max
        self._by_slot: dict[int, array[int]] = {}
        self.unknown: set[int] = set()
        """Slots that may have records of any key."""
        self._sorted: _Sorted | None = None
        """None until the first search."""

    def add(self, slot: int, keys: Keys) -> None:
        """Add keys whose records may be in a slot."""
        words = np.ascontiguousarray(keys[:, _WORD]).tobytes()
        self._by_slot.setdefault(slot, array("Q")).frombytes(words)
        if self._sorted is not None:
            self._sorted.new.frombytes(words)
            if len(self._sorted.new) > self._new_max:
                self._sorted = None

    def forget(self, slots: Iterable[int]) -> None:
        """Forget slots whose records are unreadable for good."""
        for slot in slots:
            self._by_slot.pop(slot, None)
            self.unknown.discard(slot)

    def search(self) -> Search:
        """Begin a search. The slow part, which sorts the keys, is in `Search.may_hold`."""
        if self.unknown:
            return Search(None, _NO_WORDS)
        if self._sorted is None:
            parts = [np.frombuffer(words, np.uint64) for words in self._by_slot.values()]
            self._sorted = _Sorted(np.concatenate([_NO_WORDS, *parts]))
        return Search(self._sorted, np.array(self._sorted.new, np.uint64))


class SegmentSet:
    """The segments of one volume."""

    def __init__(
        self,
        mounted: Mounted,
        metadata: MetadataLog,
        files: Files,
        health: LogHealth,
    ) -> None:
        self.medium = mounted.medium
        self.header = mounted.header
        self.settings = mounted.settings
        self.slots_max = mounted.slots_max
        self.metadata = metadata
        self.files = files
        self.health = health
        self.held = HeldKeys()
        """The keys of all records that can be found on the medium; guarded by `state_lock`."""
        self.by_slot: dict[int, Segment] = {}
        self.free: list[int] = []
        self.releasing: dict[int, int] = {}
        """Slots of released segments, with segment id, that may still be on disk: the page that
        makes them unreadable is not durable yet, or the kernel may still write to the slot."""
        self.active: Segment | None = None
        self.live_bytes = 0
        self.append_lock = threading.RLock()
        self.state_lock = threading.Condition(threading.RLock())
        """Notified when a write has ended, for the removal of a volume."""
        self._slots_for_moves = 0
        """Number of segments allowed while the volume is shrunk: those in use and _FOR_MOVES."""

    @property
    def record_bytes_max(self) -> int:
        return self.settings.segment_bytes - PAGE - footer_bytes(1)

    def slot_count(self) -> int:
        """Number of slots that exist, used or not."""
        return len(self.by_slot) + len(self.free) + len(self.releasing)

    def spare_slots(self) -> int:
        """Segments that can be opened without releasing one. On a full disk none can be created."""
        with self.state_lock:
            creatable = max(self.slots_max, self._slots_for_moves) - self.slot_count()
            return len(self.free) + (max(0, creatable) if self.health.growth.closed else 0)

    def surplus(self) -> int:
        """Number of segments above the limit."""
        with self.state_lock:
            return max(0, self.slot_count() - self.slots_max)

    def usage(self) -> SegmentUsage:
        """Return the present use of the segments."""
        with self.state_lock:
            used, spare = list(self.by_slot.values()), self.spare_slots()
            slots = len(used) + len(self.free) + len(self.releasing)
            kept_back, room = 1 if len(used) + spare > 2 else 0, 0
            if spare > kept_back:
                room = self.record_bytes_max
            elif spare == kept_back and self.active is not None:
                end = self.settings.segment_bytes - footer_bytes(self.active.count + 1)
                room = max(0, end - self.active.tail)
            ids = [*[segment.segment_id for segment in used], *self.releasing.values()]
            return SegmentUsage(
                slots, spare, max(0, slots - self.slots_max), room, min(ids, default=0),
                sum([segment.writes for segment in used]),
            )  # fmt: skip

    def has_room(self, segment: Segment, nbytes: int) -> bool:
        end = self.settings.segment_bytes - footer_bytes(segment.count + 1)
        return segment.tail + nbytes <= end

    def segment_for(self, nbytes: int, purpose: Purpose, full: list[Segment]) -> Segment | None:
        """A segment with room for `nbytes`, or None. Adds segments to be sealed to `full`.

        With `append_lock`.
        """
        kept_back = self._kept_back(purpose)
        if self.spare_slots() < kept_back:
            return None
        if self.active is not None and self.has_room(self.active, nbytes):
            return self.active
        slot = self._take_slot(kept_back)
        if slot is None:
            return None
        with self.state_lock:
            before, self.active = self.active, None
            if before is not None and self.begin_sealing(before):
                full.append(before)
        fd, base = self.medium.extent(slot)
        segment = Segment(self.metadata.stamps.next(), slot, extent=(fd, base))
        try:
            if slot in self.held.unknown:
                self.wipe(slot)
                segment.segment_id = self.metadata.stamps.next()
            header = SegmentHeader(
                segment.segment_id, slot, self.settings.segment_bytes, self.header.store
            )
            self.files.write(fd, base, header.pack())
        except OSError as error:
            self.health.write_failed(error)
            with self.state_lock:
                if self._is_held(slot):
                    self.releasing[slot] = segment.segment_id
                else:
                    self.free.append(slot)
            return None
        with self.state_lock:
            self.by_slot[slot] = self.active = segment
        return segment

    def begin_sealing(self, segment: Segment) -> bool:
        """True if a segment is full and its last write has ended. It is then marked as busy."""
        if segment is self.active or segment.writes or segment.sealed:
            return False
        segment.writes += 1
        return True

    def count(self, slot: int, nbytes: int, records: int) -> None:
        """Count records as in use, or with negative numbers as not in use."""
        segment = self.by_slot.get(slot)
        if segment is not None:
            segment.live_bytes += nbytes
            segment.live_count += records
            self.live_bytes += nbytes

    def release(self, slot: int) -> bool:
        """Free a segment's extent and make its records unreadable, also after a restart. False:
        there is no such segment.
        """
        with self.append_lock, self.files.descriptors.use():
            with self.state_lock:
                segment = self.by_slot.pop(slot, None)
                if segment is None:
                    return False
                if segment is self.active:
                    self.active = None
                self.live_bytes -= segment.live_bytes
                self.releasing[slot] = segment.segment_id
            self._wipe_released()
            if self._slots_for_moves:
                self.trim()
            return True

    def wipe(self, slot: int) -> None:
        """Make a segment unreadable, so that dropped records do not come back. Durable, because its
        old footer must not be taken for that of the next segment in the slot.

        The metadata records it too: damage to the next header, or an older file that is put back,
        could make the records readable again. Keys that may come back are held.
        """
        fd, base = self.medium.extent(slot)
        self.files.write(fd, base, bytes(PAGE))
        if self.settings.fsync != "never":
            self.files.sync(fd)
        try:
            self.metadata.release([slot])
        except OSError as error:
            self.health.write_failed(error)
            with self.state_lock:
                self.held.unknown.add(slot)
            return
        with self.state_lock:
            self.held.forget([slot])

    def borrow_free_segment(self) -> Segment | None:
        """Lend a free segment until `return_segment`; None if there is no spare one."""
        with self.append_lock:
            kept_back = self._kept_back(Purpose.BLOCK)
            slot = None if self.health.lost else self._take_slot(kept_back)
            if slot is None:
                return None
            borrowed = Segment(self.metadata.stamps.next(), slot, extent=self.medium.extent(slot))
            with self.state_lock:
                self.by_slot[slot] = borrowed
            return borrowed

    def return_segment(self, borrowed: Segment) -> None:
        if self.by_slot.get(borrowed.slot) is borrowed:
            self.release(borrowed.slot)

    def is_stuck(self) -> bool:
        """True if the kernel may still write to a slot that was released."""
        return any(map(self._is_held, list(self.releasing)))

    def set_slots_max(self, slots_max: int) -> None:
        """Set the number of segments; `trim` deletes surplus ones."""
        with self.append_lock, self.state_lock:
            self.slots_max = min(slots_max, self.medium.slots_max(self.settings.segment_bytes))
            self._slots_for_moves = len(self.by_slot) + _FOR_MOVES

    def trim(self) -> None:
        """Delete surplus free segments, except for those that moves may need."""
        with self.append_lock:
            self._wipe_released()
            self._slots_for_moves = min(self._slots_for_moves, len(self.by_slot) + _FOR_MOVES)
            if self._slots_for_moves <= self.slots_max or not self.slots_max:
                self._slots_for_moves = 0
            surplus = self.slot_count() - max(self.slots_max, self._slots_for_moves)
            if surplus <= 0 or not self.free or self.health.lost or not self.medium.intact():
                return
            try:
                self.remove_slots(self.free[-surplus:])
            except OSError as error:
                self.health.write_failed(error)

    def remove_slots(self, slots: list[int]) -> None:
        """Delete free slots. Raises OSError."""
        self.note_slots({*self.by_slot, *self.free, *self.releasing}.difference(slots))
        for slot in slots:
            self.medium.remove(slot)
            with self.state_lock:
                self.free.remove(slot)

    def note_slots(self, slots: set[int]) -> None:
        """Record the existing slots, so that a check finds a missing file. Call it after a file is
        created and before one is deleted: a crash leaves at most one extra file. Raises OSError.
        """
        self.metadata.put_own(MetaKind.SLOTS, pack_slots(slots))

    def _kept_back(self, purpose: Purpose) -> int:
        """Spare segments reserved for moves. A volume with two segments has none."""
        if purpose is Purpose.MOVE:
            return 0
        return 1 if len(self.by_slot) + self.spare_slots() > 2 else 0

    def _take_slot(self, kept_back: int) -> int | None:
        """A free slot, or a new one. A full disk is tried again after pauses. None while a write to
        a released slot stalls, so that writes to other slots do not stall too.
        """
        slot = None
        self._wipe_released()
        if self.is_stuck():
            return None
        if not self.health.growth.closed or (not self.free and self.spare_slots() > kept_back):
            slot = self._new_slot()
        with self.state_lock:
            if slot is None and self.free and self.spare_slots() > kept_back:
                return self.free.pop()
        return slot

    def _new_slot(self) -> int | None:
        taken = {*self.by_slot, *self.free, *self.releasing}
        limit = max(self.slots_max, self._slots_for_moves)
        if len(taken) >= limit or not self.health.growth.allows():
            return None
        if not self.medium.intact():
            self.health.lose()
            return None
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        try:
            self.medium.create(slot, self.settings.segment_bytes)
        except OSError as error:
            self.health.no_segment(error, has_others=len(taken) >= 2)
            return None
        try:
            self.note_slots({*taken, slot})
        except OSError as error:
            self.health.write_failed(error)
        self.health.growth.succeeded()
        return slot

    def _wipe_released(self) -> None:
        """Make released segments unreadable, oldest first, and free their slots. With
        `append_lock`.

        Skips segments that the kernel may still write to, and those that cannot be written.
        """
        for slot in sorted(self.releasing, key=self.releasing.__getitem__):
            if self._is_held(slot):
                continue
            try:
                self.wipe(slot)
            except OSError as error:
                self.health.write_failed(error)
                return
            with self.state_lock:
                del self.releasing[slot]
                self.free.append(slot)

    def _is_held(self, slot: int) -> bool:
        """True if a write that missed its deadline may still arrive in a slot."""
        fd, base = self.medium.extent(slot)
        return self.files.may_still_write(fd, base, base + self.settings.segment_bytes)


class Syncer:
    """Makes the segments and the metadata of one volume durable."""

    def __init__(self, segments: SegmentSet) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        """One fsync at a time; taken before `state_lock`."""
        self._unsynced: set[int] = set()
        """Slots written since their last sync."""
        self._unproven: set[int] = set()
        """Slots whose sync failed: until they are reused, `sync` returns False."""
        self._has_failed = False
        """True if the last sync failed: none is tried while the volume is down."""

    @property
    def is_proven(self) -> bool:
        return not self._unproven

    def written(self, slots: set[int]) -> None:
        """Record slots that were written to."""
        with self._segments.state_lock:
            self._unsynced |= slots

    def forget(self, slot: int) -> None:
        """Remove the slot of a released segment."""
        with self._segments.state_lock:
            self._unsynced.discard(slot)
            self._unproven.discard(slot)

    def sync(self, timeout_s: float) -> bool:
        """Make all earlier writes durable, for `timeout_s` at most. False: that failed, or a slot
        failed before.
        """
        segments, health = self._segments, self._segments.health
        if not self._lock.acquire(timeout=min(timeout_s, segments.settings.write_timeout_s)):
            return False
        try:
            if health.lost or not segments.medium.intact():
                health.lose()
                return False
            with segments.state_lock:
                slots = list(self._unsynced)
            if slots and self._has_failed and not health.breaker.closed:
                return False
            self._has_failed = True
            with segments.files.descriptors.use():
                for slot in slots:
                    self._sync_slot(slot)
                if segments.settings.writable:
                    segments.metadata.sync()
            self._has_failed = False
        except OSError as error:
            health.write_failed(error)
            return False
        else:
            return True
        finally:
            self._lock.release()

    def sync_slot(self, slot: int) -> None:
        """Make one segment durable. Raises OSError, ETIMEDOUT if another fsync takes too long."""
        if not self._lock.acquire(timeout=self._segments.settings.write_timeout_s):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        try:
            self._sync_slot(slot)
        finally:
            self._lock.release()

    def _sync_slot(self, slot: int) -> None:
        """Sync a slot. With the lock. With a page cache a failure is final: the kernel drops pages
        that it could not write, so that a second sync would succeed without them.
        """
        segments = self._segments
        with segments.state_lock:
            if slot not in self._unsynced:
                return
            self._unsynced.discard(slot)  # later writes may not be covered by this sync
            fd, _ = segments.medium.extent(slot)
        if segments.settings.fsync == "never":
            return
        try:
            segments.files.sync(fd)
        except OSError:
            with segments.state_lock:
                if slot not in segments.by_slot:
                    return  # released meanwhile
                (self._unsynced if segments.medium.direct else self._unproven).add(slot)
            raise


class Appender:
    """Appends to one volume."""

    def __init__(self, segments: SegmentSet, syncer: Syncer, wear: Wear) -> None:
        self._segments = segments
        self._syncer = syncer
        self._wear = wear
        self.may_write = segments.settings.writable

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        """See Volume.append. Blocks for `write_timeout_s`, on a stalled medium until it ends."""
        segments = self._segments
        places = np.full(len(records), NO_PLACE, np.int64)
        full: list[Segment] = []
        parts: list[SegmentWrites] = []
        with segments.files.descriptors.use():
            # If the lock is not free in time the medium stalls: write nothing more to it.
            if segments.append_lock.acquire(timeout=segments.settings.write_timeout_s):
                try:
                    parts = self._reserve(records, purpose, full)
                finally:
                    segments.append_lock.release()
            written = self._write(parts, records) if parts else np.zeros(0, bool)
            if segments.settings.fsync == "always" and written.any():
                timeout_s = segments.settings.write_timeout_s
                written &= self._syncer.sync(timeout_s) and self._syncer.is_proven
            with segments.state_lock:
                for part in parts:
                    self._commit(part, records, written, places)
                    if segments.begin_sealing(part.segment):
                        full.append(part.segment)
            for segment in full:
                self.finish(segment, sealed=True)
                with segments.state_lock:
                    segment.writes -= 1
        with segments.state_lock:
            segments.state_lock.notify_all()
        return places

    def finish(self, segment: Segment, *, sealed: bool) -> None:
        """Write a segment's footer. Without one the next start scans the segment."""
        segments, nbytes = self._segments, self._segments.settings.segment_bytes
        with segments.state_lock:
            if segments.by_slot.get(segment.slot) is not segment:
                return
            fd, base = segment.extent
            entries = b"".join(part.tobytes() for part in segment.entries)
            header = SegmentHeader(segment.segment_id, segment.slot, nbytes, segments.header.store)
            offset, footer, trailer = close_segment(header, segment.tail, entries, sealed=sealed)
        if segments.append_lock.acquire(timeout=segments.settings.write_timeout_s):
            try:
                self._wear.take(PAGE + len(footer) + len(trailer))
            finally:
                segments.append_lock.release()
        try:
            if footer:
                segments.files.write(fd, base + offset, footer)
                self._syncer.written({segment.slot})
            self._syncer.sync_slot(segment.slot)  # the trailer must only describe durable records
            segments.files.write(fd, base + nbytes - PAGE, trailer)
        except OSError as error:
            segments.health.write_failed(error)
        with segments.state_lock:
            segment.sealed = sealed
            segment.entries = []

    def _reserve(
        self, records: Array, purpose: Purpose, full: list[Segment]
    ) -> list[SegmentWrites]:
        """Assign places to records, as far as there is room. With `append_lock`."""
        segments, health = self._segments, self._segments.health
        works = health.breaker.closed and health.room.closed and not health.lost
        if not self.may_write or not (works or health.allows_writes()):
            return []
        sizes = record_sizes(records["payload_bytes"])
        left = np.flatnonzero(sizes <= segments.record_bytes_max)
        parts: list[SegmentWrites] = []
        while len(left):
            segment = segments.segment_for(int(sizes[left[0]]), purpose, full)
            if segment is None:
                break
            with segments.state_lock:
                ends = segment.tail + np.cumsum(sizes[left])
                counts = segment.count + 1 + np.arange(len(left))
                fits = ends <= segments.settings.segment_bytes - footer_bytes(counts)
                count = len(left) if fits.all() else int(fits.argmin())
                indexes, ends = left[:count], ends[:count]
                segments.held.add(segment.slot, records["key"][indexes])
                parts.append(SegmentWrites(segment, indexes, ends - sizes[indexes]))
                segment.tail = int(ends[-1])
                segment.count += count
                segment.writes += 1
            place_records(records["image"][indexes], segment.segment_id)
            left = left[count:]
        nbytes = sum(int(sizes[part.indexes].sum()) for part in parts)
        if self._wear.limited:
            self._wear.take(nbytes)
        else:
            self._wear.written_bytes += nbytes
        return parts

    def _write(self, parts: list[SegmentWrites], records: Array) -> Array:
        """Write the records that have a place. Returns True for each record that was written."""
        segments, timeout_s = self._segments, self._segments.settings.write_timeout_s
        indexes = np.concatenate([part.indexes for part in parts])
        ops = io_ops(len(indexes))
        ops["opcode"] = WRITE
        ops["address"] = records["image"][indexes]
        ops["nbytes"] = record_sizes(records["payload_bytes"][indexes])
        start = 0
        for part in parts:
            rows = ops[start : start + len(part.indexes)]
            rows["fd"], base = part.segment.extent
            rows["offset"] = base + part.offsets
            start += len(rows)
        pending = segments.files.run(ops, timeout_s)
        while pending is not None:
            segments.health.breaker.failed("writes do not finish", at_once=True)
            if pending.wait(_WRITES_END_S):
                break
        health, codes = segments.health, ops["result"]
        if codes.any() or health.breaker.troubled or not health.room.closed:
            health.judge_writes(codes)
        self._syncer.written({part.segment.slot for part in parts})
        written = np.zeros(len(records), bool)
        written[indexes] = codes == 0
        return written

    def _commit(self, part: SegmentWrites, records: Array, written: Array, places: Ints) -> None:
        """Add the written records to their segment and its footer. With `state_lock`."""
        segment, good = part.segment, written[part.indexes]
        indexes, pages = part.indexes[good], part.offsets[good] // PAGE
        payload_bytes = records["payload_bytes"][indexes]
        entries = np.zeros(len(indexes), ENTRY)
        entries["key"] = np.ascontiguousarray(records["key"][indexes]).view("V32")[:, 0]
        entries["page"], entries["kind"] = pages, Kind.BLOCK
        entries["payload_bytes"] = entries["stored_bytes"] = payload_bytes
        entries["stamp"] = records["stamp"][indexes]
        segment.entries.append(entries)
        segment.count -= len(part.indexes) - len(indexes)
        segment.writes -= 1
        nbytes = int(record_sizes(payload_bytes).sum())
        self._segments.count(segment.slot, nbytes, len(indexes))
        places[indexes] = segment.slot << SEGMENT_SHIFT | pages
