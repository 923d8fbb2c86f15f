"""Opening one drive: what it says about itself, or what its segments say where that is lost."""

import struct
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

from kvdepot.codec.record import PAGE
from kvdepot.codec.segment import FORMAT, HEADER_MAGIC, SegmentHeader, Superblock
from kvdepot.core.clock import Clock, WallClock
from kvdepot.errors import ConfigError, FormatError
from kvdepot.tiers.device.breaker import RetryPauses
from kvdepot.tiers.device.files import Files
from kvdepot.tiers.log.drive import Drive, DriveSettings
from kvdepot.tiers.log.medium import (
    Access,
    DeviceMedium,
    DirectIo,
    DirectoryMedium,
    Medium,
    open_medium,
)
from kvdepot.tiers.log.segments import Numbers

_BLANK_BYTES: Final = 128 << 10
_SLOTS_MIN: Final = 3
_STRETCH: Final = 32 << 20
_PROBE_BYTES: Final = 2 << 30
"""How far a device with a lost superblock is searched for segments."""
_TELLS_SIZE: Final = b"segment_bytes"
"""A damaged page with this in it was a superblock."""
_PREFIX: Final = struct.Struct("<QII")
"""How the header page begins in every format: checksum, magic, version."""


@dataclass(frozen=True, slots=True)
class MountSettings:
    """How drives are opened."""

    capacity_bytes: int
    segment_bytes: int
    direct_io: DirectIo = "auto"
    fsync: str = "flush"
    write_timeout_s: float = 10.0
    pauses: RetryPauses = field(default_factory=RetryPauses)
    writable: bool = True
    tier: str = "ssd"
    daily_bytes: int = 0
    """What may be written to each drive in a day; 0: no limit."""
    wall: Clock = field(default_factory=WallClock)
    profile: Literal["auto", "always", "never"] = "auto"
    """Whether drives are measured: see tiers.log.measuring."""
    mirrored: bool = False
    """Whether a second copy of a block on another drive is of use."""


def mount(
    path: Path, files: Files, settings: MountSettings, numbers: Numbers, clock: Clock
) -> Drive:
    """Open the drive at `path`.

    Raises ConfigError, FormatError or StoreBusyError; then nothing is held.
    """
    access = Access(settings.tier, settings.direct_io, settings.writable)
    medium = open_medium(path, files, access)
    try:
        superblock, damage = _superblock(medium, files, settings)
        slots = _slots(medium, superblock, settings)
    except OSError as error:
        medium.close()
        reason = f"cannot use {path}: {error.strerror}"
        raise ConfigError(access.setting("path"), reason) from error
    except (ConfigError, FormatError):
        medium.close()
        raise
    drive = Drive(
        medium,
        files,
        DriveSettings(
            segment_bytes=superblock.segment_bytes,
            slots_max=slots,
            store=uuid.UUID(superblock.store).bytes,
            fsync=settings.fsync,
            write_timeout_s=settings.write_timeout_s,
            pauses=settings.pauses,
            writable=settings.writable,
            daily_bytes=settings.daily_bytes if settings.writable else 0,
            wall=settings.wall,
        ),
        numbers,
        clock,
    )
    drive.damage += damage
    return drive


def _slots(medium: Medium, superblock: Superblock, settings: MountSettings) -> int:
    """How many segments there may be. Raises ConfigError where they are too few to work with."""
    segment_bytes = superblock.segment_bytes
    slots = min(settings.capacity_bytes // segment_bytes, medium.slots_max(segment_bytes))
    if settings.writable and slots < _SLOTS_MIN:
        raise ConfigError(
            f"{settings.tier}.capacity",
            f"{medium.label}: room for {slots} segments of {segment_bytes} bytes, "
            f"at least {_SLOTS_MIN} needed",
            hint=f"raise {settings.tier}.capacity, or remove the store and choose a smaller "
            f"{settings.tier}.segment",
        )
    return slots


def _superblock(
    medium: Medium, files: Files, settings: MountSettings
) -> tuple[Superblock, list[str]]:
    page = medium.read_superblock()
    found = Superblock.parse(page) if page is not None else None
    if isinstance(found, int):
        raise _other_format(medium, found)
    if found is not None:
        return found, []
    state = "missing" if page is None else "damaged"
    # A device that begins with zeros was cleared on purpose; a file that is gone was not.
    cleared = page is None and isinstance(medium, DeviceMedium)
    superblock = None if cleared else _from_segments(medium, files)
    if superblock is not None:
        damage = [f"{medium.label}: superblock: {state}; the segments tell what it said"]
    elif isinstance(medium, DeviceMedium) and not medium.blank(_BLANK_BYTES):
        raise FormatError(
            medium.label,
            "the device holds something that is not a kvdepot store",
            hint=f"if it may be overwritten: wipefs -a {medium.label}",
        )
    elif not settings.writable and (page is None or _TELLS_SIZE not in page):
        raise FormatError(medium.label, "there is no store here", hint="check the path")
    else:
        superblock, damage = Superblock(str(uuid.uuid4()), settings.segment_bytes), []
        if page is not None:
            damage = [f"{medium.label}: superblock: damaged, and there is no segment"]
    if settings.writable:
        medium.write_superblock(superblock)
    return superblock, damage


def _other_format(medium: Medium, number: int) -> FormatError:
    return FormatError(
        medium.label,
        f"store of format {number}, this kvdepot reads format {FORMAT}",
        hint="use the kvdepot version that made it, or another path",
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
                if _stands_at(page, start + index * PAGE):
                    yield page
            if whole < _STRETCH:
                return


def _stands_at(page: bytes, offset: int) -> bool:
    """Whether a header on a device is where it says it is: others are part of a block's data."""
    header = SegmentHeader.parse(page)
    return header is None or (header.slot + 1) * header.segment_bytes == offset
