"""The metadata that all volumes of a store share.

Every local volume has all of it (namespaces, tombstones, sessions, pins, quarantines), so that any
volume may be lost. A volume that was down or detached gets missing entries when it works again.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.core.block import TAG_BYTES
from kvdepot.core.clock import StampClock
from kvdepot.core.keys import Keys
from kvdepot.core.metadata import (
    OWN_KINDS,
    TOMBSTONE_AGE_US,
    Metadata,
    MetaEntry,
    MetaKind,
    Tombstone,
    floor_entry,
)
from kvdepot.core.volume import Bools, Contents
from kvdepot.store.volume_entry import VolumeEntry

SYNC_S: Final = 10.0
_TOMBSTONES_MANY: Final = 4096
"""Number of tombstones from which unneeded ones are looked for."""
_TOMBSTONE_BYTES: Final = 80
_TOMBSTONES_SHARE: Final = 64
"""Tombstones may take this part of the smallest volume."""
_REMOTE_KINDS: Final = frozenset({MetaKind.NAMESPACE, MetaKind.TOMBSTONE})
"""Kinds of metadata that are written to shared volumes too."""


@dataclass(frozen=True, slots=True)
class Written:
    """Number of volumes that have written metadata, and of those that should have."""

    have: int
    should: int


class SharedMetadata:
    """The metadata of one store. Thread-safe; volumes are written without the store's lock."""

    def __init__(
        self, entries: Callable[[], Sequence[VolumeEntry]], stamps: StampClock, *, writable: bool
    ) -> None:
        """`entries` returns the entries of all volumes."""
        self._entries = entries
        self._stamps = stamps
        self._writable = writable
        self._known = Metadata()
        """Merged metadata of all local volumes."""
        self._remote = Metadata()
        """Metadata of other nodes on shared volumes."""
        self._behind: Counter[VolumeEntry] = Counter()
        """Volumes that lack entries, with the number of writes that have failed."""
        self.removals = 0
        """Number of removals of this node."""
        self._lock = threading.Lock()
        """Guards the fields above; held briefly."""

    def learn(self, entry: VolumeEntry, contents: Contents) -> list[MetaEntry]:
        """Add the metadata of a volume. Returns it without removals that this node has applied:
        blocks that were put since must stay.
        """
        with self._lock:
            new = [one for one in contents.metadata if not self._is_applied(one)]
            metadata = self._remote if entry.is_remote else self._known
            for one in contents.metadata:
                if one.kind not in OWN_KINDS:
                    metadata.add(one)
        return new

    def _is_applied(self, entry: MetaEntry) -> bool:
        stone = Tombstone.parse(entry) if entry.kind is MetaKind.TOMBSTONE else None
        return stone is not None and (self._known.removes(stone) or self._remote.removes(stone))

    def compare(self) -> None:
        """After all volumes were opened: the shared ones may lack removals of this node, which
        could not be written there before it was closed.
        """
        with self._lock:
            stones = self._known.tombstones.values()
            if self._writable and not all(map(self._remote.removes, stones)):
                self._behind.update(entry for entry in self._entries() if entry.is_remote)

    def announce(self, tombstones: Sequence[Tombstone]) -> None:
        """Apply removals to blocks that are entered from now on, before `put` records them. Called
        in the section of the store's lock that deletes the present blocks.
        """
        with self._lock:
            self.removals += 1
            for one in tombstones:
                self._known.add(one.entry)

    def put(
        self,
        entries: Sequence[MetaEntry],
        sync_s: float | None = None,
        *,
        to_others: bool = True,
    ) -> Written:
        """Write metadata to all local volumes; one that is down gets it when it works again. With
        `sync_s` a volume only counts if it is durable there within that time. `to_others`: also
        write _REMOTE_KINDS to volumes shared with other nodes.
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
                    self._behind[entry] += 1
            if done and sync_s is not None:
                done = entry.volume.sync(sync_s)
            if not entry.draining:
                have, should = have + done, should + 1
        return Written(have, should)

    def values(self, kind: MetaKind) -> dict[bytes, bytes]:
        """Values by name of one kind of entries of local volumes."""
        with self._lock:
            return self._known.values(kind)

    def remote_values(self, kind: MetaKind) -> dict[bytes, bytes]:
        """Values by name of one kind of entries of other nodes on shared volumes."""
        with self._lock:
            return self._remote.values(kind)

    def known(self) -> Metadata:
        """A copy of the metadata of local volumes."""
        with self._lock:
            return Metadata(dict(self._known.entries), dict(self._known.tombstones))

    def tombstones(self) -> tuple[dict[bytes, Tombstone], int]:
        """The tombstones of all volumes, and the floor: segments with ids up to it do not count."""
        with self._lock:
            stones = dict(self._remote.tombstones)
            for name, stone in self._known.tombstones.items():
                stones[name] = stone.merged(stones.get(name))
            return stones, self._known.floor

    def catch_up(self, entry: VolumeEntry) -> None:
        """Write missing metadata to a volume that works again."""
        if entry in self._behind and entry.volume.facts().up:
            self._bring_up_to_date(entry)

    def behind(self) -> list[VolumeEntry]:
        """Volumes that lack metadata."""
        return list(self._behind)

    def is_recorded(self) -> bool:
        """False if all attached volumes of this node lack metadata, such as removals that were made
        while none of them could write.
        """
        with self._lock:
            lacking = {entry for entry in self._behind if not entry.is_remote}
        return not lacking or not lacking.issuperset(self.local())

    def segment_released(self) -> None:
        """Called after a release: drops unneeded tombstones if there are many."""
        if len(self._known.tombstones) >= _TOMBSTONES_MANY:
            self.raise_floor()

    def may_hold(self, keys: Keys) -> Bools:
        """True for keys of which a volume may have a record, also one that is away or that another
        node writes to. A removal of the others need not be recorded.
        """
        used = [entry for entry in self._entries() if not entry.retired]
        local, found = self.local(), np.zeros(len(keys), bool)
        if used and (len(local) < len(used) or self._are_missing(local)):
            return ~found
        for entry in local:
            may_hold = entry.volume.facts().may_hold
            if may_hold is None:
                return np.ones(len(keys), bool)
            found |= may_hold(keys)
        return found

    def crowded(self) -> list[bytes]:
        """The namespaces to remove as a whole because there are more tombstones than the smallest
        volume should keep: those with the most of them, so that half of the limit stays.
        """
        if len(self._known.tombstones) <= _TOMBSTONES_MANY:
            return []
        room = min((one.volume.facts().capacity_bytes for one in self.local()), default=0)
        limit = max(_TOMBSTONES_MANY, room // _TOMBSTONES_SHARE // _TOMBSTONE_BYTES)
        if len(self._known.tombstones) <= limit:
            return []
        self.raise_floor()
        with self._lock:
            names = list(self._known.tombstones)
        counts = Counter(name[:TAG_BYTES] for name in names if len(name) > TAG_BYTES)
        left = len(names)
        tags: list[bytes] = []
        for tag, count in counts.most_common():
            if left <= (limit // 2 if tags else limit):
                break
            tags.append(tag)
            left -= count
        return tags

    def forget(self, entry: VolumeEntry) -> None:
        """Remove a volume that is not used any more."""
        with self._lock:
            self._behind.pop(entry, None)

    def local(self) -> list[VolumeEntry]:
        """Volumes of this node that are attached: each has all metadata."""
        return [
            entry
            for entry in self._entries()
            if not (entry.is_remote or entry.retired or entry.error is not None)
            and not entry.volume.facts().lost
        ]

    def share(self, gone: bytes = b"") -> None:
        """Write the merged metadata durably to all local volumes, so that one of them may drop it
        or be removed. `gone` is the identity of a volume that is being removed.
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
            failed = self._behind[entry]
        done = entry.volume.put_meta(entries) and entry.volume.sync(SYNC_S)
        with self._lock:
            if not done:
                self._behind[entry] += 1
            elif self._behind[entry] == failed:  # none has failed meanwhile
                del self._behind[entry]

    def _are_missing(self, local: Sequence[VolumeEntry]) -> bool:
        """True if a local volume is detached, or a volume lacks metadata that others have."""
        with self._lock:
            members = self._known.values(MetaKind.MEMBER).keys()
            behind = bool(self._behind)
        return behind or not members <= {entry.identity for entry in local}

    def raise_floor(self) -> None:
        """Drop tombstones that delete no record any more."""
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
