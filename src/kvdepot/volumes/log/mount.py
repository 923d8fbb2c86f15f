"""Opens a medium: what its superblock says, or what its segments say if that is lost."""

import errno
import itertools
import struct
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvdepot.core.units import format_bytes
from kvdepot.errors import DriveError, FormatError, KVDepotError, UnsafePathError
from kvdepot.format.record import PAGE
from kvdepot.format.segment import FORMAT, HEADER_MAGIC, SegmentHeader, Superblock
from kvdepot.io.files import Files
from kvdepot.volumes.log.medium import (
    TELLS_SIZE,
    DeviceMedium,
    DirectoryMedium,
    Medium,
    MountSettings,
    open_medium,
)

_ASKED: Final = 8
"""Segments that are compared with the superblock."""
_BLANK_BYTES: Final = 128 << 10
_SLOTS_MIN: Final = 3
_STRETCH: Final = 32 << 20
_PROBE_BYTES: Final = 2 << 30
"""How far a device with a lost superblock is searched for segments."""
_PREFIX: Final = struct.Struct("<QII")
"""How the header page begins in every format: checksum, magic, version."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """An open medium and what it says about itself."""

    medium: Medium
    superblock: Superblock
    settings: MountSettings
    """With the size of segments that the medium has."""
    slots_max: int
    is_new: bool
    damage: list[str]

    @property
    def store(self) -> bytes:
        """The UUID of the volume."""
        return uuid.UUID(self.superblock.store).bytes


def mount(path: Path, files: Files, settings: MountSettings) -> Mounted:
    """Open a medium and read its superblock. Raises ConfigError, FormatError or StoreBusyError;
    then nothing is held. DriveError and FormatError are the medium's fault, and concern no other.
    """
    try:
        medium = open_medium(path, files, settings)
    except OSError as error:
        raise cannot_use(path, settings, error) from error
    try:
        superblock, damage, is_new = _superblock(medium, files, settings)
        slots_max = _slots(medium, superblock, settings)
    except OSError as error:
        medium.close()
        raise cannot_use(path, settings, error) from error
    except KVDepotError:
        medium.close()
        raise
    settings = replace(settings, segment_bytes=superblock.segment_bytes)
    return Mounted(medium, superblock, settings, slots_max, is_new, damage)


def cannot_use(path: Path, settings: MountSettings, error: OSError) -> DriveError:
    """The error for a path that the system does not let us use."""
    full = error.errno == errno.ENOSPC
    hint = "make room on the disk, or give another path" if full else ""
    reason = f"cannot use {path}: {error.strerror}"
    return DriveError(f"{settings.tier}.path", reason, hint=hint)


def _slots(medium: Medium, superblock: Superblock, settings: MountSettings) -> int:
    """How many segments there may be. Raises DriveError where they are too few to work with."""
    segment_bytes = superblock.segment_bytes
    slots = min(settings.capacity_bytes // segment_bytes, medium.slots_max(segment_bytes))
    if settings.writable and slots < _SLOTS_MIN:
        raise DriveError(
            f"{settings.tier}.capacity",
            f"{medium.label}: room for {slots} segments of {format_bytes(segment_bytes)}, "
            f"at least {_SLOTS_MIN} needed",
            hint=f"raise {settings.tier}.capacity, or remove the store and choose a smaller "
            f"{settings.tier}.segment",
        )
    return slots


def _superblock(
    medium: Medium, files: Files, settings: MountSettings
) -> tuple[Superblock, list[str], bool]:
    """What the drive says about itself, what was damaged, and whether it is a new drive."""
    page = medium.read_superblock()
    found = Superblock.parse(page) if page is not None else None
    if isinstance(found, int):
        raise _other_format(medium, found)
    if found is not None and not _is_foreign(found, medium, files, settings):
        return found, [], False
    state = "missing" if page is None else "of another store" if found else "damaged"
    # A device that begins with zeros was cleared on purpose; a file that is gone was not.
    # Segments of an earlier store may lie between the files of what the device was made since.
    lost = isinstance(medium, DeviceMedium) and (page is None or medium.is_foreign())
    superblock = None if lost else _from_segments(medium, files)
    if superblock is not None:
        damage = [f"{medium.label}: superblock: {state}; the segments tell what it said"]
        return superblock, damage, False
    if isinstance(medium, DeviceMedium) and not medium.blank(_BLANK_BYTES):
        raise FormatError(
            medium.label,
            "the device holds something that is not a kvdepot store",
            hint=f"if it may be overwritten: dd if=/dev/zero of={medium.label} bs=128K count=1",
        )
    if not settings.writable and (page is None or TELLS_SIZE not in page):
        raise FormatError(medium.label, "there is no store here", hint="check the path")
    damaged = f"{medium.label}: superblock: damaged, and there is no segment"
    damage = [damaged] if page is not None else []
    return Superblock(str(uuid.uuid4()), settings.segment_bytes), damage, True


def _other_format(medium: Medium, number: int) -> FormatError:
    return FormatError(
        medium.label,
        f"store of format {number}, this kvdepot reads format {FORMAT}",
        hint="it is a cache: remove the folder or give another path, and it fills again; or use "
        "the kvdepot version that made it",
    )


def _from_segments(medium: Medium, files: Files) -> Superblock | None:
    """What most segments say. Raises FormatError where they are of another format."""
    votes: Counter[tuple[bytes, int]] = Counter()
    others: Counter[int] = Counter()
    for page in _first_pages(medium, files):
        header = SegmentHeader.parse(page)
        if header is not None:
            votes[header.store, header.segment_bytes] += 1
        elif len(page) >= _PREFIX.size:
            _, magic, version = _PREFIX.unpack_from(page)
            others[version] += magic == HEADER_MAGIC and version > FORMAT
    if votes:
        (store, segment_bytes), _ = votes.most_common(1)[0]
        return Superblock(str(uuid.UUID(bytes=store)), segment_bytes)
    number, count = others.most_common(1)[0] if others else (0, 0)
    if count:
        raise _other_format(medium, number)
    return None


def _is_foreign(
    superblock: Superblock, medium: Medium, files: Files, settings: MountSettings
) -> bool:
    """Whether the segments agree that they are of another store than the superblock says; or there
    are none, and it speaks of segments for which the drive is too small.

    Some are asked. On a device they may be left over from an earlier store.
    """
    if isinstance(medium, DeviceMedium):
        return False
    try:
        pages = list(itertools.islice(_first_pages(medium, files), _ASKED))
    except (OSError, UnsafePathError):
        return False  # recovery says what is wrong with them
    headers = [header for page in pages if (header := SegmentHeader.parse(page)) is not None]
    if not headers and len(pages) < _ASKED:
        too_large = settings.capacity_bytes // superblock.segment_bytes < _SLOTS_MIN
        return settings.writable and too_large
    stores = {header.store for header in headers}
    return len(stores) == 1 and stores != {uuid.UUID(superblock.store).bytes}


def _first_pages(medium: Medium, files: Files) -> Iterator[bytes]:
    """The first page of every segment, or of the first ones of a device."""
    if isinstance(medium, DirectoryMedium):
        yield from medium.first_pages()
    elif isinstance(medium, DeviceMedium):
        fd, _ = medium.extent(0)
        for start in range(0, _PROBE_BYTES, _STRETCH):
            window = files.read(fd, start, _STRETCH)
            whole = len(window) // PAGE * PAGE
            pages = np.frombuffer(window[:whole], np.uint8).reshape(-1, PAGE)
            words = np.ascontiguousarray(pages[:, 8:12]).view("<u4")[:, 0]
            for index in np.flatnonzero(words == HEADER_MAGIC).tolist():
                page = bytes(pages[index])
                header, at = SegmentHeader.parse(page), start + index * PAGE
                # A header that is not where it says it is belongs to a block's data.
                if header is None or (header.slot + 1) * header.segment_bytes == at:
                    yield page
            if whole < _STRETCH:
                return
