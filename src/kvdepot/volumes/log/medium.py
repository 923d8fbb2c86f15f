"""Where segments live: files in a directory, or extents of a raw block device.

Both look the same from above: numbered slots of one size, each a descriptor and a base offset.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Protocol

from kvdepot.core.clock import Clock, WallClock
from kvdepot.core.private import FILE_MODE, check_file_status, check_folder_status, check_link
from kvdepot.errors import (
    ConfigError,
    DriveError,
    FormatError,
    StoreBusyError,
    UnsafePathError,
)
from kvdepot.format.metadata import MAGIC as METADATA_MAGIC
from kvdepot.format.record import PAGE
from kvdepot.format.segment import HEADER_MAGIC, SUPERBLOCK_MAGIC, Superblock, pack_slots
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import LOST_AND_FOUND, Files
from kvdepot.volumes.log.metadata import COPIES, CopyPlace, ExtentCopy, FileCopy

DirectIo = Literal["auto", "always", "never"]
_METADATA_MIN: Final = 1 << 20
_METADATA_SHARE: Final = 32
"""The metadata log takes one part in so many of a drive at most, in each copy."""
_SEGMENT: Final = re.compile(r"segment-(\d{6})\.kvs")
_LOCK: Final = "lock"
_KEPT: Final = ("superblock", *COPIES)
_PARTIAL: Final = tuple(f"{name}.new" for name in _KEPT)
_NAMES: Final = frozenset({_LOCK, *_KEPT, *_PARTIAL})
_HOLDER: Final = re.compile(rb"\d*\n?\0*")
"""What a lock file of ours holds: a process, or nothing yet."""
_FOREIGN: Final = (
    (0x1FE, b"\x55\xaa"),
    (0x200, b"EFI PART"),
    (0x200, b"LABELONE"),
    (0x438, b"\x53\xef"),
    (0, b"XFSB"),
    (0, b"LUKS\xba\xbe"),
    (0, b"bcachefs"),
    (0xFF6, b"SWAPSPACE2"),
    (0x1000, b"\xfc\x4e\x2b\xa9"),
    (0x8001, b"CD001"),
    (0x10040, b"_BHRfS_M"),
)
"""Where partition tables, filesystems, encryption, volume managers and swap say what they are."""
_FOREIGN_BYTES: Final = 68 << 10
TELLS_SIZE: Final = b"segment_bytes"
"""A damaged page with this in it was a superblock."""


class Medium(Protocol):
    """Numbered slots of `segment_bytes` each. Methods raise OSError for faults of the medium."""

    label: str
    direct: bool

    def read_superblock(self) -> bytes | None:
        """The superblock's page; None where there is none yet."""

    def write_superblock(self, superblock: Superblock) -> None:
        """Put it in force, whole or not at all."""

    def open_slots(self, segment_bytes: int) -> list[int]:
        """Open what exists; the numbers of the slots that do."""

    def slots_max(self, segment_bytes: int) -> int:
        """How many slots the medium itself could have; the caller's capacity may be lower."""

    def create(self, slot: int, segment_bytes: int) -> None:
        """Make a slot. Afterwards `extent` works, or OSError and nothing is left behind."""

    def remove(self, slot: int) -> None:
        """Give a slot's space back to the medium."""

    def extent(self, slot: int) -> tuple[int, int]:
        """Descriptor and base offset of a slot; after `close`, a descriptor that is none."""

    def metadata_copies(self, segment_bytes: int, slots_max: int) -> list[CopyPlace]:
        """Where the two copies of the metadata log are, or would be."""

    def intact(self) -> bool:
        """False when the medium was taken away underfoot."""

    def complete(self) -> bool:
        """False when slots were taken away underfoot one by one. Looks at each of them."""

    def restorable(self) -> bool:
        """Whether a medium that was taken away can be opened anew now."""

    def close(self) -> None:
        """Close all files and give up the lock. Reads that come later fail. May be called twice."""


