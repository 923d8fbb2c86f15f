"""Metadata of volumes: descriptions of namespaces, tombstones, sessions, a profile and others.

An entry has a kind, a name and a stamp. Of several entries with one kind and name, on any volume,
the one with the greatest stamp counts; one without a value deletes the others. Tombstones are
merged: see `Tombstone.merged`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import KEY_BYTES, TAG_BYTES
from kvdepot.core.clock import STAMP_MAX

NAME_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 8 << 20
TOMBSTONE_AGE_US: Final = 30 * 86_400 * 1_000_000
"""Deletions are kept for this time, for volumes that are detached."""
_U64: Final = struct.Struct("<Q")
Array = npt.NDArray[Any]


class MetaKind(IntEnum):
    """The kind of an entry. Its name is in brackets."""

    NAMESPACE = 1
    """Description of a namespace, as JSON [tag]."""
    TOMBSTONE = 2
    """Deleted records [key or tag]."""
    SESSION = 3
    """A named prompt, as JSON [tag and session name]."""
    PIN = 4
    """Blocks of a session that are kept until a time, as JSON [tag and session name]."""
    QUARANTINE = 5
    """A namespace in quarantine, as JSON [tag]."""
    PRODUCER = 6
    """The description of a producer, as text [its number]."""
    MEMBER = 7
    """A volume that belongs to the tier [its UUID]."""
    FLOOR = 8
    """Segments with this id or a lower one do not count, u64 [empty]."""
    PROFILE = 9
    """Measured speed of the volume itself [empty]."""
    SLOTS = 10
    """Segments of the volume that have a file, as ranges [empty]."""
    BUDGET = 11
    """Remaining write budget in bytes, and its time, two f64 [empty]."""
    OPENED = 12
    """The volume was opened for writing at this stamp, no value [empty]."""
    OWED = 13
    """Blocks with this stamp or a later one may be missing on a tier, u64 [its name]."""
    RELEASED = 14
    """Segments with a lower id do not count in a slot, u64 [number of the slot, u32]."""


OWN_KINDS: Final = frozenset(
    {MetaKind.PROFILE, MetaKind.SLOTS, MetaKind.BUDGET, MetaKind.OPENED, MetaKind.RELEASED}
)
"""Kinds that concern one volume and are not copied to others."""


@dataclass(frozen=True, slots=True)
class MetaEntry:
    """A metadata entry; `value` None deletes it."""

    kind: MetaKind
    name: bytes
    stamp: int
    value: bytes | None

    @property
    def is_valid(self) -> bool:
        """True if the fields are within their limits, which a checksum does not prove."""
        return (
            len(self.name) <= NAME_BYTES_MAX
            and 0 <= self.stamp <= STAMP_MAX
            and len(self.value or b"") <= VALUE_BYTES_MAX
        )


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Deletes every record of a key or a namespace with a stamp below `below`."""

    name: bytes
    """A whole key, or the tag of a namespace."""
    below: int
    recorded: int
    """Stamp of the removal: the records that it deletes are in segments with lower ids."""

    @property
    def is_valid(self) -> bool:
        return (
            len(self.name) in (KEY_BYTES, TAG_BYTES)
            and 0 <= self.below <= STAMP_MAX
            and 0 <= self.recorded <= STAMP_MAX
        )

    @property
    def entry(self) -> MetaEntry:
        return MetaEntry(MetaKind.TOMBSTONE, self.name, self.recorded, _U64.pack(self.below))

    @classmethod
    def parse(cls, entry: MetaEntry) -> "Tombstone | None":
        """Parse an entry; None if it is not a valid tombstone."""
        if entry.value is None or len(entry.value) != _U64.size:
            return None
        found = cls(entry.name, _U64.unpack(entry.value)[0], entry.stamp)
        return found if found.is_valid else None

    def covers(self, other: "Tombstone") -> bool:
        """True for the tombstone of a namespace that deletes all that the one of its key does."""
        mine = len(self.name) < len(other.name) and other.name.startswith(self.name)
        return mine and self.below >= other.below and self.recorded >= other.recorded

    def merged(self, other: "Tombstone | None") -> "Tombstone":
        """A tombstone that deletes the records of both."""
        if other is None or other == self:
            return self
        below, recorded = max(self.below, other.below), max(self.recorded, other.recorded)
        return Tombstone(self.name, below, recorded)


