"""A bucket prefix or folder that several nodes share, with records in immutable objects.

Each writer has its own data objects and manifests; every node reads those of all writers. A record
is durable and published when `append` returns its place. Lookups and facts send no requests;
appends, reads, tombstones and the background thread (upkeep.py) do.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import MetaEntry, MetaKind, Tombstone
from kvdepot.core.volume import (
    NO_PLACE,
    Array,
    Change,
    Contents,
    Ints,
    Purpose,
    VolumeContext,
    VolumeFacts,
    pack_place,
)
from kvdepot.errors import KVDepotError
from kvdepot.format.record import PAGE, place_records, record_sizes, token_ids
from kvdepot.io.breaker import Breaker, RetryPauses
from kvdepot.native.memory import view_at
from kvdepot.volumes.object.bucket import (
    Bucket,
    BucketError,
    ObjectExistsError,
    open_bucket,
)
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.manifest import ROW, Listing, Manifest, data_path
from kvdepot.volumes.object.reading import RangeReader
from kvdepot.volumes.object.room import BucketRoom
from kvdepot.volumes.object.upkeep import BucketUpkeep

_RECORD_BYTES_MAX: Final = 4 << 30
_WRITERS_MAX: Final = 8
_LOOK_S: Final = 1.0
_USD: Final = (0.005 / 1000, 0.0004 / 1000)
"""Prices of requests at Amazon (us-east-1): for writes and lists, and for reads."""
_log = RateLimitedLog("kvdepot.store")


class BucketVolume:
    """One prefix of a bucket, or one shared folder. Implements core.volume.Volume."""

    def __init__(
        self, config: ObjectConfig, context: VolumeContext, bucket: Bucket | None = None
    ) -> None:
        """Raises ConfigError if the server refuses the settings, FormatError if the bucket has
        another format or is not a depot. If the server does not answer, the volume is down.
        """
        self._config = config
        self._context = context
        self._bucket = bucket or open_bucket(config)
        self._contents = BucketContents(
            secrets.token_hex(8), context.stamps, context.capacity_bytes or config.capacity
        )
        self._breaker = Breaker(
            context.clock,
            RetryPauses(config.retry_initial, config.retry_max),
            changed=self._changed,
        )
        self._reader = RangeReader(
            self._bucket, self._contents, self._breaker, context.clock, config.parallel
        )
        self.upkeep = BucketUpkeep(
            config, self._bucket, self._contents, self._breaker, self._reader.pool, context
        )
        self._room = BucketRoom(config, self._contents, self.upkeep, context.clock)
        self.upkeep.manifests.on_published = lambda: context.on_change(Change.PUBLISHED)
        self._lock = threading.Lock()
        self._number = 0
        self._writes = 0
        self._may_write = context.writable
        self._closed = False
        self.read = self._reader.read
        self.discard, self.segments = self._contents.discard, self._contents.segments
        try:
            self.upkeep.start()
        except KVDepotError:
            self._reader.close()
            raise
        if context.writable and config.is_measured and self.upkeep.begun:
            self._reader.meter.profile = self._reader.measure(context.wall)

    def facts(self, *, details: bool = False) -> VolumeFacts:
        health, meter = self._breaker.health(), self._reader.meter
        segment_bytes, contents = self._config.object_bytes, self._contents
        room = self._room.nbytes
        return VolumeFacts(
            label=self._bucket.label,
            up=health.ok and not self.upkeep.has_ended,
            takes_blocks=health.ok and self._may_write and self.upkeep.begun,
            may_write=self._may_write,
            lost=self.upkeep.has_ended,
            may_reopen=self.upkeep.has_ended,
            reason=health.reason,
            errors=health.errors,
            retry_in_s=health.retry_in_s,
            capacity_bytes=contents.capacity_bytes,
            used_bytes=contents.used_bytes,
            held_bytes=contents.held_bytes,
            segment_bytes=segment_bytes,
            segments_max=max(1, contents.capacity_bytes // segment_bytes),
            spare_segments=room // segment_bytes,
            room_bytes=room,
            record_bytes_max=min(contents.capacity_bytes, _RECORD_BYTES_MAX),
            writes=self._writes,
            read_bytes_per_s=meter.bytes_per_s,
            queued_bytes=meter.queued_bytes,
            contiguous_bytes=segment_bytes,
            writers=min(_WRITERS_MAX, self._config.parallel),
            is_remote=True,
            details=self._details() if details else {},
        )

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        del purpose  # no segment is reserved
        places = np.full(len(records), NO_PLACE, np.int64)
        for group, nbytes in self._groups(record_sizes(records["payload_bytes"]).tolist()):
            try:
                if self._may_write and self.upkeep.begun and self._breaker.allows():
                    if self.upkeep.excess_bytes(self._room.reserved_bytes) > 0:
                        self.upkeep.delete_dropped(self._room.reserved_bytes)
                    places[group] = self._upload(records[group])
                    self._breaker.succeeded()
            except ObjectExistsError:
                pass  # not stored: the next append uses another number
            except BucketError as error:
                self._breaker.failed(error.reason, at_once=True)
            finally:
                self._room.release(nbytes)
                with self._lock:
                    self._writes -= 1
        return places

    def _groups(self, sizes: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Group the records for which there is room into objects, with their bytes. Reserves the
        room.
        """
        group: list[int] = []
        total = 0
        for index, nbytes in enumerate(sizes):
            if group and total + nbytes > self._config.object_bytes:
                yield group, total
                group, total = [], 0
            if self._room.reserve(nbytes, waits=self._breaker.closed):
                with self._lock:
                    self._writes += not group
                group.append(index)
                total += nbytes
        if group:
            yield group, total

    def _upload(self, records: Array) -> Ints:
        """Write one data object and publish it. Returns the places of its records."""
        with self._lock:
            self._number += 1
            number = self._number
        sizes = record_sizes(records["payload_bytes"])
        images = [
            view_at(address, nbytes).data
            for address, nbytes in zip(records["image"].tolist(), sizes.tolist(), strict=True)
        ]
        place_records(records["image"], number)
        rows = np.zeros(len(records), ROW)
        rows["key"], rows["payload"] = records["key"], records["payload_bytes"]
        rows["stamp"], rows["page"] = records["stamp"], (np.cumsum(sizes) - sizes) // PAGE
        tokens = {
            page: ids
            for page, key, image in zip(rows["page"].tolist(), rows["key"], images, strict=True)
            if (ids := token_ids(image, BlockKey(key.tobytes())))
        }
        path = data_path(self._contents.writer, number)
        try:
            self._bucket.create(path, images)
        except BucketError:
            self.upkeep.trash.add([path])  # the server may have stored it in spite of the error
            raise
        created_s = int(self._context.wall.now())
        listing = Listing(path, int(sizes.sum()), created_s, rows, tokens)
        added = self._contents.add(listing, self._contents.writer, appended=True)
        if added is None:
            self.upkeep.trash.add([path])
            raise BucketError("the bucket has too many objects")
        try:
            self.upkeep.manifests.publish(Manifest([listing]))
        except BucketError:
            self._contents.drop(path, report=False)
            self.upkeep.trash.add([path])
            raise
        return added.places

    def release(self, segment: int) -> bool:
        """Drop an object. Other nodes may read it for a grace period; this one
        does not any more.
        """
        one = self._contents.at(pack_place(segment, 0))
        if one is not None:
            self._contents.drop(one.path, report=False)
            self.upkeep.manifests.drop(one.path, one.listing.nbytes)
        return True

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        """Publish tombstones at once, and descriptions of namespaces with the next manifest. Other
        kinds are ignored: they belong to one node.
        """
        if not self._context.writable:
            return False
        manifests = self.upkeep.manifests
        known = {
            one.name: one.value for one in self.upkeep.metadata() if one.kind is MetaKind.NAMESPACE
        }
        for entry in entries:
            if entry.kind is MetaKind.NAMESPACE and known.get(entry.name) != entry.value:
                manifests.describe_namespace(entry)
        stones = [entry for entry in entries if Tombstone.parse(entry) is not None]
        if not stones:
            return True
        if not self.upkeep.begun or not self._breaker.allows():
            return False
        try:
            manifests.publish(Manifest(metadata=stones))
        except BucketError as error:
            self._breaker.failed(error.reason, at_once=True)
            return False
        self._breaker.succeeded()
        if self._contents.learn(stones, report=False):
            manifests.recheck()
        return True

    def sync(self, timeout_s: float) -> bool:
        """Does nothing: records are durable when `append` returns. False if the bucket is down."""
        del timeout_s
        return self._breaker.closed

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        if look:
            self.upkeep.request_refresh()
        found = self._contents.take((since or 0) + 1)
        return found if since is not None else replace(found, metadata=self.upkeep.metadata())

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        self._may_write = may_write and self._context.writable
        if capacity_bytes is not None:
            self._contents.capacity_bytes = capacity_bytes

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        del is_quiet  # upkeep has its own thread, which waits for the network
        return _LOOK_S

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.upkeep.close()
            self._reader.close()

    def _details(self) -> dict[str, Any]:
        requests = self._bucket.requests.as_dict()
        usd = (requests["puts"] + requests["lists"]) * _USD[0] + requests["gets"] * _USD[1]
        contents, meter = self._contents, self._reader.meter
        return {
            "profile": asdict(meter.profile) if meter.profile else None,
            "read_bytes_per_s": round(meter.bytes_per_s),
            "objects": len(contents.objects),
            "own_bytes": contents.own_bytes,
            "writers": len(self.upkeep.writers.living()),
            "refused_manifests": self.upkeep.others.refused_total,
            "requests": requests,
            "requests_usd": round(usd, 6),
        }

    def _changed(self, reason: str) -> None:
        if reason:
            _log.warning("object: the bucket is down and will be retried: %s", reason)
        else:
            _log.info("object: the bucket works again")
        self._context.on_change(Change.STATE)