@dataclass(frozen=True, slots=True)
class MountSettings:
    """How drives are opened and used."""

    capacity_bytes: int
    segment_bytes: int
    """Of a new drive; one that holds a store keeps its own."""
    direct_io: DirectIo = "auto"
    fsync: str = "flush"
    write_timeout_s: float = 10.0
    pauses: RetryPauses = field(default_factory=RetryPauses)
    writable: bool = True
    tier: str = "ssd"
    daily_bytes: int = 0
    """What may be written to each drive in a day; 0: no limit."""
    wall: Clock = field(default_factory=WallClock)
    profile: Literal["auto", "always", "never"] = "auto"
    """Whether volumes are measured: see volumes.log.measuring."""
    contiguous_bytes: int = 0
    """How much of a prompt should lie in one piece; 0: seeks cost nothing."""
    any_owner: bool = False
    """Whether the folder may be another user's: for who looks, and does not serve from it."""


def known_superblock(medium: Medium) -> Superblock | None:
    """What the medium says of itself; None where that is missing, damaged or of another format."""
    page = medium.read_superblock()
    found = Superblock.parse(page) if page is not None else None
    return found if isinstance(found, Superblock) else None


def open_medium(path: Path, files: Files, settings: MountSettings) -> Medium:
    """The medium at `path`: a block device, or a directory (made if its parent exists)."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFDIR
    except OSError as error:
        reason = f"cannot use {path}: {error.strerror}"
        raise DriveError(f"{settings.tier}.path", reason) from error
    if stat.S_ISBLK(mode):
        return DeviceMedium(path, files, settings)
    if not stat.S_ISDIR(mode):
        reason = f"{path} is neither a directory nor a block device"
        raise DriveError(f"{settings.tier}.path", reason)
    return DirectoryMedium(path, files, settings)


def _lock(fd: int, label: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        os.lseek(fd, 0, os.SEEK_SET)
        holder = (
            os.read(fd, 32).decode(errors="replace").strip()
            if stat.S_ISREG(os.fstat(fd).st_mode)
            else ""
        )
        raise StoreBusyError(label, f"process {holder}" if holder else "another process") from error


class DirectoryMedium:
    """One file a slot, of fixed size, reused in place."""

    def __init__(self, path: Path, files: Files, settings: MountSettings) -> None:
        self.label = str(path)
        self._path = path
        self._files = files
        self._tier = settings.tier
        self._writable = settings.writable
        self._any_owner = settings.any_owner
        self._fds: dict[int, int] = {}
        self._lock_fd = -1
        self._directory_fd = -1
        self._store = ""
        if self._writable:
            self._prepare()
        elif not path.is_dir():
            raise FormatError(self.label, "there is no store here")
        else:
            self._directory_fd = files.open_directory(path)
            try:
                self._check_folder()
            except UnsafePathError:
                self._unlock()
                raise
        self._device = os.fstat(self._directory_fd).st_dev
        self.direct = settings.direct_io != "never" and self._accepts_direct()
        if settings.direct_io == "always" and not self.direct:
            self.close()
            raise ConfigError(
                f"{settings.tier}.direct_io",
                f"{path} does not support O_DIRECT",
                hint='direct_io = "auto"',
            )

    def read_superblock(self) -> bytes | None:
        try:
            return self._first_page("superblock")
        except FileNotFoundError:
            return None

    def write_superblock(self, superblock: Superblock) -> None:
        files, partial = self._files, self._path / "superblock.new"
        fd = files.open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            files.write(fd, 0, superblock.pack())
            files.sync(fd)
        finally:
            os.close(fd)
        files.replace(partial, self._path / "superblock")
        files.sync_directory(self._directory_fd)

    def open_slots(self, segment_bytes: int) -> list[int]:
        slots = []
        for name in sorted(os.listdir(self._path)):
            if found := _SEGMENT.fullmatch(name):
                slot = int(found[1])
                try:
                    self._fds[slot] = self._open(slot, 0)
                except FileNotFoundError:
                    if self._writable:
                        raise
                    continue  # the writer beside us has just removed it
                if self._writable and os.fstat(self._fds[slot]).st_size != segment_bytes:
                    self._files.truncate(self._fds[slot], segment_bytes)
                    self._files.sync(self._fds[slot])
                slots.append(slot)
        self._store = self._store_there()
        if self._writable:
            self._register()
        return slots

    def slots_max(self, segment_bytes: int) -> int:
        return 10**6

    def create(self, slot: int, segment_bytes: int) -> None:
        fd = self._open(slot, os.O_CREAT | os.O_EXCL)
        self._fds[slot] = fd
        try:
            self._files.allocate(fd, segment_bytes)
            self._files.sync(fd)
            self._files.sync_directory(self._directory_fd)
            self._register()
        except OSError:
            del self._fds[slot]
            os.close(fd)
            self._files.unlink(self._name(slot))
            raise

    def remove(self, slot: int) -> None:
        fd = self._fds.pop(slot)
        try:
            self._register()
            self._files.unlink(self._name(slot))
            self._files.sync_directory(self._directory_fd)
        except OSError:
            self._fds[slot] = fd
            raise
        self._files.descriptors.give_up(fd)

    def extent(self, slot: int) -> tuple[int, int]:
        return self._fds.get(slot, -1), 0

    def metadata_copies(self, segment_bytes: int, slots_max: int) -> list[CopyPlace]:
        limit = max(_METADATA_MIN, segment_bytes * slots_max // _METADATA_SHARE)
        return [
            FileCopy(self._path / name, self._files, limit, writable=self._writable)
            for name in COPIES
        ]

    def intact(self) -> bool:
        try:
            ours = os.fstat(self._lock_fd if self._writable else self._directory_fd)
            there = os.stat(self._path / _LOCK if self._writable else self._path)
        except OSError:
            return False
        return (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev)

    def complete(self) -> bool:
        try:
            return all(os.fstat(fd).st_nlink for fd in list(self._fds.values()))
        except OSError:
            return False

    def restorable(self) -> bool:
        """True: the directory or its parent is there on the same disk, or the same store is there
        on a disk that the system calls by another name now.
        """
        for place in (self._path, self._path.parent):
            try:
                same_disk = place.stat().st_dev == self._device
            except OSError:
                continue
            return same_disk or bool(self._store and self._store == self._store_there())
        return False

    def _store_there(self) -> str:
        try:
            found = known_superblock(self)
        except OSError:
            return ""
        return found.store if found is not None else ""

    def first_pages(self) -> Iterator[bytes]:
        for path in sorted(self._path.glob("segment-*.kvs")):
            yield self._first_page(path.name)

    def _first_page(self, name: str) -> bytes:
        fd = self._open_own(self._path / name, os.O_RDONLY)
        try:
            return bytes(self._files.read(fd, 0, PAGE))
        finally:
            os.close(fd)

    def close(self) -> None:
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            self._files.descriptors.give_up(fd)
        self._unlock()

    def _unlock(self) -> None:
        for fd in (self._lock_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._directory_fd = -1

    def _register(self) -> None:
        """Write down which slots there are, so that a check can tell when a file is gone.

        After a file is made and before one is removed: a crash leaves a file too many at most.
        """
        known, slots = known_superblock(self), pack_slots(self._fds)
        if known is not None and known.slots != slots:
            self.write_superblock(replace(known, slots=slots))

    def _prepare(self) -> None:
        try:
            self._files.make_directory(self._path)
            self._directory_fd = self._files.open_directory(self._path)
            self._check_folder()
            self._refuse_others()
            self._lock_fd = self._open_own(self._path / _LOCK, os.O_RDWR | os.O_CREAT)
        except (UnsafePathError, FormatError):
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            raise DriveError(
                f"{self._tier}.path",
                f"cannot write to {self._path}: {error.strerror}",
                hint="make the parent directory, check permissions, or open with mode='r'",
            ) from error
        try:
            _lock(self._lock_fd, self.label)
            os.truncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
            for name in _PARTIAL:
                self._files.unlink(self._path / name)
        except StoreBusyError:
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            reason = f"cannot write to {self._path}: {error.strerror}"
            raise DriveError(f"{self._tier}.path", reason) from error

    def _refuse_others(self) -> None:
        """Raises FormatError for a folder with files that are not a store's; nothing was touched.

        A store is known by any one of its files, since the others may be damaged. Where none tells,
        as after a crash while the first were made, there are no other names than a store's, and
        the lock file, which is made first, names a process or nothing.
        """
        names = set(os.listdir(self._path)) - {LOST_AND_FOUND}
        ours = {name for name in names if name in _NAMES or _SEGMENT.fullmatch(name)}
        if not names or any(map(self._is_of_a_store, sorted(ours))):
            return
        if names == ours and _LOCK in ours and _HOLDER.fullmatch(self._start_of(_LOCK)):
            return
        raise FormatError(
            self.label,
            f"is not empty and not a kvdepot store: it has {min(names - ours or names)!r}",
            hint=f"give {self._tier}.path a folder of its own, such as {self._path / 'kvdepot'}",
        )

    def _is_of_a_store(self, name: str) -> bool:
        """Whether a file is a superblock, a segment or metadata, whatever it is called."""
        start = self._start_of(name)
        segment = start[8:12] == HEADER_MAGIC.to_bytes(4, "little")
        superblock = start[8:16] == SUPERBLOCK_MAGIC or TELLS_SIZE in start
        return segment or superblock or start.startswith(METADATA_MAGIC)

    def _start_of(self, name: str) -> bytes:
        """The first page of a file that may be another program's; nothing of what is no file."""
        try:
            fd = self._files.open_file(self._path / name, os.O_RDONLY)
        except OSError:
            return b""
        try:
            return bytes(self._files.read(fd, 0, PAGE))
        finally:
            os.close(fd)

    def _accepts_direct(self) -> bool:
        probe = self._path / _LOCK
        try:
            if probe.exists():
                fd = self._files.open_file(probe, os.O_RDONLY | os.O_DIRECT)
            else:
                fd = self._files.open_directory(self._path, os.O_DIRECT)
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
        """Open a file of ours. UnsafePathError for one that is, or may be changed by, another's."""
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

    def _check_folder(self) -> None:
        if not self._any_owner:
            check_link(self._path)
            check_folder_status(self._path, os.fstat(self._directory_fd))

    def _name(self, slot: int) -> Path:
        return self._path / f"segment-{slot:06d}.kvs"


