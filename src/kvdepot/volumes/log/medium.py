"""Opens the medium of a log volume, and identifies the volume.

A medium is a directory of files, or a raw block device. Both have numbered slots of one size, each
with a descriptor and a base offset.

Three pages have the identity of a volume: the superblock and the header of each copy of the
metadata log. The majority counts; if all differ, the superblock. Segments do not count, because the
identity must belong to the metadata with the removals. So swapping a segment file with another
drive's never changes the identity of a drive.
"""

import errno
import fcntl
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from kvdepot.core.clock import StampClock
from kvdepot.core.private import FILE_MODE, check_file_status, check_folder_status, check_link
from kvdepot.core.units import format_bytes
from kvdepot.errors import (
    ConfigError,
    DriveError,
    FormatError,
    KVDepotError,
    StoreBusyError,
    UnsafePathError,
)
from kvdepot.format.metadata import HEADER_BYTES, MAGIC, VolumeHeader
from kvdepot.format.record import PAGE
from kvdepot.format.segment import FORMAT, HEADER_MAGIC
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import LOST_AND_FOUND, Files
from kvdepot.volumes.log.metadata import COPIES, CopyPlace, ExtentCopy, FileCopy, MetadataLog

DirectIo = Literal["auto", "always", "never"]
_METADATA_MIN: Final = 1 << 20
_METADATA_SHARE: Final = 32
"""Each copy of the metadata log takes at most this part of a volume's capacity."""
_SEGMENT: Final = re.compile(r"segment-(\d{6})\.kvs")
_LOCK: Final = "lock"
_SUPERBLOCK: Final = "superblock"
_PARTIAL: Final = tuple(f"{name}.new" for name in (_SUPERBLOCK, *COPIES))
_NAMES: Final = frozenset({_LOCK, _SUPERBLOCK, *COPIES, *_PARTIAL})
_HOLDER: Final = re.compile(rb"\d*\n?\0*")
"""The content of our lock file: a process id, or nothing yet."""
_SLOTS_MIN: Final = 3
_START_BYTES: Final = 128 << 10
"""The start of a device, which is blank on a new one."""


@dataclass(frozen=True, slots=True)
class MountSettings:
    """Settings of log volumes."""

    capacity_bytes: int
    segment_bytes: int
    """Used for a new volume. An existing volume keeps its segment size."""
    direct_io: DirectIo = "auto"
    fsync: str = "flush"
    write_timeout_s: float = 10.0
    pauses: RetryPauses = field(default_factory=RetryPauses)
    writable: bool = True
    tier: str = "ssd"
    daily_bytes: int = 0
    """Bytes that may be written to the volume in a day; 0: no limit."""
    profile: Literal["auto", "always", "never"] = "auto"
    """Which volumes are measured: see volumes.log.measuring."""
    contiguous_bytes: int = 0
    """Bytes of a prompt that should lie together; 0: seeks cost nothing."""
    any_owner: bool = False
    """Accept a folder of another user, for read-only commands."""


