"""The pages of a segment that are not records, and a drive's superblock.

A segment is a fixed-size extent: one header page, records one after another, and at its end an
index footer and a trailer page:

    | header | record | record | … | free | footer entries | trailer |

The header names the segment; each record repeats that name, so that bytes left over from an
earlier use of the extent never count. The footer is written when the segment is full (sealed) or
when the store closes (open: more records may follow behind `tail`). A segment without a valid
trailer is scanned record by record.
"""

import json
import struct
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.clock import STAMP_MAX
from kvdepot.core.json_object import parse_object
from kvdepot.core.volume import SEGMENTS_MAX
from kvdepot.format.record import PAGE, round_up
from kvdepot.native import checksum

FORMAT: Final = 2
HEADER_MAGIC: Final = 0x3153564B  # "KVS1"
TRAILER_MAGIC: Final = 0x3154564B  # "KVT1"
SUPERBLOCK_MAGIC: Final = b"KVDEPOT\x00"

ENTRY: Final = np.dtype(
    [
        ("key", "V32"),
        ("page", "<u4"),
        ("kind", "<u4"),
        ("payload_bytes", "<u8"),
        ("stamp", "<u8"),
        ("stored_bytes", "<u8"),
    ]
)
"""One record in a footer."""

Entries = npt.NDArray[np.void]
"""An array of ENTRY."""

_SLOTS_CHARS_MAX: Final = 5 << 9
_SEGMENT_BYTES_MAX: Final = 1 << 36
"""Pages of a segment are counted in 24 bits."""
_HEADER: Final = struct.Struct("<QIIQQQ16s")
_TRAILER: Final = struct.Struct("<QIIQQQQQQQQ16s")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment."""

    segment_id: int
    slot: int
    segment_bytes: int
    store: bytes

    def pack(self) -> bytes:
        page = bytearray(PAGE)
        names = (self.segment_id, self.slot, self.segment_bytes, self.store)
        _HEADER.pack_into(page, 0, 0, HEADER_MAGIC, FORMAT, *names)
        return _closed(page, _HEADER.size)

    @classmethod
    def parse(cls, page: memoryview | bytes) -> "SegmentHeader | None":
        if len(page) < PAGE:
            return None
        digest, magic, version, segment_id, slot, segment_bytes, store = _HEADER.unpack_from(page)
        if magic != HEADER_MAGIC or version != FORMAT or digest != checksum(page[8 : _HEADER.size]):
            return None
        return cls(segment_id, slot, segment_bytes, store)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Last page of a segment: where its footer is, and how far records reach."""

    segment_id: int
    slot: int
    segment_bytes: int
    footer_offset: int
    tail: int
    count: int
    sealed: bool
    footer_checksum: int
    store: bytes

    def pack(self) -> bytes:
        page = bytearray(PAGE)
        _TRAILER.pack_into(
            page, 0, 0, TRAILER_MAGIC, FORMAT, self.segment_id, self.slot, self.segment_bytes,
            self.footer_offset, self.tail, self.count, int(self.sealed), self.footer_checksum,
            self.store,
        )  # fmt: skip
        return _closed(page, _TRAILER.size)

    @classmethod
    def parse(cls, page: memoryview | bytes) -> "Trailer | None":
        if len(page) < PAGE:
            return None
        digest, magic, version, *fields = _TRAILER.unpack_from(page)
        intact = digest == checksum(page[8 : _TRAILER.size])
        if magic != TRAILER_MAGIC or version != FORMAT or not intact:
            return None
        trailer = cls(*fields)
        return replace(trailer, sealed=bool(trailer.sealed))


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a drive says about itself."""

    store: str
    segment_bytes: int
    format: int = FORMAT
    made_by: str = ""
    slots: str = ""
    """Slots that have a file, as `0-5,7`: a file of these that is not there was taken away."""
    budget_bytes: float = 0.0
    """What may be written, where there is a limit, at `budget_at_s`."""
    budget_at_s: float = 0.0
    """Seconds since 1970; 0: nothing was kept yet."""
    opened: int = 0
    """The stamp with which the volume was last opened for writing: stamps that a power cut has
    taken with it are not given out again."""

    def pack(self) -> bytes:
        page = bytearray(PAGE)
        text = json.dumps(asdict(self), sort_keys=True).encode()
        struct.pack_into("<Q8sII", page, 0, 0, SUPERBLOCK_MAGIC, self.format, len(text))
        page[24 : 24 + len(text)] = text
        return _closed(page, 24 + len(text))

    @classmethod
    def parse(cls, page: memoryview | bytes) -> "Superblock | int | None":
        """The superblock; the format's number where it is not ours; None if the page is damaged."""
        if len(page) < PAGE:
            return None
        digest, magic, version, length = struct.unpack_from("<Q8sII", page)
        if magic != SUPERBLOCK_MAGIC or not 0 < length <= PAGE - 24:
            return None
        if digest != checksum(page[8 : 24 + length]):
            return None
        if version != FORMAT:
            return int(version)
        try:
            fields = parse_object(bytes(page[24 : 24 + length]))
            known = cls.__dataclass_fields__
            found = cls(**{name: value for name, value in fields.items() if name in known})
        except (TypeError, ValueError):
            return None
        return found if found._makes_sense() else None

    def _makes_sense(self) -> bool:
        """Whether the fields are what they are said to be: a checksum tells of bytes only."""
        budget = (self.budget_bytes, self.budget_at_s)
        if not all(isinstance(text, str) for text in (self.store, self.made_by, self.slots)):
            return False
        if type(self.segment_bytes) is not int or not _is_segment_size(self.segment_bytes):
            return False
        if any(type(number) not in (int, float) or abs(number) > 1e18 for number in budget):
            return False
        if type(self.opened) is not int or not 0 <= self.opened <= STAMP_MAX:
            return False
        try:
            uuid.UUID(self.store)
            parse_slots(self.slots)
        except ValueError:
            return False
        return True


def pack_slots(slots: Iterable[int]) -> str:
    """`0-5,7` for 0, 1, 2, 3, 4, 5, 7; empty where that would not fit into a superblock."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    text = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return text if len(text) <= _SLOTS_CHARS_MAX else ""


def parse_slots(text: str) -> set[int]:
    """The slots that `pack_slots` has written; ValueError where it was something else."""
    found: set[int] = set()
    for run in text.split(",") if text else []:
        first, _, last = run.partition("-")
        if int(last or first) >= SEGMENTS_MAX:
            raise ValueError(f"{run} is no slot")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _is_segment_size(nbytes: int) -> bool:
    return 2 * PAGE < nbytes <= _SEGMENT_BYTES_MAX and nbytes % PAGE == 0


def footer_bytes(count: int) -> int:
    """Room that a footer of `count` entries and the trailer need at a segment's end."""
    return round_up(count * ENTRY.itemsize) + PAGE


def footer_sizes(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`footer_bytes` for many."""
    sizes: npt.NDArray[np.int64] = -(-counts * ENTRY.itemsize // PAGE) * PAGE + PAGE
    return sizes


def _closed(page: bytearray, used: int) -> bytes:
    struct.pack_into("<Q", page, 0, checksum(memoryview(page)[8:used]))
    return bytes(page)