class DeviceMedium:
    """Extents of a block device: the superblock in the first page, then the metadata log in the
    place of a segment, slot n at (n + 1) segments.
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
            if error.errno == errno.EBUSY:
                raise StoreBusyError(
                    self.label, "the system or another process (mounted?)"
                ) from error
            reason = f"cannot open {path}: {error.strerror}"
            raise DriveError(f"{settings.tier}.path", reason) from error
        files.attach(self._fd, self.label)
        self._size = os.lseek(self._fd, 0, os.SEEK_END)
        if settings.writable:
            try:
                _lock(self._fd, self.label)
            except StoreBusyError:
                self.close()
                raise

    def read_superblock(self) -> bytes | None:
        page = bytes(self._files.read(self._fd, 0, PAGE))
        return page if any(page) else None

    def write_superblock(self, superblock: Superblock) -> None:
        self._files.write(self._fd, 0, superblock.pack())
        self._files.sync(self._fd)

    def open_slots(self, segment_bytes: int) -> list[int]:
        self._segment_bytes = segment_bytes
        return list(range(self.slots_max(segment_bytes)))

    def slots_max(self, segment_bytes: int) -> int:
        return max(0, self._size // segment_bytes - 1)

    def create(self, slot: int, segment_bytes: int) -> None:
        if slot >= self.slots_max(segment_bytes):
            raise OSError(errno.ENOSPC, "the device is full")

    def remove(self, slot: int) -> None:
        """An extent of a device stays where it is."""

    def extent(self, slot: int) -> tuple[int, int]:
        return self._fd, (slot + 1) * self._segment_bytes

    def metadata_copies(self, segment_bytes: int, slots_max: int) -> list[CopyPlace]:
        del slots_max
        area = (segment_bytes - PAGE) // (2 * len(COPIES)) // PAGE * PAGE
        return [
            ExtentCopy(name, self._files, self._fd, PAGE + 2 * number * area, area)
            for number, name in enumerate(COPIES)
        ]

    def intact(self) -> bool:
        return self._fd >= 0

    def is_foreign(self) -> bool:
        """Whether a filesystem, a partition table or the like is on the device."""
        start = bytes(self._files.read(self._fd, 0, _FOREIGN_BYTES))
        return any(start[at : at + len(sign)] == sign for at, sign in _FOREIGN)

    def blank(self, nbytes: int) -> bool:
        """Whether the device begins with zeros, as no filesystem or partition table does."""
        return not any(self._files.read(self._fd, 0, nbytes))

    def complete(self) -> bool:
        return True

    def restorable(self) -> bool:
        return False

    def close(self) -> None:
        if self._fd >= 0:
            self._files.descriptors.give_up(self._fd)
            self._fd = -1
