"""All I/O of drives. Batches run in the native engine; single pages and changes of directories are
system calls.

Tests replace `Files` to put faults, delays, kills and power cuts between a drive and its disk
(kvdepot.testing.faults, kvdepot.testing.power). Volumes make no other system calls that write.
"""

import errno
import itertools
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvdepot.format.record import round_up
from kvdepot.native import IO_DTYPE, SYNC, WRITE, PendingOps, address_of, open_engine

Pending = PendingOps
"""I/O that missed its deadline. Its memory is in use until `wait` returns True."""
EngineKind = Literal["auto", "uring", "threads", "python"]
Ops = npt.NDArray[Any]
LOST_AND_FOUND: Final = "lost+found"
"""The folder that an empty ext4 filesystem has."""


def io_ops(count: int) -> Ops:
    """An empty batch for `Files.run`."""
    return np.zeros(count, dtype=IO_DTYPE)


def aligned(nbytes: int) -> memoryview:
    """Fresh page-aligned memory for direct I/O."""
    return memoryview(mmap.mmap(-1, round_up(max(nbytes, 1))))


class Descriptors:
    """Closes descriptors when no planned read or write uses them any more, so that their numbers
    are not reused too early. Thread-safe.

    Callers announce I/O (`use`) before they look up descriptors. `give_up` redirects a descriptor
    to /dev/null at once, so that its disk can be unmounted, and closes it when all I/O that was
    running at that moment has ended.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._users: dict[int, Pending | None] = {}
        """Running I/O by number, with operations that have missed their deadline."""
        self._given_up: list[tuple[int, int]] = []
        """Descriptors that were given up, each with a number that orders it with the I/O."""
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Announce that descriptors will be looked up and used until `end`."""
        number = next(self._numbers)
        self._users[number] = None
        return number

    def end(self, number: int, pending: Pending | None = None) -> None:
        """End the use with this number, except for pending operations."""
        if pending is not None:
            self._users[number] = pending
            self._forget_ended()
        else:
            del self._users[number]
        if self._given_up:
            self._close_unused()

    @contextmanager
    def use(self) -> Iterator[None]:
        number = self.begin()
        try:
            yield
        finally:
            self.end(number)

    def give_up(self, fd: int) -> None:
        """Close the file of a descriptor now, and its number when it is not in use any more."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, fd, inheritable=False)
        os.close(null)
        with self._lock:
            self._given_up.append((next(self._numbers), fd))
        self._close_unused()

    def close(self) -> None:
        """Close all descriptors that were given up. No I/O may be under way."""
        with self._lock:
            left, self._given_up = self._given_up, []
        for _, fd in left:
            os.close(fd)

    def _forget_ended(self) -> None:
        for number, pending in list(self._users.items()):
            if pending is not None and pending.wait(0.0):
                self._users.pop(number, None)

    def _close_unused(self) -> None:
        self._forget_ended()
        with self._lock:
            oldest = min(list(self._users), default=next(self._numbers))
            unused = [fd for number, fd in self._given_up if number < oldest]
            self._given_up = [one for one in self._given_up if one[0] > oldest]
        for fd in unused:
            os.close(fd)


class SharedPending:
    """Late I/O for which several threads may wait."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._asked = threading.Lock()

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        if not self._asked.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            return self._pending.wait(max(0.0, deadline_s - time.monotonic()))
        finally:
            self._asked.release()


