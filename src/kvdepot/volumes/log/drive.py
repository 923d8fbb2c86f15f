"""One drive of a log tier: an active segment that grows, sealed ones that do not, free slots.

Places in the log are given out one after the other (`_turn`); records are written, segments sealed
and made durable without a lock. Reads need none, because every record names its segment and carries
its checksums: a read that races with the reuse of an extent fails its check.

Locks, in this order: `_turn` (places, new and released segments; held over writes of single pages
and the sync that makes a released segment unreadable for good),
`_syncing` (one fsync at a time), `_books` (all fields; held for an instant).
"""

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.tier import DriveFacts, Purpose
from kvdepot.format.record import HEAD_BYTES, PAGE, parse_own, place, record_bytes
from kvdepot.format.segment import ENTRY, SegmentHeader, Trailer, footer_bytes, pack_entry
from kvdepot.io.breaker import Breaker
from kvdepot.io.files import Files, Ops, aligned, io_ops, io_rows
from kvdepot.io.speed import Profile, ThroughputMeter
from kvdepot.native import READ, WRITE, address_of, checksum
from kvdepot.volumes.log.medium import Medium, MountSettings, known_superblock
from kvdepot.volumes.log.metadata import MetadataLog
from kvdepot.volumes.log.recovery import Recovered, SegmentReader
from kvdepot.volumes.log.wear import Wear

_NO_CHECKS: Final = (0,) * 11
"""What a row of native.IO_DTYPE says of reads only."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_GONE: Final = "the directory or a file in it was removed"
_TRIAL_UNIT: Final = 256 << 10
_TRIAL_BYTES: Final = 4 << 20
_FOR_MOVES: Final = 2
"""Segments that a drive which was made smaller may have beside those that leases keep, for blocks
that are moved: one that is written to, and one that can be reclaimed."""


@dataclass(slots=True, eq=False)
class Segment:
    """One extent in use."""

    segment_id: int
    slot: int
    tail: int = PAGE
    sealed: bool = False
    live_bytes: int = 0
    live_count: int = 0
    entries: list[bytes] = field(default_factory=list)
    """Footer entries, as packed bytes; emptied when the segment is sealed."""
    count: int = 0
    runs: int = 0
    """Writes under way; a segment is sealed when it is full and they have ended."""
    extent: tuple[int, int] = (-1, 0)
    """Descriptor of its file, and where it begins there."""
    unentered: int = 0
    """Blocks that were given a place but are in no index yet, so that they look dead."""


def closing_pages(
    segment: Segment, segment_bytes: int, store: bytes, *, sealed: bool
) -> tuple[int, bytes, bytes]:
    """Where a segment's footer begins, the footer, and the trailer, which is its last page."""
    footer = b"".join(segment.entries)
    segment.count = len(footer) // ENTRY.itemsize
    offset = segment_bytes - footer_bytes(segment.count)
    trailer = Trailer(
        segment.segment_id, segment.slot, segment_bytes, offset,
        segment.tail, segment.count, sealed, checksum(footer), store,
    )  # fmt: skip
    return offset, footer.ljust(segment_bytes - PAGE - offset, b"\0"), trailer.pack()


