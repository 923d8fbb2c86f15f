"""What a drive knows of the segments of its log, and the numbers they and their records get."""

import threading
from dataclasses import dataclass, field
from typing import Final

from kvdepot.codec.record import PAGE
from kvdepot.codec.segment import ENTRY, Trailer, footer_bytes
from kvdepot.core.tier import Purpose
from kvdepot.native import checksum

_NOTE_RESERVE_MAX: Final = 64 << 10
_CARRY_RESERVE_MAX: Final = 256 << 10


def kept_back(purpose: Purpose, segment_bytes: int, *, last: bool) -> int:
    """Room in a segment that is not for this purpose: in each some for notes alone, so that
    removals can be recorded on a full drive; in the last some for notes that a reclaim must carry.
    """
    notes = 0 if purpose.is_note else min(_NOTE_RESERVE_MAX, segment_bytes // 8)
    carried = min(_CARRY_RESERVE_MAX, segment_bytes // 8)
    return notes + (carried if last and purpose is not Purpose.CARRY else 0)


@dataclass(slots=True, eq=False)
class Segment:
    """One extent in use."""

    segment_id: int
    slot: int
    tail: int = PAGE
    sealed: bool = False
    live_bytes: int = 0
    live_count: int = 0
    entries: list[bytes] = field(default_factory=list)
    """Footer entries, as packed bytes; emptied when the segment is sealed."""
    count: int = 0
    runs: int = 0
    """Writes under way; a segment is sealed when it is full and they have ended."""
    unentered: int = 0
    """Blocks that were given a place but are in no index yet, so that they look dead."""


def closing_pages(
    segment: Segment, segment_bytes: int, store: bytes, *, sealed: bool
) -> tuple[int, bytes, bytes]:
    """Where a segment's footer begins, the footer, and the trailer, which is its last page."""
    footer = b"".join(segment.entries)
    segment.count = len(footer) // ENTRY.itemsize
    offset = segment_bytes - footer_bytes(segment.count)
    trailer = Trailer(
        segment.segment_id, segment.slot, segment_bytes, offset,
        segment.tail, segment.count, sealed, checksum(footer), store,
    )  # fmt: skip
    return offset, footer.ljust(segment_bytes - PAGE - offset, b"\0"), trailer.pack()


@dataclass(slots=True)
class SegmentWrites:
    """Records that go into one segment: the number of each image and its offset."""

    segment: Segment
    places: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a record went."""

    slot: int
    page: int
    segment_id: int


class Numbers:
    """Segment ids and record sequences of a tier: each is given out once, and they rise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment_id = 1
        self._sequence = 1

    def raise_to(self, segment_id: int, sequence: int) -> None:
        with self._lock:
            self._segment_id = max(self._segment_id, segment_id + 1)
            self._sequence = max(self._sequence, sequence + 1)

    def segment_id(self) -> int:
        with self._lock:
            self._segment_id += 1
            return self._segment_id - 1

    def sequence(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence - 1
