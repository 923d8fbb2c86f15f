"""Checks that file systems have room for the configured capacities."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvdepot.config.settings import Config
from kvdepot.core.units import format_bytes


@dataclass(slots=True)
class DiskRoom:
    """A file system, and the capacities of the paths on it."""

    free_bytes: int
    """Free bytes, including those of the store's own segments."""
    wanted_bytes: int = 0
    settings: dict[str, None] = field(default_factory=dict)
    """The settings with these capacities, in order."""
    paths: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        where = ", ".join(map(str, self.paths))
        return (
            f"{' and '.join(self.settings)}: {format_bytes(self.wanted_bytes)} wanted on the disk "
            f"of {where}, which has room for {format_bytes(self.free_bytes)}"
        )


def shortages(config: Config) -> list[DiskRoom]:
    """The file systems with less room than the capacities of the file tiers on them."""
    disks: dict[int, DiskRoom] = {}
    for tier in config.file_tiers:
        for path in tier.path:
            place = nearest(path)
            try:
                if path.is_block_device() or place is None:
                    continue  # a device says its size when it is opened
                found = os.statvfs(place)
                free_bytes = found.f_bavail * found.f_frsize
                disk = disks.setdefault(place.stat().st_dev, DiskRoom(free_bytes))
                segments = path.glob("segment-*.kvs")
                disk.free_bytes += sum(one.lstat().st_blocks * 512 for one in segments)
            except OSError:
                continue  # a drive that cannot be read is left out when it is opened
            disk.wanted_bytes += tier.path_capacity
            disk.settings[f"{tier.TIER}.capacity"] = None
            disk.paths.append(path)
    return [disk for disk in disks.values() if disk.wanted_bytes > disk.free_bytes]


def nearest(path: Path) -> Path | None:
    """The path, or its nearest existing parent; None if that cannot be accessed."""
    for place in (path, *path.absolute().parents):
        try:
            if place.exists():
                return place
        except OSError:
            return None
    return None
