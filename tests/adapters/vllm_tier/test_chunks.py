"""Chunks of vLLM in a depot: keys from its hashes, transfers in threads. Without vLLM."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.small_store import BLOCK, settings, space_of

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


def job(
    space: NamespaceHandle, chunks: list[bytes], rows: Sequence[object], *, is_load: bool = False
) -> ChunkJob:
    keys = keys_of({0: space}, chunks, [None, *chunks[:-1]])
    return ChunkJob(1, "request", chunks, keys, rows, is_load)


def ended(transfers: ChunkTransfers, job: ChunkJob) -> FinishedJob:
    """Submit a job; how it has ended."""
    transfers.submit(job)
    transfers.drain()
    (finished,) = transfers.take()
    return finished


def test_the_chunk_before_is_the_parent() -> None:
    places = RequestChunks({0: 16, 1: 32})
    first, second, tail, other, wide = (chunk(at) for at in range(5))
    other, wide = chunk(3, 1), chunk(4, 1)
    ends = {first: 16, second: 32, other: 32, wide: 64}
    assert places.parent(first, ends) is None
    assert places.parent(second, ends) == first
    assert places.parent(other, ends) is None
    assert places.parent(wide, ends) == other
    ends[tail] = 40  # a part of a chunk, reported later
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
    stored = ended(transfers, job(space, chunks, list(rows)))
    assert stored.complete and stored.nbytes == rows.nbytes
    targets = np.zeros_like(rows)
    assert ended(transfers, job(space, chunks, list(targets), is_load=True)).complete
    assert np.array_equal(targets, rows)


def test_chunks_after_a_gap_do_not_count(store: kvdepot.Store, transfers: ChunkTransfers) -> None:
    space = space_of(store)
    chunks = [chunk(at) for at in range(4)]
    whole = job(space, chunks, [bytearray(BLOCK) for _ in chunks])
    assert ended(transfers, whole).complete
    store.remove(whole.keys[2])
    finished = ended(transfers, replace(whole, is_load=True))
    assert not finished.complete
    assert list(finished.done) == chunks[:2]
    assert leading([chunk(1), chunk(2, 1), chunk(3)], [False, True, True]) == [chunk(2, 1)]


def test_a_job_ends_after_any_error(store: kvdepot.Store, transfers: ChunkTransfers) -> None:
    space = space_of(store)
    good = job(space, [chunk(1)], [bytearray(BLOCK)])
    for bad in (replace(good, keys=[]), replace(good, rows=[bytearray(3)])):
        assert not ended(transfers, bad).complete
        assert not ended(transfers, replace(bad, is_load=True)).complete
    store.close()
    assert not ended(transfers, replace(good, is_load=True)).complete
    with pytest.raises(StoreClosedError):
        store.match(good.keys)


def test_a_load_that_waited_too_long_does_not_begin(store: kvdepot.Store) -> None:
    late = ChunkTransfers(store, 0.0, 1)
    good = job(space_of(store), [chunk(1)], [bytearray(BLOCK)])
    assert ended(late, good).complete
    assert not ended(late, replace(good, is_load=True)).complete
    late.drain()
    late.close()


def test_loads_are_counted_until_they_are_taken(
    store: kvdepot.Store, transfers: ChunkTransfers
) -> None:
    stored = job(space_of(store), [chunk(1)], [np.ones(BLOCK, np.uint8)])
    transfers.submit(stored)
    assert transfers.loads == 0
    transfers.drain()
    transfers.take()
    transfers.submit(replace(stored, is_load=True))
    assert transfers.loads == 1
    transfers.drain()
    assert [finished.complete for finished in transfers.take()] == [True]
    assert transfers.loads == 0
