"""Nodes over one bucket: tiers whose background work is done when a test says so."""

from collections.abc import Sequence
from typing import Any

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.tier import Changes, Outcome
from kvdepot.format.record import parse_own
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.images import loaded, make_image, make_key, make_load, payload_for
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.tier import ObjectTier

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
    """A tier that stands for one machine, with its own clocks."""

    def __init__(self, bucket: Bucket, *, wall_s: float = 1.8e9, **more: Any) -> None:
        self.clock = ManualClock(100.0)
        self.wall = ManualClock(wall_s)
        self.bucket = same_bucket(bucket)
        config = object_config(refresh=NEVER_S, **more)
        self.tier = ObjectTier(config, bucket=self.bucket, clock=self.clock, wall=self.wall)
        self.places: dict[BlockKey, int] = {}
        """What this node knows, as its store would."""
        self.take(self.tier.take_changes())

    def put(self, numbers: Sequence[int]) -> None:
        images = [make_image(key, payload_for(key, PAYLOAD)) for key in map(make_key, numbers)]
        for image, place in zip(images, self.tier.append(0, images), strict=True):
            assert place is not None
            self.tier.count(place, PAYLOAD)
            self.places[BlockKey(parse_own(image)[1])] = place

    def step(self) -> Changes | None:
        """Do what the background thread does, and take in what it found."""
        self.tier.upkeep.step()
        changes = self.tier.take_changes()
        self.take(changes)
        return changes

    def take(self, changes: Changes | None) -> None:
        if changes is None:
            return
        gone = set(changes.gone_locations.tolist())
        self.places = {key: at for key, at in self.places.items() if at not in gone}
        for stone in changes.removed:
            self.places.pop(BlockKey(stone.name), None)
        come = changes.come
        for words, place in zip(come.words, come.locations.tolist(), strict=True):
            self.places.setdefault(BlockKey(words.tobytes()), place)

    def knows(self) -> list[BlockKey]:
        return sorted(self.places)

    def read(self, number: int) -> Outcome:
        """Load a block that this node knows; never a wrong byte."""
        key = make_key(number)
        wanted = make_load(key, self.places[key], PAYLOAD)
        (outcome,), _ = self.tier.load([wanted], 30.0)
        if outcome is Outcome.OK:
            assert loaded(wanted) == payload_for(key, PAYLOAD)
        return outcome

    def die(self) -> None:
        """End without a word."""
        self.tier.upkeep._stop.set()
        self.tier.upkeep.request_refresh()
        self.tier._closed = True
        self.tier._reader.close()


def keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    return sorted(map(make_key, numbers))


def paths_of(bucket: Bucket, prefix: str = "") -> list[str]:
    return sorted(one.path for one in bucket.list_all(prefix))
