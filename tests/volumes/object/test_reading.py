"""Range reads: how many requests there are, how many at once, and what a late one may touch."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from tests.support.object_nodes import PAYLOAD, MemoryBucket, memory_bucket, object_config
from tests.support.waiting import until

from kvdepot.core.block import BlockKey
from kvdepot.core.volume import Outcome, PendingRead, Priority
from kvdepot.native import address_of
from kvdepot.testing.contract import put, read
from kvdepot.testing.fakes import CONTEXT
from kvdepot.testing.images import Reads, make_key, make_records, payload_for
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.volume import BucketVolume

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
def volume(bucket: GatedBucket) -> Iterator[BucketVolume]:
    config = object_config(parallel=PARALLEL, capacity=1 << 30)
    volume = BucketVolume(config, CONTEXT, bucket)
    yield volume
    bucket.open_gate()
    volume.close()


def reads_of(
    volume: BucketVolume, first: int, count: int, payload_bytes: int = PAYLOAD, target: int = 0
) -> Reads:
    """Reads of blocks that are stored together."""
    keys = [make_key(number) for number in range(first, first + count)]
    reads = Reads()
    places = put(volume, make_records(keys, payload_bytes, CHUNK))
    for key, place in zip(keys, places, strict=True):
        reads.add(key, place, payload_bytes, chunk_bytes=CHUNK, target=target)
    return reads


def begin(volume: BucketVolume, reads: Reads, timeout_s: float = 30.0) -> PendingRead:
    return volume.read(reads.rows, Priority.FOREGROUND, timeout_s)


def are_right(reads: Reads) -> bool:
    """Whether each image has the payload of its key."""
    return all(
        reads.payload(index) == payload_for(BlockKey(row["key"].tobytes()), row["payload_bytes"])
        for index, row in enumerate(reads.rows)
    )


def test_calls_share_the_requests_and_none_waits_for_another(
    volume: BucketVolume, bucket: GatedBucket
) -> None:
    calls = [reads_of(volume, 10 * number, 4) for number in range(5)]
    told: list[int] = []
    pending = [begin(volume, reads) for reads in calls]
    for number, one in enumerate(pending):
        one.when_done(partial(told.append, number))
    until(lambda: bucket.waiting == PARALLEL)
    assert not told
    bucket.open_gate()
    for one, reads in zip(pending, calls, strict=True):
        assert one.result().tolist() == [Outcome.OK] * 4
        assert one.released(0.0) and are_right(reads)
    until(lambda: sorted(told) == list(range(5)))
    assert len(bucket.asked) == len(calls), "blocks that lie together are one request"


def test_what_is_late_touches_nothing_afterwards(volume: BucketVolume, bucket: GatedBucket) -> None:
    reads = reads_of(volume, 0, 2)
    pending = begin(volume, reads, 0.0)
    assert pending.result().tolist() == [Outcome.LATE] * 2
    assert pending.released(0.0)
    before = [bytes(image) for image in reads.images]
    bucket.open_gate()
    volume.close()
    assert [bytes(image) for image in reads.images] == before


@pytest.mark.parametrize(
    ("blocks", "payload", "requests"),
    [(2, 400_000, 1), (9, 400_000, 4), (1, 9 << 20, 3), (3, 9 << 20, 4), (40, 700_001, 4)],
)
def test_requests_end_at_multiples_of_their_size_and_records_are_put_together(
    volume: BucketVolume, bucket: GatedBucket, blocks: int, payload: int, requests: int
) -> None:
    bucket.open_gate()
    reads = reads_of(volume, 0, blocks, payload)
    assert read(volume, reads) == [Outcome.OK] * blocks
    assert are_right(reads)
    asked = sorted(bucket.asked)
    assert len(asked) == requests
    assert [stop for _, stop in asked[:-1]] == [start for start, _ in asked[1:]]
    assert all(stop % MIB == 0 for _, stop in asked[:-1])


def test_a_record_in_several_parts_is_checked_like_others(
    volume: BucketVolume, bucket: GatedBucket
) -> None:
    bucket.open_gate()
    target = bytearray(9 << 20)
    reads = reads_of(volume, 0, 1, len(target), address_of(target)[0])
    assert read(volume, reads) == [Outcome.OK]
    assert target == payload_for(make_key(0), len(target))
    bucket.flip_at = 5 << 20
    assert read(volume, reads) == [Outcome.CORRUPT]
    bucket.flip_at, bucket.cut = None, True
    assert read(volume, reads) == [Outcome.CORRUPT]


def test_damage_of_one_block_spoils_no_other(volume: BucketVolume, bucket: GatedBucket) -> None:
    bucket.open_gate()
    reads = reads_of(volume, 0, 2)
    bucket.flip_at = 5000
    assert read(volume, reads) == [Outcome.CORRUPT, Outcome.OK]
    assert len(bucket.asked) == 1, "they came together"
    assert reads.payload(1) == payload_for(make_key(1), PAYLOAD)
