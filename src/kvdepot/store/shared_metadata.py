"""The metadata that all volumes of a store share.

Every local volume keeps all of it (namespaces, tombstones, sessions, pins, quarantines), so that
any of them may be lost. A volume that was down or away gets what it lacks when it is back.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import (
    OWN_KINDS,
    TOMBSTONE_AGE_US,
    Metadata,
    MetaEntry,
    MetaKind,
    Tombstone,
    floor_entry,
)
from kvdepot.core.volume import Contents
from kvdepot.store.volume_entry import VolumeEntry

SYNC_S: Final = 10.0
_TOMBSTONES_MANY: Final = 4096
"""From this many on it is worth looking for tombstones that cover nothing."""
_REMOTE_KINDS: Final = frozenset({MetaKind.NAMESPACE, MetaKind.TOMBSTONE})
"""Metadata that other nodes need too."""


@dataclass(frozen=True, slots=True)
class Written:
    """Number of volumes that wrote metadata, and of volumes that should have."""

    have: int
    should: int


class SharedMetadata:
    """The metadata of one store. Thread-safe; volumes are written without the store's lock."""

    def __init__(
        self, entries: Callable[[], Sequence[VolumeEntry]], stamps: StampClock, *, writable: bool
    ) -> None:
        """`entries` are those of all volumes."""
        self._entries = entries
        self._stamps = stamps
        self._writable = writable
        self._known = Metadata()
        """Metadata of all local volumes together."""
        self._remote = Metadata()
        """Metadata of other nodes on volumes that they share with this one."""
        self._behind: set[VolumeEntry] = set()
        """Volumes that lack metadata which was given to the store."""
        self._lock = threading.Lock()
        """Over the three above; held for an instant."""

    def learn(self, entry: VolumeEntry, contents: Contents) -> None:
        """Know the metadata of a volume."""
        with self._lock:
            metadata = self._remote if entry.is_remote else self._known
            for one in contents.metadata:
                if one.kind not in OWN_KINDS:
                    metadata.add(one)

    def put(
        self,
        entries: Sequence[MetaEntry],
        sync_s: float | None = None,
        *,
        to_others: bool = True,
    ) -> Written:
        """Record metadata on every volume; one that is down gets it when it works again. With
        `sync_s` a volume counts once it has it durably, within that time. `to_others`: also on
        volumes that are shared with other nodes, what concerns these.
        """
        with self._lock:
            for one in entries:
                self._known.add(one)
        have = should = 0
        shared = [one for one in entries if to_others and one.kind in _REMOTE_KINDS]
        for entry in self._entries() if self._writable else ():
            mine = shared if entry.is_remote else entries
            if entry.retired or entry.error is not None or not mine:
                continue
            done = entry.volume.put_meta(mine)
            if not done:
                with self._lock:
                    self._behind.add(entry)
            if done and sync_s is not None:
                done = entry.volume.sync(sync_s)
            if not entry.draining:
                have, should = have + done, should + 1
        return Written(have, should)

    def values(self, kind: MetaKind) -> dict[bytes, bytes]:
        """Name to value of the entries of one kind that local volumes have."""
        with self._lock:
            return self._known.values(kind)

    def remote_values(self, kind: MetaKind) -> dict[bytes, bytes]:
        """The same of volumes that are shared with other nodes."""
        with self._lock:
            return self._remote.values(kind)

    def known(self) -> Metadata:
        """A copy of all that local volumes know."""
        with self._lock:
            return Metadata(dict(self._known.entries), dict(self._known.tombstones))

    def tombstones(self) -> tuple[dict[bytes, Tombstone], int]:
        """Tombstones of all volumes, and the floor: segments with this id or a lower one
        do not count.
        """
        with self._lock:
            stones = dict(self._remote.tombstones)
            for name, stone in self._known.tombstones.items():
                stones[name] = stone.merged(stones.get(name))
            return stones, self._known.floor

    def catch_up(self, entry: VolumeEntry) -> None:
        """Give a volume that works again the metadata that it lacks."""
        if entry in self._behind and entry.volume.facts().up:
            self._bring_up_to_date(entry)

    def behind(self) -> list[VolumeEntry]:
        """Volumes that lack metadata."""
        return list(self._behind)

    def segment_released(self) -> None:
        """Tombstones may cover nothing any more. Looks only if there are many."""
        if len(self._known.tombstones) >= _TOMBSTONES_MANY:
            self.raise_floor()

    def forget(self, entry: VolumeEntry) -> None:
        """A volume is used no more."""
        with self._lock:
            self._behind.discard(entry)

    def local(self) -> list[VolumeEntry]:
        """Volumes of this node that are there, so that they keep all metadata."""
        return [
            entry
            for entry in self._entries()
            if not (entry.is_remote or entry.retired or entry.error is not None)
            and not entry.volume.facts().lost
        ]

    def share(self, gone: bytes = b"") -> None:
        """Record durably on all local volumes what they know together: from then on one may forget
        it, or go. `gone` names a volume that will not come back.
        """
        stamp, local = self._stamps.next(), self.local()
        with self._lock:
            members = self._known.values(MetaKind.MEMBER).keys()
            for entry in local:
                if entry.identity and entry.identity not in members:
                    self._known.add(MetaEntry(MetaKind.MEMBER, entry.identity, stamp, b""))
            if gone:
                self._known.add(MetaEntry(MetaKind.MEMBER, gone, stamp, None))
        for entry in local:
            self._bring_up_to_date(entry)

    def _bring_up_to_date(self, entry: VolumeEntry) -> None:
        kinds = _REMOTE_KINDS if entry.is_remote else frozenset(MetaKind)
        with self._lock:
            entries = [one for one in self._known.all() if one.kind in kinds]
        done = entry.volume.put_meta(entries) and entry.volume.sync(SYNC_S)
        with self._lock:
            (self._behind.discard if done else self._behind.add)(entry)

    def _are_missing(self, local: Sequence[VolumeEntry]) -> bool:
        """True if a local volume is away, or lacks metadata that the others have."""
        with self._lock:
            members = self._known.values(MetaKind.MEMBER).keys()
            behind = any(not entry.is_remote for entry in self._behind)
        return behind or not members <= {entry.identity for entry in local}

    def raise_floor(self) -> None:
        """Forget tombstones that cover nothing any more."""
        local = self.local()
        if not self._writable or not local or not self._known.tombstones:
            return
        stamp = self._stamps.next()
        floor = min(entry.volume.facts().oldest_segment or stamp for entry in local) - 1
        if self._are_missing(local):
            floor = min(floor, stamp - TOMBSTONE_AGE_US)
        if floor <= self._known.floor:
            return
        entry = floor_entry(floor, stamp)
        durable = [one.volume.put_meta([entry]) and one.volume.sync(SYNC_S) for one in local]
        with self._lock:
            self._known.add(entry)
            if all(durable):
                self._known.drop_below(floor)
