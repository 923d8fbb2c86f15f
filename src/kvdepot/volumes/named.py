"""A volume on any medium that keeps values by name: a folder, a key-value server, a dict.

A segment is one value with one record. What is held is known in memory; names are listed once.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
)
from kvdepot.errors import FormatError
from kvdepot.format.metadata import LogCopy, LogHeader, pack_log
from kvdepot.format.record import HEAD_BYTES, Head, parse_head, place, record_bytes
from kvdepot.io.breaker import Breaker, RetryPauses
from kvdepot.volumes.records import BlockingReads, images_of, newest_records

_METADATA: Final = "metadata"
_OWNER: Final = b"kvdepot named v1"
_RECORD: Final = "record-"
_LOOK_S: Final = 1.0
_TYPICAL_BYTES: Final = 1 << 20


class NamedValues(Protocol):
    """What a medium does for a NamedVolume. Thread-safe. An error of the medium is an OSError.

    Names have at most 40 letters, digits and `-`.
    """

    def names(self) -> Iterable[str]:
        """The names of all values."""

    def write(self, name: str, value: bytes) -> None:
        """Keep a value in place of what had its name. It is whole and durable when this returns;
        after an error there is this value, the one before or none.
        """

    def read(self, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of a value, or all if it has fewer; empty if there is none."""

    def delete(self, name: str) -> None:
        """It does not matter if there is none."""


@dataclass(slots=True)
class _Value:
    """A segment: its place in the order, and whether its record is in use."""

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
        """Raises OSError if the values cannot be listed, FormatError if the metadata is damaged:
        without it removed blocks would come back.
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
        """Guards what follows. No I/O is done with it held."""
        self._segments: dict[int, _Value] = {}
        self._held_bytes = self._used_bytes = 0
        self._last_segment = 0
        self._metadata = Metadata()
        self._metadata_lock = threading.Lock()
        """One writes the metadata at a time. Taken before `_lock`."""
        self._read_metadata()
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
        del purpose  # nothing is kept back: a segment is released without a move
        places = [self._append(image.data) for image in images_of(records)]
        return np.array(places, np.int64)

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> BlockingReads:
        del priority  # there is no queue
        return BlockingReads(reads, self._record, timeout_s)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        del payload_bytes  # each segment knows its own
        with self._lock:
            for segment in map(segment_of, places.tolist()):
                value = self._segments.get(segment)
                if value is not None and value.live:
                    value.live = False
                    self._used_bytes -= value.nbytes

    def segments(self) -> SegmentTable:
        with self._lock:
            rows = sorted(
                (one.id, segment, one.live, one.nbytes * one.live, one.written)
                for segment, one in self._segments.items()
            )
        ids, segments, live, live_bytes, written = np.array(rows, np.int64).reshape(-1, 5).T
        return SegmentTable(segments, ids, live, live_bytes, written.astype(bool))

    def release(self, segment: int) -> bool:
        with self._lock:
            value = self._segments.get(segment)
        if value is None:
            return True
        if not self._try(lambda: self._values.delete(value.name(segment))):
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
            log = pack_log(LogHeader(_OWNER, 1, len(kept)), kept)
            return self._try(lambda: self._values.write(_METADATA, log))

    def sync(self, timeout_s: float) -> bool:
        del timeout_s  # what was written is durable
        return self._breaker.closed

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        del look  # no other node writes to it
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
            self._try(lambda: self._values.read(_METADATA, 1))
        return _LOOK_S

    def close(self) -> None:
        """Nothing is open."""

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
        done = self._try(lambda: self._values.write(value.name(segment), bytes(image)))
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

    def _try(self, call: Callable[[], object]) -> bool:
        """Call the medium unless it is down. False: that failed."""
        if not self._breaker.allows():
            return False
        try:
            call()
        except OSError as error:
            self._breaker.failed(str(error))
            return False
        self._breaker.succeeded()
        return True

    def _end_if_empty(self) -> None:
        """Of a volume without capacity nothing stays."""
        with self._lock:
            is_over = not self._capacity_bytes and not self._segments
        if is_over:
            self._try(lambda: self._values.delete(_METADATA))

    def _read_metadata(self) -> None:
        if _METADATA not in self._values.names():
            return
        copy = LogCopy.parse(self._values.read(_METADATA, 1 << 30), _OWNER)
        if copy is None or not copy.has_all(copy.header.settled):
            raise FormatError(self.label, f"the value {_METADATA!r} is damaged")
        for frame in copy.frames.values():
            self._metadata.add(frame.entry)
            self._stamps.observe(frame.entry.stamp)

    def _recover(self) -> Contents:
        heads: list[tuple[int, Head | None]] = []
        for name in self._values.names():
            if not name.startswith(_RECORD):
                continue
            number, segment = (int(part, 16) for part in name.removeprefix(_RECORD).split("-"))
            head = parse_head(memoryview(self._values.read(name, HEAD_BYTES)))
            nbytes = record_bytes(head.payload_bytes) if head is not None else 0
            self._segments[segment] = _Value(number, nbytes)
            self._stamps.observe(number)
            heads.append((pack_place(segment, 0), head))
        heads.sort(key=lambda pair: self._segments[segment_of(pair[0])].id)
        found = newest_records(heads, self._metadata.all())
        for segment in map(segment_of, found.places.tolist()):
            self._segments[segment].live = True
        self._held_bytes = sum(one.nbytes for one in self._segments.values())
        self._used_bytes = sum(one.nbytes for one in self._segments.values() if one.live)
        return found
