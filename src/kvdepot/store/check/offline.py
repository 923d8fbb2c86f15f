"""Checks the volumes of a store on disk. Read-only; may run while a writer has the store open.

Reads every live block in large reads and verifies its checksums. What a crash leaves is not damage:
a segment without footer, a torn record, a `superblock.new`.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.core.clock import StampClock, SystemClock, WallClock
from kvdepot.core.depot import CheckReport, Finding
from kvdepot.core.metadata import MetaKind, surviving
from kvdepot.core.volume import SEGMENT_SHIFT, Contents, segment_of
from kvdepot.errors import FormatError
from kvdepot.format.record import (
    PAGE,
    Kind,
    parse_head,
    payload_intact,
    record_bytes,
    record_sizes,
)
from kvdepot.format.segment import Entries, parse_slots
from kvdepot.io.files import Files
from kvdepot.volumes.log.health import LogHealth
from kvdepot.volumes.log.medium import Medium, MountSettings, cannot_use, mount
from kvdepot.volumes.log.metadata import MetadataLog
from kvdepot.volumes.log.recovery import (
    Recovered,
    SegmentReader,
    contents_of,
    recover,
    segment_reader,
)
from kvdepot.volumes.log.segments import SegmentSet

Progress = Callable[[int, int], None]
"""Called with the bytes that were checked and the total."""

_WINDOW: Final = 32 << 20
_GAP_MAX: Final = 1 << 20
"""Largest gap of dead bytes between two live records that are read in one request."""
_TRIES: Final = 3
_UNLIMITED: Final = 1 << 62
_SEGMENT_BYTES: Final = 256 << 20


@dataclass
class AuditReport(CheckReport):
    """Result of `audit`. `blocks` and `nbytes` count the intact ones."""

    path: str = ""
    segments: int = 0
    held_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        facts = {"path": self.path, "segments": self.segments, "held_bytes": self.held_bytes}
        return {**super().as_dict(), **facts}


@dataclass(slots=True)
class Pace:
    """Counts bytes for a progress display."""

    watcher: Progress | None
    total: int = 0
    done: int = field(default=0, init=False)

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.watcher is not None:
            self.watcher(self.done, self.total)


def audit(path: Path, *, progress: Progress | None = None) -> AuditReport:
    """Check the store at `path`: a directory or a block device.

    Raises FormatError if there is no store, or one of another format. Reports only findings of two
    checks in a row, because a writer may reuse the space that is being read.
    """
    report = _look_again(path, progress)
    if not report.ok:
        again = _look_again(path, progress)
        again.findings = [finding for finding in again.findings if finding in report.findings]
        return again
    return report


@dataclass(frozen=True, slots=True)
class OpenedVolume:
    """A volume opened without a store."""

    medium: Medium
    segments: SegmentSet
    metadata: MetadataLog
    damage: list[str]
    """Descriptions of the damage found."""

    @property
    def segment_bytes(self) -> int:
        return self.segments.settings.segment_bytes

    def reader(self, slot: int) -> SegmentReader:
        return segment_reader(self.segments, slot)

    def read(self) -> tuple[Contents, list[Recovered]]:
        """Read the volume's contents. Raises FileNotFoundError if a writer deletes files
        meanwhile.
        """
        recovered = recover(self.segments, self.damage)
        found = contents_of(self.segments, recovered)
        alive = surviving(found.words, found.stamps, self.metadata.known.tombstones)
        dead = np.setdiff1d(np.arange(len(found.words)), alive)
        sizes = record_sizes(found.payload_bytes[dead]).tolist()
        for place, nbytes in zip(found.places[dead].tolist(), sizes, strict=True):
            self.segments.count(segment_of(place), -nbytes, -1)
        alive_contents = Contents(
            found.words[alive],
            found.places[alive],
            found.payload_bytes[alive],
            found.stamps[alive],
            token=0,
        )
        return alive_contents, recovered


@contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[OpenedVolume]:
    """Open the volume at `path` without a store. Takes the writer's lock if `writable`.

    Raises FormatError if there is no store; never creates one.
    """
    _require_store(path)
    files = Files()
    try:
        settings = MountSettings(
            _UNLIMITED, _segment_bytes(path), writable=writable, any_owner=not writable
        )
        mounted = mount(path, files, settings)
        stamps = StampClock(WallClock())
        metadata = mounted.open_metadata(stamps)
        try:
            medium = mounted.medium
            health = LogHealth(medium.label, SystemClock(), settings.pauses, lambda _: None)
            segments = SegmentSet(mounted, metadata, files, health)
            damage = [*mounted.damage, *(f"{medium.label}: {text}" for text in metadata.damage)]
            yield OpenedVolume(medium, segments, metadata, damage)
        except PermissionError as error:
            raise _unreadable(path, error) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise cannot_use(str(path), settings, error) from error
        finally:
            metadata.close()
            mounted.medium.close()
    finally:
        files.close()


def examine(reader: SegmentReader, segment_id: int, entries: Entries, pace: Pace) -> list[str]:
    """Return the fault of each record; an empty text for an intact one."""
    verdicts = [""] * len(entries)
    for run in _runs(entries):
        start, stop = _span(entries, run[0])[0], _span(entries, run[-1])[1]
        try:
            window = reader.files.read(reader.fd, reader.base + start, stop - start)
        except OSError:
            window = None
        for index in run:
            first, last = _span(entries, index)
            if window is None:
                verdicts[index] = _read_alone(reader, segment_id, entries, index)
            else:
                image = window[first - start : last - start]
                verdicts[index] = _verdict(image, segment_id, entries, index)
        pace.advance(stop - start)
    return verdicts


def _look_again(path: Path, progress: Progress | None) -> AuditReport:
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return _look(path, progress)
    return _look(path, progress)


def _look(path: Path, progress: Progress | None) -> AuditReport:
    with opened(path) as volume:
        entry = volume.metadata.own(MetaKind.SLOTS)
        listed = parse_slots(entry.value or b"") if entry is not None else set[int]()
        contents, found = volume.read()
        report = AuditReport(path=str(path), segments=len(found))
        report.held_bytes = volume.segments.slot_count() * volume.segment_bytes
        report.findings = [_finding(volume, text) for text in volume.damage]
        _check_files(volume, listed, report)
        pace = Pace(progress, int(record_sizes(contents.payload_bytes).sum()))
        segments = contents.places >> SEGMENT_SHIFT
        for recovered in found:
            pages = contents.places[segments == recovered.slot] & (1 << SEGMENT_SHIFT) - 1
            _check_segment(volume, recovered, set(pages.tolist()), report, pace)
    return report


def _finding(volume: OpenedVolume, text: str) -> Finding:
    where, _, what = text.removeprefix(f"{volume.medium.label}: ").partition(": ")
    return Finding(where, what)


def _check_files(volume: OpenedVolume, listed: set[int], report: AuditReport) -> None:
    """Check that each file that the metadata lists exists and has the size of a segment. A file
    that a crash left half made is not listed.
    """
    expected, by_slot = volume.segment_bytes, volume.segments.by_slot
    there = sorted([*by_slot, *volume.segments.free])
    for slot in sorted(listed.difference(there)):
        report.add(f"slot {slot}", "file is missing")
    unusable = {finding.where for finding in report.findings}
    for slot in there:
        status = os.fstat(volume.medium.extent(slot)[0])
        in_use = slot in by_slot or slot in listed or f"slot {slot}" in unusable
        wrong = status.st_size > expected or (in_use and status.st_size < expected)
        if wrong and stat.S_ISREG(status.st_mode):
            report.add(f"slot {slot}", f"file has {status.st_size} bytes, not {expected}")


def _check_segment(
    volume: OpenedVolume, segment: Recovered, live: set[int], report: AuditReport, pace: Pace
) -> None:
    blocks = segment.entries[segment.entries["kind"] == Kind.BLOCK]
    blocks = blocks[[page in live for page in blocks["page"].tolist()]]
    verdicts = examine(volume.reader(segment.slot), segment.segment_id, blocks, pace)
    for index, verdict in enumerate(verdicts):
        if verdict:
            where = f"slot {segment.slot}, page {blocks['page'][index]}"
            report.add(where, f"block {_key(blocks, index).hex()}: {verdict}")
        else:
            report.blocks += 1
            report.nbytes += int(blocks["payload_bytes"][index])


def _runs(entries: Entries) -> Iterator[list[int]]:
    """Group records to be read in one request, in the order of their places."""
    run: list[int] = []
    for index in np.argsort(entries["page"], kind="stable").tolist():
        first, last = _span(entries, index)
        if run:
            start, stop = _span(entries, run[0])[0], _span(entries, run[-1])[1]
            if first - stop > _GAP_MAX or last - start > _WINDOW or first < stop:
                yield run
                run = []
        run.append(index)
    if run:
        yield run


def _span(entries: Entries, index: int) -> tuple[int, int]:
    start = int(entries["page"][index]) * PAGE
    return start, start + record_bytes(int(entries["payload_bytes"][index]))


def _key(entries: Entries, index: int) -> bytes:
    key: bytes = entries["key"][index].tobytes()
    return key


def _read_alone(reader: SegmentReader, segment_id: int, entries: Entries, index: int) -> str:
    start, stop = _span(entries, index)
    try:
        image = reader.files.read(reader.fd, reader.base + start, stop - start)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return _verdict(image, segment_id, entries, index)


def _verdict(image: memoryview, segment_id: int, entries: Entries, index: int) -> str:
    entry = entries[index]
    nbytes = int(entry["payload_bytes"])
    if len(image) < record_bytes(nbytes):
        return "is cut off"
    head = parse_head(image)
    if head is None:
        return "head is damaged"
    found = (head.key, head.kind, head.segment_id, head.payload_bytes, head.stamp)
    listed = (_key(entries, index), entry["kind"], segment_id, nbytes, entry["stamp"])
    if found != listed:
        return "is not the record that the footer lists"
    return "" if payload_intact(image, head) else "does not match its checksum"


def _segment_bytes(path: Path) -> int:
    """The segment size of a store whose headers are all damaged, from its files."""
    sizes = [file.stat().st_size for file in path.glob("segment-*.kvs") if not file.is_symlink()]
    nbytes = max(sizes, default=0)
    return nbytes if nbytes and nbytes % PAGE == 0 else _SEGMENT_BYTES


def _require_store(path: Path) -> None:
    """Raise FormatError, with a hint, if there cannot be a store at `path`."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FormatError(str(path), "does not exist", hint="check the path") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISBLK(mode):
        return
    if not stat.S_ISDIR(mode):
        raise FormatError(
            str(path),
            "is a file, not a store",
            hint="give the directory or block device that ssd.path names",
        )
    try:
        names: Sequence[str] = os.listdir(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not any(name == "superblock" or name.startswith("segment-") for name in names):
        raise FormatError(
            str(path),
            "there is no store in this directory",
            hint="give the directory or block device that ssd.path names",
        )


def _unreadable(path: Path, error: OSError) -> FormatError:
    place = error.filename if error.filename is not None else path
    return FormatError(
        str(place), f"{error.strerror}".lower(), hint="run this as the user that owns the store"
    )
