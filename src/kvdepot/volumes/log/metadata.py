"""The metadata log of one volume: every entry in two copies, both readable alone.

Entries are appended to both copies and are durable after `sync`. A log that has grown to twice
what it holds is written anew. If one copy is damaged, the other counts. If frames that were synced
are in neither copy, the log is not whole: what was removed may be among them, so that the blocks of
the volume are not served until `kvdepot check --repair`.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from kvdepot.core.metadata import TOMBSTONE_AGE_US, Metadata, MetaEntry
from kvdepot.format.metadata import (
    FRAMES_AT,
    LogContents,
    LogCopy,
    LogHeader,
    frame_bytes,
    merge_copies,
    pack_frame,
    pack_log,
)
from kvdepot.format.record import PAGE, round_up
from kvdepot.io.files import Files

COPIES: Final = ("metadata-a", "metadata-b")
"""File names of the two copies."""
_REWRITE_FROM: Final = 64 << 10
"""Room that a log has at least, reserved on the disk."""


class CopyPlace(Protocol):
    """Where one copy of the log lies. Methods raise OSError."""

    label: str
    limit_bytes: int
    """How long the log may become."""

    def read(self) -> list[bytes]:
        """What is there; a place with two areas has two candidates."""

    def replace(self, image: bytes, generation: int, room_bytes: int) -> None:
        """Put a whole log in the place of the one before, durably: the new one or the old. It has
        room to grow to `room_bytes` also on a disk that is full.
        """

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages into the log that is in force."""

    def sync(self) -> None:
        """What was written is durable."""

    def close(self) -> None:
        """Close the file. May be called twice."""


