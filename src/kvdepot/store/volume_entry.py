"""A numbered place for a volume in a store."""

from dataclasses import dataclass, field

from kvdepot.core.volume import Contents, OpenVolume, Volume
from kvdepot.errors import KVDepotError


@dataclass(eq=False)
class VolumeEntry:
    """A number and the present volume with it."""

    number: int
    tier: str
    path: str
    open: OpenVolume
    volume: Volume
    error: KVDepotError | None = None
    """The error that prevented opening it; None if it is open."""
    is_remote: bool = False
    identity: bytes = b""
    mounts: int = 0
    """Number of times it was opened again: appends to earlier instances are lost."""
    token: int = 0
    news: list[Contents] = field(default_factory=list)
    has_news: bool = False
    """True if other nodes have changed its contents since `take_news`."""
    draining: bool = False
    retired: bool = False
    """True if it was removed; its number may be given to another volume."""
    capacity_bytes: int | None = None
    """The capacity after a resize; None: as configured."""
