"""Blocks in append-only segments on one or many drives.

A location is (drive, slot, page) in one integer. Which segment makes room is decided above
(store.reclaimer); this file appends, reads and verifies.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.codec.notes import Removal
from kvdepot.codec.record import (
    HEAD_BYTES,
    IDENTITY,
    PAGE,
    TABLE_OFFSET,
    Kind,
    identity,
    parse_head,
    parse_own,
    payload_intact,
    record_bytes,
    round_up,
)
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.tier import Found, Health, Load, Outcome, Pending, Usage
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.native import READ, address_of
from kvdepot.tiers.device.files import Files, Ops, io_ops
from kvdepot.tiers.device.profile import PROFILE_TAG
from kvdepot.tiers.log.contents import NOTHING, Contents, read_contents
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.mount import MountSettings, mount
from kvdepot.tiers.log.notes import Notebook
from kvdepot.tiers.log.numbers import Numbers
from kvdepot.tiers.log.segments import Purpose
from kvdepot.tiers.memory.memory import Memory

_DRIVE_SHIFT: Final = 56
_SLOT_SHIFT: Final = 32
_SLOT_MASK: Final = (1 << 24) - 1
_PAGE_MASK: Final = (1 << 32) - 1
_STANDS_OUT: Final = 4.0
_DRIVES_MAX: Final = 127
_REGISTERED_MAX: Final = 8 << 30
_STALL_S: Final = 1.0
"""Who gave a drive less time than this cannot tell whether it stalls or is slow."""
_TOO_SLOW: Final = "reads are many times slower than they were"
_IDENTITY_BYTES: Final = IDENTITY.stop - IDENTITY.start


Rows = npt.NDArray[np.int64]


def pack_location(drive: int, slot: int, page: int) -> int:
    return drive << _DRIVE_SHIFT | slot << _SLOT_SHIFT | page


def drive_of(location: int) -> int:
    return location >> _DRIVE_SHIFT


def slot_of(location: int) -> int:
    return location >> _SLOT_SHIFT & _SLOT_MASK


@dataclass(frozen=True, slots=True)
class LateLoads:
    """Loads that outlived their deadline, with the memory the kernel may still use."""

    pending: Pending
    ops: Ops
    expected: bytearray

    def wait(self, timeout_s: float) -> bool:
        return self.pending.wait(timeout_s)


class SegmentTier:
    """A file tier: `ssd`, or what `settings.tier` says. Implements core.tier.Tier."""

    def __init__(
        self, paths: Sequence[Path], files: Files, settings: MountSettings, clock: Clock
    ) -> None:
        """Open the drives at `paths`. Takes over `files`: closes it, also when this raises."""
        self.name = settings.tier
        self.writable = settings.writable
        self.drives: list[Drive] = []
        self._former: list[Drive] = []
        """Drives that were mounted anew. Reads may still be about to use their descriptors."""
        self._paths = list(paths)
        self._files = files
        self._settings = settings
        self._clock = clock
        self._numbers = Numbers()
        self._turn = 0
        self._closed = False
        try:
            for index in range(len(self._paths)):
                self.drives.append(self._mount(index))
            self.notebooks = [Notebook(drive) for drive in self.drives]
            self._contents = self._recover()
        except KVDepotError:
            self.close()
            raise
        except OSError as error:
            self.close()
            full = error.errno == errno.ENOSPC
            hint = "make room on the disk, or give another path" if full else ""
            reason = f"cannot open the store: {error}"
            raise ConfigError(f"{self.name}.path", reason, hint=hint) from error

    def _recover(self) -> Contents:
        contents = read_contents(self.notebooks, mirrored=self._settings.mirrored)
        if self.writable:
            for drive, recovered in zip(self.drives, contents.recovered, strict=True):
                drive.resume(recovered)
        return contents

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        """See Tier.store.

        Spreads batches over the drives in turn; a failed drive's share goes to the next.
        """
        results: list[int | None] = [None] * len(images)
        left = list(range(len(images)))
        for step in range(2 * len(self.drives)):
            index = (self._turn + step) % len(self.drives)
            if step >= len(self.drives) and not self._reuse_dead(index):
                continue
            places = self.append(index, [images[i] for i in left])
            for i, location in zip(left, places, strict=True):
                results[i] = location
            left = [i for i in left if results[i] is None]
            if not left:
                break
        self._turn += 1
        for image, location in zip(images, results, strict=True):
            if location is not None:
                self.count(location, parse_own(image)[3])
        return results

    def _reuse_dead(self, index: int) -> bool:
        """Release the segments of a drive in which nothing is alive. False: there are none."""
        dead = [segment for segment in self.drives[index].sealed() if not segment.live_count]
        for segment in dead:
            if self.carry(index, segment.slot):
                self.release(index, segment.slot)
        return bool(dead)

    def append(
        self, index: int, images: Sequence[memoryview], purpose: Purpose = Purpose.BLOCK
    ) -> list[int | None]:
        """`store` on one drive; the caller counts what it keeps (`count`)."""
        return [
            None if place is None else pack_location(index, place.slot, place.page)
            for place in self.drives[index].append(images, purpose)
        ]

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        outcomes = [Outcome.FAILED] * len(loads)
        involved = {drive_of(load.location) for load in loads}
        allowed = {index for index in involved if self.drives[index].breaker.allows()}
        rows: list[tuple[Any, ...]] = []
        asked: list[int] = []
        expected = bytearray(_IDENTITY_BYTES * len(loads))
        expected_at = address_of(expected)[0] if expected else 0
        for index, load in enumerate(loads):
            drive = self.drives[drive_of(load.location)]
            segment = drive.segments.get(slot_of(load.location))
            if segment is None or drive_of(load.location) not in allowed:
                continue
            at = _IDENTITY_BYTES * index
            expected[at : at + _IDENTITY_BYTES] = identity(Kind.BLOCK, load.key, segment.segment_id)
            rows.append(_read_op(load, *drive.medium.extent(segment.slot), expected_at + at))
            asked.append(index)
        if not rows:
            return outcomes, None
        ops = io_ops(len(rows))
        ops[:] = rows
        locations = [loads[index].location for index in asked]
        drives = [self.drives[drive_of(location)] for location in locations]
        if len(set(drives)) == 1:
            pending, slow = self._timed_read(drives[0], ops, locations, timeout_s)
        else:
            pending, slow = self._read(ops, locations, timeout_s), False
        for index, drive, code in zip(asked, drives, ops["result"].tolist(), strict=True):
            outcomes[index] = _outcome(code)
            late = code == -errno.ETIMEDOUT and timeout_s < _STALL_S
            if not late and (code != 0 or not slow):
                self._judge(drive, code)
        return outcomes, LateLoads(pending, ops, expected) if pending is not None else None

    def _timed_read(
        self, drive: Drive, ops: Ops, locations: Sequence[int], timeout_s: float
    ) -> tuple[Pending | None, bool]:
        """`_read` from one drive, and whether that one has become too slow to be used."""
        trial = not drive.breaker.closed
        asked = int(ops["nbytes"].sum())
        drive.gauge.begin(asked, trial=trial)
        pending = self._read(ops, locations, timeout_s)
        done = np.flatnonzero(ops["result"] == 0)
        work_bytes = self._work_bytes(ops[done], np.array(locations, dtype=np.int64)[done])
        fine = drive.gauge.end(work_bytes, len(done), asked, trial=trial)
        slow = not fine and self._stands_out(drive)
        if slow:
            drive.breaker.failed(_TOO_SLOW, at_once=True, slow=True)
        return pending, slow

    def try_reads(
        self,
        index: int,
        ops: Ops,
        locations: Sequence[int],
        timeout_s: float,
        memory: memoryview,
    ) -> None:
        """Run reads of one drive that was left alone, and judge it by them alone."""
        drive = self.drives[index]
        pending, slow = self._timed_read(drive, ops, locations, timeout_s)
        if pending is not None:
            self._files.keep(pending, memory)
        bad = next((code for code in ops["result"].tolist() if code), 0)
        if bad or not slow:
            self._judge(drive, bad)

    def _stands_out(self, drive: Drive) -> bool:
        """Whether a slow drive is slower than the others have become: else it is the machine."""
        others = [one.gauge.slowdown for one in self.drives if one is not drive and not one.retired]
        return bool(others) and drive.gauge.slowdown >= _STANDS_OUT * median(others)

    def _work_bytes(self, ops: Ops, locations: Rows) -> int:
        """What reads cost a drive, in bytes."""
        del locations
        return int(ops["nbytes"].sum())

    def _read(self, ops: Ops, locations: Sequence[int], timeout_s: float) -> Pending | None:
        """Run reads of these places; as Files.run."""
        del locations  # flash has no order
        return self._files.run(ops, timeout_s)

    def register_memory(self, memory: Memory) -> bool:
        """Tell the I/O engine about memory that transfers will use, where the machine lets it.

        The memory must be faulted in: pinning it is then cheap. Every ring pins it anew, so very
        large memory is left alone.
        """
        if memory.nbytes > _REGISTERED_MAX:
            return False
        return self._files.register(memory.address, memory.nbytes)

    def read_image(self, key: BlockKey, location: int, image: memoryview) -> bool:
        """`read_images` for one."""
        return self.read_images([key], [location], [image])[0]

    def read_images(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        """Read whole records, each verified by what its own head says.

        Blocks until the medium answers.
        """
        drives = [self.drives[drive_of(location)] for location in locations]
        allowed = {drive for drive in dict.fromkeys(drives) if drive.breaker.allows()}
        asked = []
        rows = []
        for index, (drive, location) in enumerate(zip(drives, locations, strict=True)):
            segment = drive.segments.get(slot_of(location))
            if segment is not None and drive in allowed:
                fd, base = drive.medium.extent(segment.slot)
                asked.append((index, segment.segment_id))
                rows.append((fd, base + (location & _PAGE_MASK) * PAGE, *address_of(images[index])))
        ops = io_ops(len(rows))
        ops["opcode"] = READ
        for column, name in enumerate(("fd", "offset", "address", "nbytes")):
            ops[name] = [row[column] for row in rows]
        self._run_through(ops, [drives[index] for index, _ in asked])
        intact = [False] * len(keys)
        for (index, segment_id), code in zip(asked, ops["result"].tolist(), strict=True):
            head = parse_head(images[index]) if code == 0 else None
            if head is not None and (head.key, head.segment_id) == (keys[index], segment_id):
                intact[index] = payload_intact(images[index], head)
        return intact

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

    def remount(self, index: int, before: Callable[[], None]) -> Contents | None:
        """Open a lost drive again, once its pause is over. `before` is called when its old blocks
        are gone.

        None: not yet. Raises what `mount` raises.
        """
        drive = self.drives[index]
        if not drive.medium.restorable() or not drive.breaker.allows():
            return None
        before()
        drive.medium.unlock()
        fresh = self._mount(index)
        fresh.wear.take_over(drive.wear)
        self._former.append(drive)
        notebook = Notebook(fresh)
        others = [other for other in self.notebooks if other.drive is not drive]
        contents = read_contents([notebook], first_drive=index, others=others)
        fresh.resume(contents.recovered[0])
        self.drives[index], self.notebooks[index] = fresh, notebook
        return contents

    def add(self, path: Path) -> int:
        """Use one more drive, which must be empty; its number. Raises what `mount` raises."""
        setting = f"{self.name}.path"
        if path in self._paths or len(self._paths) > _DRIVES_MAX:
            raise ConfigError(setting, f"{path} is in use, or there are too many drives")
        drive = mount(path, self._files, self._settings, self._numbers, self._clock)
        notebook = Notebook(drive)
        contents = read_contents([notebook])
        if len(contents.words) or notebook.removals or notebook.spaces:
            drive.close()
            raise ConfigError(setting, f"{path} holds a store", hint="empty the directory first")
        drive.resume(contents.recovered[0])
        known = {tag: text for other in self.notebooks for tag, (_, text) in other.spaces.items()}
        known.pop(PROFILE_TAG, None)
        for tag, description in known.items():
            notebook.remember(tag, description)
        self._paths.append(path)
        self.notebooks.append(notebook)
        self.drives.append(drive)
        return len(self.drives) - 1

    def index_of(self, path: Path) -> int:
        """The number of the drive at `path`, or ConfigError."""
        for index, known in enumerate(self._paths):
            if known == path or known.resolve() == path.resolve():
                return index
        raise ConfigError(f"{self.name}.path", f"{path} is not one of this store's drives")

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        """See Tier.discard. The bytes stay on disk, dead, until their segment is reused."""
        for location, nbytes in zip(locations, payload_bytes, strict=True):
            drive = self.drives[drive_of(location)]
            drive.count(slot_of(location), -record_bytes(nbytes), -1)

    def scan(self) -> Iterator[Found]:
        return self._contents.found()

    def take_contents(self) -> Contents:
        """What `scan` tells, as arrays, once: afterwards it is forgotten, for it can be large."""
        contents, self._contents = self._contents, NOTHING
        return contents

    def erase(self, removals: list[Removal], drives: Sequence[int] | None = None) -> list[int]:
        """Record removals, so that the blocks do not come back after a restart.

        On every drive, or those given. Returns the drives on which it could not be done.
        """
        asked = range(len(self.drives)) if drives is None else drives
        return [
            index
            for index in asked
            if not self.drives[index].retired and not self.notebooks[index].remove(removals)
        ]

    def remember(self, tag: bytes, description: bytes) -> bool:
        """Record what a namespace tag stands for, on every drive that does not know it."""
        unaware = [
            notebook
            for notebook in self.notebooks
            if tag not in notebook.spaces and not notebook.drive.retired
        ]
        done = [notebook.remember(tag, description) for notebook in unaware]
        return all(done)

    def removal(self, key: BlockKey, *, whole_namespace: bool = False) -> Removal:
        """The note that keeps every record of a key, or of its namespace, from coming back.

        Older copies may lie in any segment that exists now, also where they were dropped long ago.
        """
        sequence, last_segment = self._numbers.sequence(), self._numbers.segment_id()
        return Removal(key, whole_namespace, sequence, last_segment)

    def carry(self, index: int, slot: int) -> bool:
        """Write a segment's notes again elsewhere. False: no room for them; do not release it."""
        segment = self.drives[index].segments[slot]
        return self.notebooks[index].carry(segment.segment_id)

    def release(self, index: int, slot: int) -> None:
        """Reuse a segment. Its blocks must have been moved or dropped, its notes carried."""
        self.drives[index].release(slot)

    def flush(self, timeout_s: float = 10.0) -> bool:
        done = [drive.sync(timeout_s) for drive in self.drives]
        return all(done)

    def count(self, location: int, payload_bytes: int) -> None:
        """A block that was appended is in use from now on, until it is discarded."""
        drive = self.drives[drive_of(location)]
        drive.count(slot_of(location), record_bytes(payload_bytes))

    def usage(self) -> Usage:
        return Usage(
            capacity_bytes=sum(
                d.settings.slots_max * d.settings.segment_bytes for d in self.drives
            ),
            used_bytes=sum(s.live_bytes for d in self.drives for s in list(d.segments.values())),
            held_bytes=sum(drive.held_bytes() for drive in self.drives),
        )

    def is_up(self) -> bool:
        """Whether every drive works, as far as is known."""
        return all(drive.breaker.closed for drive in self.drives)

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
        for drive in [*self.drives, *self._former]:
            drive.close()
        self._files.close()

    def _mount(self, index: int) -> Drive:
        return mount(self._paths[index], self._files, self._settings, self._numbers, self._clock)

    def _judge(self, drive: Drive, code: int) -> None:
        if code == 0:
            drive.breaker.succeeded()
        elif code == -errno.ETIMEDOUT:
            drive.breaker.failed("reads do not finish", at_once=True)
        elif code != -errno.EBADMSG:
            drive.breaker.failed(f"read error {errno.errorcode.get(-code, code)}")


