"""A volume in plain memory."""

from typing import Final

from kvdepot.core.clock import StampClock, SystemClock, WallClock
from kvdepot.core.volume import VolumeContext
from kvdepot.volumes.named import NamedVolume

CONTEXT: Final = VolumeContext(SystemClock(), WallClock(), StampClock(WallClock()))
"""Opens a volume without a store, for writing."""


class MemoryMedium(dict[str, bytes]):
    """Values in a dict. Implements volumes.named.NamedValues.

    To simulate a restart, pass it to another MemoryVolume.
    """

    def names(self) -> list[str]:
        return list(self)

    def write(self, name: str, value: bytes) -> None:
        self[name] = value

    def read(self, name: str, nbytes: int) -> bytes:
        return self.get(name, b"")[:nbytes]

    def delete(self, name: str) -> None:
        self.pop(name, None)


class MemoryVolume(NamedVolume):
    """A volume in plain memory."""

    def __init__(
        self,
        capacity_bytes: int,
        medium: MemoryMedium | None = None,
        label: str = "memory",
        context: VolumeContext = CONTEXT,
    ) -> None:
        self.medium = MemoryMedium() if medium is None else medium
        super().__init__(self.medium, context, label, capacity_bytes)
