"""The `object` tier: records in immutable objects of a bucket that several nodes share.

Each writer has its own data objects and manifests; every node reads those of all. What an append
has returned a place for is durable and published. Lookups and facts are answered from memory; the
network is used by append, load and erase, and by the background thread (upkeep.py).
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock, StampClock, SystemClock, WallClock
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind, Tombstone
from kvdepot.core.tier import (
    NO_CONTENTS,
    Changes,
    Contents,
    DriveFacts,
    Health,
    Load,
    Loaded,
    MetaWritten,
    Purpose,
    SegmentInfo,
    Usage,
    pack_location,
)
from kvdepot.errors import KVDepotError
from kvdepot.format.record import PAGE, parse_own, place, token_ids
from kvdepot.io.breaker import Breaker, RetryPauses
from kvdepot.volumes.object.bucket import Bucket, BucketError, explain, open_bucket
from kvdepot.volumes.object.contents import BucketContents, span_of
from kvdepot.volumes.object.manifest import ROW, Entry, Listing, data_path
from kvdepot.volumes.object.measuring import measure
from kvdepot.volumes.object.reading import RangeLoads, RangeReader
from kvdepot.volumes.object.upkeep import BucketUpkeep, Clocks
from kvdepot.volumes.records import describe_drive, is_intact

_RECORD_BYTES_MAX: Final = 4 << 30
_USD: Final = (0.005 / 1000, 0.0004 / 1000)
"""What Amazon asks for a request in its first region: to write or list, to read."""
_log = RateLimitedLog("kvdepot.store")


class ObjectTier:
    """One bucket, or a shared folder, below a prefix. Implements Tier, QueuesReads and
    SharesContents.
    """

    name = "object"

    def __init__(
        self,
        config: ObjectConfig,
        *,
        writable: bool = True,
        bucket: Bucket | None = None,
        clock: Clock | None = None,
        wall: Clock | None = None,
        stamps: StampClock | None = None,
    ) -> None:
        """Raises ConfigError where the bucket cannot be used, FormatError where what lies there is
        newer, or not a depot.
        """
        self.writable = writable
        self._config = config
        self._bucket = bucket or open_bucket(config)
        self._clocks = Clocks(clock or SystemClock(), wall or WallClock())
        stamps = stamps or StampClock(self._clocks.wall)
        self._contents = BucketContents(secrets.token_hex(8), stamps)
        self._breaker = Breaker(
            self._clocks.steady,
            RetryPauses(config.retry_initial, config.retry_max),
            changed=self._tell,
        )
        self._reader = RangeReader(
            self._bucket, self._contents, self._breaker, self._clocks.steady, config.parallel
        )
        self.upkeep = BucketUpkeep(
            config, self._bucket, self._contents, self._reader, self._breaker, self._clocks,
            writable=writable,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._number = 0
        self._reserved_bytes = 0
        """Being uploaded."""
        self._closed = False
        try:
            self.upkeep.start()
            if writable and config.is_measured:
                self._reader.gauge.profile = measure(
                    self._bucket, self._contents.writer, self._reader.pool, config.parallel,
                    (self._clocks.steady, self._clocks.wall),
                )  # fmt: skip
        except BucketError as error:
            self._reader.close()
            raise explain(error, config) from None
        except KVDepotError:
            self._reader.close()
            raise

    def append(
        self,
        drive: int,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[int | None]:
        del drive, purpose  # there is one drive, and nothing is kept back
        places: list[int | None] = [None] * len(images)
        for group in self._groups(images):
            nbytes = sum(len(images[index]) for index in group)
            try:
                if self.writable and self._breaker.allows():
                    found = self._upload([images[index] for index in group])
                    for index, location in zip(group, found, strict=True):
                        places[index] = location
                    self._breaker.succeeded()
            except BucketError as error:
                if not error.exists:
                    self._breaker.failed(error.reason, at_once=True)
            finally:
                with self._lock:
                    self._reserved_bytes -= nbytes
        return places

    def _groups(self, images: Sequence[memoryview]) -> Iterator[list[int]]:
        """Images that go into one object each, for which there is room: it is reserved."""
        group: list[int] = []
        nbytes = 0
        for index, image in enumerate(images):
            if group and nbytes + len(image) > self._config.object_bytes:
                yield group
                group, nbytes = [], 0
            with self._lock:
                fits = len(image) <= self._room()
                self._reserved_bytes += len(image) if fits else 0
            if fits:
                group.append(index)
                nbytes += len(image)
        if group:
            yield group

    def _upload(self, images: Sequence[memoryview]) -> list[int]:
        """Write one data object and publish it. Returns where its records are."""
        with self._lock:
            self._number += 1
            number = self._number
        records = np.zeros(len(images), ROW)
        at = 0
        tokens: dict[int, bytes] = {}
        for row, image in zip(records, images, strict=True):
            _, key, stamp, payload_bytes = parse_own(image)
            if ids := token_ids(image, BlockKey(key)):
                tokens[at // PAGE] = ids
            place(image, number)
            row["key"] = np.frombuffer(key, np.uint64)
            row["page"], row["payload"], row["stamp"] = at // PAGE, payload_bytes, stamp
            at += len(image)
        path = data_path(self._contents.writer, number)
        try:
            self._bucket.create(path, images)
        except BucketError:
            self.upkeep.trash.add([path])  # it may have arrived all the same
            raise
        listing = Listing(path, at, int(self._clocks.wall.now()), records, tokens)
        added = self._contents.add(listing, self._contents.writer, appended=True)
        if added is None:
            self.upkeep.trash.add([path])
            raise BucketError("the bucket has too many objects")
        try:
            self.upkeep.manifests.publish(Entry([listing]))
        except BucketError:
            self._contents.drop(path, told=False)
            self.upkeep.trash.add([path])
            raise
        return [pack_location(0, added.slot, int(page)) for page in records["page"]]

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        return self._reader.load(loads, timeout_s)

    def submit(
        self, loads: Sequence[Load], timeout_s: float, done: Callable[[], None]
    ) -> RangeLoads:
        return self._reader.submit(loads, timeout_s, done)

    def read_records(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        return list(self._reader.pool.map(self._read_record, keys, locations, images))

    def _read_record(self, key: BlockKey, location: int, image: memoryview) -> bool:
        source = self._contents.at(location)
        if source is None or not self._breaker.closed:
            return False
        start, _ = span_of(location, 0)
        try:
            record = self._bucket.get_range(source.path, start, start + len(image))
        except BucketError as error:
            if error.missing:
                self._contents.drop(source.path)
            else:
                self._breaker.failed(error.reason, at_once=True)
            return False
        if len(record) != len(image) or not is_intact(record, key):
            return False
        image[:] = record
        return True

    def count(self, location: int, payload_bytes: int) -> None:
        self._contents.count(location, payload_bytes)

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        for location, nbytes in zip(locations, payload_bytes, strict=True):
            self._contents.discard(location, nbytes)

    def put_meta(self, entries: Sequence[MetaEntry], sync_s: float | None = None) -> MetaWritten:
        """Tell all nodes of tombstones now; of namespaces with the next manifest, without a request
        of their own. What else there is stays on the node's own drives.
        """
        del sync_s  # what is published is durable
        if not self.writable:
            return MetaWritten(0, 0)
        known = self.descriptions()
        for entry in entries:
            text = entry.value if entry.kind is MetaKind.NAMESPACE else None
            if text is not None and known.get(entry.name) != text:
                self.upkeep.manifests.describe_namespace(entry.name, text)
        stones = [entry for entry in entries if entry.kind is MetaKind.TOMBSTONE]
        tombstones = [stone for stone in map(Tombstone.parse, stones) if stone is not None]
        if not tombstones:
            return MetaWritten(1, 1)
        if not self._publish(Entry(tombstones=tombstones)):
            return MetaWritten(0, 1)
        if self._contents.bury(tombstones, told=False):
            self.upkeep.manifests.recheck()
        return MetaWritten(1, 1)

    def metadata(self) -> Metadata:
        found = Metadata()
        for tag, text in self.descriptions().items():
            found.add(MetaEntry(MetaKind.NAMESPACE, tag, 0, text))
        for stone in self._contents.tombstones():
            found.add(stone.entry)
        return found

    def _publish(self, entry: Entry) -> bool:
        if not self.writable or not self._breaker.allows():
            return False
        try:
            self.upkeep.manifests.publish(entry)
        except BucketError as error:
            self._breaker.failed(error.reason, at_once=True)
            return False
        self._breaker.succeeded()
        return True

    def descriptions(self) -> dict[bytes, bytes]:
        """By tag what namespaces are, as all nodes tell it."""
        return self.upkeep.descriptions()

    def has_room(self, drive: int, nbytes: int) -> bool:
        del drive
        with self._lock:
            return nbytes <= self._room()

    def _room(self) -> int:
        """What this node may still write: what is left, or what its share of all still lacks."""
        capacity, contents = self._config.capacity, self._contents
        left = capacity - contents.held_bytes - self._reserved_bytes
        share = capacity // self.upkeep.writers - contents.own_bytes - self._reserved_bytes
        return max(0, left, share)

    def segments(self, drive: int, *, reclaimable: bool = True) -> list[SegmentInfo]:
        del drive
        return self._contents.segments(reclaimable=reclaimable)

    def has_unentered(self, drive: int) -> bool:
        del drive
        return self._reserved_bytes > 0 or self._contents.has_unentered()

    def release(self, drive: int, slot: int) -> bool:
        """Free an object. Other nodes may read it for a grace period still; this one does not."""
        one = self._contents.at(pack_location(drive, slot, 0))
        if one is not None:
            self._contents.drop(one.path, told=False)
            self.upkeep.manifests.drop(one.path)
        return True

    def take_contents(self) -> Contents:
        changes = self._contents.take()
        return NO_CONTENTS if changes is None else changes.come

    def read_tokens(self, keys: Sequence[BlockKey], locations: Sequence[int]) -> list[bytes]:
        """From the manifests: no request."""
        return [self._contents.tokens(*one) for one in zip(keys, locations, strict=True)]

    def take_changes(self) -> Changes | None:
        return self._contents.take()

    def request_refresh(self) -> None:
        self.upkeep.request_refresh()

    def when_published(self, tell: Callable[[], None]) -> None:
        self.upkeep.manifests.published = tell

    def drive_count(self) -> int:
        return 1

    def drive(self, drive: int) -> DriveFacts:
        del drive
        health, gauge, segment = (
            self._breaker.health(),
            self._reader.gauge,
            self._config.object_bytes,
        )
        with self._lock:
            room = self._room()
        return DriveFacts(
            label=self._bucket.label,
            up=health.ok,
            takes_blocks=health.ok and self.writable,
            retry_in_s=health.retry_in_s,
            segment_bytes=segment,
            segments_max=max(1, self._config.capacity // segment),
            spare_segments=room // segment,
            record_bytes_max=min(self._config.capacity, _RECORD_BYTES_MAX),
            read_bytes_per_s=gauge.bytes_per_s,
            queued_bytes=gauge.queued_bytes,
        )

    def is_up(self, drive: int | None = None) -> bool:
        del drive
        return self._breaker.closed

    def write_budget(self) -> None:
        return None

    def flush(self, timeout_s: float = 10.0) -> bool:
        """What was appended is durable already."""
        del timeout_s
        return self._breaker.closed

    def usage(self) -> Usage:
        contents = self._contents
        return Usage(self._config.capacity, contents.used_bytes, contents.held_bytes)

    def health(self) -> Health:
        return self._breaker.health()

    def describe_drives(self) -> list[dict[str, Any]]:
        requests = self._bucket.requests.as_dict()
        usd = (requests["puts"] + requests["lists"]) * _USD[0] + requests["gets"] * _USD[1]
        contents, gauge = self._contents, self._reader.gauge
        return [
            {
                **describe_drive(self.drive(0), self.usage(), self.health()),
                "profile": asdict(gauge.profile) if gauge.profile else None,
                "read_bytes_per_s": round(gauge.bytes_per_s),
                "objects": len(contents.objects),
                "own_bytes": contents.own_bytes,
                "writers": self.upkeep.writers,
                "requests": requests,
                "requests_usd": round(usd, 6),
            }
        ]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.upkeep.close()
            self._reader.close()

    def _tell(self, reason: str) -> None:
        if reason:
            _log.warning("object: the bucket is left alone for a while: %s", reason)
        else:
            _log.info("object: the bucket works again")
