"""What lies in the bucket, as far as this node knows: data objects, their records, removals.

In memory only, guarded by one lock; lookups and facts never ask the bucket.
"""

import itertools
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import MetaEntry, MetaKind, Tombstone
from kvdepot.core.volume import (
    SEGMENT_SHIFT,
    SEGMENTS_MAX,
    Array,
    Contents,
    Ints,
    SegmentTable,
    no_contents,
    page_of,
    segment_of,
)
from kvdepot.format.record import PAGE, record_bytes, record_sizes
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

    @property
    def path(self) -> str:
        return self.listing.path


class BucketContents:
    """All data objects of a bucket. Thread-safe."""

    def __init__(self, writer: str, stamps: StampClock, capacity_bytes: int) -> None:
        self.writer = writer
        self.capacity_bytes = capacity_bytes
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
        self._learnt: list[MetaEntry] = []
        """Tombstones and descriptions of other nodes that the store does not know yet."""

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
                self._count(one, len(listing.records), int(_sizes(listing.records).sum()))
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
                self._gone.append((one.listing.records["key"], _places(one)))
            return one

    def at(self, place: int) -> DataObject | None:
        return self._slots.get(segment_of(place))

    def tokens(self, key: BlockKey, place: int) -> bytes | None:
        """Token ids of the record at a place, empty if they are unknown; None: it is not there."""
        one, page = self.at(place), page_of(place)
        if one is None:
            return None
        records = one.listing.records
        there = records["key"][records["page"] == page]
        return one.listing.tokens.get(page, b"") if there.tobytes() == key else None

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        with self.lock:
            sizes = record_sizes(payload_bytes).tolist()
            for place, nbytes in zip(places.tolist(), sizes, strict=True):
                one = self._slots.get(segment_of(place))
                if one is not None and one.live_count:
                    self._count(one, -1, -nbytes)

    def _count(self, one: DataObject, count: int, nbytes: int) -> None:
        one.live_count += count
        one.live_bytes += nbytes
        self.used_bytes += nbytes

    def segments(self) -> SegmentTable:
        """Objects, oldest first; those of this writer are sealed: it may release them."""
        with self.lock:
            found = sorted(self.objects.values(), key=lambda one: one.order)
            return SegmentTable(
                np.array([one.slot for one in found], np.int64),
                np.array([one.order for one in found], np.int64),
                np.array([one.live_count for one in found], np.int64),
                np.array([one.live_bytes for one in found], np.int64),
                np.array([one.owner == self.writer for one in found], bool),
            )

    def own_objects(self) -> list[DataObject]:
        """Objects of this writer, oldest first."""
        with self.lock:
            found = [one for one in self.objects.values() if one.owner == self.writer]
            return sorted(found, key=lambda one: one.order)

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
                    self._learnt.append(one.entry)
        return fresh

    def learn(self, descriptions: Mapping[bytes, bytes]) -> None:
        """Another node says what these tags stand for."""
        with self.lock:
            self._learnt += [
                MetaEntry(MetaKind.NAMESPACE, tag, 0, text) for tag, text in descriptions.items()
            ]

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

    def take(self, token: int) -> Contents:
        """What has come and gone since the last call, and what other nodes told."""
        with self.lock:
            come, self._come = self._come, []
            gone, self._gone = self._gone, []
            learnt, self._learnt = self._learnt, []
            if not (come or gone or learnt):
                return no_contents(token)
            contents = self._contents(come, token)
        if gone:
            words = np.concatenate([keys for keys, _ in gone])
            places = np.concatenate([places for _, places in gone])
            contents = replace(contents, gone_words=words, gone_places=places)
        return replace(contents, metadata=learnt)

    def _contents(self, come: list[DataObject], token: int) -> Contents:
        """The newest record of each key that is not removed; they count as in use."""
        if not come:
            return no_contents(token)
        records = np.concatenate([one.listing.records for one in come])
        places = np.concatenate([_places(one) for one in come])
        standing = np.flatnonzero(self._standing(records))
        order = standing[np.argsort(records["stamp"][standing], kind="stable")]
        flat = np.ascontiguousarray(records["key"][order]).view("V32").reshape(-1)
        _, first = np.unique(flat[::-1], return_index=True)
        order = order[np.sort(len(order) - 1 - first)]
        words = np.ascontiguousarray(records["key"][order]).astype(np.uint64, copy=False)
        sizes = _sizes(records[order]).tolist()
        for place, nbytes in zip(places[order].tolist(), sizes, strict=True):
            self._count(self._slots[segment_of(place)], 1, nbytes)
        payload_bytes = records["payload"][order].astype(np.int64)
        stamps = records["stamp"][order].astype(np.int64)
        return Contents(words, places[order], payload_bytes, stamps, token)


def _sizes(records: Records) -> Ints:
    return record_sizes(records["payload"].astype(np.int64))


def _places(one: DataObject) -> Ints:
    places: Ints = (one.slot << SEGMENT_SHIFT) + one.listing.records["page"].astype(np.int64)
    return places


def span_of(place: int, payload_bytes: int) -> tuple[int, int]:
    """Where in its object a record begins and ends."""
    start = page_of(place) * PAGE
    return start, start + record_bytes(payload_bytes)
