"""Digests of every byte of model files, kept by device, inode, size and times of the file.

A file that has changed after the start of the process that uses it may differ from what the process
has loaded. It is refused.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kvdepot.core.keys import encode
from kvdepot.core.private import make_private_folder, open_private_file
from kvdepot.errors import ModelError, UnsafePathError

_PART_BYTES: Final = 64 << 20
_THREADS: Final = 4
_SETTLED_NS: Final = 2 * 10**9
"""A file that was written within this time may be written again without new times."""
FileFacts = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of content and inode."""


def digest_of_files(
    folder: Path, files: Sequence[Path], memo: Path | None, not_after_ns: int | None, user: str
) -> str:
    """A digest of the names and all bytes of files in a folder. Files in `memo` are not read.

    ModelError if a file changes meanwhile, or has changed after `not_after_ns`, the start of the
    engine named by `user`.
    """
    with _open_memo(memo) as known:
        _check_unchanged(folder, files, not_after_ns, user)
        digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-weights2")
        for path in files:
            digest.update(encode((path.name, _known_digest(path, known))))
        _check_unchanged(folder, files, not_after_ns, user)
    return digest.hexdigest()


def _check_unchanged(folder: Path, files: Sequence[Path], limit_ns: int | None, user: str) -> None:
    """A file, a link to one, or the folder itself may have been replaced."""
    for path in (folder, *files):
        times = (path.lstat().st_ctime_ns, path.stat().st_ctime_ns)
        if limit_ns is not None and max(times) > limit_ns:
            raise ModelError(f"{path} has changed since {user} was started")


def _known_digest(path: Path, known: dict[str, str]) -> str:
    facts = file_facts(path)
    name = " ".join(map(str, facts))
    if name in known:
        return known[name]
    digest = file_digest(path)
    if file_facts(path) != facts:
        raise ModelError(f"{path} is being written to")
    if time.time_ns() - max(facts[3:]) > _SETTLED_NS:
        known[name] = digest
    return digest


def file_facts(path: Path) -> FileFacts:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def file_digest(path: Path) -> str:
    """A digest of every byte of a file, read by several threads."""
    size = path.stat().st_size

    def part(offset: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return hashlib.blake2b(file.read(_PART_BYTES), digest_size=32).digest()

    with ThreadPoolExecutor(_THREADS, "kvdepot-weights") as threads:
        parts = b"".join(threads.map(part, range(0, max(size, 1), _PART_BYTES)))
    return hashlib.blake2b(encode((size, parts)), digest_size=32).hexdigest()


@contextlib.contextmanager
def _open_memo(memo: Path | None) -> Iterator[dict[str, str]]:
    """The digests in the file `memo`, for one process at a time, so that the others need not read
    the same files. Changes are written at the end of the scope.

    Without `memo`, or if it cannot be read or written, the digests are kept for this scope alone.
    Other users must not write to it: they could give weights a wrong identity.
    """
    with contextlib.ExitStack() as stack:
        fd = -1
        with contextlib.suppress(OSError, UnsafePathError):
            if memo is not None:
                make_private_folder(memo.parent)
                fd = open_private_file(memo, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
        known = _read_memo(fd) if fd >= 0 else {}
        before = dict(known)
        try:
            yield known
        finally:
            if fd >= 0 and known != before:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, json.dumps(known, indent=0).encode(), 0)


def _read_memo(fd: int) -> dict[str, str]:
    try:
        known = json.loads(os.pread(fd, os.fstat(fd).st_size, 0) or b"{}")
    except ValueError:
        return {}
    pairs = known.items() if isinstance(known, dict) else ()
    return {name: digest for name, digest in pairs if isinstance(digest, str)}


def process_start_ns(process: int | None = None) -> int:
    """The start of a process, by default this one, in nanoseconds since 1970."""
    stat = Path("/proc") / str(process or "self") / "stat"
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
