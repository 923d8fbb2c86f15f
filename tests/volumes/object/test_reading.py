"""Range reads: how many requests there are, how many at once, and what a late one may touch."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.object_nodes import PAYLOAD, MemoryBucket, memory_bucket, object_config
from tests.support.waiting import until

from kvdepot.core.tier import Load, Outcome, QueuesReads
from kvdepot.native import address_of
from kvdepot.testing.contract import put
from kvdepot.testing.images import loaded, make_image, make_key, make_load, payload_for
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.tier import ObjectTier

pytest.importorskip("obstore", reason="the extra s3 is not installed")
PARALLEL = 3
MIB = 1 << 20
CHUNK = 64 << 10


class GatedBucket(MemoryBucket):
    """Answers range reads when the test lets it."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket._reader, bucket._writer, bucket.label)
        self.gate = threading.Semaphore(0)
        self.waiting = 0
        self.asked: list[tuple[int, int]] = []
        self.flip_at: int | None = None
        self.cut = False
        self._count = threading.Lock()

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        with self._count:
            self.waiting += 1
            self.asked.append((start, stop))
        self.gate.acquire()
        with self._count:
            self.waiting -= 1
        body = super().get_range(path, start, stop)
        if self.flip_at is not None and start <= self.flip_at < stop:
            wrong = bytearray(body)
            wrong[self.flip_at - start] ^= 1
            return memoryview(wrong)
        return body[: len(body) - 1] if self.cut else body

    def open_gate(self) -> None:
        for _ in range(1000):
            self.gate.release()


@pytest.fixture
def bucket() -> GatedBucket:
    return GatedBucket(memory_bucket())


@pytest.fixture
def tier(bucket: GatedBucket) -> Iterator[ObjectTier]:
    tier = ObjectTier(object_config(parallel=PARALLEL, capacity=1 << 30), bucket=bucket)
    yield tier
    bucket.open_gate()
    tier.close()


def loads_of(tier: ObjectTier, first: int, count: int, payload: int = PAYLOAD) -> list[Load]:
    keys = [make_key(number) for number in range(first, first + count)]
    places = put(tier, [make_image(key, payload_for(key, payload), CHUNK) for key in keys])
    found = [place for place in places if place is not None]
    return [make_load(key, place, payload, CHUNK) for key, place in zip(keys, found, strict=True)]


def test_calls_share_the_requests_and_none_waits_for_another(
    tier: ObjectTier, bucket: GatedBucket
) -> None:
    assert isinstance(tier, QueuesReads)
    calls = [loads_of(tier, 10 * number, 4) for number in range(5)]
    told: list[int] = []
    readings = [
        tier.submit(loads, 30.0, partial(told.append, number)) for number, loads in enumerate(calls)
    ]
    until(lambda: bucket.waiting == PARALLEL)
    assert not told
    bucket.open_gate()
    for reading, loads in zip(readings, calls, strict=True):
        assert reading.result() == ([Outcome.OK] * 4, None)
        assert all(loaded(one) == payload_for(one.key, PAYLOAD) for one in loads)
    until(lambda: sorted(told) == list(range(5)))
    assert len(bucket.asked) == len(calls), "blocks that lie together are one request"


def test_what_is_late_touches_nothing_afterwards(tier: ObjectTier, bucket: GatedBucket) -> None:
    loads = loads_of(tier, 0, 2)
    outcomes, pending = tier.submit(loads, 0.0, lambda: None).result()
    assert outcomes == [Outcome.LATE] * 2
    assert pending is not None and pending.wait(0.0)
    before = [bytes(one.image) for one in loads]
    bucket.open_gate()
    tier.close()
    assert [bytes(one.image) for one in loads] == before


@pytest.mark.parametrize(
    ("blocks", "payload", "requests"),
    [(2, 400_000, 1), (9, 400_000, 4), (1, 9 << 20, 3), (3, 9 << 20, 4), (40, 700_001, 4)],
)
def test_requests_end_at_multiples_of_their_size_and_records_are_put_together(
    tier: ObjectTier, bucket: GatedBucket, blocks: int, payload: int, requests: int
) -> None:
    bucket.open_gate()
    loads = loads_of(tier, 0, blocks, payload)
    assert tier.load(loads, 30.0) == ([Outcome.OK] * blocks, None)
    assert all(loaded(one) == payload_for(one.key, payload) for one in loads)
    asked = sorted(bucket.asked)
    assert len(asked) == requests
    assert [stop for _, stop in asked[:-1]] == [start for start, _ in asked[1:]]
    assert all(stop % MIB == 0 for _, stop in asked[:-1])


def test_a_record_in_several_parts_is_checked_like_others(
    tier: ObjectTier, bucket: GatedBucket
) -> None:
    bucket.open_gate()
    (one,) = loads_of(tier, 0, 1, 9 << 20)
    target = bytearray(9 << 20)
    one.copy_to = address_of(target)[0]
    assert tier.load([one], 30.0) == ([Outcome.OK], None)
    assert target == payload_for(one.key, 9 << 20)
    bucket.flip_at = 5 << 20
    assert tier.load([one], 30.0) == ([Outcome.CORRUPT], None)
    bucket.flip_at, bucket.cut = None, True
    assert tier.load([one], 30.0) == ([Outcome.CORRUPT], None)


def test_damage_spoils_both_copies_of_no_other_block(tier: ObjectTier, bucket: Any) -> None:
    bucket.open_gate()
    wrong, right = loads_of(tier, 0, 2)
    wrong.key = make_key(99)
    assert tier.load([wrong, right], 30.0) == ([Outcome.CORRUPT, Outcome.OK], None)
    assert loaded(right) == payload_for(right.key, PAYLOAD)
