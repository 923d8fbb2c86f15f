"""Recovers the contents of segments: from the footer, or record by record if there is none.

    header page
      all zeros                                                  → the slot is free
      damaged                                                    → trailer and records show the id
      of another slot or volume                                  → not usable: swapped or foreign
      not above the floor of the slot in the metadata             → not usable: put back
        … of another volume, on a device                         → free: from an earlier use
    trailer page
      belongs to this use of the extent, footer intact           → footer entries
        … and sealed                                             → that is all
        … and open                                               → scan on from its tail
      otherwise                                                  → scan from the first record

A scan verifies everything: a record counts if its head is intact and names this segment, and its
payload matches its checksums. After anything else the scan looks for the next head page by page, so
that one bad record does not hide others.

The state after a crash is not damage: no footer, a footer older than the last records, a torn
record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.keys import Keys
from kvdepot.core.volume import SEGMENT_SHIFT, Contents
from kvdepot.format.record import (
    HEAD_BYTES,
    MAGIC,
    PAGE,
    Head,
    Kind,
    parse_head,
    payload_intact,
    record_bytes,
    record_sizes,
)
from kvdepot.format.segment import (
    ENTRY,
    HEADER_MAGIC,
    TRAILER_MAGIC,
    Entries,
    SegmentHeader,
    Trailer,
    footer_bytes,
)
from kvdepot.io.files import Files
from kvdepot.native import checksum
from kvdepot.volumes.log.segments import Segment, SegmentSet
from kvdepot.volumes.records import newest_records

_WINDOW: Final = 32 << 20
_NOISE_BYTES_MAX: Final = 8
PUT_BACK: Final = "is older than the segments in use: put back from an earlier time"


@dataclass(slots=True)
class Recovered:
    """The contents of one segment."""

    segment_id: int
    slot: int
    tail: int = PAGE
    sealed: bool = False
    entries: Entries = field(default_factory=lambda: np.zeros(0, ENTRY))
    damage: list[str] = field(default_factory=list)
    """Descriptions of damage."""
    usable: bool = True
    """False if it belongs to another slot or volume, or no record can be found."""
    origin: SegmentHeader | None = None
    """Its header, if it belongs to another slot or volume."""
    scanned: bool = False
    """True if there was no valid footer."""


@dataclass(frozen=True, slots=True)
class SegmentReader:
    """Reads one segment extent. Methods raise OSError."""

    files: Files
    fd: int
    base: int
    segment_bytes: int
    slot: int
    store: bytes
    floor: int = 0
    """Segments with this id or a lower one do not count in the slot (MetadataLog.floor)."""

    def recover(self) -> Recovered | None:
        """Read the contents of the segment; None if the slot is free."""
        page = self.files.read(self.fd, self.base, PAGE)
        end = self.base + self.segment_bytes
        trailer_page = self.files.read(self.fd, end - PAGE, PAGE)
        header, trailer = SegmentHeader.parse(page), Trailer.parse(trailer_page)
        damage: list[str] = []
        if header is None:
            if _is_blank(page):
                return None
            header = self._identify(trailer)
            if header is None:
                if not self._was_ours(page, HEADER_MAGIC):
                    return None
                damage = ["header page is damaged and no record is intact: overwritten or swapped"]
                return Recovered(0, self.slot, damage=damage, usable=False)
            damage.append("header page is damaged")
        if header.store != self.store and self.base:
            return None
        found = Recovered(header.segment_id, self.slot, damage=damage)
        if header.slot != self.slot or header.store != self.store:
            where = f"slot {header.slot} of volume {header.store.hex()}"
            damage.append(f"holds {where}: swapped or foreign")
            found.usable, found.origin = False, header
        elif header.segment_id <= self.floor:
            damage.append(PUT_BACK)
            found.usable = False
        elif trailer is None and self._was_ours(trailer_page, TRAILER_MAGIC):
            damage.append("trailer page is damaged")
            self._scan(found)
        elif trailer is None or trailer.segment_id != header.segment_id:
            self._scan(found)
        else:
            self._read_entries(found, trailer)
        return found

    def _read_entries(self, found: Recovered, trailer: Trailer) -> None:
        """Read the footer. Records that an open segment has after it are scanned."""
        footer = b""
        if trailer.footer_offset == self.segment_bytes - footer_bytes(trailer.count):
            padded = footer_bytes(trailer.count) - PAGE
            page = self.files.read(self.fd, self.base + trailer.footer_offset, padded)
            footer = bytes(page[: trailer.count * ENTRY.itemsize])
        if checksum(footer) == trailer.footer_checksum:
            found.entries = np.frombuffer(footer, dtype=ENTRY)
            found.tail, found.sealed = trailer.tail, bool(trailer.sealed)
            if not trailer.sealed:
                self._extend(found)
        else:
            self._extend(found)
            if trailer.sealed or _is_flipped(footer, found.entries.tobytes()):
                found.damage.append("footer is damaged")

    def _identify(self, trailer: Trailer | None) -> SegmentHeader | None:
        """Reconstruct a damaged header from trailer and records. These may be from earlier uses of
        the extent; the highest id is that of the latest use.
        """
        newest = max((head.segment_id for _, head in self.records(None, PAGE)), default=0)
        if trailer is not None and trailer.segment_id >= newest:
            return SegmentHeader(
                trailer.segment_id, trailer.slot, trailer.segment_bytes, trailer.store
            )
        return SegmentHeader(newest, self.slot, self.segment_bytes, self.store) if newest else None

    def _was_ours(self, page: memoryview, magic: int) -> bool:
        """True if an invalid page was written by us and damaged later. A file has our pages or
        zeros; a device may have had another use.
        """
        if self.base == 0:
            return not _is_blank(page)
        return (int.from_bytes(page[8:12], "little") ^ magic).bit_count() <= 1

    def _scan(self, found: Recovered) -> None:
        found.scanned = True
        self._extend(found)

    def _extend(self, found: Recovered) -> None:
        """Add the records after the tail."""
        more = []
        for offset, head in self.records(found.segment_id, found.tail):
            size = head.payload_bytes
            more.append((head.key, offset // PAGE, head.kind, size, head.stamp, size))
            found.tail = offset + record_bytes(size)
        if more:
            found.entries = np.concatenate([found.entries, np.array(more, dtype=ENTRY)])

    def records(self, segment_id: int | None, start: int) -> Iterator[tuple[int, Head]]:
        """Intact records from `start` on, with their offsets; of this segment, or of any."""
        offset = start
        limit = self.segment_bytes - PAGE
        window, window_at = memoryview(b""), 0
        while offset + HEAD_BYTES <= limit:
            if offset + HEAD_BYTES > window_at + len(window):
                window_at = offset
                nbytes = min(_WINDOW, limit - offset)
                window = self.files.read(self.fd, self.base + offset, nbytes)
                window = window[: len(window) // PAGE * PAGE]  # the file may be cut off
                if len(window) < HEAD_BYTES:
                    return
            at = _next_head(window, offset - window_at)
            offset = window_at + at
            if at >= len(window):
                continue
            head = parse_head(window[at:])
            nbytes = record_bytes(head.payload_bytes) if head is not None else 0
            ours = head is not None and segment_id in (None, head.segment_id)
            if head is None or not ours or offset + nbytes > limit:
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


def _next_head(window: memoryview, at: int) -> int:
    """The next page, from `at` on, that begins like a head; the window's end if none does."""
    pages = np.frombuffer(window[at:], dtype="<u4").reshape(-1, PAGE // 4)
    if len(pages) and pages[0, 2] == MAGIC:
        return at
    hits = np.flatnonzero(pages[:, 2] == MAGIC)
    return at + int(hits[0]) * PAGE if len(hits) else len(window)


def _is_blank(page: memoryview) -> bool:
    """True for zeros, even with a flipped bit: our pages have a checksum, a magic and a UUID."""
    return len(page) - bytes(page).count(0) < _NOISE_BYTES_MAX


def _is_flipped(footer: bytes, expected: bytes) -> bool:
    """True if the footer of an open segment is damaged by a few wrong bits. A footer that a crash
    left is older than the last records, or overwritten by them.
    """
    if len(footer) != len(expected):
        return False
    wrong = np.frombuffer(footer, np.uint8) != np.frombuffer(expected, np.uint8)
    return 2 * int(wrong.sum()) < len(expected)


def recover(segments: SegmentSet, damage: list[str]) -> list[Recovered]:
    """Open every slot of a volume and read its contents. Appends texts about damage to `damage`."""
    found: list[Recovered] = []
    held = segments.held
    label = segments.medium.label
    for slot in segments.medium.open_slots(segments.settings.segment_bytes):
        try:
            recovered = segment_reader(segments, slot).recover()
        except OSError as error:
            damage.append(f"{label}: slot {slot}: {error.strerror}")
            segments.health.breaker.failed(str(error.strerror))
            held.unknown.add(slot)
            recovered = None
        if recovered is not None:
            damage += [f"{label}: slot {slot}: {text}" for text in recovered.damage]
            last = int(recovered.entries["stamp"].max()) if len(recovered.entries) else 0
            segments.metadata.stamps.observe(max(recovered.segment_id, last))
            if recovered.damage and PUT_BACK not in recovered.damage:
                held.unknown.add(slot)  # its records may be found again when it is repaired
        if recovered is None or not recovered.usable:
            segments.free.append(slot)
            continue
        found.append(recovered)
        held.add(slot, words_of(recovered.entries))
        segment = Segment(recovered.segment_id, slot, recovered.tail, recovered.sealed)
        segment.count = len(recovered.entries)
        segment.extent = segments.medium.extent(slot)
        segments.by_slot[slot] = segment
    segments.free.sort(reverse=True)
    surplus = segments.surplus()
    if not surplus or not segments.settings.writable:
        return found
    # The capacity was lowered: drop segments without records, which a kill may leave, then the
    # oldest ones.
    oldest = sorted(found, key=lambda one: (len(one.entries) > 0, one.segment_id))
    dropped = oldest[: max(0, surplus - len(segments.free))]
    going = [*segments.free[:surplus], *(one.slot for one in dropped)]
    try:
        for recovered in dropped:
            del segments.by_slot[recovered.slot]
            segments.free.append(recovered.slot)
            segments.wipe(recovered.slot)
        segments.remove_slots(going)
    except OSError as error:
        damage.append(f"{label}: surplus segments: {error.strerror}")
    return [recovered for recovered in found if recovered not in dropped]


def segment_reader(segments: SegmentSet, slot: int) -> SegmentReader:
    fd, base = segments.medium.extent(slot)
    floor, store = segments.metadata.floor(slot), segments.header.store
    nbytes = segments.settings.segment_bytes
    return SegmentReader(segments.files, fd, base, nbytes, slot, store, floor)


def words_of(entries: Entries) -> Keys:
    """The keys of the entries of a footer."""
    return np.frombuffer(np.ascontiguousarray(entries["key"]).tobytes(), np.uint64).reshape(-1, 4)


def contents_of(segments: SegmentSet, found: Sequence[Recovered]) -> Contents:
    """The newest record of each key in the segments that were recovered; counts them as in use."""
    parts, places = [np.zeros(0, ENTRY)], [np.zeros(0, np.int64)]
    for recovered in found:
        blocks = recovered.entries[recovered.entries["kind"] == Kind.BLOCK]
        parts.append(blocks)
        places.append((recovered.slot << SEGMENT_SHIFT) + blocks["page"].astype(np.int64))
    entries = np.concatenate(parts)
    contents = newest_records(
        words_of(entries), np.concatenate(places), entries["payload_bytes"], entries["stamp"]
    )
    slots, which = np.unique(contents.places >> SEGMENT_SHIFT, return_inverse=True)
    sizes = record_sizes(contents.payload_bytes)
    counts = np.bincount(which, minlength=len(slots))
    totals = np.bincount(which, weights=sizes, minlength=len(slots))
    for slot, count, total in zip(slots.tolist(), counts.tolist(), totals.tolist(), strict=True):
        segments.count(slot, int(total), count)
    return contents
