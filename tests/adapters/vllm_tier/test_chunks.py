"""Chunks of vLLM in a depot: keys from its hashes, transfers in threads. Without vLLM."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.small_store import BLOCK, settings, space_of
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.vllm_tier.chunks import (
    ChunkJob,
    ChunkTransfers,
    FinishedJob,
    RequestChunks,
    keys_of,
    leading,
)
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import StoreClosedError


def chunk(number: int, group: int = 0) -> bytes:
    return random.Random(number).randbytes(32) + group.to_bytes(4, "big")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvdepot.Store]:
    with kvdepot.open(**settings(tmp_path / "depot")) as opened:
        assert isinstance(opened, kvdepot.Store)
        yield opened


@pytest.fixture
def transfers(store: kvdepot.Store) -> Iterator[ChunkTransfers]:
    made = ChunkTransfers(store, 5.0, 2)
    yield made
    made.close()


def job(space: NamespaceHandle, chunks: list[bytes], rows: Sequence[object]) -> ChunkJob:
    parents = [None, *chunks[:-1]]
    return ChunkJob(1, "request", chunks, keys_of({0: space}, chunks, parents), rows)


def ended(transfers: ChunkTransfers) -> FinishedJob:
    found: list[FinishedJob] = []

    def one() -> bool:
        found.extend(transfers.take())
        return bool(found)

    until(one)
    return found[0]


def test_the_chunk_before_is_the_parent() -> None:
    places = RequestChunks({0: 16, 1: 32})
    first, second, tail, other, wide = (chunk(at) for at in range(5))
    other, wide = chunk(3, 1), chunk(4, 1)
    ends = {first: 16, second: 32, other: 32, wide: 64}
    assert places.parent(first, ends) is None
    assert places.parent(second, ends) == first
    assert places.parent(other, ends) is None
    assert places.parent(wide, ends) == other
    ends[tail] = 40  # a part of a chunk, told later
    assert places.parent(tail, ends) == second
    assert places.parent(chunk(9), ends) is None


def test_keys_do_not_depend_on_which_request_asks(store: kvdepot.Store) -> None:
    space = space_of(store)
    chunks = [chunk(at) for at in range(4)]
    whole = keys_of({0: space}, chunks, [None, *chunks[:-1]])
    assert keys_of({0: space}, chunks[2:], chunks[1:3]) == whole[2:]
    assert keys_of({0: space}, [chunk(1, 7)], [None]) == []


def test_a_round_trip(store: kvdepot.Store, transfers: ChunkTransfers) -> None:
    space = space_of(store)
    chunks = [chunk(at) for at in range(6)]
    rows = np.random.default_rng(1).integers(0, 256, (6, BLOCK), np.uint8)
    transfers.store(job(space, chunks, list(rows)))
    stored = ended(transfers)
    assert stored.complete and stored.nbytes == rows.nbytes
    targets = np.zeros_like(rows)
    transfers.load(job(space, chunks, list(targets)))
    assert ended(transfers).complete
    assert np.array_equal(targets, rows)


def test_what_is_behind_a_gap_does_not_count(
    store: kvdepot.Store, transfers: ChunkTransfers
) -> None:
    space = space_of(store)
    chunks = [chunk(at) for at in range(4)]
    rows = [bytearray(BLOCK) for _ in chunks]
    whole = job(space, chunks, rows)
    transfers.store(whole)
    assert ended(transfers).complete
    store.remove(whole.keys[2])
    transfers.load(whole)
    found = ended(transfers)
    assert not found.complete
    assert list(found.done) == chunks[:2]
    assert leading([chunk(1), chunk(2, 1), chunk(3)], [False, True, True]) == [chunk(2, 1)]


def test_a_job_ends_whatever_happens(store: kvdepot.Store, transfers: ChunkTransfers) -> None:
    space = space_of(store)
    good = job(space, [chunk(1)], [bytearray(BLOCK)])
    for bad in (
        ChunkJob(1, "r", [chunk(1)], [], [bytearray(BLOCK)]),
        job(space, [chunk(1)], [bytearray(3)]),
    ):
        transfers.store(bad)
        assert not ended(transfers).complete
        transfers.load(bad)
        assert not ended(transfers).complete
    store.close()
    transfers.load(good)
    assert not ended(transfers).complete
    with pytest.raises(StoreClosedError):
        store.match(good.keys)


def test_a_load_that_waited_too_long_does_not_begin(store: kvdepot.Store) -> None:
    space = space_of(store)
    late = ChunkTransfers(store, 0.0, 1)
    try:
        good = job(space, [chunk(1)], [bytearray(BLOCK)])
        late.store(good)
        assert ended(late).complete
        late.load(good)
        assert not ended(late).complete
        late.drain()
    finally:
        late.close()


def test_loads_are_counted_until_they_are_taken(
    store: kvdepot.Store, transfers: ChunkTransfers
) -> None:
    space = space_of(store)
    chunks = [chunk(1)]
    load = replace(job(space, chunks, [np.zeros(BLOCK, np.uint8)]), is_load=True)
    transfers.store(job(space, chunks, [np.ones(BLOCK, np.uint8)]))
    assert transfers.loads == 0
    ended(transfers)
    transfers.load(load)
    assert transfers.loads == 1
    assert ended(transfers).complete
    assert transfers.loads == 0
