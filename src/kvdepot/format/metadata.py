"""The bytes of a volume's metadata: the header page, and the metadata log.

    volume header, a page: the superblock, and the first page of each copy of the log
    0    u64   checksum of the bytes 8 to 64
    8    8s    magic
    16   u32   format
    20   u32   40: bytes of the fields that follow
    24   16s   UUID of the volume
    40   u64   segment bytes
    48   u64   generation    0 in the superblock; each time the log is written again, one more
    56   u64   settled       frames up to this number were synced before the log came into force

    frame, a multiple of 8 bytes: one entry of the log
    0    u64   checksum of what follows, of the volume's UUID and of the generation
    8    u32   bytes of the value
    12   u8    kind, u8 flags (1: deleted), u16 bytes of the name
    16   u64   number        1, 2, 3 … in each generation
    24   u64   synced        all frames up to this number were durable when this one was written
    32   u64   stamp
    40         name, value, zeros

A power cut may leave any subset of unsynced frames. A gap in the numbers is damage only if a later
frame records that the missing one was synced.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.metadata import NAME_BYTES_MAX, VALUE_BYTES_MAX, MetaEntry, MetaKind
from kvdepot.format.record import PAGE
from kvdepot.format.segment import FORMAT
from kvdepot.native import checksum

MAGIC: Final = b"KVDEPOT\0"
FRAMES_AT: Final = PAGE
"""The header has a page of its own, so that writing a frame never touches it."""
_HEADER: Final = struct.Struct("<Q8sII16sQQQ")
HEADER_BYTES: Final = _HEADER.size
"""The rest of the header's page is zeros."""
_PREFIX: Final = struct.Struct("<Q8sII")
"""The fields that are the same in every format."""
_FRAME: Final = struct.Struct("<QIBBHQQQ")
_U64: Final = struct.Struct("<Q")
_SEGMENT_BYTES_MAX: Final = 1 << 36
"""Pages of a segment are counted in 24 bits."""
_DELETED: Final = 1
_KINDS: Final = frozenset(int(kind) for kind in MetaKind)
_UNIT: Final = 8


