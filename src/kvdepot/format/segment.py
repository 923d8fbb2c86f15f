"""The pages of a segment that are not records.

A segment is a fixed-size extent: one header page, records one after another, and at its end an
index footer and a trailer page:

    | header | record | record | … | free | footer entries | trailer |

The header has the segment id. Each record repeats it, so that records of an earlier use of the
extent are ignored. The footer is written when the segment is full (sealed) or
when the store closes (open: more records may follow behind `tail`). A segment without a valid
trailer is scanned record by record.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvdepot.core.volume import SEGMENTS_MAX
from kvdepot.format.record import PAGE
from kvdepot.native import checksum

FORMAT: Final = 2
"""The format of all data on a volume. A store of another format is refused."""
HEADER_MAGIC: Final = 0x3153564B  # "KVS1"
TRAILER_MAGIC: Final = 0x3154564B  # "KVT1"

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

_HEADER: Final = struct.Struct("<QIIQQQ16s")
_TRAILER: Final = struct.Struct("<QIIQQQQQQQQ16s")
_SLOTS: Final = re.compile(rb"\d{1,9}-\d{1,9}(,\d{1,9}-\d{1,9})*")
Count = TypeVar("Count", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment."""

    segment_id: int
    slot: int
    segment_bytes: int
    store: bytes

    def pack(self) -> bytes:
        return _pack(_HEADER, HEADER_MAGIC, astuple(self))

    @classmethod
    def parse(cls, page: memoryview | bytes) -> "SegmentHeader | None":
        fields = _parse(_HEADER, HEADER_MAGIC, page)
        return cls(*fields) if fields else None


@dataclass(frozen=True, slots=True)
class Trailer:
    """Last page of a segment: the place of its footer, and the end of its records."""

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
        return _pack(_TRAILER, TRAILER_MAGIC, astuple(self))

    @classmethod
    def parse(cls, page: memoryview | bytes) -> "Trailer | None":
        fields = _parse(_TRAILER, TRAILER_MAGIC, page)
        return cls(*fields) if fields else None


def _pack(layout: struct.Struct, magic: int, fields: tuple[Any, ...]) -> bytes:
    page = bytearray(PAGE)
    layout.pack_into(page, 0, 0, magic, FORMAT, *fields)
    struct.pack_into("<Q", page, 0, checksum(memoryview(page)[8 : layout.size]))
    return bytes(page)


def _parse(layout: struct.Struct, magic: int, page: memoryview | bytes) -> tuple[Any, ...]:
    """The fields after checksum, magic and format; empty if the page is invalid."""
    if len(page) < PAGE:
        return ()
    digest, its_magic, number, *fields = layout.unpack_from(page)
    is_right = (its_magic, number) == (magic, FORMAT) and digest == checksum(page[8 : layout.size])
    return tuple(fields) if is_right else ()


def pack_slots(slots: Iterable[int]) -> bytes:
    """Encode slots as ranges: `0-5,7-7` for 0, 1, 2, 3, 4, 5, 7."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ",".join(f"{first}-{last}" for first, last in runs).encode()


def parse_slots(text: bytes) -> set[int]:
    """Parse the ranges of `pack_slots`; empty if the text is invalid."""
    slots: set[int] = set()
    for run in text.split(b",") if _SLOTS.fullmatch(text) else ():
        first, last = map(int, run.split(b"-"))
        slots.update(range(first, min(last + 1, SEGMENTS_MAX)))
    return slots


def footer_bytes(count: Count) -> Count:
    """Bytes of a footer with `count` entries and the trailer."""
    return -(-count * ENTRY.itemsize // PAGE) * PAGE + PAGE


def close_segment(
    header: SegmentHeader, tail: int, entries: bytes, *, sealed: bool
) -> tuple[int, bytes, bytes]:
    """Make the footer and the trailer, which is the last page. Returns the offset of the footer,
    the footer and the trailer. `entries` are ENTRY rows; records end at `tail`.
    """
    nbytes, count = header.segment_bytes, len(entries) // ENTRY.itemsize
    offset = nbytes - footer_bytes(count)
    trailer = Trailer(
        header.segment_id, header.slot, nbytes, offset,
        tail, count, sealed, checksum(entries), header.store,
    )  # fmt: skip
    return offset, entries.ljust(nbytes - PAGE - offset, b"\0"), trailer.pack()
