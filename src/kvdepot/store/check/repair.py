"""Repairs the volumes of a store on disk. Afterwards `audit` finds nothing.

All intact blocks are kept, unless entries of the metadata are lost in both copies: then all blocks
are dropped. Each step writes data, syncs it, then writes the pointers to it, so that a segment is
either unchanged or repaired, and an interrupted repair can be run again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdepot.core.depot import Finding
from kvdepot.core.metadata import MetaKind
from kvdepot.core.units import format_bytes
from kvdepot.format.record import PAGE
from kvdepot.format.segment import (
    ENTRY,
    Entries,
    SegmentHeader,
    close_segment,
    pack_slots,
)
from kvdepot.store.check.offline import OpenedVolume, Pace, Progress, examine, opened
from kvdepot.volumes.log.recovery import Recovered, SegmentReader


@dataclass(slots=True)
class RepairReport:
    """Result of a repair. True if all damage could be repaired."""

    done: list[Finding] = field(default_factory=list)
    failed: list[Finding] = field(default_factory=list)
    dropped: int = 0
    """Damaged records that were dropped."""

    def __bool__(self) -> bool:
        return not self.failed

    def did(self, slot: int, what: str) -> None:
        self.done.append(Finding(f"slot {slot}", what))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def repair(path: Path, *, progress: Progress | None = None) -> RepairReport:
    """Repair the store at `path` and keep every intact block.

    Takes the writer's lock: raises StoreBusyError while a writer has the store open, FormatError if
    there is none. A segment that cannot be read or written is not changed and listed as failed.
    """
    report = RepairReport()
    files = path.glob("segment-??????.kvs") if path.is_dir() else ()
    numbered = [file for file in files if file.stem[-6:].isdigit()]
    sizes = {int(file.stem[-6:]): file.stat().st_size for file in numbered}
    with opened(path, writable=True) as volume:
        if any(": superblock: " in text for text in volume.damage):
            report.done.append(Finding("superblock", "written anew"))
        segment_bytes = volume.segment_bytes
        slots = volume.medium.open_slots(segment_bytes)
        there, slots = pack_slots(slots), _repair_metadata(volume, slots, report)
        for slot in slots:
            if sizes.get(slot, segment_bytes) != segment_bytes:
                report.did(slot, f"file given its size of {format_bytes(segment_bytes)} again")
        found = _recover(volume, slots, report)
        ids = {segment.segment_id for segment in found if segment.usable}
        origins = {segment.origin.slot for segment in found if segment.origin is not None}
        floors = {slot: volume.metadata.floor(slot) for slot in origins}  # repairs change them
        pace = Pace(progress, len(found) * segment_bytes)
        for segment in found:
            try:
                whole = segment if segment.usable else _swapped(volume, segment, ids, floors)
                _repair_segment(volume, segment, whole, report, pace)
                ids |= {whole.segment_id} if whole is not None else set()
            except OSError as error:
                report.failed.append(Finding(f"slot {segment.slot}", f"{error.strerror}"))
        if volume.metadata.is_whole:
            volume.metadata.put_own(MetaKind.SLOTS, there)
            volume.metadata.sync()
    return report


def _repair_metadata(volume: OpenedVolume, slots: list[int], report: RepairReport) -> list[int]:
    """Write the metadata log again. If entries are lost in both copies, removed blocks cannot be
    distinguished from others, so that all blocks are dropped. Returns the slots left to repair.
    """
    whole = volume.metadata.is_whole
    if volume.metadata.damage or not whole:
        try:
            for slot in slots if not whole else ():
                _wipe(volume.reader(slot))
                report.did(slot, "cleared: which of its blocks were removed is lost")
            volume.metadata.create()
        except OSError as error:
            report.failed.append(Finding("metadata", f"{error.strerror}"))
            return slots
        report.done.append(Finding("metadata", "both copies written anew"))
    return slots if whole else []


def _recover(volume: OpenedVolume, slots: list[int], report: RepairReport) -> list[Recovered]:
    found = []
    for slot in slots:
        try:
            segment = volume.reader(slot).recover()
        except OSError as error:
            report.failed.append(Finding(f"slot {slot}", f"cannot be read: {error.strerror}"))
            continue
        if segment is not None:
            found.append(segment)
    return found


def _repair_segment(
    volume: OpenedVolume,
    segment: Recovered,
    whole: Recovered | None,
    report: RepairReport,
    pace: Pace,
) -> None:
    """`whole` is what belongs in the segment's slot."""
    reader = volume.reader(segment.slot)
    if whole is None:
        _wipe(reader)
        report.did(segment.slot, "cleared: nothing in it belongs here")
        return
    verdicts = examine(reader, whole.segment_id, whole.entries, pace)
    intact = whole.entries[[not verdict for verdict in verdicts]]
    lost = len(verdicts) - len(intact)
    if not (segment.damage or lost):
        return
    if not whole.entries.size:
        _wipe(reader)
        report.did(segment.slot, "cleared: it held no record")
        return
    _rewrite(reader, whole, intact)
    if not segment.usable:
        volume.metadata.release([segment.slot], below=whole.segment_id)
    report.dropped += lost
    report.did(segment.slot, _told(segment, whole, len(intact), lost))


def _told(segment: Recovered, whole: Recovered, kept: int, lost: int) -> str:
    moved = "" if segment.usable else f"taken over from slot {whole.slot}, "
    dropped = f", {lost} damaged records dropped" if lost else ""
    return f"{moved}header and footer written anew, {kept} records kept{dropped}"


def _swapped(
    volume: OpenedVolume, segment: Recovered, ids: set[int], floors: Mapping[int, int]
) -> Recovered | None:
    """Contents of a segment of this volume in a wrong slot; None if it is another volume's."""
    origin, reader = segment.origin, volume.reader(segment.slot)
    if origin is None or origin.store != reader.store or origin.segment_id in ids:
        return None
    if origin.segment_bytes != reader.segment_bytes:
        return None
    return replace(reader, slot=origin.slot, floor=floors[origin.slot]).recover()


def _rewrite(reader: SegmentReader, segment: Recovered, intact: Entries) -> None:
    """Write header, footer and trailer of a sealed segment with these records."""
    header = SegmentHeader(segment.segment_id, reader.slot, reader.segment_bytes, reader.store)
    entries = np.ascontiguousarray(intact, dtype=ENTRY).tobytes()
    offset, footer, trailer = close_segment(header, segment.tail, entries, sealed=True)
    files, fd, base = reader.files, reader.fd, reader.base
    files.write(fd, base, header.pack())
    if footer:
        files.write(fd, base + offset, footer)
    files.sync(fd)
    files.write(fd, base + reader.segment_bytes - PAGE, trailer)
    files.sync(fd)


def _wipe(reader: SegmentReader) -> None:
    """Free a slot. The header is wiped last, so that an interrupted repair starts again."""
    reader.files.write(reader.fd, reader.base + reader.segment_bytes - PAGE, bytes(PAGE))
    reader.files.sync(reader.fd)
    reader.files.write(reader.fd, reader.base, bytes(PAGE))
    reader.files.sync(reader.fd)
