"""Blocks in append-only segments on one or many drives.

A location is (drive, slot, page) in one integer. Which segment makes room is decided above
(store/move/reclaim.py); this file appends, reads and verifies.
"""

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind, floor_entry, merged
from kvdepot.core.tier import (
    DRIVES_MAX,
    NO_CONTENTS,
    SEGMENT_SHIFT,
    Contents,
    DriveFacts,
    Health,
    Load,
    Loaded,
    MetaWritten,
    Outcome,
    Pending,
    Purpose,
    SegmentInfo,
    Usage,
    WriteBudget,
    drive_of,
    pack_location,
    page_of,
    segment_of,
)
from kvdepot.errors import (
    ConfigError,
    DriveError,
    FormatError,
    KVDepotError,
    UnsafePathError,
)
from kvdepot.format.record import (
    HEAD_BYTES,
    IDENTITY,
    PAGE,
    TABLE_OFFSET,
    Kind,
    identity,
    parse_head,
    payload_intact,
    producer_of,
    record_bytes,
    round_up,
    token_ids,
)
from kvdepot.io.files import Files, Ops, aligned, io_ops, io_rows
from kvdepot.io.survey import FLASH
from kvdepot.memory.memory import Memory
from kvdepot.native import READ, address_of
from kvdepot.volumes.log.contents import read_contents
from kvdepot.volumes.log.drive import Drive, Segment
from kvdepot.volumes.log.measuring import Measuring
from kvdepot.volumes.log.medium import Medium, MountSettings, known_superblock
from kvdepot.volumes.log.metadata import TOMBSTONE_AGE_US
from kvdepot.volumes.log.mount import leave_out, mount
from kvdepot.volumes.log.recovery import Recovered

_log: Final = logging.getLogger("kvdepot.volumes")
_TOMBSTONES_MANY: Final = 4096
"""From so many on it is worth while to look for those that cover nothing."""
_DAMAGE_LOGGED_MAX: Final = 8
_STANDS_OUT: Final = 4.0
_REGISTERED_MAX: Final = 8 << 30
_HEADS_AT_ONCE: Final = 64
"""Pages read in one batch for token ids."""
_STALL_S: Final = 1.0
"""A read with a shorter deadline does not tell whether the drive stalls or is slow."""
_TRIAL_TIMEOUT_S: Final = 2.0
_TOO_SLOW: Final = "reads are many times slower than they were"
_IDENTITY_BYTES: Final = IDENTITY.stop - IDENTITY.start

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LateLoads:
    """Loads that outlived their deadline, with the memory the kernel may still use."""

    pending: Pending
    ops: Ops
    expected: bytearray

    def wait(self, timeout_s: float) -> bool:
        return self.pending.wait(timeout_s)


@dataclass(slots=True)
class PlannedReads:
    """Loads as operations of the I/O engine. Loads that cannot be tried have none."""

    ops: Ops
    asked: list[int]
    """The load of each operation."""
    drives: list[Drive]
    locations: list[int]
    expected: bytearray
    """What the engine compares the heads with; in use until the last read has ended."""
    outcomes: list[Outcome]
    """Of the loads."""


