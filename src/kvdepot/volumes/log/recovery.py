"""What is in a segment: read from its footer, or record by record where there is none. Top to
bottom.

    header page
      all zeros                                                  → the slot is free
      damaged                                                    → trailer and records tell the id
      of another slot or store                                   → not usable: swapped or foreign
      not above the floor of the metadata                         → not usable: put back
        … of another store, on a device                          → free: from an earlier life
    trailer page
      belongs to this use of the extent, footer intact           → footer entries
        … and sealed                                             → that is all
        … and open                                               → scan on from its tail
      otherwise                                                  → scan from the first record

A scan trusts nothing: a record counts when its head is intact, names this segment, and its payload
matches its checksums. After anything else it looks for the next head page by page, so one bad
record costs itself only.

What a crash leaves is not damage: no footer yet, a footer that is older than the last records, a
torn record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.volume import SEGMENT_SHIFT, Array, Contents
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

_STRETCH: Final = 32 << 20
_NOISE_BYTES_MAX: Final = 8
_MAGIC_BYTES: Final = MAGIC.to_bytes(4, "little")

HEADER_DAMAGED: Final = "header page is damaged"
TRAILER_DAMAGED: Final = "trailer page is damaged"
FOOTER_DAMAGED: Final = "footer is damaged"
PUT_BACK: Final = "is older than every segment in use: put back from an earlier time"
NOTHING_LEFT: Final = "header page is damaged and no record is intact: overwritten or swapped"


@dataclass(slots=True)
class Recovered:
    """What one segment holds. `damage` lists what was not as it should be, for people."""

    segment_id: int
    slot: int
    tail: int
    sealed: bool
    entries: Entries
    damage: list[str] = field(default_factory=list)
    usable: bool = True
    """False: it belongs elsewhere, or nothing in it can be told; its blocks do not count here."""
    origin: SegmentHeader | None = None
    """Where it belongs, if that is not here."""
    scanned: bool = False
    """There was no footer that could be used."""


@dataclass(frozen=True, slots=True)
class SegmentReader:
    """Reads one segment extent."""

    files: Files
    fd: int
    base: int
    segment_bytes: int
    slot: int
    store: bytes
    floor: int = 0
    """Segments with this id or a lower one do not count (core.metadata)."""

    def recover(self) -> Recovered | None:
        """What the segment holds; None if the slot is free. Raises OSError."""
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
                return self._unusable(0, [NOTHING_LEFT])
            damage.append(HEADER_DAMAGED)
        if header.store != self.store and self.base:
            return None
        if header.slot != self.slot or header.store != self.store:
            damage.append(
                f"holds slot {header.slot} of store {header.store.hex()}: swapped or foreign"
            )
            return self._unusable(header.segment_id, damage, header)
        if header.segment_id <= self.floor:
            return self._unusable(header.segment_id, [*damage, PUT_BACK])
        if trailer is None and self._was_ours(trailer_page, TRAILER_MAGIC):
            damage.append(TRAILER_DAMAGED)
        elif trailer is not None and trailer.segment_id != header.segment_id:
            trailer = None
        return self._contents(header.segment_id, trailer, damage)

    def _contents(self, segment_id: int, trailer: Trailer | None, damage: list[str]) -> Recovered:
        found = Recovered(segment_id, self.slot, PAGE, False, np.zeros(0, ENTRY), damage)
        footer = self._read_footer(trailer) if trailer is not None else b""
        if trailer is None:
            found.scanned = True
            self._extend(found)
        elif checksum(footer) == trailer.footer_checksum:
            found.entries = np.frombuffer(footer, dtype=ENTRY)
            found.tail, found.sealed = trailer.tail, trailer.sealed
            if not trailer.sealed:
                self._extend(found)
        else:
            self._extend(found)
            if trailer.sealed or _is_flipped(footer, found.entries.tobytes()):
                damage.append(FOOTER_DAMAGED)
        return found

    def _unusable(
        self, segment_id: int, damage: list[str], origin: SegmentHeader | None = None
    ) -> Recovered:
        found = Recovered(segment_id, self.slot, PAGE, False, np.zeros(0, ENTRY), damage)
        found.usable, found.origin = False, origin
        return found

    def _identify(self, trailer: Trailer | None) -> SegmentHeader | None:
        """What a damaged header must have said.

        Trailer and records may be left over from earlier uses of the extent; ids grow, so the
        highest one tells the latest use.
        """
        newest = max((head.segment_id for _, head in self.records(None, PAGE)), default=0)
        if trailer is not None and trailer.segment_id >= newest:
            return SegmentHeader(
                trailer.segment_id, trailer.slot, trailer.segment_bytes, trailer.store
            )
        return SegmentHeader(newest, self.slot, self.segment_bytes, self.store) if newest else None

    def _was_ours(self, page: memoryview, magic: int) -> bool:
        """Whether a page that does not parse was written by us and damaged later.

        In a file we only find what we wrote, or zeros. A device may have had another life.
        """
        if self.base == 0:
            return not _is_blank(page)
        return (int.from_bytes(page[8:12], "little") ^ magic).bit_count() <= 1

    def _read_footer(self, trailer: Trailer) -> bytes:
        """The footer's entries; nothing where the trailer is wrong about them."""
        length = trailer.count * ENTRY.itemsize
        if trailer.footer_offset != self.segment_bytes - footer_bytes(trailer.count):
            return b""
        padded = footer_bytes(trailer.count) - PAGE
        return bytes(self.files.read(self.fd, self.base + trailer.footer_offset, padded)[:length])

    def _extend(self, found: Recovered) -> None:
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
                nbytes = min(_STRETCH, limit - offset)
                window = self.files.read(self.fd, self.base + offset, nbytes)
                window = window[: len(window) // PAGE * PAGE]  # the file may be cut off
                if len(window) < HEAD_BYTES:
                    return
            at = self._next_head(window, offset - window_at)
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

    @staticmethod
    def _next_head(window: memoryview, at: int) -> int:
        """The next page, from `at` on, that begins like a head; the window's end if none does."""
        if len(window) - at < HEAD_BYTES:
            return len(window)
        if window[at + 8 : at + 12] == _MAGIC_BYTES:
            return at
        pages = np.frombuffer(window[at : at + (len(window) - at) // PAGE * PAGE], dtype="<u4")
        hits = np.flatnonzero(pages.reshape(-1, PAGE // 4)[:, 2] == MAGIC)
        return at + int(hits[0]) * PAGE if len(hits) else len(window)


def _is_blank(page: memoryview) -> bool:
    """Zeros, give or take a flipped bit: what we write has a checksum, a magic, a store's name."""
    return len(page) - bytes(page).count(0) < _NOISE_BYTES_MAX


def _is_flipped(footer: bytes, expected: bytes) -> bool:
    """Whether an open segment's footer was right once and has a few wrong bits now.

    One that a crash left behind is older than the last records, or overwritten by them.
    """
    if len(footer) != len(expected):
        return False
    wrong = np.frombuffer(footer, np.uint8) != np.frombuffer(expected, np.uint8)
    return 2 * int(wrong.sum()) < len(expected)


def recover(segments: SegmentSet, floor: int, damage: list[str]) -> list[Recovered]:
    """Open every slot of a volume and read what is in it. `damage` gets what was found damaged."""
    found: list[Recovered] = []
    settings, label = segments.settings, segments.medium.label
    for slot in segments.medium.open_slots(settings.segment_bytes):
        fd, base = segments.medium.extent(slot)
        reader = SegmentReader(
            segments.files, fd, base, settings.segment_bytes, slot, segments.store, floor
        )
        try:
            recovered = reader.recover()
        except OSError as error:
            damage.append(f"{label}: slot {slot}: {error.strerror}")
            segments.health.breaker.failed(str(error.strerror))
            recovered = None
        if recovered is not None:
            damage += [f"{label}: slot {slot}: {text}" for text in recovered.damage]
            last = int(recovered.entries["stamp"].max()) if len(recovered.entries) else 0
            segments.stamps.observe(max(recovered.segment_id, last))
        if recovered is None or not recovered.usable:
            segments.free.append(slot)
            continue
        found.append(recovered)
        segment = Segment(recovered.segment_id, slot, recovered.tail, recovered.sealed)
        segment.count = len(recovered.entries)
        segments.add_found(segment)
    segments.free.sort(reverse=True)
    return _shrink(segments, found, damage)


def _shrink(segments: SegmentSet, found: list[Recovered], damage: list[str]) -> list[Recovered]:
    """Give up the oldest segments where the capacity is smaller than it was; before them those
    without a record, as a kill leaves one that was just begun.
    """
    surplus = segments.surplus()
    if not surplus or not segments.settings.writable:
        return found
    oldest = sorted(found, key=lambda one: (len(one.entries) > 0, one.segment_id))
    spare, segments.free = segments.free[:surplus], segments.free[surplus:]
    dropped = oldest[: surplus - len(spare)]
    for slot in [*spare, *(recovered.slot for recovered in dropped)]:
        try:
            if segments.by_slot.pop(slot, None) is not None:
                segments.wipe(slot)
            segments.medium.remove(slot)
        except OSError as error:
            damage.append(f"{segments.medium.label}: slot {slot}: {error.strerror}")
    return [recovered for recovered in found if recovered not in dropped]


def contents_of(segments: SegmentSet, found: Sequence[Recovered]) -> Contents:
    """The newest record of each key in the segments that were recovered; counts them as in use."""
    parts, places = [np.zeros(0, ENTRY)], [np.zeros(0, np.int64)]
    for recovered in found:
        blocks = recovered.entries[recovered.entries["kind"] == Kind.BLOCK]
        parts.append(blocks)
        places.append((recovered.slot << SEGMENT_SHIFT) + blocks["page"].astype(np.int64))
    entries, place = np.concatenate(parts), np.concatenate(places)
    words = np.frombuffer(np.ascontiguousarray(entries["key"]).tobytes(), np.uint64).reshape(-1, 4)
    stamps = entries["stamp"].astype(np.int64)
    order = np.argsort(stamps, kind="stable")
    newest = order[_last_of_each(words[order])]
    payload_bytes, place = entries["payload_bytes"][newest].astype(np.int64), place[newest]
    slots, which = np.unique(place >> SEGMENT_SHIFT, return_inverse=True)
    counts = np.bincount(which, minlength=len(slots))
    totals = np.bincount(which, weights=record_sizes(payload_bytes), minlength=len(slots))
    for slot, count, total in zip(slots.tolist(), counts.tolist(), totals.tolist(), strict=True):
        segments.count(slot, int(total), count)
    return Contents(words[newest], place, payload_bytes, stamps[newest], token=0)


def _last_of_each(words: Array) -> Array:
    """Where each key comes last, in order."""
    backwards = words[::-1]
    _, first, key = np.unique(backwards[:, 2], return_index=True, return_inverse=True)
    if not np.array_equal(backwards[first[key]], backwards):  # one word of two keys is the same
        _, first = np.unique(backwards, axis=0, return_index=True)
    last: Array = np.sort(len(words) - 1 - first)
    return last
