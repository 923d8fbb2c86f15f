"""Simulates a power cut: what it leaves of files, in one process and in milliseconds.

    files = PowerFiles(random.Random(seed))
    store = assemble(config, files=files)
    ...                                   # put, flush, remove, drain: on real files
    files.cut()                           # from any thread, at any moment
    store.close()                         # quick: every operation fails now and changes nothing
    store = assemble(config, files=PowerFiles(random.Random(seed + 1)))

Reads see every write at once, as from a page cache. Unsynced writes are recorded together with
the data they replace, and `cut` leaves a state that a power cut could leave:

- a page of a write is kept, lost, or torn between two sectors; of several writes to one page any
  may be the last that arrived; pages are independent of each other and of their order;
- a new size of a file is kept or lost;
- a name that was made, renamed or unlinked is kept or lost, unless its directory was synced since.

The share `late` of the writes fails with ETIMEDOUT and stays with the kernel. Such a write arrives
during a later operation, when its `Pending` is waited for, or at the cut, and overwrites what was
written and synced there meanwhile; or it is lost.

`sync` and `sync_directory` do not reach the disk itself, so that cuts are quick. `seams` names the
ones that count: a test that removes one shows that a store needs it.
"""

import contextlib
import errno
import os
import random
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from kvdepot.format.record import PAGE
from kvdepot.io.files import EngineKind, Files, Ops, Pending, io_ops
from kvdepot.native import SYNC, WRITE
from kvdepot.native.memory import view_at

Seam = Literal["sync", "sync_directory"]
FileId = tuple[int, int]
"""Device and inode."""

_SECTOR: Final = 512
_KEPT_SHARES: Final = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Shares of a file's unsynced pages that survive; a cut draws one for each file."""
_TORN: Final = 0.1
_LET_GO: Final = 0.02
"""Probability that a late write arrives during another operation."""
_GRAVES: Final = ".unsynced"