@dataclass(frozen=True, slots=True)
class VolumeHeader:
    """The page with the identity of a volume."""

    store: bytes
    """UUID of the volume."""
    segment_bytes: int
    generation: int = 0
    settled: int = 0

    def pack(self) -> bytes:
        fields = (self.store, self.segment_bytes, self.generation, self.settled)
        length = _HEADER.size - _PREFIX.size
        body = _HEADER.pack(0, MAGIC, FORMAT, length, *fields)[_U64.size :]
        return (_U64.pack(checksum(body)) + body).ljust(PAGE, b"\0")

    @classmethod
    def parse(cls, page: bytes | memoryview) -> "VolumeHeader | int | None":
        """Parse a header page. Returns the number of the format if it is another one, and None if
        the page is damaged or not a header.
        """
        if len(page) < PAGE:
            return None
        digest, magic, number, length = _PREFIX.unpack_from(page)
        end = _PREFIX.size + length
        if magic != MAGIC or end > PAGE or digest != checksum(bytes(page[8:end])):
            return None
        if number != FORMAT:
            return int(number)
        if end != _HEADER.size:
            return None
        found = cls(*_HEADER.unpack_from(page)[4:])
        is_size = 2 * PAGE < found.segment_bytes <= _SEGMENT_BYTES_MAX
        return found if is_size and not found.segment_bytes % PAGE else None

    @property
    def seed(self) -> bytes:
        return self.store + _U64.pack(self.generation)


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One entry of the log."""

    number: int
    synced: int
    entry: MetaEntry


def frame_bytes(entry: MetaEntry) -> int:
    """Bytes that an entry takes in the log."""
    length = _FRAME.size + len(entry.name) + len(entry.value or b"")
    return -(-length // _UNIT) * _UNIT


def pack_frame(header: VolumeHeader, number: int, synced: int, entry: MetaEntry) -> bytes:
    value = entry.value or b""
    flags = _DELETED if entry.value is None else 0
    body = _FRAME.pack(
        0, len(value), entry.kind, flags, len(entry.name), number, synced, entry.stamp
    )[8:] + entry.name + value  # fmt: skip
    body = body.ljust(frame_bytes(entry) - 8, b"\0")
    return _U64.pack(checksum(body + header.seed)) + body


def pack_log(header: VolumeHeader, entries: Iterable[MetaEntry]) -> bytes:
    """A whole log with these entries, all of which count as synced."""
    frames = [
        pack_frame(header, number, header.settled, entry)
        for number, entry in enumerate(entries, start=1)
    ]
    return header.pack() + b"".join(frames)


def _parse_frame(image: memoryview, at: int, seed: bytes) -> tuple[LogFrame, int] | None:
    """Parse the frame at `at`. Returns it and its end; None if it is not intact."""
    if at + _FRAME.size > len(image):
        return None
    digest, value_bytes, kind, flags, name_bytes, number, synced, stamp = _FRAME.unpack_from(
        image, at
    )
    length = -(-(_FRAME.size + name_bytes + value_bytes) // _UNIT) * _UNIT
    plausible = kind in _KINDS and flags <= _DELETED and name_bytes <= NAME_BYTES_MAX
    if not plausible or value_bytes > VALUE_BYTES_MAX or at + length > len(image):
        return None
    if digest != checksum(bytes(image[at + 8 : at + length]) + seed):
        return None
    name_at = at + _FRAME.size
    name = bytes(image[name_at : name_at + name_bytes])
    value = bytes(image[name_at + name_bytes : name_at + name_bytes + value_bytes])
    entry = MetaEntry(MetaKind(kind), name, stamp, None if flags & _DELETED else value)
    return LogFrame(number, synced, entry), at + length


def _next_frame(image: memoryview, start: int, seed: bytes) -> tuple[LogFrame, int] | None:
    """The first intact frame from `start` on; None if there is none."""
    if start + _FRAME.size > len(image):
        return None
    rows = np.frombuffer(image[start : len(image) // _UNIT * _UNIT], np.uint8).reshape(-1, _UNIT)
    tail = rows[1:]  # bytes of a frame that begins one row before
    names = np.ascontiguousarray(tail[:, 6:8]).view("<u2")[:, 0]
    plausible = np.isin(tail[:, 4], list(_KINDS)) & (tail[:, 5] <= _DELETED)
    for row in np.flatnonzero(plausible & (names <= NAME_BYTES_MAX)).tolist():
        found = _parse_frame(image, start + row * _UNIT, seed)
        if found is not None:
            return found
    return None


@dataclass(slots=True)
class LogCopy:
    """The intact frames of one copy of a log."""

    header: VolumeHeader
    frames: dict[int, LogFrame] = field(default_factory=dict)
    """Frames by number."""
    end: int = FRAMES_AT
    """The offset for the next frame: after the last frame before the first gap."""

    @classmethod
    def parse(cls, image: bytes | memoryview, store: bytes) -> "LogCopy | None":
        """Parse a copy; None if its header is damaged, or of another volume."""
        view = memoryview(image)
        header = VolumeHeader.parse(view[:PAGE])
        if not isinstance(header, VolumeHeader) or not header.generation or header.store != store:
            return None
        copy, at, seed = cls(header), FRAMES_AT, header.seed
        while at < len(view):
            found = _parse_frame(view, at, seed) or _next_frame(view, at + _UNIT, seed)
            if found is None:
                break
            frame, at = found
            copy.frames[frame.number] = frame
            if frame.number == len(copy.frames):
                copy.end = at
        return copy

    def has_all(self, last: int) -> bool:
        """True if all frames up to this number are present."""
        return all(number in self.frames for number in range(1, last + 1))


@dataclass(frozen=True, slots=True)
class LogContents:
    """The merged content of the copies of a log."""

    entries: list[MetaEntry]
    generation: int
    last: int
    """The number of the last frame that counts."""
    synced: int
    """Frames up to this number were durable in both copies."""
    missing: int
    """The number of synced frames that are in no copy."""


def merge_copies(copies: Sequence[LogCopy]) -> LogContents:
    """Merge the copies of the newest generation. A frame that one lacks comes from the other."""
    generation = max((copy.header.generation for copy in copies), default=0)
    newest = [copy for copy in copies if copy.header.generation == generation]
    frames: dict[int, LogFrame] = {}
    for copy in newest:
        frames |= copy.frames
    settled = [copy.header.settled for copy in newest]
    synced = max([0, *settled, *(frame.synced for frame in frames.values())])
    last = 0
    while last + 1 in frames:
        last += 1
    missing = sum(number not in frames for number in range(last + 1, synced + 1))
    # Frames after a gap count only if the gap is damage and not left by a power cut.
    counted = [frame for number, frame in sorted(frames.items()) if missing or number <= last]
    return LogContents([frame.entry for frame in counted], generation, last, synced, missing)
