"""What lies in the bucket, as far as this node knows: data objects, their records, removals.

In memory only, guarded by one lock; lookups and facts never ask the bucket.
"""

import itertools
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import Tombstone
from kvdepot.core.tier import (
    NO_CONTENTS,
    SEGMENTS_MAX,
    Array,
    Changes,
    Contents,
    SegmentInfo,
    pack_location,
    page_of,
    segment_of,
)
from kvdepot.format.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.volumes.object.manifest import Listing, Records


@dataclass(slots=True, eq=False)
class DataObject:
    """One object with records, and how many of them are in use here."""

    listing: Listing
    owner: str
    """The writer that may delete it."""
    slot: int
    order: int
    """Rises with the time at which this node learned of it."""
    live_count: int = 0
    live_bytes: int = 0
    unentered: set[int] = field(default_factory=set)
    """Pages of records that were appended here and not counted yet."""

    @property
    def path(self) -> str:
        return self.listing.path


class BucketContents:
    """All data objects of a bucket. Thread-safe."""

    def __init__(self, writer: str, stamps: StampClock) -> None:
        self.writer = writer
        self._stamps = stamps
        self.lock = threading.Lock()
        self.objects: dict[str, DataObject] = {}
        """By path."""
        self.held_bytes = 0
        self.own_bytes = 0
        self.used_bytes = 0
        self._slots: dict[int, DataObject] = {}
        self._next_slot = 1
        self._orders = itertools.count(1)
        self._tombstones: dict[bytes, Tombstone] = {}
        self._come: list[DataObject] = []
        self._gone: list[tuple[Array, Array]] = []
        self._removed: list[Tombstone] = []

    def add(self, listing: Listing, owner: str, *, appended: bool = False) -> DataObject | None:
        """An object is known from now on; its records are new to the store unless it appended them.

        None: it is known, or there are too many of them.
        """
        with self.lock:
            if listing.path in self.objects or len(self._slots) >= SEGMENTS_MAX - 1:
                return None
            while self._next_slot in self._slots:
                self._next_slot = self._next_slot % (SEGMENTS_MAX - 1) + 1
            slot = self._next_slot
            self._next_slot = slot % (SEGMENTS_MAX - 1) + 1
            one = DataObject(listing, owner, slot, next(self._orders))
            self.objects[listing.path] = self._slots[slot] = one
            self.held_bytes += listing.nbytes
            self.own_bytes += listing.nbytes if owner == self.writer else 0
            if appended:
                one.unentered.update(listing.records["page"].tolist())
            else:
                self._come.append(one)
            if len(listing.records):
                self._stamps.observe(int(listing.records["stamp"].max()))
            return one

    def own(self, path: str, owner: str) -> None:
        """An object has another owner."""
        with self.lock:
            one = self.objects.get(path)
            if one is not None and one.owner != owner:
                sign = (owner == self.writer) - (one.owner == self.writer)
                self.own_bytes += sign * one.listing.nbytes
                one.owner = owner

    def drop(self, path: str, *, told: bool = True) -> DataObject | None:
        """An object is gone. `told`: the store must be told of it."""
        with self.lock:
            one = self.objects.pop(path, None)
            if one is None:
                return None
            del self._slots[one.slot]
            self.held_bytes -= one.listing.nbytes
            self.own_bytes -= one.listing.nbytes if one.owner == self.writer else 0
            self.used_bytes -= one.live_bytes
            if one in self._come:
                self._come.remove(one)
            elif told:
                self._gone.append((one.listing.records["key"], _locations(one)))
            return one

    def at(self, location: int) -> DataObject | None:
        return self._slots.get(segment_of(location))

    def tokens(self, key: BlockKey, location: int) -> bytes:
        """Token ids of the record there; empty where they are not known or it is another block."""
        one, page = self.at(location), page_of(location)
        if one is None or page not in one.listing.tokens:
            return b""
        records = one.listing.records
        there = records["key"][records["page"] == page]
        return one.listing.tokens[page] if there.tobytes() == key else b""

    def count(self, location: int, payload_bytes: int) -> None:
        with self.lock:
            one = self._slots.get(segment_of(location))
            if one is not None:
                one.unentered.discard(page_of(location))
                self._count(one, 1, record_bytes(payload_bytes))

    def discard(self, location: int, payload_bytes: int) -> None:
        with self.lock:
            one = self._slots.get(segment_of(location))
            if one is not None and one.live_count:
                self._count(one, -1, -record_bytes(payload_bytes))

    def _count(self, one: DataObject, count: int, nbytes: int) -> None:
        one.live_count += count
        one.live_bytes += nbytes
        self.used_bytes += nbytes

    def segments(self, *, reclaimable: bool) -> list[SegmentInfo]:
        """Objects, oldest first: those of this writer whose records are all counted, or all."""
        with self.lock:
            found = sorted(self.objects.values(), key=lambda one: one.order)
            if reclaimable:
                found = [one for one in found if one.owner == self.writer and not one.unentered]
            return [
                SegmentInfo(one.slot, one.order, one.live_bytes, one.live_count) for one in found
            ]

    def has_unentered(self) -> bool:
        with self.lock:
            return any(one.unentered for one in self.objects.values())

    def own_objects(self) -> list[DataObject]:
        """Own objects whose records are all counted, oldest first."""
        with self.lock:
            found = [one for one in self.objects.values() if one.owner == self.writer]
            return sorted((one for one in found if not one.unentered), key=lambda one: one.order)

    def bury(self, tombstones: Iterable[Tombstone], *, told: bool) -> bool:
        """Records were removed. `told`: by another node, the store must be told.

        Returns whether one of them is new.
        """
        fresh = False
        with self.lock:
            for one in tombstones:
                known = self._tombstones.get(one.name)
                if known is not None and known.below >= one.below:
                    continue
                self._tombstones[one.name] = one
                self._stamps.observe(max(one.below, one.recorded))
                fresh = True
                if told:
                    self._removed.append(one)
        return fresh

    def tombstones(self) -> list[Tombstone]:
        """Removals that any node still tells of."""
        with self.lock:
            return list(self._tombstones.values())

    def forget_tombstones(self, kept: Collection[bytes]) -> None:
        """Only tombstones of these names are still told by any node."""
        with self.lock:
            self._tombstones = {name: one for name, one in self._tombstones.items() if name in kept}

    def standing(self, records: Records) -> Array:
        """Which records no removal covers."""
        with self.lock:
            return self._standing(records)

    def _standing(self, records: Records) -> Array:
        keep = np.ones(len(records), dtype=bool)
        if not self._tombstones:
            return keep
        keys, stamps = records["key"].tobytes(), records["stamp"].tolist()
        for index, stamp in enumerate(stamps):
            key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            for name in (key, key[:TAG_BYTES]):
                found = self._tombstones.get(name)
                if found is not None and stamp < found.below:
                    keep[index] = False
        return keep

    def take(self) -> Changes | None:
        """What has come and gone since the last call, and was removed by others."""
        with self.lock:
            if not (self._come or self._gone or self._removed):
                return None
            come, self._come = self._come, []
            gone, self._gone = self._gone, []
            removed, self._removed = self._removed, []
            contents = self._contents(come)
        words, locations = NO_CONTENTS.words, NO_CONTENTS.locations
        if gone:
            words = np.concatenate([keys for keys, _ in gone])
            locations = np.concatenate([places for _, places in gone])
        return Changes(contents, words, locations, removed)

    def _contents(self, come: list[DataObject]) -> Contents:
        """The newest record of each key that is not removed; they count as in use."""
        if not come:
            return NO_CONTENTS
        records = np.concatenate([one.listing.records for one in come])
        places = np.concatenate([_locations(one) for one in come])
        standing = np.flatnonzero(self._standing(records))
        order = standing[np.argsort(records["stamp"][standing], kind="stable")]
        flat = np.ascontiguousarray(records["key"][order]).view("V32").reshape(-1)
        _, first = np.unique(flat[::-1], return_index=True)
        order = order[np.sort(len(order) - 1 - first)]
        words = np.ascontiguousarray(records["key"][order]).astype(np.uint64, copy=False)
        payload_bytes = records["payload"][order].astype(np.int64)
        for location, nbytes in zip(places[order].tolist(), payload_bytes.tolist(), strict=True):
            self._count(self._slots[segment_of(location)], 1, record_bytes(nbytes))
        stamps = records["stamp"][order].astype(np.int64)
        return Contents(words, places[order], payload_bytes, stamps)


def _locations(one: DataObject) -> Array:
    places: Array = one.listing.records["page"].astype(np.int64) + pack_location(0, one.slot, 0)
    return places


def span_of(location: int, payload_bytes: int) -> tuple[int, int]:
    """Where in its object a record begins and ends."""
    start = page_of(location) * PAGE
    return start, start + record_bytes(payload_bytes)


assert HEAD_BYTES == PAGE
