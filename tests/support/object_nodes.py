"""Nodes over one bucket: volumes whose background work is done when a test says so."""

from collections.abc import Sequence
from typing import Any

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import StampClock
from kvdepot.core.metadata import Metadata, MetaKind
from kvdepot.core.volume import Contents, Outcome, Priority, VolumeContext
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.contract import store
from kvdepot.testing.images import Reads, make_key, payload_for
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.volume import BucketVolume

NEVER_S = 1e6
PAYLOAD = 16000
CAPACITY_BYTES = 4 << 20


def object_config(**more: Any) -> ObjectConfig:
    known = {"url": "s3://memory/p", "capacity": CAPACITY_BYTES, "measure": False}
    return ObjectConfig(**{**known, **more})


class MemoryBucket(Bucket):
    """In memory. obstore keeps the caller's memory there, so it is given a copy."""

    def create(self, path: str, body: bytes | Sequence[memoryview]) -> None:
        super().create(path, body if isinstance(body, bytes) else b"".join(body))


def memory_bucket() -> Bucket:
    from obstore.store import MemoryStore

    store = MemoryStore()
    return MemoryBucket(store, store, "memory")


def same_bucket(bucket: Bucket) -> Bucket:
    """The same objects, with a count of requests of its own."""
    return type(bucket)(bucket._reader, bucket._writer, bucket.label)


class Node:
    """A volume that stands for one machine, with its own clocks."""

    def __init__(self, bucket: Bucket, *, wall_s: float = 1.8e9, **more: Any) -> None:
        self.clock = ManualClock(100.0)
        self.wall = ManualClock(wall_s)
        self.stamps = StampClock(self.wall)
        self.bucket = same_bucket(bucket)
        context = VolumeContext(self.clock, self.wall, self.stamps)
        self.volume = BucketVolume(object_config(refresh=NEVER_S, **more), context, self.bucket)
        self.places: dict[BlockKey, int] = {}
        """What this node knows, as its store would."""
        self.learned = Metadata()
        """What other nodes have told it."""
        self._token = 0
        self._take(self.volume.contents(None))

    def put(self, numbers: Sequence[int]) -> None:
        keys = [make_key(number) for number in numbers]
        self.places.update(zip(keys, store(self.volume, keys, PAYLOAD), strict=True))

    def step(self) -> None:
        """Do what the background thread does, and take in what it found."""
        self.volume.upkeep.step()
        self._take(self.volume.contents(self._token))

    def _take(self, contents: Contents) -> None:
        self._token = contents.token
        gone = set(contents.gone_places.tolist())
        self.places = {key: at for key, at in self.places.items() if at not in gone}
        for entry in contents.metadata:
            self.learned.add(entry)
            if entry.kind is MetaKind.TOMBSTONE:
                self.places.pop(BlockKey(entry.name), None)
        for words, place in zip(contents.words, contents.places.tolist(), strict=True):
            self.places.setdefault(BlockKey(words.tobytes()), place)

    def knows(self) -> list[BlockKey]:
        return sorted(self.places)

    def read(self, number: int) -> Outcome:
        """Read a block that this node knows; never a wrong byte."""
        key = make_key(number)
        reads = Reads().add(key, self.places[key], PAYLOAD)
        (outcome,) = self.volume.read(reads.rows, Priority.FOREGROUND, 30.0).result()
        if outcome == Outcome.OK:
            assert reads.payload(0) == payload_for(key, PAYLOAD)
        return Outcome(outcome)

    def described(self) -> dict[bytes, bytes]:
        """What it knows of namespaces, by their tags."""
        return self.learned.values(MetaKind.NAMESPACE)

    def owned(self) -> list[int]:
        """Segments that this node may release."""
        table = self.volume.segments()
        segments: list[int] = table.segments[table.sealed].tolist()
        return segments

    def die(self) -> None:
        """End without a word."""
        self.volume.upkeep._stop.set()
        self.volume.upkeep.request_refresh()
        self.volume._closed = True
        self.volume._reader.close()


def keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    return sorted(map(make_key, numbers))


def paths_of(bucket: Bucket, prefix: str = "") -> list[str]:
    return sorted(one.path for one in bucket.list_all(prefix))
