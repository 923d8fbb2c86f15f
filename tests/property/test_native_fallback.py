"""The C extension equals its fallback: any length, alignment, strides, every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.native import fallback
from kvdepot.native.ops import FILL, STRIDED_DTYPE, TRANSFER_DTYPE, VERIFY
from kvdepot.native.xxh3 import checksums_of

c = pytest.importorskip("kvdepot.native._native", exc_type=ImportError)

MEMORY = np.random.default_rng(20261115).integers(0, 256, 3 << 20, dtype=np.uint8)

lengths = st.one_of(
    st.integers(0, 300),
    st.integers(0, 5000),
    st.integers(0, 200_000),
    st.sampled_from([1 << 20, (1 << 20) + 1, (1 << 20) - 1, 1024, 1025, 65536]),
)
starts = st.integers(0, 200)


@pytest.fixture(params=["avx512", "avx2", "portable"], scope="module")
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    if not c.select_simd(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    c.select_simd(None)


@given(start=starts, nbytes=lengths)
def test_checksums_are_those_of_xxhash(simd: str, start: int, nbytes: int) -> None:
    xxhash = pytest.importorskip("xxhash")
    data = MEMORY[start : start + nbytes]
    assert c.checksum(data) == xxhash.xxh3_64_intdigest(data.tobytes())


def test_every_short_length_is_that_of_xxhash(simd: str) -> None:
    xxhash = pytest.importorskip("xxhash")
    for nbytes in range(2100):
        data = MEMORY[nbytes : 2 * nbytes]
        assert (
            c.checksum(data) == fallback.checksum(data) == xxhash.xxh3_64_intdigest(data.tobytes())
        )


class Guarded:
    """Room for a copy at any alignment, with margins that must stay as they were."""

    def __init__(self, nbytes: int, skew: int) -> None:
        self.area = np.full(nbytes + 512, 0xEE, np.uint8)
        self.first = -self.area.ctypes.data % 64 + skew
        self.inner = self.area[self.first : self.first + nbytes]

    def margins_intact(self) -> bool:
        outer = (self.area[: self.first], self.area[self.first + self.inner.nbytes :])
        return all(bool((margin == 0xEE).all()) for margin in outer)


def transfer_op(
    source: Any, target: Any, table: Any, chunk_bytes: int, mode: int, *, copy: bool
) -> Any:
    address = target.ctypes.data if copy else 0
    fields = (0, source.ctypes.data, address, source.nbytes, chunk_bytes, table.ctypes.data, mode)
    return np.array([fields], TRANSFER_DTYPE)


@given(
    start=starts,
    skew=st.one_of(st.just(0), st.integers(0, 63)),
    nbytes=st.one_of(lengths, st.integers(1 << 20, 2 << 20)),
    chunk_bytes=st.one_of(st.just(0), st.integers(500, 100_000), st.just(65536)),
    mode=st.integers(0, 2),
    copy=st.booleans(),
    harm=st.one_of(st.none(), st.integers(0, 1 << 30)),
)
def test_transfers_are_equal(
    simd: str,
    start: int,
    skew: int,
    nbytes: int,
    chunk_bytes: int,
    mode: int,
    copy: bool,
    harm: int | None,
) -> None:
    source = MEMORY[start : start + nbytes].copy()
    entries = -(-nbytes // chunk_bytes) if chunk_bytes else 0
    table = np.zeros(entries, np.uint64)
    if mode == VERIFY and entries:
        table = checksums_of(source, chunk_bytes)
        if harm is not None:
            source[harm % nbytes] ^= 1 << harm % 8
    outcomes = []
    for native in (c, fallback):
        room, own_table = Guarded(nbytes, skew), table.copy()
        ops = transfer_op(source, room.inner, own_table, chunk_bytes, mode, copy=copy)
        native.transfer(ops)
        assert room.margins_intact()
        if copy and ops["result"] == 0:
            assert np.array_equal(room.inner, source)
        outcomes.append((int(ops["result"][0]), own_table.tolist()))
    assert outcomes[0] == outcomes[1]
    harmed = mode == VERIFY and entries and harm is not None
    assert (outcomes[0][0] != 0) == bool(harmed)


@given(data=st.data())
@settings(max_examples=60)
def test_gather_and_scatter_are_equal(simd: str, data: st.DataObject) -> None:
    shapes = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 9), st.sampled_from([0, 1, 7, 64, 4096, 20_001]), st.integers(0, 99)
            ),
            max_size=8,
        )
    )
    backwards = data.draw(st.booleans())
    address, pieces = MEMORY.ctypes.data, []
    at = 0
    for rows, row_bytes, gap in shapes:
        pitch = row_bytes + gap
        last = max(rows - 1, 0) * pitch
        pieces.append(
            (at + last, rows, row_bytes, -pitch) if backwards else (at, rows, row_bytes, pitch)
        )
        at += rows * pitch
    total = sum(rows * row_bytes for rows, row_bytes, _ in shapes)
    results = []
    for native in (c, fallback):
        packed, spread = Guarded(total, 3), np.zeros(at, np.uint8)
        there = [(address + piece[0], *piece[1:]) for piece in pieces]
        native.gather(packed.inner, np.array(there, STRIDED_DTYPE))
        assert packed.margins_intact()
        back = [(spread.ctypes.data + piece[0], *piece[1:]) for piece in pieces]
        native.scatter(np.array(back, STRIDED_DTYPE), packed.inner)
        results.append((packed.inner.tobytes(), spread.tobytes()))
    assert results[0] == results[1]


@given(skew=st.integers(0, 63), row_bytes=st.integers(4000, 9000))
@settings(max_examples=20)
def test_a_large_gather_past_the_cache_is_exact(simd: str, skew: int, row_bytes: int) -> None:
    rows = (1 << 20) // row_bytes + 1
    room = Guarded(rows * row_bytes, skew)
    pieces = np.array([(MEMORY.ctypes.data, rows, row_bytes, row_bytes + 8)], STRIDED_DTYPE)
    c.gather(room.inner, pieces)
    expected = np.lib.stride_tricks.as_strided(MEMORY, (rows, row_bytes), (row_bytes + 8, 1))
    assert np.array_equal(room.inner.reshape(rows, row_bytes), expected)
    assert room.margins_intact()


@given(nbytes=st.integers(1, 200_000), chunk_bytes=st.integers(1000, 70_000))
@settings(max_examples=30)
def test_a_batch_is_its_ops_one_by_one(simd: str, nbytes: int, chunk_bytes: int) -> None:
    sources = [MEMORY[i : i + nbytes] for i in range(8)]
    targets = [np.zeros(nbytes, np.uint8) for _ in sources]
    tables = np.zeros((8, -(-nbytes // chunk_bytes)), np.uint64)
    ops = np.concatenate(
        [
            transfer_op(source, target, table, chunk_bytes, FILL, copy=True)
            for source, target, table in zip(sources, targets, tables, strict=True)
        ]
    )
    c.transfer(ops)
    for source, target, table in zip(sources, targets, tables, strict=True):
        assert np.array_equal(target, source)
        assert np.array_equal(table, checksums_of(source, chunk_bytes))
