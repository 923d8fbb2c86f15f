"""One number of a store's volumes, and the volume that has it."""

from dataclasses import dataclass, field

from kvdepot.core.volume import Contents, OpenVolume, Volume
from kvdepot.errors import KVDepotError


@dataclass(eq=False)
class VolumeEntry:
    """One number of the set, and the volume that has it."""

    number: int
    tier: str
    path: str
    open: OpenVolume
    volume: Volume
    writable: bool = True
    error: KVDepotError | None = None
    """Why it could not be opened, until it is."""
    is_remote: bool = False
    identity: bytes = b""
    mounts: int = 0
    """Number of times it was opened: what was appended before is gone."""
    token: int = 0
    news: list[Contents] = field(default_factory=list)
    has_news: bool = False
    """Other nodes have changed what it holds."""
    draining: bool = False
    retired: bool = False
    """It holds nothing and is used no more; its number may be given to another volume."""
    capacity_bytes: int | None = None
    """Capacity after a resize."""
