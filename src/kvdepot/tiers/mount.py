"""Opening one drive: what it says about itself, or what its segments say where that is lost."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.codec.record import PAGE
from kvdepot.codec.segment import FORMAT, SegmentHeader, Superblock
from kvdepot.core.clock import Clock
from kvdepot.errors import ConfigError, FormatError
from kvdepot.tiers.drive import Drive, DriveSettings, Numbers
from kvdepot.tiers.files import Files
from kvdepot.tiers.health import RetryPauses
from kvdepot.tiers.medium import DeviceMedium, DirectIo, DirectoryMedium, Medium, open_medium

_BLANK_BYTES: Final = 128 << 10
_SLOTS_MIN: Final = 3


@dataclass(frozen=True, slots=True)
class MountSettings:
    """How drives are opened."""

    capacity_bytes: int
    segment_bytes: int
    direct_io: DirectIo = "auto"
    fsync: str = "flush"
    write_timeout_s: float = 10.0
    pauses: RetryPauses = RetryPauses()
    writable: bool = True


def mount(
    path: Path, files: Files, settings: MountSettings, numbers: Numbers, clock: Clock
) -> Drive:
    """Open the drive at `path`. Raises ConfigError, FormatError or StoreBusyError; then nothing is held."""
    medium = open_medium(path, files, settings.direct_io, writable=settings.writable)
    try:
        superblock, damage = _superblock(medium, settings)
        slots = min(
            settings.capacity_bytes // superblock.segment_bytes,
            medium.slots_max(superblock.segment_bytes),
        )
        if settings.writable and slots < _SLOTS_MIN:
            raise ConfigError(
                "ssd.capacity",
                f"{path}: room for {slots} segments of {superblock.segment_bytes} bytes, at least {_SLOTS_MIN} needed",
                hint="raise ssd.capacity, or remove the store and choose a smaller ssd.segment",
            )
    except OSError as error:
        medium.close()
        raise ConfigError("ssd.path", f"cannot use {path}: {error.strerror}") from error
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
        ),
        numbers,
        clock,
    )
    drive.damage += damage
    return drive


def _superblock(medium: Medium, settings: MountSettings) -> tuple[Superblock, list[str]]:
    page = medium.read_superblock()
    found = Superblock.parse(page) if page is not None else None
    if isinstance(found, int):
        raise FormatError(
            medium.label,
            f"store of format {found}, this kvdepot reads format {FORMAT}",
            hint="use the kvdepot version that made it, or another path",
        )
    if found is not None:
        return found, []
    if isinstance(medium, DeviceMedium) and not medium.blank(_BLANK_BYTES):
        raise FormatError(
            medium.label,
            "the device holds something that is not a kvdepot store",
            hint=f"if it may be overwritten: wipefs -a {medium.label}",
        )
    rebuilt = _from_segments(medium) if isinstance(medium, DirectoryMedium) else None
    if rebuilt is not None:
        superblock, damage = (
            rebuilt,
            [f"{medium.label}: superblock is missing or damaged: rebuilt from segments"],
        )
    elif not settings.writable:
        raise FormatError(medium.label, "there is no store here", hint="check the path")
    else:
        superblock, damage = Superblock(str(uuid.uuid4()), settings.segment_bytes), []
        if page is not None:
            damage = [
                f"{medium.label}: superblock is damaged and there are no segments: started anew"
            ]
    if settings.writable:
        medium.write_superblock(superblock)
    return superblock, damage


def _from_segments(medium: DirectoryMedium) -> Superblock | None:
    for page in medium.first_pages():
        header = SegmentHeader.parse(page) if len(page) == PAGE else None
        if header is not None:
            return Superblock(str(uuid.UUID(bytes=header.store)), header.segment_bytes)
    return None