class FileCopy:
    """A copy in a file of its own, replaced by renaming."""

    def __init__(self, path: Path, files: Files, limit_bytes: int, *, writable: bool) -> None:
        self.label = path.name
        self.limit_bytes = limit_bytes
        self._path = path
        self._files = files
        self._writable = writable
        self._fd = -1

    def read(self) -> list[bytes]:
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            fd = self._files.open_file(self._path, flags)
        except FileNotFoundError:
            return []
        try:
            image = bytes(self._files.read(fd, 0, round_up(os.fstat(fd).st_size or 1)))
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd = fd
        return [image]

    def replace(self, image: bytes, generation: int, room_bytes: int) -> None:
        del generation  # renaming tells the new from the old
        partial = self._path.with_name(f"{self._path.name}.new")
        fd = self._files.open_file(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.allocate(fd, round_up(room_bytes))
            self._files.write(fd, 0, image.ljust(round_up(len(image)), b"\0"))
            self._files.sync(fd)
            self._files.replace(partial, self._path)
            directory = self._files.open_directory(self._path.parent)
            try:
                self._files.sync_directory(directory)
            finally:
                os.close(directory)
        except OSError:
            self._files.descriptors.give_up(fd)
            raise
        self.close()
        self._fd = fd

    def write(self, offset: int, data: bytes) -> None:
        self._files.write(self._fd, offset, data)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.descriptors.give_up(fd)


class ExtentCopy:
    """A copy in two areas of a device, used in turn: the header page, written last, decides."""

    def __init__(self, label: str, files: Files, fd: int, start: int, area_bytes: int) -> None:
        self.label = label
        self.limit_bytes = area_bytes
        self._files = files
        self._fd = fd
        self._areas = (start, start + area_bytes)
        self._start = start

    def read(self) -> list[bytes]:
        found = []
        for start in self._areas:
            header = LogHeader.parse(bytes(self._files.read(self._fd, start, PAGE)))
            if header is not None:
                found.append(bytes(self._files.read(self._fd, start, self.limit_bytes)))
                self._start = self._areas[header.generation % 2]
        return found

    def replace(self, image: bytes, generation: int, room_bytes: int) -> None:
        del room_bytes  # an area has all of it
        start = self._areas[generation % 2]
        if self._files.may_still_write(self._fd, start, start + self.limit_bytes):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        body = image[PAGE:]
        if body:
            self._files.write(self._fd, start + PAGE, body.ljust(round_up(len(body)), b"\0"))
            self._files.sync(self._fd)
        self._files.write(self._fd, start, image[:PAGE])
        self._files.sync(self._fd)
        self._start = start

    def write(self, offset: int, data: bytes) -> None:
        self._files.write(self._fd, self._start + offset, data)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        """The descriptor is the device's."""


class MetadataLog:
    """The log of one volume. Thread-safe. Methods that write raise OSError, ETIMEDOUT while another
    thread's write stalls.
    """

    def __init__(
        self, copies: Sequence[CopyPlace], store: bytes, *, fsync: str, timeout_s: float = 10.0
    ) -> None:
        self.damage: list[str] = []
        """What was found damaged, for people."""
        self.is_whole = True
        """False: synced entries are lost, so that removed blocks may look alive."""
        self._copies = copies
        self._fsync = fsync
        self._timeout_s = timeout_s
        self._closed = False
        self._known = Metadata()
        self._lock = threading.Lock()
        """Over `_known`; held for an instant."""
        self._io_lock = threading.Lock()
        """Over all below; held while the copies are written."""
        self._header = LogHeader(store, 0)
        self._last = 0
        """The number of the last frame."""
        self._synced = 0
        self._end = FRAMES_AT
        self._rewrite_at = _REWRITE_FROM
        self._tail = b""
        """What the last page holds."""
        self._must_rewrite = True
        """The copies differ, or a write has failed: the next write replaces both."""

    def load(self) -> None:
        """Read both copies. Raises OSError where neither can be read."""
        found: list[LogCopy] = []
        errors: list[OSError] = []
        for place in self._copies:
            try:
                parsed = [LogCopy.parse(image, self._header.store) for image in place.read()]
            except OSError as error:
                errors.append(error)
                self.damage.append(f"{place.label}: {error.strerror}")
                continue
            copies = [copy for copy in parsed if copy is not None]
            if copies:
                found.append(max(copies, key=lambda copy: copy.header.generation))
            else:
                self.damage.append(f"{place.label}: is missing or damaged")
        if len(errors) == len(self._copies) and errors:
            raise errors[0]
        contents = merge_copies(found)
        self._take_in(contents, found)

    def _take_in(self, contents: LogContents, found: Sequence[LogCopy]) -> None:
        self.is_whole = bool(found) and not contents.missing
        for copy in found:
            if copy.header.generation == contents.generation and not copy.has_all(contents.synced):
                self.damage.append("metadata: entries are damaged in one copy")
        if contents.missing:
            self.damage.append(f"metadata: {contents.missing} entries are lost in both copies")
        for entry in contents.entries:
            self._known.add(entry)
        self._known.drop_below(self._known.floor)
        self._header = LogHeader(self._header.store, contents.generation)
        self._last = contents.last
        self._must_rewrite = True  # what a crash has left behind the last frame must not count

    def create(self) -> None:
        """Begin an empty log on a new volume."""
        with self._writing():
            self.is_whole, self.damage = True, []
            self._rewrite()

    def repair(self) -> None:
        """Write both copies anew with what can be read."""
        with self._writing():
            self._rewrite()
        self.is_whole, self.damage = True, []

    def clear(self) -> None:
        """Forget everything: the volume is given back."""
        with self._writing():
            with self._lock:
                self._known = Metadata()
            self._rewrite()

    def snapshot(self) -> Metadata:
        """A copy of all that is known."""
        with self._lock:
            return Metadata(dict(self._known.entries), dict(self._known.tombstones))

    @property
    def known(self) -> Metadata:
        """What is known, to be looked at and not kept: others add to it meanwhile."""
        return self._known

    def put(self, entries: Iterable[MetaEntry]) -> None:
        """Append what says something new. Durable after `sync`; with fsync = "always" at once."""
        with self._writing():
            new = [entry for entry in entries if self._known.is_news(entry)]
            if not new:
                return
            # What a deleted description said must not stay on the disk.
            deletes = any(entry.value is None for entry in new)
            if self._must_rewrite or deletes or self._end + _bytes_of(new) > self._rewrite_at:
                self._rewrite(new)
            else:
                self._append(new)
                if self._fsync == "always":
                    self._sync()
            with self._lock:
                for entry in new:
                    self._known.add(entry)

    def sync(self) -> None:
        """What was put is durable. Tombstones below a durable floor are forgotten; the log shrinks
        when it is written anew.
        """
        if self._fsync != "never" and self._synced < self._last:
            with self._writing():
                if self._must_rewrite:  # what a killed process has left may not be durable
                    self._rewrite()
                else:
                    self._sync()
        with self._lock:
            self._known.drop_below(self._known.floor)

    def close(self) -> None:
        """Close the copies. A write that stalls has its file until it ends."""
        self._closed = True
        for place in self._copies:
            place.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write alone. After an error the copies may differ: the next write replaces both."""
        code = errno.EBADF if self._closed else errno.ETIMEDOUT
        if self._closed or not self._io_lock.acquire(timeout=self._timeout_s):
            raise OSError(code, os.strerror(code))
        try:
            yield
        except OSError:
            self._must_rewrite = True
            raise
        finally:
            self._io_lock.release()

    def _append(self, new: Sequence[MetaEntry]) -> None:
        frames = [
            pack_frame(self._header, number, self._synced, entry)
            for number, entry in enumerate(new, start=self._last + 1)
        ]
        data = self._tail + b"".join(frames)
        start = self._end - len(self._tail)
        for place in self._copies:
            place.write(start, data.ljust(round_up(len(data)), b"\0"))
        self._last += len(new)
        self._end = start + len(data)
        self._tail = data[len(data) // PAGE * PAGE :]

    def _rewrite(self, new: Sequence[MetaEntry] = ()) -> None:
        """Write both copies anew, one after the other, with what is known and `new`."""
        entries = self._kept(new)
        header = LogHeader(self._header.store, self._header.generation + 1, len(entries))
        image = pack_log(header, entries)
        limit = min(place.limit_bytes for place in self._copies)
        if len(image) > limit:
            raise OSError(errno.ENOSPC, "the metadata log is full")
        rewrite_at = min(limit, max(_REWRITE_FROM, 2 * len(image)))
        for place in self._copies:
            place.replace(image, header.generation, rewrite_at)
        self._header = header
        self._last = self._synced = len(entries)
        self._end = len(image)
        self._tail = image[len(image) // PAGE * PAGE :]
        self._rewrite_at = rewrite_at
        self._must_rewrite = False

    def _kept(self, new: Sequence[MetaEntry]) -> list[MetaEntry]:
        """What a log that is written anew has: deletions only as long as a volume may be away."""
        after = self.snapshot()
        for entry in new:
            after.add(entry)
        entries = after.all()
        newest = max((entry.stamp for entry in entries), default=0)
        return [
            entry
            for entry in entries
            if entry.value is not None or entry.stamp > newest - TOMBSTONE_AGE_US
        ]

    def _sync(self) -> None:
        for place in self._copies:
            place.sync()
        self._synced = self._last


def _bytes_of(entries: Iterable[MetaEntry]) -> int:
    return sum(map(frame_bytes, entries))
