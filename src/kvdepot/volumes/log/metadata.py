"""The metadata log of one volume, in two independent copies.

Entries are appended to both copies and are durable after `sync`. A log that has grown to twice the
size of its content is written again. If a copy is damaged, the other one is used. If synced frames
are missing in both, the log is not whole: removals may be lost, so that the blocks of the volume
are not served until `kvdepot check --repair`.
"""

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import TOMBSTONE_AGE_US, Metadata, MetaEntry, MetaKind
from kvdepot.format.metadata import (
    FRAMES_AT,
    LogCopy,
    VolumeHeader,
    frame_bytes,
    merge_copies,
    pack_frame,
    pack_log,
)
from kvdepot.format.record import PAGE, round_up
from kvdepot.io.files import Files

COPIES: Final = ("metadata-a", "metadata-b")
"""File names of the two copies."""
_SLOT: Final = struct.Struct("<I")
_ID: Final = struct.Struct("<Q")
_REWRITE_FROM: Final = 64 << 10
"""Least bytes that are reserved on the disk for a log."""


class FileCopy:
    """A copy in a file of its own, replaced by renaming. Methods raise OSError."""

    def __init__(
        self,
        path: Path,
        files: Files,
        limit_bytes: int,
        *,
        writable: bool,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_ours` returns True while the folder of `path` is the one that was opened."""
        self.label = path.name
        self.limit_bytes = limit_bytes
        """Largest size of the log."""
        self._path = path
        self._files = files
        self._writable = writable
        self._is_ours = is_ours
        self._fd = -1

    def read(self, store: bytes) -> LogCopy | None:
        """Read the copy; None if it is missing, damaged or not of the volume `store`."""
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            fd = self._files.open_file(self._path, flags)
        except FileNotFoundError:
            return None
        try:
            image = self._files.read(fd, 0, round_up(os.fstat(fd).st_size or 1))
        except OSError:
            os.close(fd)
            raise
        self.close()
        self._fd = fd
        return LogCopy.parse(image, store)

    def replace(self, image: bytes, room_bytes: int) -> None:
        """Replace the log atomically and durably. Reserves `room_bytes` on the disk, so that it can
        grow even if the disk is full.
        """
        if not self._is_ours():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        fd = self._files.write_new(self._path, image, room_bytes)
        self.close()
        self._fd = fd

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages to the present log."""
        self._files.write(self._fd, offset, data)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the file. May be called twice."""
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
        self._start = self._areas[1]
        """The area in force. A new log begins in the first one."""

    def read(self, store: bytes) -> LogCopy | None:
        newest: tuple[int, int] | None = None
        for start in self._areas:
            header = VolumeHeader.parse(self._files.read(self._fd, start, PAGE))
            if isinstance(header, VolumeHeader) and header.store == store:
                newest = max(newest or (0, 0), (header.generation, start))
        if newest is None:
            return None
        self._start = newest[1]
        return LogCopy.parse(self._files.read(self._fd, self._start, self.limit_bytes), store)

    def replace(self, image: bytes, room_bytes: int) -> None:
        del room_bytes  # an area has a fixed size
        start = self._areas[self._start == self._areas[0]]
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
        """Does nothing: the device owns the descriptor."""


CopyPlace = FileCopy | ExtentCopy


class MetadataLog:
    """The metadata log of one volume. Thread-safe. Methods that write raise OSError; ETIMEDOUT
    while the write of another thread stalls.
    """

    def __init__(
        self,
        copies: Sequence[CopyPlace],
        header: VolumeHeader,
        stamps: StampClock,
        *,
        fsync: str,
        timeout_s: float = 10.0,
    ) -> None:
        self.damage: list[str] = []
        """Descriptions of damage."""
        self.is_whole = True
        """False: synced entries are lost, so that removed blocks may reappear."""
        self._copies = copies
        self._header = header
        self.stamps = stamps
        self._fsync = fsync
        self._timeout_s = timeout_s
        self._ended: Literal["", "cleared", "closed"] = ""
        """"cleared": the volume is being removed, and later entries are not written."""
        self._known = Metadata()
        self._lock = threading.Lock()
        """Guards `_known`; held briefly."""
        self._io_lock = threading.Lock()
        """Guards the fields below; held while the copies are written."""
        self._last = 0
        """The number of the last frame."""
        self._synced = 0
        self._end = FRAMES_AT
        self._tail = b""
        """The content of the last page."""
        self._rewrite_at = 0
        """Size from which the log is written again. 0: the copies may differ, or a write has
        failed, so that the next write replaces both."""

    def load(self) -> None:
        """Read both copies. Raises OSError if neither can be read."""
        copies: list[LogCopy] = []
        errors: list[OSError] = []
        for place in self._copies:
            try:
                copy = place.read(self._header.store)
            except OSError as error:
                errors.append(error)
                self.damage.append(f"{place.label}: {error.strerror}")
                continue
            if copy is not None:
                copies.append(copy)
            else:
                self.damage.append(f"{place.label}: is missing or damaged")
        if len(errors) == len(self._copies):
            raise errors[0]
        contents = merge_copies(copies)
        self.is_whole = bool(copies) and not contents.missing
        for copy in copies:
            if copy.header.generation == contents.generation and not copy.has_all(contents.synced):
                self.damage.append("metadata: entries are damaged in one copy")
        if contents.missing:
            self.damage.append(f"metadata: {contents.missing} entries are lost in both copies")
        for entry in contents.entries:
            self._known.add(entry)
            self.stamps.observe(entry.stamp)
        self._known.drop_below(self._known.floor)
        self._header = replace(self._header, generation=contents.generation)
        self._last = contents.last  # later frames were left by a crash and do not count

    def create(self) -> None:
        """Write both copies of a new log; in a repair with the entries that could be read."""
        with self._writing():
            self._rewrite()
        self.is_whole, self.damage = True, []

    def restore(self) -> None:
        """Write both copies again if one is missing or damaged and nothing is lost. If the disk
        refuses, the next write does it.
        """
        if self.is_whole and self.damage:
            with contextlib.suppress(OSError), self._writing():
                self._rewrite()

    def clear(self) -> None:
        """Delete all entries of a volume that is being removed. Later ones are not written: the
        folder would hold a store again.
        """
        with self._writing():
            with self._lock:
                self._known = Metadata()
            self._rewrite()
            self._ended = "cleared"

    def snapshot(self) -> Metadata:
        """A copy of all entries."""
        with self._lock:
            return Metadata(dict(self._known.entries), dict(self._known.tombstones))

    @property
    def known(self) -> Metadata:
        """All entries. Not a copy: other threads may add entries."""
        return self._known

    def own(self, kind: MetaKind) -> MetaEntry | None:
        """The entry of a kind that concerns this volume alone."""
        return self._known.entries.get((kind, b""))

    def release(self, slots: Iterable[int], *, below: int = 0) -> None:
        """Record that segments with ids below `below`, by default those begun before now, do not
        count in these slots.
        """
        stamp = self.stamps.next()
        value = _ID.pack(below or stamp)
        self.put(MetaEntry(MetaKind.RELEASED, _SLOT.pack(slot), stamp, value) for slot in slots)

    def floor(self, slot: int) -> int:
        """Segments with this id or a lower one do not count in a slot."""
        entry = self._known.entries.get((MetaKind.RELEASED, _SLOT.pack(slot)))
        value = entry.value if entry is not None else None
        released = _ID.unpack(value)[0] - 1 if value is not None and len(value) == _ID.size else 0
        return max(self._known.floor, released)

    def put_own(self, kind: MetaKind, value: bytes) -> None:
        """Write an entry that concerns this volume alone, durably, if it is new."""
        before = self.own(kind)
        if before is None or before.value != value:
            self.put([MetaEntry(kind, b"", self.stamps.next(), value)])
            self.sync()

    def put(self, entries: Iterable[MetaEntry]) -> None:
        """Append the entries that are new. Durable after `sync`; with fsync = "always" at once."""
        with self._writing():
            new = [entry for entry in entries if self._known.is_news(entry)]
            if not new or self._ended:
                return
            # A deleted description must not stay on the disk.
            deletes = any(entry.value is None for entry in new)
            nbytes = sum(map(frame_bytes, new))
            if deletes or self._end + nbytes > self._rewrite_at:
                self._rewrite(new)
            else:
                self._append(new)
                if self._fsync == "always":
                    self._sync()
            with self._lock:
                for entry in new:
                    self._known.add(entry)

    def sync(self) -> None:
        """Make all entries durable. Drops tombstones below a durable floor; the log shrinks when it
        is written again.
        """
        if self._fsync != "never" and self._synced < self._last:
            with self._writing():
                if not self._rewrite_at:  # entries of a killed process may not be durable
                    self._rewrite()
                else:
                    self._sync()
        with self._lock:
            self._known.drop_below(self._known.floor)

    def close(self) -> None:
        """Close the copies. A stalled write keeps its file open until it ends."""
        self._ended = "closed"
        for place in self._copies:
            place.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers. After an error the copies may differ: the next write replaces
        both.
        """
        is_closed = self._ended == "closed"
        code = errno.EBADF if is_closed else errno.ETIMEDOUT
        if is_closed or not self._io_lock.acquire(timeout=self._timeout_s):
            raise OSError(code, os.strerror(code))
        try:
            yield
        except OSError:
            self._rewrite_at = 0
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
        """Write both copies again, one after the other, with all entries and `new`. Deletions are
        kept only as long as a volume may be away.
        """
        after = self.snapshot()
        for entry in new:
            after.add(entry)
        entries = after.all()
        oldest = max((entry.stamp for entry in entries), default=0) - TOMBSTONE_AGE_US
        entries = [one for one in entries if one.value is not None or one.stamp > oldest]
        # A log that was only partly written may be on the disk: its number is not used again.
        self._header = replace(
            self._header, generation=self._header.generation + 1, settled=len(entries)
        )
        image = pack_log(self._header, entries)
        limit = min(place.limit_bytes for place in self._copies)
        if len(image) > limit:
            raise OSError(errno.ENOSPC, "the metadata log is full")
        rewrite_at = min(limit, max(_REWRITE_FROM, 2 * len(image)))
        for place in self._copies:
            place.replace(image, rewrite_at)
        self._last = self._synced = len(entries)
        self._end = len(image)
        self._tail = image[len(image) // PAGE * PAGE :]
        self._rewrite_at = rewrite_at

    def _sync(self) -> None:
        for place in self._copies:
            place.sync()
        self._synced = self._last
