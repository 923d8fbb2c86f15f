"""The known contents of a bucket: data objects, their records, metadata.

Kept in memory, so that lookups and facts send no requests.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind, Tombstone, surviving
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
    segment_table,
)
from kvdepot.format.record import record_sizes
from kvdepot.volumes.object.manifest import Listing, Manifest, Records
from kvdepot.volumes.records import newest_records


@dataclass(slots=True, eq=False)
class DataObject:
    """A data object, and its records that are in use here."""

    listing: Listing
    owner: str
    """The writer that owns it, and may delete it."""
    slot: int
    order: int
    """Number of the object, in the order in which this node found them."""
    live_count: int = 0
    live_bytes: int = 0

    @property
    def path(self) -> str:
        return self.listing.path

    @property
    def places(self) -> Ints:
        places: Ints = (self.slot << SEGMENT_SHIFT) + self.listing.records["page"].astype(np.int64)
        return places


class BucketContents:
    """All data objects of a bucket. Thread-safe."""

    def __init__(self, writer: str, stamps: StampClock, capacity_bytes: int) -> None:
        self.writer = writer
        self.capacity_bytes = capacity_bytes
        self._stamps = stamps
        self.lock = threading.Lock()
        self.objects: dict[str, DataObject] = {}
        """Data objects by path."""
        self.held_bytes = 0
        self.own_bytes = 0
        self.used_bytes = 0
        self.by_slot: dict[int, DataObject] = {}
        """Data objects by the segment number of their places."""
        self._next_slot = 1
        self._orders = itertools.count(1)
        self._metadata = Metadata()
        self._come: list[DataObject] = []
        self._gone: list[tuple[Array, Array]] = []
        self._learned: list[MetaEntry] = []
        """New metadata for the store."""

    def add(self, listing: Listing, owner: str, *, appended: bool = False) -> DataObject | None:
        """Add an object. Its records are reported to the store unless the store `appended` them.
        Returns None if it is known, or there are too many objects.
        """
        with self.lock:
            if listing.path in self.objects or len(self.by_slot) >= SEGMENTS_MAX - 1:
                return None
            while self._next_slot in self.by_slot:
                self._next_slot = self._next_slot % (SEGMENTS_MAX - 1) + 1
            slot = self._next_slot
            self._next_slot = slot % (SEGMENTS_MAX - 1) + 1
            added = DataObject(listing, owner, slot, next(self._orders))
            self.objects[listing.path] = self.by_slot[slot] = added
            self.held_bytes += listing.nbytes
            self.own_bytes += listing.nbytes if owner == self.writer else 0
            records = listing.records
            if appended:
                nbytes = int(record_sizes(records["payload"]).sum())
                self._count(added, len(records), nbytes)
            else:
                self._come.append(added)
            if len(records):
                self._stamps.observe(int(records["stamp"].max()))
            return added

    def is_credible(self, manifest: Manifest) -> bool:
        """False if later stamps of this node could not follow those of a manifest."""
        return self._stamps.is_credible(manifest.last_stamp)

    def own(self, path: str, owner: str) -> None:
        """Change the owner of an object."""
        with self.lock:
            known = self.objects.get(path)
            if known is not None and known.owner != owner:
                sign = (owner == self.writer) - (known.owner == self.writer)
                self.own_bytes += sign * known.listing.nbytes
                known.owner = owner

    def drop(self, path: str, *, report: bool = True) -> None:
        """Remove an object. `report`: the next `take` reports it to the store."""
        with self.lock:
            known = self.objects.pop(path, None)
            if known is None:
                return
            del self.by_slot[known.slot]
            self.held_bytes -= known.listing.nbytes
            self.own_bytes -= known.listing.nbytes if known.owner == self.writer else 0
            self.used_bytes -= known.live_bytes
            if known in self._come:
                self._come.remove(known)
            elif report:
                self._gone.append((known.listing.records["key"], known.places))

    def at(self, place: int) -> DataObject | None:
        return self.by_slot.get(segment_of(place))

    def tokens(self, key: BlockKey, place: int) -> bytes | None:
        """Token ids of the record at a place, empty if unknown; None if it does
        not have the key.
        """
        known, page = self.at(place), page_of(place)
        if known is None:
            return None
        records = known.listing.records
        there = records["key"][records["page"] == page]
        return known.listing.tokens.get(page, b"") if there.tobytes() == key else None

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        with self.lock:
            sizes = record_sizes(payload_bytes).tolist()
            for place, nbytes in zip(places.tolist(), sizes, strict=True):
                known = self.by_slot.get(segment_of(place))
                if known is not None and known.live_count:
                    self._count(known, -1, -nbytes)

    def _count(self, known: DataObject, count: int, nbytes: int) -> None:
        known.live_count += count
        known.live_bytes += nbytes
        self.used_bytes += nbytes

    def segments(self) -> SegmentTable:
        """The objects, oldest first. Those of this writer count as sealed: it may release them."""
        with self.lock:
            return segment_table(
                (one.order, one.slot, one.live_count, one.live_bytes, one.owner == self.writer)
                for one in self.objects.values()
            )

    def owned_by(self, *, others: bool = False) -> list[DataObject]:
        """Objects of this writer, or of all others, oldest first."""
        with self.lock:
            objects = self.objects.values()
            wanted = [one for one in objects if (one.owner != self.writer) == others]
            return sorted(wanted, key=lambda one: one.order)

    def learn(self, entries: Iterable[MetaEntry], *, report: bool) -> bool:
        """Add metadata. `report`: the next `take` reports it to the store. Returns True if a
        tombstone is new.
        """
        removes = False
        with self.lock:
            for entry in entries:
                if not self._metadata.is_news(entry):
                    continue
                self._metadata.add(entry)
                stone = Tombstone.parse(entry) if entry.kind is MetaKind.TOMBSTONE else None
                self._stamps.observe(max(entry.stamp, stone.below if stone else 0))
                removes |= stone is not None
                if report:
                    self._learned.append(entry)
        return removes

    def forget_tombstones(self, kept: Callable[[], Collection[bytes]]) -> None:
        """Drop all tombstones whose names `kept` does not return."""
        with self.lock:  # else one that is being published would be dropped
            names, stones = kept(), self._metadata.tombstones
            self._metadata.tombstones = {name: stones[name] for name in stones if name in names}

    def standing(self, records: Records) -> Array:
        """True for records that no tombstone deletes."""
        with self.lock:
            return self._standing(records)

    def _standing(self, records: Records) -> Array:
        keep = np.zeros(len(records), dtype=bool)
        stamps = records["stamp"].astype(np.int64)
        keep[surviving(records["key"], stamps, self._metadata.tombstones)] = True
        return keep

    def take(self, token: int) -> Contents:
        """Take the objects added and dropped since the last call, and new metadata."""
        with self.lock:
            come, self._come = self._come, []
            gone, self._gone = self._gone, []
            learned, self._learned = self._learned, []
            contents = self._newest(come) if come else no_contents()
        if gone:
            words = np.concatenate([keys for keys, _ in gone])
            places = np.concatenate([places for _, places in gone])
            contents = replace(contents, gone_words=words, gone_places=places)
        return replace(contents, token=token, metadata=learned)

    def _newest(self, come: list[DataObject]) -> Contents:
        """The newest record of each key that is not removed. Counts them as in use."""
        records = np.concatenate([one.listing.records for one in come])
        places = np.concatenate([one.places for one in come])
        keep = self._standing(records)
        records, places = records[keep], places[keep]
        found = newest_records(records["key"], places, records["payload"], records["stamp"])
        sizes = record_sizes(found.payload_bytes).tolist()
        for place, nbytes in zip(found.places.tolist(), sizes, strict=True):
            self._count(self.by_slot[segment_of(place)], 1, nbytes)
        return found