class Files:
    """Files and directories of drives. Raises OSError; batches report errors in their `result`
    column. New files can be used by their owner alone.
    """

    def __init__(self, kind: EngineKind = "auto", depth: int = 32, timeout_s: float = 10.0) -> None:
        self.engine = open_engine(kind, depth=depth)
        self._timeout_s = timeout_s
        self._missed: list[tuple[Pending, list[tuple[int, int, int]], object]] = []
        """I/O that missed its deadline, the ranges that it writes (descriptor, start, stop), and
        its memory."""
        self._missed_lock = threading.Lock()
        self._holders = 1
        self.descriptors = Descriptors()

    def open_file(self, path: Path, flags: int) -> int:
        """Open or create a regular file. ELOOP for a symbolic link, EINVAL for other kinds of file.
        Does not block for a FIFO or a device.
        """
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(fd, True)
        return fd

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_device(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC)

    def make_directory(self, path: Path) -> None:
        """Create a directory durably, unless it exists."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return
        parent_fd = self.open_directory(path.parent)
        try:
            self.sync_directory(parent_fd)
        finally:
            os.close(parent_fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file within its directory, replacing the file with that name."""
        os.replace(source, target)

    def sync_directory(self, fd: int) -> None:
        """Make created, renamed and deleted files of a directory durable."""
        os.fsync(fd)  # fdatasync need not write a new name

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def is_emulated(self, drive: str) -> bool:
        """True for an emulated drive (testing/emulation.py)."""
        return False

    def attach(self, fd: int, drive: str) -> None:
        """Associate a descriptor with a drive."""

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        """Execute a batch; see native.IoEngine.run. GIL released."""
        pending = self.engine.run(ops, timeout_s)
        return None if pending is None else SharedPending(pending)

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory to make transfers cheaper. False: the kernel refuses."""
        return self.engine.register(address, nbytes)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        """Read `nbytes` (whole pages) at `offset`; fewer at the end of the file."""
        buffer = aligned(nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [buffer[done:nbytes]], offset + done)
            if got <= 0:
                break
            done += got
        return buffer[:done]

    def write(self, fd: int, offset: int, data: bytes) -> None:
        """Write whole pages at `offset`, all or OSError; ETIMEDOUT when the medium stalls."""
        buffer = aligned(len(data))
        buffer[: len(data)] = data
        ops = io_ops(1)
        ops["fd"], ops["opcode"], ops["offset"] = fd, WRITE, offset
        ops["address"], ops["nbytes"] = address_of(buffer)[0], len(data)
        self._run_one(ops, buffer)

    def sync(self, fd: int) -> None:
        """Make earlier writes durable, or raise OSError; ETIMEDOUT on a stalled medium."""
        ops = io_ops(1)
        ops["fd"], ops["opcode"] = fd, SYNC
        self._run_one(ops, None)

    def keep(self, pending: Pending, ops: Ops, memory: object) -> None:
        """Keep the memory of pending operations alive until they end."""
        writes = ops[ops["opcode"] == WRITE]
        starts, stops = writes["offset"], writes["offset"] + writes["nbytes"]
        places = list(zip(writes["fd"].tolist(), starts.tolist(), stops.tolist(), strict=True))
        with self._missed_lock:
            self._missed.append((pending, places, memory))
        self.descriptors.end(self.descriptors.begin(), pending)

    def may_still_write(self, fd: int, start: int, stop: int) -> bool:
        """True if a write that missed its deadline may still change this range."""
        with self._missed_lock:
            self._missed = [part for part in self._missed if not part[0].wait(0.0)]
            return any(
                fd == written and start < last and first < stop
                for _, places, _ in self._missed
                for written, first, last in places
            )

    def _run_one(self, ops: Ops, memory: object) -> None:
        pending = Files.run(self, ops, self._timeout_s)
        if pending is not None:
            self.keep(pending, ops, memory)
        code = -int(ops["result"][0])
        if code:
            raise OSError(code, os.strerror(code))

    def write_new(self, path: Path, data: bytes, room_bytes: int = 0) -> int:
        """Replace the file at `path` atomically and durably. Returns a descriptor, which the caller
        must close. Reserves `room_bytes` on the disk for the file.
        """
        partial = path.with_name(f"{path.name}.new")
        fd = self.open_file(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            if room_bytes:
                self.allocate(fd, round_up(room_bytes))
            self.write(fd, 0, data.ljust(round_up(len(data)), b"\0"))
            self.sync(fd)
            self.replace(partial, path)
            directory = self.open_directory(path.parent)
            try:
                self.sync_directory(directory)
            finally:
                os.close(directory)
        except OSError:
            self.descriptors.give_up(fd)
            raise
        return fd

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give a file its full size. Reserves the disk blocks if the file system can."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.truncate(fd, nbytes)

    def share(self) -> "Files":
        """Add a holder. The last holder that calls `close` closes the engine."""
        self._holders += 1
        return self

    def close(self) -> None:
        self._holders -= 1
        if not self._holders:
            self.engine.close()
            self.descriptors.close()


_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