def _outcome(code: int) -> Outcome:
    if code == 0:
        return Outcome.OK
    if code == -errno.EBADMSG:
        return Outcome.CORRUPT
    return Outcome.LATE if code == -errno.ETIMEDOUT else Outcome.FAILED


def _read_op(load: Load, fd: int, base: int, expected_at: int) -> tuple[Any, ...]:
    """One row of native.IO_DTYPE: the whole record at once, or head and payload range apart."""
    image = address_of(load.image)[0]
    record = base + (load.location & _PAGE_MASK) * PAGE
    if load.start == 0 and load.stop == load.payload_bytes:
        span = (record, image, record_bytes(load.payload_bytes), 0, image, 0)
    else:
        first, last = load.start // PAGE * PAGE, round_up(load.stop)
        span = (
            record + HEAD_BYTES + first, image + HEAD_BYTES + first, last - first,
            record, image, HEAD_BYTES,
        )  # fmt: skip
    table = image + TABLE_OFFSET + 8 * (load.start // load.chunk_bytes)
    payload = image + HEAD_BYTES + load.start
    return (
        0, fd, READ, *span, expected_at, _IDENTITY_BYTES, 1,
        table, payload, load.stop - load.start, load.chunk_bytes, load.copy_to,
    )  # fmt: skip