@dataclass(slots=True)
class UnsyncedFile:
    """The state of a file that a power cut may lose."""

    fd: int
    """A separate descriptor, through the page cache."""
    size: int
    """The size at the last sync."""
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    """Versions of each page: the durable one, then those written since."""

    def write(self, offset: int, data: bytes) -> None:
        """Write pages, and record the versions they replace."""
        assert offset % PAGE == 0
        for start in range(0, len(data), PAGE):
            page, new = (offset + start) // PAGE, data[start : start + PAGE].ljust(PAGE, b"\0")
            if page not in self.versions:
                self.versions[page] = [os.pread(self.fd, PAGE, page * PAGE).ljust(PAGE, b"\0")]
            self.versions[page].append(new)
        os.pwrite(self.fd, data, offset)

    def lose(self, rng: random.Random) -> None:
        """Restore a random state of the pages that a power cut could leave."""
        regular = stat.S_ISREG(os.fstat(self.fd).st_mode)
        if regular and rng.random() < 0.5:
            os.ftruncate(self.fd, max(self.size, 0))
        size, share = os.fstat(self.fd).st_size, rng.choice(_KEPT_SHARES)
        for page, versions in self.versions.items():
            if regular and page * PAGE >= size:
                continue
            at = rng.randrange(1, len(versions)) if rng.random() < share else 0
            left = versions[at]
            if at and rng.random() < _TORN:
                cut = rng.randrange(1, PAGE // _SECTOR) * _SECTOR
                left = versions[at][:cut] + versions[at - 1][cut:]
            os.pwrite(self.fd, left, page * PAGE)


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of a directory: `name` becomes this file, or none."""

    name: str
    file: FileId | None
    before: str = ""
    """The previous name of a renamed file."""


@dataclass(slots=True)
class UnsyncedNames:
    """The names in a directory that a power cut may lose, also after the directory was moved."""

    fd: int
    """A separate descriptor."""
    durable: dict[str, FileId] = field(default_factory=dict)
    """The state at the last sync of the names that changed since."""
    changes: list[NameChange] = field(default_factory=list)
    graves: dict[FileId, Path] = field(default_factory=dict)
    """Temporary paths of files without a name."""

    @property
    def path(self) -> Path:
        """The directory, by descriptor, because it may have been renamed."""
        return Path(f"/proc/self/fd/{self.fd}")

    def bury(self, name: str) -> None:
        """Keep the file of a name that is about to be removed, because the cut may restore it."""
        path = self.path / name
        if not path.exists():
            return
        file = _path_id(path)
        self.note_durable(name, file)
        grave = self.path / _GRAVES / f"{file[1]}"
        grave.parent.mkdir(exist_ok=True)
        os.replace(path, grave)
        self.graves[file] = grave

    def note_durable(self, name: str, file: FileId) -> None:
        """Record a name before its removal; durable unless it was made since the last sync."""
        if not any(name in (change.name, change.before) for change in self.changes):
            self.durable[name] = file

    def clear_graves(self) -> None:
        for grave in self.graves.values():
            grave.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / _GRAVES).rmdir()

    def lose(self, rng: random.Random) -> None:
        """Apply a random part of the changes, as a power cut could leave them."""
        if not os.fstat(self.fd).st_nlink:  # a directory that was removed has no names
            return
        share = rng.choice(_KEPT_SHARES)
        wanted: dict[str, FileId | None] = dict(self.durable)
        for change in self.changes:
            wanted.setdefault(change.name, None)
            if rng.random() >= share:
                continue
            wanted[change.name] = change.file
            if change.before and wanted.get(change.before) == change.file:
                wanted[change.before] = None
        found = {_path_id(path): path for path in self.path.iterdir() if path.is_file()}
        found.update(self.graves)
        there = {name: file for name, file in wanted.items() if file is not None and file in found}
        spare = self.path / _GRAVES
        spare.mkdir(exist_ok=True)
        for path in (self.path / name for name in wanted):
            if path.exists():
                grave = spare / f"{_path_id(path)[1]}"
                found[_path_id(path)] = grave
                os.replace(path, grave)
        for name, file in there.items():
            if not (self.path / name).exists():
                os.link(found[file], self.path / name)
        for grave in spare.iterdir():
            grave.unlink()
        spare.rmdir()


@dataclass(eq=False, slots=True)
class LateWrites:
    """Writes that missed their deadline. Implements io.files.Pending."""

    files: "PowerFiles"
    writes: list[tuple[int, int, bytes]]
    """A separate descriptor, an offset, the bytes."""

    def wait(self, timeout_s: float) -> bool:
        return self.files.let_go(self, now=timeout_s > 0)


class PowerFiles(Files):
    """Files whose power can be cut once. Thread-safe; changes of a disk are serialized."""

    def __init__(
        self,
        rng: random.Random,
        kind: EngineKind = "auto",
        depth: int = 32,
        timeout_s: float = 10.0,
        *,
        late: float = 0.0,
        seams: frozenset[Seam] = frozenset({"sync", "sync_directory"}),
    ) -> None:
        super().__init__(kind, depth, timeout_s)
        self._rng = rng
        self.late = late
        """Share of the writes that miss their deadline."""
        self._seams = seams
        self._lock = threading.RLock()
        self._files: dict[FileId, UnsyncedFile] = {}
        self._names: dict[FileId, UnsyncedNames] = {}
        """Keyed by directory."""
        self._late: list[LateWrites] = []
        self.off = False
        """The power was cut."""
        self.writes = 0
        """Number of operations that changed the disk, for choosing the moment of a cut."""
        self.cut_at = 0
        """The power is cut automatically before the write with this number; 0: never."""

    def cut(self) -> None:
        """Cut the power. Every later operation fails with EIO."""
        with self._lock:
            if self.off:
                return
            self.off = True
            try:
                for unsynced in self._files.values():
                    unsynced.lose(self._rng)
                for fd, offset, data in (write for late in self._late for write in late.writes):
                    if self._rng.random() < 0.5:
                        os.pwrite(fd, data, offset)
                for names in self._names.values():
                    names.lose(self._rng)
            except OSError as error:  # a store would take it for the disk's
                raise AssertionError(f"the model of a power cut is wrong: {error}") from error
            finally:
                self._close_own()

    def _close_own(self) -> None:
        """Close the descriptors that are not the store's."""
        fds = [fd for late in self._late for fd, _, _ in late.writes]
        fds += [unsynced.fd for unsynced in self._files.values()]
        fds += [names.fd for names in self._names.values()]
        for fd in fds:
            os.close(fd)
        self._files.clear()
        self._names.clear()
        self._late.clear()

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        try:
            if not ((ops["opcode"] == WRITE) | (ops["opcode"] == SYNC)).any():
                self._check()
                return super().run(ops, timeout_s)
            with self._changing():
                return self._run_writes(ops, timeout_s)
        except OSError:
            ops["result"] = -errno.EIO
            return None

    def _run_writes(self, ops: Ops, timeout_s: float) -> Pending | None:
        late = LateWrites(self, [])
        results = []
        for op in ops:
            fd, offset, nbytes = int(op["fd"]), int(op["offset"]), int(op["nbytes"])
            if int(op["opcode"]) == WRITE:
                data = bytes(view_at(int(op["address"]), nbytes))
                results.append(self._write(fd, offset, data, late))
            elif int(op["opcode"]) == SYNC:
                self._synced(fd)
                results.append(0)
            else:
                results.append(1)
        rest = ops[[result == 1 for result in results]]
        pending = super().run(rest, timeout_s) if len(rest) else None
        done = iter(rest["result"].tolist())
        ops["result"] = [next(done) if result == 1 else result for result in results]
        assert pending is None, "reads and writes of one batch are never late together"
        if not late.writes:
            return None
        self._late.append(late)
        return late

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        self._check()
        return super().read(fd, offset, nbytes)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        with self._changing():
            late = LateWrites(self, [])
            code = -self._write(fd, offset, data, late)
            if late.writes:
                self._late.append(late)
                self.keep(late, _write_op(fd, offset, len(data)), data)
        if code:
            raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        with self._changing():
            self._synced(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._changing():
            self._unsynced(fd)
            os.ftruncate(fd, nbytes)

    def allocate(self, fd: int, nbytes: int) -> None:
        with self._changing():
            self._unsynced(fd)
            super().allocate(fd, nbytes)

    def open_file(self, path: Path, flags: int) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            self._check()
            return super().open_file(path, flags)
        with self._changing():
            names = self._unsynced_names(path.parent)
            path = names.path / path.name
            known = path.exists()
            fd = super().open_file(path, flags & ~os.O_TRUNC)
            if not known:
                names.changes.append(NameChange(path.name, _file_id(fd)))
            if flags & os.O_TRUNC:
                self._unsynced(fd)
                os.ftruncate(fd, 0)
            return fd

    def open_directory(self, path: Path) -> int:
        self._check()
        return super().open_directory(path)

    def open_device(self, path: Path, flags: int) -> int:
        self._check()
        return super().open_device(path, flags)

    def make_directory(self, path: Path) -> None:
        self._check()
        super().make_directory(path)

    def unlink(self, path: Path) -> None:
        with self._changing():
            try:
                names = self._unsynced_names(path.parent)
            except FileNotFoundError:
                return
            if (names.path / path.name).exists():
                names.bury(path.name)
                names.changes.append(NameChange(path.name, None))

    def replace(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        with self._changing():
            names = self._unsynced_names(target.parent)
            moved = _path_id(names.path / source.name)
            names.bury(target.name)
            names.note_durable(source.name, moved)
            names.changes.append(NameChange(target.name, moved, source.name))
            super().replace(names.path / source.name, names.path / target.name)

    def sync_directory(self, fd: int) -> None:
        with self._changing():
            if "sync_directory" not in self._seams:
                return
            names = self._names.pop(_file_id(fd), None)
            if names is not None:
                names.clear_graves()
                os.close(names.fd)

    def close(self) -> None:
        super().close()
        with self._lock:
            if not self._holders and not self.off:  # the kernel has written it all down
                for late in list(self._late):
                    self._land(late)
                for names in self._names.values():
                    names.clear_graves()
                self._close_own()

    def let_go(self, late: LateWrites, *, now: bool) -> bool:
        """True if late writes have ended. With `now`, end them."""
        with self._lock:
            if late in self._late and now:
                self._land(late)
            return late not in self._late

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Run an operation that changes the disk. The power may be cut before it."""
        with self._lock:
            self._check()
            self.writes += 1
            if self.writes == self.cut_at:
                self.cut()
                self._check()
            for late in [one for one in self._late if self._rng.random() < _LET_GO]:
                self._land(late)
            yield

    def _check(self) -> None:
        if self.off:
            raise OSError(errno.EIO, "the power is off")

    def _write(self, fd: int, offset: int, data: bytes, late: LateWrites) -> int:
        """Write now or late. Returns the result of the operation."""
        if self.late and self._rng.random() < self.late:
            late.writes.append((_reopened(fd), offset, data))
            return -errno.ETIMEDOUT
        try:
            self._unsynced(fd).write(offset, data)
        except OSError as error:
            return -(error.errno or errno.EIO)
        return 0

    def _land(self, late: LateWrites) -> None:
        """Carry out late writes."""
        self._late.remove(late)
        for fd, offset, data in late.writes:
            self._unsynced(fd).write(offset, data)
            os.close(fd)

    def _unsynced(self, fd: int) -> UnsyncedFile:
        """The unsynced state of a file that is about to change."""
        file_id = _file_id(fd)
        if file_id not in self._files:
            self._files[file_id] = UnsyncedFile(_reopened(fd), os.fstat(fd).st_size)
        return self._files[file_id]

    def _synced(self, fd: int) -> None:
        if "sync" in self._seams:
            unsynced = self._files.pop(_file_id(fd), None)
            if unsynced is not None:
                os.close(unsynced.fd)

    def _unsynced_names(self, directory: Path) -> UnsyncedNames:
        """The unsynced names of a directory that is about to change."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        names = self._names.setdefault(_file_id(fd), UnsyncedNames(fd))
        if names.fd != fd:
            os.close(fd)
        return names


def _write_op(fd: int, offset: int, nbytes: int) -> Ops:
    ops = io_ops(1)
    ops["fd"], ops["opcode"], ops["offset"], ops["nbytes"] = fd, WRITE, offset, nbytes
    return ops


def _file_id(fd: int) -> FileId:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _path_id(path: Path) -> FileId:
    status = path.stat(follow_symlinks=False)
    return status.st_dev, status.st_ino


def _reopened(fd: int) -> int:
    """The same file through the page cache."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