def open_medium(path: Path, files: Files, settings: MountSettings) -> "Medium":
    """Open a directory or a block device. Raises OSError, FormatError, UnsafePathError,
    StoreBusyError or ConfigError, and then leaves nothing open. A folder of another program is not
    changed.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFDIR
    if stat.S_ISBLK(mode):
        return DeviceMedium(path, files, settings)
    if not stat.S_ISDIR(mode):
        reason = f"{path} is neither a directory nor a block device"
        raise DriveError(f"{settings.tier}.path", reason)
    return DirectoryMedium(path, files, settings)


def check_format(label: str, page: bytes | None) -> VolumeHeader | None:
    """Parse the header page of a volume. Returns None if it is missing or damaged. Raises
    FormatError for a header of another format.
    """
    header = VolumeHeader.parse(page) if page is not None else None
    if isinstance(header, int):
        raise _other_format(label, header)
    return header


def _other_format(label: str, number: int) -> FormatError:
    return FormatError(
        label,
        f"store of format {number}, this kvdepot reads format {FORMAT}",
        hint="it is a cache: remove the folder or give another path, and it fills again; or use "
        "the kvdepot version that made it",
    )


def _lock(fd: int, label: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() if is_file else ""
        raise StoreBusyError(label, f"process {holder}" if holder else "another process") from error


class DirectoryMedium:
    """One file for each slot, of fixed size, reused in place. Methods raise OSError for faults of
    the medium.
    """

    def __init__(self, path: Path, files: Files, settings: MountSettings) -> None:
        self.label = str(path)
        self._path = path
        self._files = files
        self._writable = settings.writable
        self._any_owner = settings.any_owner
        self._fds: dict[int, int] = {}
        self._lock_fd = self._directory_fd = -1
        try:
            self._open_folder(settings.tier)
            self.direct = settings.direct_io != "never" and self._accepts_direct()
            if settings.direct_io == "always" and not self.direct:
                reason = f"{path} does not support O_DIRECT"
                raise ConfigError(f"{settings.tier}.direct_io", reason, hint='direct_io = "auto"')
        except (KVDepotError, OSError):
            self.close()
            raise

    def read_headers(self) -> tuple[bytes | None, Sequence[VolumeHeader]]:
        """The superblock's page, None if there is none yet, and the intact headers of the copies of
        the metadata log. Raises FormatError if one is of another format.
        """
        found = [check_format(self.label, self._first_page(name)) for name in COPIES]
        return self._first_page(_SUPERBLOCK), [header for header in found if header is not None]

    def write_superblock(self, header: VolumeHeader) -> None:
        """Write the superblock, atomically and durably."""
        os.close(self._files.write_new(self._path / _SUPERBLOCK, header.pack()))

    def has_blocks(self) -> bool:
        """True if a medium without headers has segments. Raises FormatError if they have another
        format, or belong to another program.
        """
        names = [name for name in os.listdir(self._path) if _SEGMENT.fullmatch(name)]
        pages = [self._first_page(name) or b"" for name in names]
        magic = HEADER_MAGIC.to_bytes(4, "little")
        formats = [int.from_bytes(page[12:16], "little") for page in pages if page[8:12] == magic]
        if formats and FORMAT not in formats:  # one of several may be damaged
            raise _other_format(self.label, formats[0])
        return any(map(any, pages))  # a segment is free if its first page is blank

    def open_slots(self, segment_bytes: int) -> list[int]:
        """Open the slots that exist, and return their numbers."""
        slots = []
        for name in sorted(os.listdir(self._path)):
            if not (found := _SEGMENT.fullmatch(name)):
                continue
            slot = int(found[1])
            try:
                fd = self._fds[slot] = self._open(slot, 0)
            except FileNotFoundError:
                if self._writable:
                    raise
                continue  # the writer has just removed it
            if self._writable and os.fstat(fd).st_size != segment_bytes:
                self._files.truncate(fd, segment_bytes)
                self._files.sync(fd)
            slots.append(slot)
        return slots

    def slots_max(self, segment_bytes: int) -> int:
        """The number of slots that the medium itself could have. The capacity may be lower."""
        return 10**6

    def create(self, slot: int, segment_bytes: int) -> None:
        """Create a slot. Raises OSError, and then leaves nothing behind."""
        fd = self._open(slot, os.O_CREAT | os.O_EXCL)
        try:
            self._files.allocate(fd, segment_bytes)
            self._files.sync(fd)
            self._files.sync_directory(self._directory_fd)
        except OSError:
            os.close(fd)
            self._files.unlink(self._name(slot))
            raise
        self._fds[slot] = fd

    def remove(self, slot: int) -> None:
        """Delete a slot, which frees its space."""
        fd = self._fds.pop(slot)  # first: for `intact` a file without a name was removed by others
        try:
            self._files.unlink(self._name(slot))
            self._files.sync_directory(self._directory_fd)
        except OSError:
            self._fds[slot] = fd
            raise
        self._files.descriptors.give_up(fd)

    def extent(self, slot: int) -> tuple[int, int]:
        """Descriptor and base offset of a slot; after `close` the descriptor is -1."""
        return self._fds.get(slot, -1), 0

    def metadata_copies(self, segment_bytes: int, slots_max: int) -> list[CopyPlace]:
        """The places of the two copies of the metadata log."""
        limit = max(_METADATA_MIN, segment_bytes * slots_max // _METADATA_SHARE)
        paths = [self._path / name for name in COPIES]
        return [
            FileCopy(path, self._files, limit, writable=self._writable, is_ours=self.intact)
            for path in paths
        ]

    def intact(self, *, every_slot: bool = False) -> bool:
        """False if the medium was removed; with `every_slot` also if a slot was."""
        try:
            ours = os.fstat(self._lock_fd if self._writable else self._directory_fd)
            there = os.stat(self._path / _LOCK if self._writable else self._path)
            fds = list(self._fds.items()) if every_slot else []
            gone = [(slot, fd) for slot, fd in fds if not os.fstat(fd).st_nlink]
        except OSError:
            return False
        has_all = not any(self._fds.get(slot) == fd for slot, fd in gone)
        return has_all and (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev)

    def restorable(self, store: bytes) -> bool:
        """True if a removed medium can be opened again now: the directory or its parent exists on
        the same disk, or the volume `store` exists on a disk with another device number.
        """
        for place in (self._path, self._path.parent):
            try:
                if place.stat().st_dev == self._device:
                    return True
                header = VolumeHeader.parse(self._first_page(_SUPERBLOCK) or b"")
            except OSError:
                continue
            return isinstance(header, VolumeHeader) and header.store == store
        return False

    def close(self) -> None:
        """Close all files and release the lock. Later reads fail. May be called twice."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            self._files.descriptors.give_up(fd)
        for fd in (self._lock_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._directory_fd = -1

    def _open_folder(self, tier: str) -> None:
        """Open the directory; for writing also create and lock it, unless
        another program uses it.
        """
        if self._writable:
            self._files.make_directory(self._path)
        elif not self._path.is_dir():
            raise FormatError(self.label, "there is no store here")
        self._directory_fd = self._files.open_directory(self._path)
        status = os.fstat(self._directory_fd)
        self._device = status.st_dev
        if not self._any_owner:
            check_link(self._path)
            check_folder_status(self._path, status)
        if self._writable:
            self._refuse_others(tier)
            self._lock_fd = self._open_own(self._path / _LOCK, os.O_RDWR | os.O_CREAT)
            _lock(self._lock_fd, self.label)
            os.truncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
            for name in _PARTIAL:
                self._files.unlink(self._path / name)

    def _refuse_others(self, tier: str) -> None:
        """Raise FormatError for a folder with files of another program, or a store of another
        format. Changes nothing.

        One valid file is enough to identify a store, since the others may be damaged. If there is
        none, as after a crash during creation, all names must be those of a store, and the lock
        file, which is created first, must hold a process id or nothing.
        """
        names = set(os.listdir(self._path)) - {LOST_AND_FOUND}
        ours = {name for name in names if name in _NAMES or _SEGMENT.fullmatch(name)}
        if _SUPERBLOCK in ours:
            check_format(self.label, self._start_of(_SUPERBLOCK))
        if not names or any(_is_of_a_store(self._start_of(name)) for name in sorted(ours)):
            return
        if names == ours and _LOCK in ours and _HOLDER.fullmatch(self._start_of(_LOCK)):
            return
        raise FormatError(
            self.label,
            f"is not empty and not a kvdepot store: it has {min(names - ours or names)!r}",
            hint=f"give {tier}.path a folder of its own, such as {self._path / 'kvdepot'}",
        )

    def _start_of(self, name: str) -> bytes:
        """The first page of a file that may belong to another program; empty if unreadable."""
        try:
            return self._first_page(name) or b""
        except OSError:
            return b""

    def _first_page(self, name: str) -> bytes | None:
        """The first page of one of our files; None if there is no such file."""
        try:
            fd = self._open_own(self._path / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return bytes(self._files.read(fd, 0, PAGE))
        finally:
            os.close(fd)

    def _accepts_direct(self) -> bool:
        try:
            fd = self._files.open_file(self._path / _LOCK, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return False
        os.close(fd)
        return True

    def _open(self, slot: int, flags: int) -> int:
        flags |= os.O_RDWR if self._writable else os.O_RDONLY
        flags |= os.O_DIRECT if self.direct else 0
        fd = self._open_own(self._name(slot), flags)
        self._files.attach(fd, self.label)
        return fd

    def _open_own(self, path: Path, flags: int) -> int:
        """Open a file of the store. UnsafePathError if another user owns it or may change it."""
        fd = self._files.open_file(path, flags)
        try:
            if not self._any_owner:
                check_file_status(path, os.fstat(fd))
                if self._writable:
                    os.fchmod(fd, FILE_MODE)
        except (UnsafePathError, OSError):
            os.close(fd)
            raise
        return fd

    def _name(self, slot: int) -> Path:
        return self._path / f"segment-{slot:06d}.kvs"


def _is_of_a_store(start: bytes) -> bool:
    """True if a file with this start is a superblock, metadata or a segment."""
    return start[8:16] == MAGIC or start[8:12] == HEADER_MAGIC.to_bytes(4, "little")


class DeviceMedium:
    """Extents of a block device: the superblock in the first page, then the metadata log up to the
    size of a segment, slot n at (n + 1) segments.
    """

    def __init__(self, path: Path, files: Files, settings: MountSettings) -> None:
        self.label = str(path)
        self.direct = settings.direct_io != "never"
        self._files = files
        self._segment_bytes = 0
        flags = (os.O_RDWR | os.O_EXCL) if settings.writable else os.O_RDONLY
        try:
            self._fd = files.open_device(path, flags | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            holder = "the system or another process (mounted?)"
            raise StoreBusyError(self.label, holder) from error
        files.attach(self._fd, self.label)
        try:
            self._size = os.lseek(self._fd, 0, os.SEEK_END)
            if settings.writable:
                _lock(self._fd, self.label)
        except (StoreBusyError, OSError):
            self.close()
            raise

    def read_headers(self) -> tuple[bytes | None, Sequence[VolumeHeader]]:
        """The first area of each copy of the log always has a header. If there is no superblock,
        the header of the first copy says where that of the second is.
        """
        start = bytes(self._files.read(self._fd, 0, _START_BYTES))
        page = start[:PAGE] if any(start[:PAGE]) else None
        superblock = check_format(self.label, page)
        if superblock is None and any(start[HEADER_BYTES:PAGE]):
            return page, []  # not a damaged superblock: another program has written here
        first = check_format(self.label, start[PAGE:])
        known = first or superblock
        if known is None:
            return page, []
        at = PAGE + 2 * self._area_bytes(known.segment_bytes)
        second = check_format(self.label, bytes(self._files.read(self._fd, at, PAGE)))
        return page, [header for header in (first, second) if header is not None]

    def write_superblock(self, header: VolumeHeader) -> None:
        self._files.write(self._fd, 0, header.pack())
        self._files.sync(self._fd)

    def has_blocks(self) -> bool:
        if any(self._files.read(self._fd, 0, _START_BYTES)):
            raise FormatError(
                self.label,
                "the device holds something that is not a kvdepot store",
                hint=f"if it may be overwritten: dd if=/dev/zero of={self.label} bs=128K count=1",
            )
        return False

    def open_slots(self, segment_bytes: int) -> list[int]:
        self._segment_bytes = segment_bytes
        return list(range(self.slots_max(segment_bytes)))

    def slots_max(self, segment_bytes: int) -> int:
        return max(0, self._size // segment_bytes - 1)

    def create(self, slot: int, segment_bytes: int) -> None:
        if slot >= self.slots_max(segment_bytes):
            raise OSError(errno.ENOSPC, "the device is full")

    def remove(self, slot: int) -> None:
        """Does nothing: extents of a device are not deleted."""

    def extent(self, slot: int) -> tuple[int, int]:
        return self._fd, (slot + 1) * self._segment_bytes

    def metadata_copies(self, segment_bytes: int, slots_max: int) -> list[CopyPlace]:
        del slots_max
        area = self._area_bytes(segment_bytes)
        return [
            ExtentCopy(name, self._files, self._fd, PAGE + 2 * number * area, area)
            for number, name in enumerate(COPIES)
        ]

    def intact(self, *, every_slot: bool = False) -> bool:
        del every_slot
        return self._fd >= 0

    def restorable(self, store: bytes) -> bool:
        del store
        return False

    def close(self) -> None:
        if self._fd >= 0:
            self._files.descriptors.give_up(self._fd)
            self._fd = -1

    def _area_bytes(self, segment_bytes: int) -> int:
        """The size of one of the two areas that each copy of the metadata log has."""
        return (segment_bytes - PAGE) // (2 * len(COPIES)) // PAGE * PAGE


Medium = DirectoryMedium | DeviceMedium


@dataclass(frozen=True, slots=True)
class Mounted:
    """An open medium, and the volume on it."""

    medium: Medium
    header: VolumeHeader
    settings: MountSettings
    """The settings, with the segment size of the medium."""
    slots_max: int
    is_new: bool
    damage: list[str]
    """Descriptions of damage of the superblock."""

    def open_metadata(self, stamps: StampClock) -> MetadataLog:
        """Read the metadata log, or create that of a new volume; then write the superblock if it is
        missing or wrong. Raises DriveError, and then closes the medium.
        """
        settings = self.settings
        copies = self.medium.metadata_copies(settings.segment_bytes, self.slots_max)
        log = MetadataLog(
            copies, self.header, stamps, fsync=settings.fsync, timeout_s=settings.write_timeout_s
        )
        try:
            if not self.is_new:
                log.load()
                if settings.writable:
                    # Before the superblock: a process may have been killed between the copies.
                    log.restore()
            elif settings.writable:
                log.create()
            if settings.writable and (self.is_new or self.damage):
                self.medium.write_superblock(self.header)
        except OSError as error:
            log.close()
            self.medium.close()
            raise cannot_use(self.medium.label, settings, error) from error
        return log


def mount(path: Path, files: Files, settings: MountSettings) -> Mounted:
    """Open a medium and identify its volume. Raises ConfigError, FormatError, UnsafePathError or
    StoreBusyError, and then leaves nothing open. DriveError, FormatError and UnsafePathError
    concern this medium only; a store may go on with others.
    """
    try:
        medium = open_medium(path, files, settings)
    except OSError as error:
        raise cannot_use(str(path), settings, error) from error
    try:
        return _identify(medium, settings)
    except OSError as error:
        medium.close()
        raise cannot_use(str(path), settings, error) from error
    except KVDepotError:
        medium.close()
        raise


def cannot_use(label: str, settings: MountSettings, error: OSError) -> DriveError:
    """The DriveError for a path that cannot be used because of `error`."""
    hints = {
        errno.ENOSPC: "make room on the disk, or give another path",
        errno.ENOENT: "make the parent directory",
        errno.EACCES: "check the permissions, or open with mode='r'",
        errno.EROFS: "mount it for writing, or open with mode='r'",
    }
    action = "write to" if settings.writable else "read"
    reason = f"cannot {action} {label}: {error.strerror}"
    return DriveError(f"{settings.tier}.path", reason, hint=hints.get(error.errno or 0, ""))


def _identify(medium: Medium, settings: MountSettings) -> Mounted:
    page, headers = medium.read_headers()
    superblock = check_format(medium.label, page)
    headers = [superblock, *headers] if superblock else headers
    votes = Counter((one.store, one.segment_bytes) for one in headers)
    state = "missing" if page is None else "of another store" if superblock else "damaged"
    damage = [f"{medium.label}: superblock: {state}"]
    if votes:
        named = VolumeHeader(*votes.most_common(1)[0][0])  # the first of those with the most votes
        damage = [] if superblock == named else damage
        is_new = False
    else:
        named = VolumeHeader(uuid.uuid4().bytes, settings.segment_bytes)
        is_new = not medium.has_blocks()
        if is_new and not settings.writable:
            raise FormatError(medium.label, "there is no store here", hint="check the path")
        damage = [] if is_new and page is None else damage
    settings = replace(settings, segment_bytes=named.segment_bytes)
    slots_max = _slots_max(medium, settings)
    return Mounted(medium, named, settings, slots_max, is_new, damage)


def _slots_max(medium: Medium, settings: MountSettings) -> int:
    """The number of segments that the volume may have. Raises DriveError if they are too few."""
    segment_bytes = settings.segment_bytes
    slots = min(settings.capacity_bytes // segment_bytes, medium.slots_max(segment_bytes))
    if settings.writable and slots < _SLOTS_MIN:
        raise DriveError(
            f"{settings.tier}.capacity",
            f"{medium.label}: room for {slots} segments of {format_bytes(segment_bytes)}, "
            f"at least {_SLOTS_MIN} needed",
            hint=f"raise {settings.tier}.capacity, or remove the store and choose a smaller "
            f"{settings.tier}.segment",
        )
    return slots