class LogTier:
    """A tier of log-structured drives. Implements core.tier.Tier and core.tier.ChangesDrives."""

    survey_limits = FLASH

    def __init__(
        self,
        paths: Sequence[Path],
        files: Files,
        settings: MountSettings,
        clock: Clock,
        stamps: StampClock | None = None,
    ) -> None:
        """Open the drives at `paths`. Takes over `files`: closes it, also when this raises.

        A drive that cannot be used is left out (`left_out`) and tried again later.
        """
        self.name = settings.tier
        self.writable = settings.writable
        self.drives: list[Drive] = []
        self.left_out: dict[int, KVDepotError] = {}
        """Why drives could not be mounted, by their number, until they are."""
        self._paths = list(paths)
        self._room_bytes: dict[int, int] = {}
        """What drives were resized to, by their number; also for one that is away."""
        self._files = files
        self._settings = settings
        self._clock = clock
        self._stamps = stamps or StampClock(settings.wall)
        self._behind: set[Drive] = set()
        """Drives that could not record some metadata; they get it when they work again."""
        self._closed = False
        self._measuring = Measuring(
            lambda: self.drives,
            settings.profile,
            self.survey_limits,
            clock,
            writable=settings.writable,
        )
        try:
            self._contents = self._recover()
        except KVDepotError:
            self.close()
            raise

    def _recover(self) -> Contents:
        started_s = self._clock.now()
        found = self._open_drives()
        known = self.metadata()
        found = [
            self._above_floor(drive, segments, known.floor)
            for drive, segments in zip(self.drives, found, strict=True)
        ]
        contents = read_contents(self.drives, found, known.tombstones)
        segments = [segment for recovered in found for segment in recovered]
        scanned = sum(segment.scanned for segment in segments)
        _log.log(
            logging.WARNING if scanned and self.writable else logging.INFO,
            "%s: %d blocks in %d segments found in %.1f s; %d were scanned after a crash",
            self.name,
            len(contents.locations),
            len(segments),
            self._clock.now() - started_s,
            scanned,
        )
        for drive in self.drives:
            for text in drive.damage[:_DAMAGE_LOGGED_MAX]:
                _log.warning("damage: %s", text)
            if len(drive.damage) > _DAMAGE_LOGGED_MAX:
                _log.warning("damage: %s: %d in all", drive.medium.label, len(drive.damage))
        if self.writable:
            for drive in self._present():
                self._begin_writing(drive)
            for drive, recovered in zip(self.drives, found, strict=True):
                drive.resume(recovered)
            self._share_metadata(self._present())
        return contents

    def _begin_writing(self, drive: Drive) -> None:
        drive.keep_opened(self._stamps.open(_opened(drive.medium)))

    def _above_floor(self, drive: Drive, found: list[Recovered], floor: int) -> list[Recovered]:
        """Drop the segments whose removals may be forgotten, because the drive was away."""
        old = [segment for segment in found if segment.segment_id <= floor]
        if not old:
            return found
        _log.warning(
            "%s: was away too long: %d of its segments are dropped", drive.medium.label, len(old)
        )
        for segment in old:
            if not self.writable or not drive.release(segment.slot):
                drive.segments.pop(segment.slot, None)
        return [segment for segment in found if segment.segment_id > floor]

    def behind(self) -> list[Drive]:
        """Drives that lack metadata that was given to the tier."""
        return list(self._behind)

    def _present(self) -> list[Drive]:
        return [drive for drive in self.drives if not (drive.lost or drive.retired)]

    def _open_drives(self) -> list[list[Recovered]]:
        """Mount all drives at the same time, and tell what is in their segments. Raises where the
        settings are wrong or another process has a drive; then `drives` has those that are open.
        """
        with ThreadPoolExecutor(max(1, len(self._paths)), "kvdepot-recovery") as threads:
            opening = [threads.submit(self._open_drive, path) for path in self._paths]
        fatal: KVDepotError | None = None
        found: list[list[Recovered]] = []
        for index, future in enumerate(opening):
            try:
                drive, segments = future.result()
            except (DriveError, FormatError, UnsafePathError) as error:
                self.left_out[index] = error
                drive, segments = self._leave_out(index, error), []
            except KVDepotError as error:
                fatal = fatal or error
                continue
            self.drives.append(drive)
            found.append(segments)
        if fatal is not None:
            raise fatal
        return found

    def _open_drive(
        self, path: Path, room_bytes: int | None = None
    ) -> tuple[Drive, list[Recovered]]:
        """Mount a drive and read its segments. Raises as `mount`; then nothing is held.

        `room_bytes`: what it may hold, where that is not what the settings say.
        """
        settings = self._settings
        if room_bytes is not None:
            settings = replace(settings, capacity_bytes=room_bytes)
        drive = mount(path, self._files, settings, self._stamps, self._clock)
        try:
            if not drive.metadata.is_whole:
                raise FormatError(
                    drive.medium.label,
                    "the metadata is damaged in both copies: removed blocks may look alive",
                    hint=f"kvdepot check --repair {path}",
                )
            return drive, drive.recover()
        except KVDepotError:
            drive.close_files()
            raise
        except OSError as error:
            drive.close_files()
            full = error.errno == errno.ENOSPC
            hint = "make room on the disk, or give another path" if full else ""
            reason = f"cannot open the store: {error}"
            raise DriveError(f"{self.name}.path", reason, hint=hint) from error

    def _leave_out(self, index: int, error: KVDepotError) -> Drive:
        path, hint = self._paths[index], f" ({error.hint})" if error.hint else ""
        reason = f"{error}{hint}"
        return leave_out(path, reason, self._files, self._settings, self._stamps, self._clock)

    def append(
        self,
        drive: int,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[int | None]:
        appended = self.drives[drive].append(images, purpose)
        return [
            None if place is None else pack_location(drive, place.slot, place.page)
            for place in appended
        ]

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        descriptors, pending = self._files.descriptors, None
        use = descriptors.begin()
        try:
            planned = self._plan(loads)
            if not planned.asked:
                return planned.outcomes, None
            pending, slow = self._timed_read(
                planned.drives, planned.ops, planned.locations, timeout_s, planned.expected
            )
        finally:
            descriptors.end(use, pending)
        return self._answer(planned, timeout_s, pending, slow)

    def _plan(self, loads: Sequence[Load]) -> PlannedReads:
        places = {load.location >> SEGMENT_SHIFT: load.location for load in loads}
        segments = self._readable(places.values())
        rows: list[tuple[int, ...]] = []
        asked: list[int] = []
        drives: list[Drive] = []
        locations: list[int] = []
        identities: list[bytes] = []
        for index, load in enumerate(loads):
            found = segments.get(load.location >> SEGMENT_SHIFT)
            if found is None:
                continue
            drive, segment = found
            identities.append(identity(Kind.BLOCK, load.key, segment.segment_id))
            rows.append(_read_op(load, *segment.extent))
            asked.append(index)
            drives.append(drive)
            locations.append(load.location)
        ops = io_rows(rows)
        expected = bytearray(b"".join(identities))
        if rows:
            ops["expect_address"] = address_of(expected)[0] + _IDENTITY_BYTES * np.arange(len(rows))
        return PlannedReads(ops, asked, drives, locations, expected, [Outcome.FAILED] * len(loads))

    def _readable(self, locations: Iterable[int]) -> dict[int, tuple[Drive, Segment]]:
        """The segments of these locations that can be read from now, by drive and number in one."""
        asked = {drive_of(location): self.drives[drive_of(location)] for location in locations}
        allowed = {
            index for index, one in asked.items() if one.breaker.closed or one.breaker.allows()
        }
        found = {}
        for location in locations:
            drive = asked[drive_of(location)]
            segment = drive.segments.get(segment_of(location))
            if segment is not None and drive_of(location) in allowed:
                found[location >> SEGMENT_SHIFT] = (drive, segment)
        return found

    def _answer(
        self,
        planned: PlannedReads,
        timeout_s: float,
        pending: Pending | None,
        slow: Collection[Drive],
    ) -> Loaded:
        """Outcomes by the results of the operations; the drives' breakers are told."""
        results = planned.ops["result"]
        calm = not slow and not any(one.breaker.troubled for one in dict.fromkeys(planned.drives))
        if calm and len(results) == len(planned.outcomes) and not results.any():
            return [Outcome.OK] * len(results), None
        codes = results.tolist()
        for index, drive, code in zip(planned.asked, planned.drives, codes, strict=True):
            planned.outcomes[index] = _outcome(code)
            late = code == -errno.ETIMEDOUT and timeout_s < _STALL_S
            if not late and (code != 0 or drive not in slow):
                self._judge(drive, code)
        if pending is None:
            return planned.outcomes, None
        return planned.outcomes, LateLoads(pending, planned.ops, planned.expected)

    def _timed_read(
        self,
        drives: Sequence[Drive],
        ops: Ops,
        locations: Sequence[int],
        timeout_s: float,
        memory: object = None,
    ) -> tuple[Pending | None, Collection[Drive]]:
        """Run reads as Files.run; also returns drives that have become too slow to be used.

        `memory` is in use until the last read has ended. Reads of several drives are not timed.
        """
        del memory  # the caller has it
        drive = drives[0]
        if drives.count(drive) != len(drives):
            return self._files.run(ops, timeout_s), ()
        trial = self._begin_timing(drive, ops)
        pending = self._files.run(ops, timeout_s)
        places = np.array(locations, dtype=np.int64)
        slow = self._end_timing(drive, ops, places, ops["result"], trial=trial)
        return pending, (drive,) if slow else ()

    def _begin_timing(self, drive: Drive, ops: Ops) -> bool:
        """Reads of a drive begin. Returns whether the drive is on trial."""
        trial = not drive.breaker.closed
        drive.gauge.begin(int(ops["nbytes"].sum()), trial=trial)
        return trial

    def _end_timing(
        self, drive: Drive, ops: Ops, places: Places, results: Ops, *, trial: bool
    ) -> bool:
        """The reads have ended. True: the drive has become too slow to be used."""
        done = np.flatnonzero(results == 0)
        work_bytes = self._work_bytes(ops[done], places[done])
        fine = drive.gauge.end(work_bytes, len(done), int(ops["nbytes"].sum()), trial=trial)
        slow = not fine and self._stands_out(drive)
        if slow:
            drive.breaker.failed(_TOO_SLOW, at_once=True, slow=True)
        return slow

    def _stands_out(self, drive: Drive) -> bool:
        """Whether a slow drive is slower than the others have become: else it is the machine."""
        others = [one.gauge.slowdown for one in self.drives if one is not drive and not one.retired]
        return bool(others) and drive.gauge.slowdown >= _STANDS_OUT * median(others)

    def _work_bytes(self, ops: Ops, places: Places) -> int:
        """What reads cost a drive, in bytes."""
        del places  # flash has no order
        return int(ops["nbytes"].sum())

    def register_memory(self, memory: Memory) -> bool:
        """Pin memory for the I/O engine, where the machine lets it. It must be faulted in: pinning
        is then cheap. Every ring pins it anew, so very large memory is left alone.
        """
        if memory.nbytes > _REGISTERED_MAX:
            return False
        return self._files.register(memory.address, memory.nbytes)

    def read_records(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        with self._files.descriptors.use():
            return self._read_records(keys, locations, images)

    def _read_records(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        intact = [False] * len(keys)
        for index, segment_id in self._read_images(locations, images):
            head = parse_head(images[index])
            if head is not None and (head.key, head.segment_id) == (keys[index], segment_id):
                intact[index] = payload_intact(images[index], head)
        return intact

    def _read_images(
        self, locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[tuple[int, int]]:
        """Fill images from these places. Returns which were read, and the segment ids there."""
        drives = [self.drives[drive_of(location)] for location in locations]
        allowed = {drive for drive in dict.fromkeys(drives) if drive.breaker.allows()}
        asked = []
        rows = []
        for index, (drive, location) in enumerate(zip(drives, locations, strict=True)):
            segment = drive.segments.get(segment_of(location))
            if segment is not None and drive in allowed:
                fd, base = segment.extent
                asked.append((index, segment.segment_id))
                rows.append((fd, base + page_of(location) * PAGE, *address_of(images[index])))
        ops = io_ops(len(rows))
        ops["opcode"] = READ
        for column, name in enumerate(("fd", "offset", "address", "nbytes")):
            ops[name] = [row[column] for row in rows]
        self._run_through(ops, [drives[index] for index, _ in asked])
        codes = ops["result"].tolist()
        return [one for one, code in zip(asked, codes, strict=True) if code == 0]

    def read_tokens(self, keys: Sequence[BlockKey], locations: Sequence[int]) -> list[bytes]:
        found = [b""] * len(keys)
        for at, head in self._heads(keys, locations):
            found[at] = token_ids(head, keys[at])
        return found

    def read_producers(self, keys: Sequence[BlockKey], locations: Sequence[int]) -> list[int]:
        found = [0] * len(keys)
        for at, head in self._heads(keys, locations):
            found[at] = producer_of(head, keys[at])
        return found

    def _heads(
        self, keys: Sequence[BlockKey], locations: Sequence[int]
    ) -> Iterator[tuple[int, memoryview]]:
        """Heads of the records that are these blocks', each good until the next is asked for."""
        memory = aligned(_HEADS_AT_ONCE * HEAD_BYTES)
        heads = [memory[at : at + HEAD_BYTES] for at in range(0, len(memory), HEAD_BYTES)]
        order = sorted(range(len(keys)), key=locations.__getitem__)
        for first in range(0, len(order), _HEADS_AT_ONCE):
            part = order[first : first + _HEADS_AT_ONCE]
            with self._files.descriptors.use():
                read = self._read_images([locations[at] for at in part], heads[: len(part)])
            for number, segment_id in read:
                head, key = parse_head(heads[number]), keys[part[number]]
                if head is not None and (head.key, head.segment_id) == (key, segment_id):
                    yield part[number], heads[number]

    def _run_through(self, ops: Ops, drives: Sequence[Drive]) -> None:
        """Run a batch to its end, however long that takes; the drives are judged by it."""
        if not len(ops):
            return
        pending = self._files.run(ops, self._settings.write_timeout_s)
        for drive, code in zip(drives, ops["result"].tolist(), strict=True):
            self._judge(drive, code)
        while pending is not None and not pending.wait(60.0):
            for drive in set(drives):
                drive.breaker.failed("reads do not finish", at_once=True)

    def remount(self, drive: int, forget: Callable[[], None]) -> Contents | None:
        lost = self.drives[drive]
        if not lost.medium.restorable() or not lost.breaker.allows():
            return None
        forget()
        lost.abandon()
        try:
            fresh, found = self._open_drive(self._paths[drive], self._room_bytes.get(drive))
        except KVDepotError as error:
            lost.breaker.failed(str(error), at_once=True)
            raise
        fresh.wear.take_over(lost.wear)
        together = [*(one for one in self._present() if one is not lost), fresh]
        known = merged(one.metadata.snapshot() for one in together)
        found = self._above_floor(fresh, found, known.floor)
        contents = read_contents([fresh], [found], known.tombstones, first_drive=drive)
        self._behind.discard(lost)
        if self.writable:
            self._begin_writing(fresh)
            fresh.resume(found)
            self._share_metadata(together, gone=lost.store if lost.store != fresh.store else None)
        self.drives[drive] = fresh
        self.left_out.pop(drive, None)
        _log.info("%s: mounted again, %d blocks", fresh.medium.label, len(contents.locations))
        return contents

    def add(self, path: Path) -> int:
        setting = f"{self.name}.path"
        free = [index for index, drive in enumerate(self.drives) if drive.retired]
        if path in [one for index, one in enumerate(self._paths) if index not in free]:
            raise ConfigError(setting, f"{path} is in use")
        if not free and len(self.drives) >= DRIVES_MAX:
            raise ConfigError(setting, f"there are {DRIVES_MAX} drives, and no more can be")
        drive, found = self._open_drive(path)
        if any(len(segment.entries) for segment in found) or drive.metadata.known.all():
            drive.close()
            raise ConfigError(setting, f"{path} holds a store", hint="empty the directory first")
        self._begin_writing(drive)
        drive.resume(found)
        index = free[0] if free else len(self.drives)  # the number of a drive that has gone
        self._paths[index : index + 1] = [path]
        self.drives[index : index + 1] = [drive]
        self._room_bytes.pop(index, None)
        self._share_metadata(self._present())
        return index

    def index_of(self, path: Path) -> int:
        by_use = sorted(enumerate(self._paths), key=lambda one: self.drives[one[0]].retired)
        for index, known in by_use:
            if known == path or known.resolve() == path.resolve():
                return index
        raise ConfigError(f"{self.name}.path", f"{path} is not one of this store's drives")

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        for location, nbytes in zip(locations, payload_bytes, strict=True):
            drive = self.drives[drive_of(location)]
            drive.count(segment_of(location), -record_bytes(nbytes), -1)

    def take_contents(self) -> Contents:
        contents, self._contents = self._contents, NO_CONTENTS
        return contents

    def put_meta(self, entries: Sequence[MetaEntry], sync_s: float | None = None) -> MetaWritten:
        used = [drive for at, drive in enumerate(self.drives) if at not in self.left_out]
        used = [drive for drive in used if not drive.retired]
        have = [drive for drive in used if drive.put_meta(entries)]
        self._behind.update(drive for drive in used if drive not in have)
        if sync_s is not None:
            have = [drive for drive in have if drive.sync(sync_s)]
        stay = [drive for drive in used if not drive.draining]
        return MetaWritten(sum(drive in stay for drive in have), len(stay))

    def metadata(self) -> Metadata:
        return merged(drive.metadata.snapshot() for drive in self._present())

    def _share_metadata(self, drives: Sequence[Drive], gone: bytes | None = None) -> None:
        """Record durably on these drives what they know together: from then on one may forget it,
        or go. `gone` is the UUID of a drive that will not come back.
        """
        stamp = self._stamps.next()
        known = merged(drive.metadata.snapshot() for drive in drives)
        names = {drive.store for drive in drives} - known.values(MetaKind.MEMBER).keys()
        for name in names:
            known.add(MetaEntry(MetaKind.MEMBER, name, stamp, b""))
        if gone is not None:
            known.add(MetaEntry(MetaKind.MEMBER, gone, stamp, None))
        for drive in drives:
            self._bring_up_to_date(drive, known.all())

    def _bring_up_to_date(self, drive: Drive, entries: Sequence[MetaEntry]) -> None:
        done = drive.put_meta(entries) and (drive.settings.fsync == "never" or drive.sync())
        (self._behind.discard if done else self._behind.add)(drive)

    def _are_missing(self) -> bool:
        """Whether a drive of this tier is away, or lacks metadata that the others have."""
        members = self.metadata().values(MetaKind.MEMBER).keys()
        return bool(self._behind) or not members <= {drive.store for drive in self._present()}

    def _raise_floor(self, *, at_once: bool = False) -> None:
        """Forget tombstones that cover nothing any more, if they are many or `at_once`."""
        drives = self._present()
        count = max((len(drive.metadata.known.tombstones) for drive in drives), default=0)
        if not self.writable or not count or not (at_once or count >= _TOMBSTONES_MANY):
            return
        stamp = self._stamps.next()
        floor = min(drive.oldest_segment() or stamp for drive in drives) - 1
        if self._are_missing():
            floor = min(floor, stamp - TOMBSTONE_AGE_US)
        if floor <= self.metadata().floor:
            return
        for drive in drives:
            if drive.put_meta([floor_entry(floor, stamp)]) and drive.sync():
                drive.metadata.drop_tombstones(floor)

    def has_room(self, drive: int, nbytes: int) -> bool:
        return self.drives[drive].has_room(nbytes)

    def segments(self, drive: int, *, reclaimable: bool = True) -> list[SegmentInfo]:
        one = self.drives[drive]
        found = one.sealed() if reclaimable else list(one.segments.values())
        return [
            SegmentInfo(each.slot, each.segment_id, each.live_bytes, each.live_count)
            for each in found
        ]

    def has_unentered(self, drive: int) -> bool:
        return self.drives[drive].is_busy()

    def release(self, drive: int, slot: int) -> bool:
        done = self.drives[drive].release(slot)
        self._raise_floor()
        return done

    def drive_count(self) -> int:
        return len(self.drives)

    def drive(self, drive: int) -> DriveFacts:
        return self.drives[drive].facts()

    def write_budget(self) -> WriteBudget | None:
        if not any(drive.wear.limited for drive in self.drives):
            return None
        usable = [one for one in self.drives if one.breaker.closed and not one.draining]
        return WriteBudget(
            bucket_bytes=int(sum(drive.wear.bucket_bytes for drive in usable)),
            left_bytes=int(sum(drive.wear.level_bytes for drive in usable)),
        )

    def describe_drives(self) -> list[dict[str, Any]]:
        return [drive.describe() for drive in self.drives]

    def start_drain(self, drive: int) -> None:
        self.drives[drive].start_drain()

    def end_drain(self, drive: int) -> None:
        self.drives[drive].end_drain()

    def retire(self, drive: int) -> bool:
        leaving = self.drives[drive]
        self._share_metadata(self._present(), gone=leaving.store)
        if not any(one not in self._behind for one in self._present() if one is not leaving):
            return False
        leaving.retire()
        self._behind.discard(leaving)
        return True

    def resize(self, drive: int, segments_max: int) -> None:
        one = self.drives[drive]
        self._room_bytes[drive] = segments_max * one.settings.segment_bytes
        one.resize(segments_max)

    def trim(self, drive: int) -> bool:
        return self.drives[drive].trim()

    def probe(self, drive: int) -> None:
        one = self.drives[drive]
        if one.draining or one.lost:
            return
        if self.writable and one in self._behind and one.breaker.closed:
            self._bring_up_to_date(one, self.metadata().all())
        if not (one.medium.intact() and one.medium.complete()):
            one.lose()
        elif not one.breaker.closed:
            self._try_out(drive)
        elif self.writable:
            one.try_for_room()

    def _try_out(self, index: int) -> None:
        """Write to and read from a drive whose pause is over, so that no request has to."""
        with self._files.descriptors.use():
            self._write_and_read(index)

    def _write_and_read(self, index: int) -> None:
        drive = self.drives[index]
        if not drive.breaker.allows() or (self.writable and not drive.try_to_write()):
            return
        trial = drive.trial_reads()
        if trial is None:
            drive.try_superblock()
            return
        segment, starts, ops, memory = trial
        places = [pack_location(index, segment.slot, start // PAGE) for start in starts]
        pending, slow = self._timed_read([drive], ops, places, _TRIAL_TIMEOUT_S, memory)
        if pending is not None:
            self._files.keep(pending, ops, memory)
        bad = next((code for code in ops["result"].tolist() if code), 0)
        if bad or not slow:
            self._judge(drive, bad)

    def measure(self, is_quiet: Callable[[], bool]) -> float:
        return self._measuring.work(is_quiet)

    def stop_measuring(self) -> None:
        self._measuring.stop()

    def flush(self, timeout_s: float = 10.0) -> bool:
        present = [drive for at, drive in enumerate(self.drives) if at not in self.left_out]
        done = [drive.sync(timeout_s) for drive in present]
        return all(done)

    def count(self, location: int, payload_bytes: int) -> None:
        drive = self.drives[drive_of(location)]
        drive.count(segment_of(location), record_bytes(payload_bytes))

    def usage(self) -> Usage:
        return Usage(
            capacity_bytes=sum(d.slots_max * d.settings.segment_bytes for d in self.drives),
            used_bytes=sum(drive.live_bytes() for drive in self.drives),
            held_bytes=sum(drive.held_bytes() for drive in self.drives),
        )

    def is_up(self, drive: int | None = None) -> bool:
        if drive is not None:
            return self.drives[drive].breaker.closed
        return all(one.breaker.closed for one in self.drives)

    def health(self) -> Health:
        parts = [drive.breaker.health() for drive in self.drives]
        bad = [part for part in parts if not part.ok]
        errors = sum(part.errors for part in parts)
        if not bad:
            return Health(True, "", errors)
        return Health(
            False, "; ".join(p.reason for p in bad), errors, min(p.retry_in_s for p in bad)
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._raise_floor(at_once=True)
        for drive in self.drives:
            drive.close()
        self._files.close()

    def _judge(self, drive: Drive, code: int) -> None:
        if code == 0:
            if drive.breaker.troubled and not drive.lost:
                drive.breaker.succeeded()
        elif code == -errno.ETIMEDOUT:
            drive.breaker.failed("reads do not finish", at_once=True)
        elif code != -errno.EBADMSG:
            drive.breaker.failed(f"read error {errno.errorcode.get(-code, code)}")


def _opened(medium: Medium) -> int:
    """The stamp with which a drive was last opened for writing; 0: it is not known."""
    try:
        known = known_superblock(medium)
    except OSError:
        return 0
    return known.opened if known is not None else 0


def _outcome(code: int) -> Outcome:
    if code == 0:
        return Outcome.OK
    if code == -errno.EBADMSG:
        return Outcome.CORRUPT
    return Outcome.LATE if code == -errno.ETIMEDOUT else Outcome.FAILED


def _read_op(load: Load, fd: int, base: int) -> tuple[int, ...]:
    """One row of native.IO_DTYPE: the whole record at once, or head and payload range apart.

    What the head must be is not in it yet.
    """
    image = address_of(load.image)[0]
    record = base + page_of(load.location) * PAGE
    if load.start == 0 and load.stop == load.payload_bytes:
        return (
            0, fd, READ, record, image, record_bytes(load.stop), 0, image, 0, 0, _IDENTITY_BYTES, 1,
            image + TABLE_OFFSET, image + HEAD_BYTES, load.stop, load.chunk_bytes, load.copy_to,
        )  # fmt: skip
    first, last = load.start // PAGE * PAGE, round_up(load.stop)
    span = (
        record + HEAD_BYTES + first, image + HEAD_BYTES + first, last - first,
        record, image, HEAD_BYTES,
    )  # fmt: skip
    table = image + TABLE_OFFSET + 8 * (load.start // load.chunk_bytes)
    payload = image + HEAD_BYTES + load.start
    return (
        0, fd, READ, *span, 0, _IDENTITY_BYTES, 1,
        table, payload, load.stop - load.start, load.chunk_bytes, load.copy_to,
    )  # fmt: skip