@dataclass(slots=True)
class SegmentWrites:
    """Records that go into one segment: the number of each image and its offset."""

    segment: Segment
    places: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a record went."""

    slot: int
    page: int
    segment_id: int


class Drive:
    """Appends records to segments on one medium."""

    def __init__(
        self,
        medium: Medium,
        files: Files,
        settings: MountSettings,
        store: bytes,
        slots_max: int,
        stamps: StampClock,
        clock: Clock,
    ) -> None:
        self.medium = medium
        self.files = files
        self.settings = settings
        self.store = store
        self.slots_max = slots_max
        self._slots_still = 0
        """While there are too many segments, so many are allowed: those in use, and _FOR_MOVES."""
        self.breaker = Breaker(clock, settings.pauses, changed=self._log_change)
        self.gauge = ThroughputMeter(clock)
        copies = medium.metadata_copies(settings.segment_bytes, slots_max)
        self.metadata = MetadataLog(
            copies, store, fsync=settings.fsync, timeout_s=settings.write_timeout_s
        )
        daily_bytes = settings.daily_bytes if settings.writable else 0
        self.wear = Wear(medium, self.breaker, daily_bytes, settings.wall)
        self._growth = Breaker(clock, settings.pauses)
        """Open while the disk has no room for one more segment."""
        self._room_left = Breaker(clock, settings.pauses)
        """Open while the disk has no room for what is written to segments that there are."""
        self._log = RateLimitedLog("kvdepot.volumes", clock.now)
        self.segments: dict[int, Segment] = {}
        self.free: list[int] = []
        self.parting: dict[int, int] = {}
        """Slots whose segment (its id) was released and may still be on disk: the page that makes
        it unreadable is not durable yet, or the kernel may still write to it."""
        self.damage: list[str] = []
        self._stamps = stamps
        self._syncing = threading.Lock()
        self._turn = threading.RLock()
        self._books = threading.RLock()
        self._settled = threading.Condition(self._books)
        """A write has ended: a drive that is to be given back looks again."""
        self._active: Segment | None = None
        self._unsynced: set[int] = set()
        """Slots that were written to since they were last made durable."""
        self._unproven: set[int] = set()
        """Slots that could not be made durable: until they are reused, flush says so."""
        self._cannot_sync = False
        """The last sync failed: while the drive is down, none is waited for."""
        self.lost = False
        self.draining = False
        """It is to go: no block is written to it any more."""
        self.retired = False
        """It has gone, and holds nothing."""

    def put_meta(self, entries: Iterable[MetaEntry]) -> bool:
        """Record entries. False: that failed, or the drive is down, and gets them when it works."""
        if self.lost or self.retired or not self.breaker.closed:
            return False
        try:
            self.metadata.put(entries)
        except OSError as error:
            self._write_failed(error.errno or errno.EIO)
            return False
        return True

    @property
    def profile(self) -> Profile | None:
        """How fast the drive is, if that was measured and kept."""
        text = self.metadata.known.values(MetaKind.PROFILE).get(b"")
        return Profile.parse(text) if text else None

    def keep_profile(self, profile: Profile) -> bool:
        entry = MetaEntry(MetaKind.PROFILE, b"", self._stamps.next(), profile.pack())
        return self.put_meta([entry])

    def recover(self) -> list[Recovered]:
        """Open every slot and tell what is in it."""
        found = []
        for slot in self.medium.open_slots(self.settings.segment_bytes):
            recovered = self._recover_slot(slot)
            if recovered is not None:
                last = int(recovered.entries["stamp"].max()) if len(recovered.entries) else 0
                self._stamps.observe(max(recovered.segment_id, last))
            if recovered is None or not recovered.usable:
                self.free.append(slot)
                continue
            found.append(recovered)
            segment = Segment(recovered.segment_id, slot, recovered.tail, recovered.sealed)
            segment.extent = self.medium.extent(slot)
            segment.count = len(recovered.entries)
            self.segments[slot] = segment
        self.free.sort(reverse=True)
        return self._shrink(found)

    def _shrink(self, found: list[Recovered]) -> list[Recovered]:
        """Give up the oldest segments where the capacity is smaller than it was; before them those
        without a record, as a kill leaves one that was just begun.
        """
        surplus = self.slot_count() - self.slots_max
        if surplus <= 0 or not self.settings.writable:
            return found
        oldest = sorted(found, key=lambda one: (len(one.entries) > 0, one.segment_id))
        spare, self.free = self.free[:surplus], self.free[surplus:]
        dropped = oldest[: surplus - len(spare)]
        for slot in [*spare, *(recovered.slot for recovered in dropped)]:
            try:
                if self.segments.pop(slot, None) is not None:
                    self._wipe(slot)
                self.medium.remove(slot)
            except OSError as error:
                self.damage.append(f"{self.medium.label}: slot {slot}: {error.strerror}")
        return [recovered for recovered in found if recovered not in dropped]

    def resume(self, found: Sequence[Recovered]) -> None:
        """Get ready to append: go on with the newest open segment, seal every other one."""
        newest = max((r for r in found if not r.sealed), key=lambda r: r.segment_id, default=None)
        for recovered in found:
            segment = self.segments[recovered.slot]
            if recovered.sealed:
                continue
            self._unsynced.add(recovered.slot)  # what a killed process left may not be durable
            segment.entries = [recovered.entries.tobytes()]
            if recovered is newest and self._room(segment, PAGE):
                self._active = segment
            else:
                self._finish(segment, sealed=True)

    def oldest_segment(self) -> int:
        """The lowest id of a segment that is in use or may still be on disk; 0: there is none."""
        with self._books:
            ids = [segment.segment_id for segment in self.segments.values()]
            return min([*ids, *self.parting.values()], default=0)

    def keep_opened(self, opened: int) -> None:
        """Write down with which stamp this time of writing begins, before any is given out."""
        try:
            known = known_superblock(self.medium)
            if known is not None:
                self.medium.write_superblock(replace(known, opened=opened))
        except OSError as error:
            self.breaker.failed(str(error.strerror), at_once=True)

    def _recover_slot(self, slot: int) -> Recovered | None:
        fd, base = self.medium.extent(slot)
        settings = self.settings
        floor = self.metadata.known.floor
        reader = SegmentReader(
            self.files, fd, base, settings.segment_bytes, slot, self.store, floor
        )
        try:
            found = reader.recover()
        except OSError as error:
            self.damage.append(f"{self.medium.label}: slot {slot}: {error.strerror}")
            self.breaker.failed(str(error.strerror))
            return None
        if found is not None:
            self.damage += [f"{self.medium.label}: slot {slot}: {text}" for text in found.damage]
        return found

    def append(
        self,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[Appended | None]:
        """Write record images to the log. None where there was no room or the write failed.

        Every image must be page-aligned and in whole pages. Blocks for `write_timeout_s`, on a
        stalled medium until it lets go of the images.

        Several threads may append: places are given out one after the other, writes overlap.
        """
        with self.files.descriptors.use():
            return self._append(images, purpose)

    def _append(self, images: Sequence[memoryview], purpose: Purpose) -> list[Appended | None]:
        full: list[Segment] = []
        runs: list[SegmentWrites] = []
        if self._turn.acquire(timeout=self.settings.write_timeout_s):  # else the medium stalls
            try:
                runs = self._reserve(images, purpose, full)
            finally:
                self._turn.release()
        written = self._write(runs, images) if runs else {}
        if self.settings.fsync == "always" and written:
            written = written if self._sync_all() and not self._unproven else {}
        results: list[Appended | None] = [None] * len(images)
        with self._books:
            for run in runs:
                self._settle(run, images, written, results)
                if self._to_be_sealed(run.segment):
                    full.append(run.segment)
        for segment in full:
            self._finish(segment, sealed=True)
            with self._books:
                segment.runs -= 1
        with self._settled:
            self._settled.notify_all()
        return results

    def _reserve(
        self,
        images: Sequence[memoryview],
        purpose: Purpose,
        full: list[Segment],
    ) -> list[SegmentWrites]:
        """Give images their places, as far as there is room; `full` gets what is to be sealed."""
        closed = self.lost or self.retired or self.draining
        if closed or not (self.breaker.closed or self.breaker.allows()):
            return []
        if not (self._room_left.closed or self._room_left.allows()):
            return []
        if not self.medium.intact():
            self.lose()
            return []
        runs: list[SegmentWrites] = []
        segment: Segment | None = None
        most_bytes = self.record_bytes_max
        for index, image in enumerate(images):
            if len(image) > most_bytes:
                continue
            if segment is None or not self._room(segment, len(image)):
                segment = self._segment_for(len(image), purpose, full)
            if segment is None:
                break
            place(image, segment.segment_id)
            with self._books:
                if not runs or runs[-1].segment is not segment:
                    runs.append(SegmentWrites(segment))
                    segment.runs += 1
                runs[-1].places.append((index, segment.tail))
                segment.tail += len(image)
                segment.count += 1
                segment.unentered += 1
        self._spend(sum(len(images[index]) for run in runs for index, _ in run.places))
        return runs

    def _spend(self, nbytes: int) -> None:
        """Bytes are about to be written."""
        if self.wear.limited:
            self.wear.spend(nbytes)
        else:
            self.wear.written_bytes += nbytes

    def _write(self, runs: list[SegmentWrites], images: Sequence[memoryview]) -> dict[int, bool]:
        """Write what was given a place; for each image whether it is on disk. No lock held."""
        indices = [index for run in runs for index, _ in run.places]
        rows = []
        for run in runs:
            fd, base = run.segment.extent
            rows += [
                (0, fd, WRITE, base + offset, *address_of(images[index]), *_NO_CHECKS)
                for index, offset in run.places
            ]
        ops = io_rows(rows)
        pending = self.files.run(ops, self.settings.write_timeout_s)
        if pending is not None:
            self.breaker.failed("writes do not finish", at_once=True)
            while not pending.wait(60.0):
                self.breaker.failed("writes do not finish", at_once=True)
        codes: list[int] = ops["result"].tolist()
        self._judge(codes)
        with self._books:
            self._unsynced.update(run.segment.slot for run in runs)
        return {index: code == 0 for index, code in zip(indices, codes, strict=True)}

    def _settle(
        self,
        run: SegmentWrites,
        images: Sequence[memoryview],
        written: dict[int, bool],
        results: list[Appended | None],
    ) -> None:
        """Enter what was written into its segment, for the footer. Books held."""
        segment = run.segment
        for index, offset in run.places:
            if not written.get(index):
                segment.count -= 1
                segment.unentered -= 1
                continue
            kind, key, stamp, payload_bytes = parse_own(images[index])
            segment.entries.append(pack_entry(key, offset // PAGE, kind, payload_bytes, stamp))
            results[index] = Appended(segment.slot, offset // PAGE, segment.segment_id)
        segment.runs -= 1

    def _to_be_sealed(self, segment: Segment) -> bool:
        """Whether a segment is full and its last write has ended; it counts as busy then."""
        if segment is self._active or segment.runs or segment.sealed:
            return False
        segment.runs += 1
        return True

    def _judge(self, codes: Sequence[int]) -> None:
        bad = [-code for code in codes if code < 0]
        if not bad:
            if self.breaker.troubled and not self.lost:  # else by a file that is deleted
                self.breaker.succeeded(by_writing=True)
            self._room_left.succeeded()
            return
        for code in bad:
            self._write_failed(code, at_once=code in (errno.ETIMEDOUT, errno.EROFS))

    def _write_failed(self, code: int, *, at_once: bool = True) -> None:
        """A disk without room is left alone by writes only."""
        if code not in _FULL:
            self.breaker.failed(os.strerror(code), at_once=at_once)
            return
        if self._room_left.closed:
            self._log.warning("%s: writes find no room: %s", self.medium.label, os.strerror(code))
        self._room_left.failed(os.strerror(code), at_once=True)

    def _room(self, segment: Segment, nbytes: int) -> bool:
        """Whether a segment has room for `nbytes` more."""
        end = self.settings.segment_bytes - footer_bytes(segment.count + 1)
        return segment.tail + nbytes <= end

    def _segment_for(self, nbytes: int, purpose: Purpose, full: list[Segment]) -> Segment | None:
        """A segment with room for `nbytes` more, or None; `full` gets what is to be sealed."""
        spare, kept_back = self.spare_slots(), self._kept_back if purpose is Purpose.BLOCK else 0
        if spare < kept_back:
            return None
        if self._active is not None and self._room(self._active, nbytes):
            return self._active
        slot = self._take_slot(kept_back)
        if slot is None:
            return None
        with self._books:
            before, self._active = self._active, None
            if before is not None and self._to_be_sealed(before):
                full.append(before)
        segment = Segment(self._stamps.next(), slot)
        segment.extent = self.medium.extent(slot)
        header = SegmentHeader(segment.segment_id, slot, self.settings.segment_bytes, self.store)
        try:
            fd, base = segment.extent
            self.files.write(fd, base, header.pack())
        except OSError as error:
            self._write_failed(error.errno or errno.EIO)
            with self._books:
                if self._is_held(slot):
                    self.parting[slot] = segment.segment_id
                else:
                    self.free.append(slot)
            return None
        with self._books:
            self.segments[slot] = segment
            self._active = segment
        return segment

    def _take_slot(self, kept_back: int) -> int | None:
        """A free slot, or a new one. A disk that was full is asked again now and then; one that
        has not ended a write to a free slot gets no further slot to stall on.
        """
        slot = None
        self._part_all()
        if any(map(self._is_held, self.parting)):
            return None
        if not self._growth.closed or (not self.free and self.spare_slots() > kept_back):
            slot = self._new_slot()
        with self._books:
            if slot is None and self.free and self.spare_slots() > kept_back:
                return self.free.pop()
        return slot

    @property
    def _kept_back(self) -> int:
        """Spare segments that blocks may not take. A drive of two has none to keep back."""
        return 1 if len(self.segments) + self.spare_slots() > 2 else 0

    def _new_slot(self) -> int | None:
        taken = {*self.segments, *self.free, *self.parting}
        if len(taken) >= max(self.slots_max, self._slots_still) or not self._growth.allows():
            return None
        slot = next(n for n in range(len(taken) + 1) if n not in taken)
        try:
            self.medium.create(slot, self.settings.segment_bytes)
        except OSError as error:
            if self._growth.closed:
                self._log.warning("%s: no further segment: %s", self.medium.label, error.strerror)
            if error.errno not in _FULL or len(taken) < 2:
                self._write_failed(error.errno or errno.EIO)
            if error.errno in _FULL:  # else segments would be reclaimed although there is room
                self._growth.failed(str(error.strerror), at_once=True)
            return None
        self._growth.succeeded()
        return slot

    @property
    def record_bytes_max(self) -> int:
        return self.settings.segment_bytes - PAGE - footer_bytes(1)

    @property
    def is_emulated(self) -> bool:
        return self.files.is_emulated(self.medium.label)

    def facts(self) -> DriveFacts:
        up, profile = self.breaker.closed, self.gauge.profile
        usable = up and not (self.lost or self.draining)
        full = not self._room_left.closed
        asked_lately = full and self._room_left.health().retry_in_s > 0
        return DriveFacts(
            label=self.medium.label,
            up=up,
            takes_blocks=usable
            and not asked_lately
            and not (self.wear.limited and self.wear.spent),
            full=full,
            lost=self.lost,
            draining=self.draining,
            retired=self.retired,
            retry_in_s=0.0 if up else self.breaker.health().retry_in_s,
            segment_bytes=self.settings.segment_bytes,
            segments_max=self.slots_max,
            spare_segments=self.spare_slots(),
            record_bytes_max=self.record_bytes_max,
            read_bytes_per_s=profile.read_bytes_per_s if profile and profile.direct_io else 0.0,
            queued_bytes=self.gauge.queued_bytes,
        )

    def describe(self) -> dict[str, Any]:
        """In plain values, for `stats`."""
        health, gauge = self.breaker.health(), self.gauge
        segment_bytes = self.settings.segment_bytes
        with self._books:
            used, segments, free = self.live_bytes(), len(self.segments), len(self.free)
        return {
            "path": self.medium.label,
            "healthy": health.ok,
            "reason": health.reason,
            "errors": health.errors,
            "full": not self._room_left.closed,
            "draining": self.draining,
            "drained": self.retired,
            "used_bytes": used,
            "capacity_bytes": self.slots_max * segment_bytes,
            "retry_in_s": round(health.retry_in_s, 3),
            "segments": segments,
            "free_segments": free,
            "segment_bytes": segment_bytes,
            "direct_io": self.medium.direct,
            "emulated": self.is_emulated,
            "read_bytes_per_s": round(gauge.bytes_per_s),
            "profile": asdict(gauge.profile) if gauge.profile else None,
            "of_profile": gauge.of_profile,
            "damage": list(self.damage),
            "written": self.wear.describe(),
        }

    def has_room(self, nbytes: int) -> bool:
        """Whether a block would find room without reclaiming a segment."""
        with self._books:
            active, spare = self._active, self.spare_slots()
            fits = active is not None and self._room(active, nbytes)
            return spare > self._kept_back or (spare == self._kept_back and fits)

    def spare_slots(self) -> int:
        """Segments that can be opened without reclaiming one; a full disk has only free ones."""
        with self._books:
            creatable = max(self.slots_max, self._slots_still) - self.slot_count()
            return len(self.free) + (max(0, creatable) if self._growth.closed else 0)

    def sealed(self) -> list[Segment]:
        """Sealed segments whose blocks have all been counted, oldest first."""
        with self._books:
            found = [s for s in self.segments.values() if s.sealed and not s.unentered]
        return sorted(found, key=lambda segment: segment.segment_id)

    def is_busy(self) -> bool:
        """Whether blocks were given a place, and are not written or not counted yet."""
        with self._books:
            return any(segment.runs or segment.unentered for segment in self.segments.values())

    def slot_count(self) -> int:
        """Slots that exist, used or not."""
        return len(self.segments) + len(self.free) + len(self.parting)

    def release(self, slot: int) -> bool:
        """A segment's extent is free for reuse; what it held is gone, also after a restart.

        What was written elsewhere in its place is made durable before. False: it could not be,
        and nothing has changed.
        """
        if not self._sync_all():
            return False
        self._free(slot)
        return True

    def _free(self, slot: int) -> None:
        with self._turn, self.files.descriptors.use():
            with self._books:
                segment = self.segments.pop(slot, None)
                if segment is None:
                    return  # the drive was given back meanwhile
                if segment is self._active:
                    self._active = None
                self._unsynced.discard(slot)
                self._unproven.discard(slot)
                self.parting[slot] = segment.segment_id
            self._part_all()
            if self._slots_still:
                self.trim()

    def _part_all(self) -> None:
        """Make released segments unreadable for good, oldest first; then their slots are free.

        `_turn` held. One that the kernel may still write to, or that cannot be written, waits.
        """
        for slot in sorted(self.parting, key=self.parting.__getitem__):
            if self._is_held(slot):
                continue
            try:
                self._wipe(slot)
            except OSError as error:
                self._write_failed(error.errno or errno.EIO)
                return
            with self._books:
                del self.parting[slot]
                self.free.append(slot)

    def _is_held(self, slot: int) -> bool:
        """Whether the kernel may still write to a slot what has missed its deadline."""
        fd, base = self.medium.extent(slot)
        return self.files.may_still_write(fd, base, base + self.settings.segment_bytes)

    def lend(self) -> Segment | None:
        """A free segment for the caller alone until `take_back`; None: there is none to spare."""
        with self._turn:
            slot = None if self.lost or self.draining else self._take_slot(self._kept_back)
            if slot is None:
                return None
            lent = Segment(self._stamps.next(), slot)
            lent.extent = self.medium.extent(slot)
            with self._books:
                self.segments[slot] = lent
            return lent

    def take_back(self, lent: Segment, written_bytes: int = 0) -> None:
        """The segment is free again, after so much was written to it."""
        with self._turn:
            self._spend(written_bytes)
            if self.segments.get(lent.slot) is lent:
                self._free(lent.slot)

    def try_to_write(self) -> bool:
        """Clear a free segment. False: that failed, or an earlier try has not ended. A drive
        without a free one is not asked.
        """
        errors = self.breaker.errors
        lent = self.lend()
        if lent is not None:
            self.take_back(lent)
        return self.breaker.errors == errors and not any(map(self._is_held, list(self.parting)))

    def try_for_room(self) -> None:
        """Ask a disk that had no room now and then. Nothing is reclaimed before it has some."""
        if self._room_left.closed or not self._room_left.allows():
            return
        try:
            known = known_superblock(self.medium)
            if known is not None:
                self.medium.write_superblock(known)
        except OSError as error:
            self._write_failed(error.errno or errno.EIO)
        else:
            self._room_left.succeeded()

    def trial_reads(self) -> "tuple[Segment, list[int], Ops, memoryview] | None":
        """Reads from the fullest segment: it, offsets in it, operations, the memory they fill.

        None: nothing is there to be read. What is read does not matter.
        """
        segment = max(list(self.segments.values()), key=lambda one: one.tail, default=None)
        if segment is None or segment.tail <= PAGE:
            return None
        fd, base = segment.extent
        whole = min(_TRIAL_BYTES, segment.tail - PAGE)
        starts = np.arange(PAGE, PAGE + whole, _TRIAL_UNIT)
        memory = aligned(whole)
        ops = io_ops(len(starts))
        ops["fd"], ops["opcode"] = fd, READ
        ops["offset"] = base + starts
        ops["address"] = address_of(memory)[0] + starts - PAGE
        ops["nbytes"] = np.minimum(_TRIAL_UNIT, PAGE + whole - starts)
        return segment, starts.tolist(), ops, memory

    def try_superblock(self) -> None:
        try:
            self.medium.read_superblock()
        except OSError as error:
            self.breaker.failed(str(error.strerror), at_once=True)
        else:
            self.breaker.succeeded()

    def count(self, slot: int, nbytes: int, records: int = 1) -> None:
        """Records of a segment came into use, or with negative counts went out of it."""
        with self._books:
            segment = self.segments.get(slot)
            if segment is not None:
                segment.live_bytes += nbytes
                segment.live_count += records
                segment.unentered -= max(0, records)

    def _wipe(self, slot: int) -> None:
        """Make a segment unreadable, so that what was dropped does not come back. Durable before
        the slot is used again: else its old footer could speak of what is written there next.
        """
        fd, base = self.medium.extent(slot)
        self.files.write(fd, base, bytes(PAGE))
        if self.settings.fsync != "never":
            self.files.sync(fd)

    def sync(self, timeout_s: float | None = None) -> bool:
        """Make what was appended durable. False: it could not be, or not in time; or what was
        durable is not any more, because files were taken away.
        """
        if not self._sync_all(timeout_s):
            return False
        with self.files.descriptors.use():
            if not self.retired and not self.medium.complete():
                self.lose()
                return False
        return not self._unproven

    def _sync_all(self, timeout_s: float | None = None) -> bool:
        """As `sync`, but for slots that were given up before, and files that are gone."""
        limit_s = self.settings.write_timeout_s
        limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        if not self._syncing.acquire(timeout=limit_s):
            return self.retired
        try:
            if self.retired:
                return True
            if self.lost or not self.medium.intact():
                self.lose()
                return False
            with self._books:
                slots = list(self._unsynced)
            if slots and self._cannot_sync and not self.breaker.closed:
                return False
            self._cannot_sync = True
            with self.files.descriptors.use():
                for slot in slots:
                    self._sync_slot(slot)
                if self.settings.writable:
                    self.metadata.sync()
            self._cannot_sync = False
        except OSError as error:
            self._write_failed(error.errno or errno.EIO)
            return False
        else:
            return True
        finally:
            self._syncing.release()

    def _sync_in_time(self, slot: int) -> None:
        """`_sync_slot`, as soon as no other fsync is under way; OSError if that takes too long."""
        if not self._syncing.acquire(timeout=self.settings.write_timeout_s):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        try:
            self._sync_slot(slot)
        finally:
            self._syncing.release()

    def _sync_slot(self, slot: int) -> None:
        """Make a slot durable. `_syncing` held. Behind a page cache a failure is final.

        The kernel then forgets what it could not write, and a second sync would tell a lie.
        """
        with self._books:
            if slot not in self._unsynced:
                return
            self._unsynced.discard(slot)  # what is written from now on may not be covered
            fd, _ = self.medium.extent(slot)
        if self.settings.fsync == "never":
            return
        try:
            self.files.sync(fd)
        except OSError:
            with self._books:
                if slot not in self.segments:
                    return  # released meanwhile
                (self._unsynced if self.medium.direct else self._unproven).add(slot)
            raise

    def resize(self, slots_max: int) -> None:
        """Have room for so many segments; those that are too many go one by one (`trim`)."""
        with self._turn, self._books:
            self.slots_max = min(slots_max, self.medium.slots_max(self.settings.segment_bytes))
            self._slots_still = len(self.segments) + _FOR_MOVES

    def trim(self) -> bool:
        """Give free segments that are too many back, but for those that moves may need until
        there are not. False: there are still too many.
        """
        with self._turn:
            self._part_all()
            self._slots_still = min(self._slots_still, len(self.segments) + _FOR_MOVES)
            if self._slots_still <= self.slots_max or self.retired:
                self._slots_still = 0
            while self.slot_count() > max(self.slots_max, self._slots_still):
                if not self.free:
                    return False
                try:
                    self.medium.remove(self.free[-1])
                except OSError as error:
                    self._write_failed(error.errno or errno.EIO)
                    return False
                with self._books:
                    self.free.pop()
            return self.slot_count() <= self.slots_max

    def start_drain(self) -> None:
        """Give blocks no more places. Those that have one are busy (`is_busy`)."""
        with self._turn:
            self.draining = True

    def end_drain(self) -> None:
        """Give blocks places again."""
        with self._turn:
            self.draining = self.retired

    def retire(self) -> None:
        """Give everything back and close the files: the drive can be unmounted.

        Writes under way have their files until they end, or until the time is over.
        """
        with self._turn:
            self.draining = self.retired = True
        with self._settled:
            self._settled.wait_for(
                lambda: not any(segment.runs for segment in self.segments.values()),
                self.settings.write_timeout_s,
            )
        with self._turn:
            for slot in sorted(self.segments, key=lambda at: self.segments[at].segment_id):
                self._free(slot)
            self.resize(0)
            self.trim()
            try:
                if not self.lost:
                    self.metadata.clear()
            except OSError as error:
                self._log.warning("%s: metadata: %s", self.medium.label, error.strerror)
            self.metadata.close()
            self.medium.detach()

    def abandon(self) -> None:
        """Close the files of a drive that was lost: it is about to be mounted anew."""
        with self._books:
            self.segments.clear()
            self.parting.clear()
            self._unsynced.clear()
            self._active = None
        self.metadata.close()
        self.medium.detach()

    def close_files(self) -> None:
        """Close a drive that cannot be used, as it is."""
        self.metadata.close()
        self.medium.close()

    def held_bytes(self) -> int:
        with self._books:
            return self.slot_count() * self.settings.segment_bytes

    def live_bytes(self) -> int:
        with self._books:
            return sum(segment.live_bytes for segment in self.segments.values())

    def close(self) -> None:
        """Write the open segment's footer, so that the next start need not scan it."""
        with self._turn:
            with self._books:
                active, self._active = self._active, None
            if active is not None and not self.lost and self.breaker.closed:
                self._finish(active, sealed=False)
            if not self.retired:
                self.wear.keep()
            self.metadata.close()
            self.medium.close()

    def _finish(self, segment: Segment, *, sealed: bool) -> None:
        """Write a segment's footer. Without it the next start scans the segment, no more."""
        nbytes = self.settings.segment_bytes
        with self._books:
            if self.segments.get(segment.slot) is not segment:
                return
            fd, base = segment.extent
            offset, footer, trailer = closing_pages(segment, nbytes, self.store, sealed=sealed)
        if self._turn.acquire(timeout=self.settings.write_timeout_s):  # else the medium stalls
            try:
                self._spend(PAGE + len(footer) + len(trailer))
            finally:
                self._turn.release()
        try:
            if footer:
                self.files.write(fd, base + offset, footer)
                with self._books:
                    self._unsynced.add(segment.slot)
            self._sync_in_time(segment.slot)  # the trailer speaks of what is there
            self.files.write(fd, base + nbytes - PAGE, trailer)
        except OSError as error:
            self._write_failed(error.errno or errno.EIO)
        with self._books:
            segment.sealed = sealed
            segment.entries = []

    def lose(self) -> None:
        """Its directory was taken away: it is used no more before it is opened anew."""
        if not self.lost:
            self.lost = True
            self.breaker.failed(_GONE, at_once=True)

    def _log_change(self, reason: str) -> None:
        if reason:
            self._log.warning("%s: the drive is down: %s", self.medium.label, reason)
        else:
            self._log.info("%s: the drive works again", self.medium.label)


assert HEAD_BYTES == PAGE and record_bytes(0) == PAGE
