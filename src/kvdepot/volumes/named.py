"""A volume on any medium that stores values by name: a folder, a key-value server, a dict.

Each segment is a value with one record. The names are listed when the volume is opened.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from kvdepot.core.metadata import Metadata, MetaEntry
from kvdepot.core.volume import (
    NO_PLACE,
    SEGMENTS_MAX,
    Array,
    Change,
    Contents,
    Ints,
    Priority,
    Purpose,
    SegmentTable,
    VolumeContext,
    VolumeFacts,
    no_contents,
    pack_place,
    segment_of,
    segment_table,
)
from kvdepot.errors import FormatError
from kvdepot.format.metadata import LogCopy, VolumeHeader, merge_copies, pack_log
from kvdepot.format.record import HEAD_BYTES, Head, parse_head, place, record_bytes
from kvdepot.io.breaker import Breaker, RetryPauses
from kvdepot.volumes.records import BlockingReads, images_of, newest_records

_COPIES: Final = ("metadata-a", "metadata-b")
_HEADER: Final = VolumeHeader(b"kvdepot named v1", 1 << 20)
_RECORD: Final = "record-"
_LOOK_S: Final = 1.0
_TYPICAL_BYTES: Final = 1 << 20


class NamedValues(Protocol):
    """The medium of a NamedVolume. Thread-safe. An error of the medium is an OSError.

    Names have at most 40 letters, digits and `-`.
    """

    def names(self) -> Iterable[str]:
        """The names of all values."""

    def write(self, name: str, value: bytes) -> None:
        """Write or replace a value. It is complete and durable when this returns. After an error
        the name may have the new value, the old one or none.
        """

    def read(self, name: str, nbytes: int) -> bytes:
        """Read at most `nbytes` from the start of a value; empty if there is none."""

    def delete(self, name: str) -> None:
        """Delete a value, if it exists."""


@dataclass(slots=True)
class _Value:
    """A segment: its id, and if its record is in use."""

    id: int
    nbytes: int
    live: bool = False
    written: bool = True

    def name(self, segment: int) -> str:
        return f"{_RECORD}{self.id:016x}-{segment:x}"


class NamedVolume:
    """Implements core.volume.Volume."""

    def __init__(
        self, values: NamedValues, context: VolumeContext, label: str, capacity_bytes: int
    ) -> None:
        """Raises OSError if the values cannot be listed, and FormatError if the metadata is
        damaged, because removed blocks would come back.
        """
        self.label = label
        self._values = values
        self._capacity_bytes = (
            capacity_bytes if context.capacity_bytes is None else context.capacity_bytes
        )
        self._may_write = self._is_writable = context.writable
        self._stamps = context.stamps
        self._breaker = Breaker(
            context.clock, RetryPauses(), changed=lambda _: context.on_change(Change.STATE)
        )
        self._lock = threading.Lock()
        """Guards the fields below. No I/O is done with it held."""
        self._segments: dict[int, _Value] = {}
        self._held_bytes = self._used_bytes = 0
        self._last_segment = 0
        self._metadata = Metadata()
        self._generation = 0
        self._metadata_lock = threading.Lock()
        """Held while the metadata is written. Taken before `_lock`."""
        self._load_metadata()
        self._found: Contents | None = self._recover()

    def facts(self, *, details: bool = False) -> VolumeFacts:
        del details
        health = self._breaker.health()
        with self._lock:
            largest = max((one.nbytes for one in self._segments.values()), default=_TYPICAL_BYTES)
            room = self._capacity_bytes - self._held_bytes
            return VolumeFacts(
                self.label,
                up=health.ok,
                takes_blocks=self._may_write and health.ok,
                may_write=self._may_write,
                reason=health.reason,
                errors=health.errors,
                retry_in_s=health.retry_in_s,
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                held_bytes=self._held_bytes,
                segment_bytes=largest,
                segments_max=max(1, self._capacity_bytes // largest),
                spare_segments=max(0, room) // largest,
                surplus_segments=max(0, -(room // largest)),
                room_bytes=max(0, room),
                record_bytes_max=self._capacity_bytes,
                is_durable=True,
            )

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        del purpose  # no segment is reserved: releasing one needs no moves
        places = [self._append(image.data) for image in images_of(records)]
        return np.array(places, np.int64)

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> BlockingReads:
        del priority  # there is no queue
        return BlockingReads(reads, self._record, timeout_s)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        del payload_bytes  # each segment has its size
        with self._lock:
            for segment in map(segment_of, places.tolist()):
                value = self._segments.get(segment)
                if value is not None and value.live:
                    value.live = False
                    self._used_bytes -= value.nbytes

    def segments(self) -> SegmentTable:
        with self._lock:
            return segment_table(
                (one.id, segment, one.live, one.nbytes * one.live, one.written)
                for segment, one in self._segments.items()
            )

    def release(self, segment: int) -> bool:
        with self._lock:
            value = self._segments.get(segment)
        if value is None:
            return True
        if not self._try(self._values.delete, value.name(segment)):
            return False
        with self._lock:
            if self._segments.pop(segment, None) is value:
                self._held_bytes -= value.nbytes
                self._used_bytes -= value.nbytes * value.live
        self._end_if_empty()
        return True

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        with self._metadata_lock:
            with self._lock:
                for entry in entries:
                    self._metadata.add(entry)
                kept = self._metadata.all()
            self._generation += 1
            header = replace(_HEADER, generation=self._generation, settled=len(kept))
            log = pack_log(header, kept)
            # A failed write may leave no value; the other copy is intact then.
            return all(
                self._try(lambda name=name: self._values.write(name, log)) for name in _COPIES
            )

    def sync(self, timeout_s: float) -> bool:
        del timeout_s  # a write is durable
        return self._breaker.closed

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        del look  # no other node writes here
        found, self._found = self._found, None
        return found if since is None and found is not None else no_contents(since or 0)

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        with self._lock:
            self._may_write = may_write and self._is_writable
            if capacity_bytes is not None:
                self._capacity_bytes = capacity_bytes
        self._end_if_empty()

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        del is_quiet
        if not self._breaker.closed and self._breaker.allows():
            self._try(self._values.read, _COPIES[0], 1)
        return _LOOK_S

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _append(self, image: memoryview) -> int:
        with self._lock:
            has_room = self._held_bytes + len(image) <= self._capacity_bytes
            if not has_room or not self._may_write or len(self._segments) >= SEGMENTS_MAX - 1:
                return NO_PLACE
            segment = self._last_segment
            while segment in self._segments or not segment:
                segment = (segment + 1) % SEGMENTS_MAX
            value = _Value(self._stamps.next(), len(image), written=False)
            self._last_segment, self._segments[segment] = segment, value
            self._held_bytes += value.nbytes
        place(image, value.id)
        done = self._try(self._values.write, value.name(segment), bytes(image))
        with self._lock:
            value.written, value.live = True, done
            self._used_bytes += value.nbytes * done
        if not done:
            self.release(segment)
        return pack_place(segment, 0) if done else NO_PLACE

    def _record(self, place: int) -> bytes | None:
        segment = segment_of(place)
        with self._lock:
            value = self._segments.get(segment)
        if value is None:
            return b""
        try:
            record = self._values.read(value.name(segment), value.nbytes)
        except OSError as error:
            self._breaker.failed(str(error))
            return None
        self._breaker.succeeded()
        return record

    def _try(self, call: Callable[..., object], *args: object) -> bool:
        """Call the medium unless it is down. False: it is down, or the call failed."""
        if not self._breaker.allows():
            return False
        try:
            call(*args)
        except OSError as error:
            self._breaker.failed(str(error))
            return False
        self._breaker.succeeded()
        return True

    def _end_if_empty(self) -> None:
        with self._lock:
            is_over = not self._capacity_bytes and not self._segments
        for name in _COPIES if is_over else ():
            self._try(self._values.delete, name)

    def _load_metadata(self) -> None:
        """Read both copies of the metadata; create them if the volume is new."""
        names = set(self._values.names())
        images = [self._values.read(name, 1 << 30) for name in _COPIES if name in names]
        parsed = [LogCopy.parse(image, _HEADER.store) for image in images]
        copies = [copy for copy in parsed if copy is not None]
        contents = merge_copies(copies)
        if contents.missing or (names and not copies):
            raise FormatError(self.label, "the metadata is damaged in both copies")
        for entry in contents.entries:
            self._metadata.add(entry)
            self._stamps.observe(entry.stamp)
        self._generation = contents.generation
        if not names and self._may_write:
            self.put_meta([])

    def _recover(self) -> Contents:
        rows: list[tuple[int, Head]] = []
        for name in self._values.names():
            if not name.startswith(_RECORD):
                continue
            number, segment = (int(part, 16) for part in name.removeprefix(_RECORD).split("-"))
            head = parse_head(memoryview(self._values.read(name, HEAD_BYTES)))
            nbytes = record_bytes(head.payload_bytes) if head is not None else 0
            self._segments[segment] = _Value(number, nbytes)
            self._stamps.observe(number)
            if head is not None:
                rows.append((segment, head))
        rows.sort(key=lambda row: self._segments[row[0]].id)
        keys = b"".join(head.key for _, head in rows)
        found = newest_records(
            np.frombuffer(keys, np.uint64).reshape(-1, 4),
            np.array([pack_place(segment, 0) for segment, _ in rows], np.int64),
            np.array([head.payload_bytes for _, head in rows], np.int64),
            np.array([head.stamp for _, head in rows], np.int64),
        )
        for segment in map(segment_of, found.places.tolist()):
            self._segments[segment].live = True
        self._held_bytes = sum(one.nbytes for one in self._segments.values())
        self._used_bytes = sum(one.nbytes for one in self._segments.values() if one.live)
        return replace(found, metadata=self._metadata.all())
