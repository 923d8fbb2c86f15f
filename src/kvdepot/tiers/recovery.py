"""What is in a segment: read from its footer, or record by record where there is none. Top to bottom.

    header and trailer pages
      trailer belongs to this use of the extent, footer intact   → footer entries
        … and sealed                                             → that is all
        … and open                                               → scan on from its tail
      otherwise                                                  → scan from the first record

A scan trusts nothing: a record counts when its head is intact, names this segment, and its payload
matches its checksums. After anything else it looks for the next head page by page, so one bad record costs itself only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.codec.record import (
    HEAD_BYTES,
    MAGIC,
    PAGE,
    Head,
    parse_head,
    payload_intact,
    record_bytes,
)
from kvdepot.codec.segment import ENTRY, Entries, SegmentHeader, Trailer, footer_bytes
from kvdepot.native import checksum
from kvdepot.tiers.files import Files

_STRETCH: Final = 32 << 20
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")


@dataclass(slots=True)
class Recovered:
    """What one segment holds. `damage` lists what was not as it should be, for people."""

    segment_id: int
    slot: int
    tail: int
    sealed: bool
    entries: Entries
    damage: list[str] = field(default_factory=list)
    scanned: bool = False


@dataclass(frozen=True, slots=True)
class SegmentReader:
    """Reads one segment extent."""

    files: Files
    fd: int
    base: int
    segment_bytes: int
    slot: int
    store: bytes

    def recover(self) -> Recovered | None:
        """What the segment holds; None if it was never used or cannot be told."""
        header = SegmentHeader.parse(self.files.read(self.fd, self.base, PAGE))
        end = self.base + self.segment_bytes
        trailer = Trailer.parse(self.files.read(self.fd, end - PAGE, PAGE))
        damage: list[str] = []
        if header is None:
            if trailer is None:
                return None
            damage.append("header page is damaged")
            header = SegmentHeader(
                trailer.segment_id, trailer.slot, trailer.segment_bytes, trailer.store
            )
        if header.slot != self.slot or header.store != self.store:
            damage.append(
                f"holds slot {header.slot} of store {header.store.hex()}: swapped or foreign"
            )
            return Recovered(header.segment_id, self.slot, PAGE, False, np.zeros(0, ENTRY), damage)
        entries = None
        if trailer is not None and trailer.segment_id == header.segment_id:
            entries = self._footer(trailer)
            if entries is None:
                if trailer.sealed:
                    damage.append("footer is damaged")
                trailer = None
        else:
            trailer = None
        found = Recovered(header.segment_id, self.slot, PAGE, False, np.zeros(0, ENTRY), damage)
        if trailer is not None and entries is not None:
            found.entries, found.tail, found.sealed = entries, trailer.tail, trailer.sealed
            if trailer.sealed:
                return found
        self._extend(found)
        return found

    def _footer(self, trailer: Trailer) -> Entries | None:
        length = trailer.count * ENTRY.itemsize
        if trailer.footer_offset != self.segment_bytes - footer_bytes(trailer.count):
            return None
        data = self.files.read(
            self.fd, self.base + trailer.footer_offset, footer_bytes(trailer.count) - PAGE
        )
        if len(data) < length or checksum(data[:length]) != trailer.footer_checksum:
            return None
        return np.frombuffer(bytes(data[:length]), dtype=ENTRY)

    def _extend(self, found: Recovered) -> None:
        """Add the records behind the tail."""
        more = []
        for offset, head in self.records(found.segment_id, found.tail):
            row = (head.key, offset // PAGE, head.kind, head.payload_bytes, head.sequence, 0)
            more.append(np.array([row], dtype=ENTRY))
            found.tail = offset + record_bytes(head.payload_bytes)
        found.scanned = True
        if more:
            found.entries = np.concatenate([found.entries, *more])

    def records(self, segment_id: int, start: int) -> Iterator[tuple[int, Head]]:
        """Intact records of this segment from `start` on, with their offsets."""
        offset = start
        limit = self.segment_bytes - PAGE
        window, window_at = memoryview(b""), 0
        while offset + HEAD_BYTES <= limit:
            if offset + HEAD_BYTES > window_at + len(window):
                window_at = offset
                window = self.files.read(self.fd, self.base + offset, min(_STRETCH, limit - offset))
                if len(window) < HEAD_BYTES:
                    return
            at = self._next_head(window, offset - window_at)
            offset = window_at + at
            if at >= len(window):
                continue
            head = parse_head(window[at:])
            if head is None or head.segment_id != segment_id:
                offset += PAGE
                continue
            nbytes = record_bytes(head.payload_bytes)
            if offset + nbytes > limit:
                offset += PAGE
                continue
            image = window[at : at + nbytes]
            if len(image) < nbytes:
                image = self.files.read(self.fd, self.base + offset, nbytes)
            if not payload_intact(image, head):
                offset += PAGE
                continue
            yield offset, head
            offset += nbytes

    @staticmethod
    def _next_head(window: memoryview, at: int) -> int:
        """Position at or after `at` of the next page that begins like a head; the window's end if none."""
        if len(window) - at < HEAD_BYTES:
            return len(window)
        if window[at + 8 : at + 12] == _MAGIC_BYTES:
            return at
        pages = np.frombuffer(window[at : at + (len(window) - at) // PAGE * PAGE], dtype="<u4")
        hits = np.flatnonzero(pages.reshape(-1, PAGE // 4)[:, 2] == MAGIC)
        return at + int(hits[0]) * PAGE if len(hits) else len(window)