@dataclass(slots=True)
class Metadata:
    """The newest entry of each kind and name, on one volume or several."""

    entries: dict[tuple[MetaKind, bytes], MetaEntry] = field(default_factory=dict)
    tombstones: dict[bytes, Tombstone] = field(default_factory=dict)

    def is_news(self, entry: MetaEntry) -> bool:
        """True if an entry is valid and newer than the known one."""
        if entry.kind is MetaKind.TOMBSTONE:
            stone, known = Tombstone.parse(entry), self.tombstones.get(entry.name)
            wider = self.tombstones.get(entry.name[:TAG_BYTES])
            if stone is None or (wider is not None and wider.covers(stone)):
                return False
            return stone.merged(known) != known
        before = self.entries.get((entry.kind, entry.name))
        return entry.is_valid and (before is None or before.stamp < entry.stamp)

    def removes(self, stone: Tombstone) -> bool:
        """True if tombstones delete every block that this one deletes."""
        known = map(self.tombstones.get, (stone.name, stone.name[:TAG_BYTES]))
        return any(one is not None and one.below >= stone.below for one in known)

    def add(self, entry: MetaEntry) -> None:
        """Add an entry if `is_news`."""
        if not self.is_news(entry):
            return
        stone = Tombstone.parse(entry) if entry.kind is MetaKind.TOMBSTONE else None
        if stone is not None:
            whole = stone.merged(self.tombstones.get(stone.name))
            if len(stone.name) == TAG_BYTES:
                for name in [name for name, one in self.tombstones.items() if whole.covers(one)]:
                    del self.tombstones[name]
            self.tombstones[stone.name] = whole
        else:
            self.entries[entry.kind, entry.name] = entry

    def all(self) -> list[MetaEntry]:
        """All entries, including deletions."""
        return [*self.entries.values(), *(stone.entry for stone in self.tombstones.values())]

    def values(self, kind: MetaKind) -> dict[bytes, bytes]:
        """Values by name of the entries of one kind that are not deleted."""
        return {
            name: entry.value
            for (its_kind, name), entry in list(self.entries.items())
            if its_kind is kind and entry.value is not None
        }

    @property
    def floor(self) -> int:
        """Segments with this id or a lower one do not count."""
        entry = self.entries.get((MetaKind.FLOOR, b""))
        value = entry.value if entry is not None else None
        return _U64.unpack(value)[0] if value is not None and len(value) == _U64.size else 0

    def drop_below(self, floor: int) -> int:
        """Drop tombstones that delete no record in a segment above `floor`.
        Returns their number.
        """
        gone = [name for name, stone in self.tombstones.items() if stone.recorded <= floor]
        for name in gone:
            del self.tombstones[name]
        return len(gone)


def floor_entry(floor: int, stamp: int) -> MetaEntry:
    """The entry that makes segments with ids up to `floor` not count."""
    return MetaEntry(MetaKind.FLOOR, b"", stamp, _U64.pack(floor))


def surviving(words: Array, stamps: Array, tombstones: Mapping[bytes, Tombstone]) -> Array:
    """Indices of the records that no tombstone deletes. Keys are four u64 each."""
    dead = np.zeros(len(words), dtype=bool)
    keyed: dict[bytes, int] = {}
    for name, stone in tombstones.items():
        if len(name) == TAG_BYTES:
            tag = np.frombuffer(name, np.uint64)[0]
            dead |= (words[:, 0] == tag) & (stamps < stone.below)
        else:
            keyed[name] = stone.below
    if keyed:
        removed = np.frombuffer(b"".join(keyed), np.uint64).reshape(-1, 4)
        for index in np.flatnonzero(np.isin(words[:, 2], removed[:, 2])).tolist():
            dead[index] |= stamps[index] < keyed.get(words[index].tobytes(), 0)
    return np.flatnonzero(~dead)
