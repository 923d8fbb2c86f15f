"""Verified reads: every engine gives the same results for the same, possibly damaged, record."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdepot import native
from kvdepot.native.ops import HEAD_BYTES, IO_DTYPE, READ

SPLIT = 8192
LONG_S = 30.0
TABLE_AT = 128


def examples(count: int) -> settings:
    """The engines keep nothing between batches, so all examples of a test may share them."""
    shared = HealthCheck.function_scoped_fixture
    return settings(max_examples=count, deadline=None, suppress_health_check=[shared])


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    kinds = ["python"]
    if native.NAME == "c":
        kinds.append("threads")
    if native.uring_available()[0]:
        kinds.append("uring")
    opened = [native.open_engine(kind, depth=3, split_bytes=SPLIT) for kind in kinds]
    yield opened
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path: Path = tmp_path_factory.mktemp("records") / "records"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@dataclass(frozen=True)
class Record:
    """A head (checksum, key, used, table) and its payload, as they lie in a file."""

    key: bytes
    head: bytes
    payload: bytes
    chunk_bytes: int


def make_record(payload: bytes, chunk_bytes: int, key: bytes) -> Record:
    table = np.zeros(-(-len(payload) // chunk_bytes), np.uint64)
    native.chunk_checksums(payload, chunk_bytes, table)
    head = np.zeros(HEAD_BYTES, np.uint8)
    head[8 : 8 + len(key)] = np.frombuffer(key, np.uint8)
    used = TABLE_AT + table.nbytes
    head[64:68] = np.frombuffer(used.to_bytes(4, "little"), np.uint8)
    head[TABLE_AT:used] = table.view(np.uint8)
    head[:8] = np.frombuffer(native.checksum(head[8:used]).to_bytes(8, "little"), np.uint8)
    return Record(key, head.tobytes(), payload, chunk_bytes)


records = st.builds(
    lambda seed, nbytes, chunk_bytes, key: make_record(
        np.random.default_rng(seed).bytes(nbytes), chunk_bytes, key
    ),
    st.integers(0, 2**32),
    st.integers(1, 100_000),
    st.sampled_from([512, 4096, 10_000, 65_536]),
    st.binary(min_size=1, max_size=56),
)


def read_op(fd: int, record: Record, memory: Any, key: Any, target: Any, *, apart: bool) -> Any:
    """Read a record written at 0: head and payload in one I/O, or the head as a second one."""
    op = np.zeros(1, IO_DTYPE)
    base = memory.ctypes.data
    op["result"], op["fd"], op["opcode"] = 77, fd, READ
    skipped = HEAD_BYTES if apart else 0
    op["offset"], op["address"] = skipped, base + skipped
    op["nbytes"] = memory.nbytes - skipped
    op["head_address"], op["head_bytes"] = base, skipped
    op["head_check"], op["table"] = 1, base + TABLE_AT
    op["expect_address"], op["expect_bytes"] = key.ctypes.data, key.nbytes
    op["payload_address"], op["payload_bytes"] = base + HEAD_BYTES, len(record.payload)
    op["chunk_bytes"] = record.chunk_bytes
    op["copy_target"] = 0 if target is None else target.ctypes.data
    return op


def outcome(engine: Any, fd: int, record: Record, key: bytes, *, apart: bool, copy: bool) -> int:
    memory = np.zeros(HEAD_BYTES + len(record.payload), np.uint8)
    target = np.zeros(len(record.payload), np.uint8) if copy else None
    op = read_op(fd, record, memory, np.frombuffer(key, np.uint8), target, apart=apart)
    assert engine.run(op, LONG_S) is None
    result = int(op["result"][0])
    if result == 0:
        assert memory[HEAD_BYTES:].tobytes() == record.payload
        assert target is None or target.tobytes() == record.payload
    return result


def write(fd: int, content: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)


@given(record=records, apart=st.booleans(), copy=st.booleans())
@examples(40)
def test_a_sound_record_is_read(
    engines: list[Any], fd: int, record: Record, apart: bool, copy: bool
) -> None:
    write(fd, record.head + record.payload)
    for engine in engines:
        assert outcome(engine, fd, record, record.key, apart=apart, copy=copy) == 0, engine.kind


@given(record=records, apart=st.booleans(), copy=st.booleans(), bit=st.integers(0, 2**30))
@examples(40)
def test_one_wrong_bit_anywhere_is_noticed(
    engines: list[Any], fd: int, record: Record, apart: bool, copy: bool, bit: int
) -> None:
    used = int.from_bytes(record.head[64:68], "little")
    content = bytearray(record.head + record.payload)
    at = bit // 8 % (used + len(record.payload))
    content[at if at < used else at - used + HEAD_BYTES] ^= 1 << bit % 8
    write(fd, bytes(content))
    for engine in engines:
        result = outcome(engine, fd, record, record.key, apart=apart, copy=copy)
        assert result == -errno.EBADMSG, engine.kind


@given(record=records, apart=st.booleans(), used=st.sampled_from([0, 63, 4097, 2**32 - 1]))
@examples(15)
def test_an_impossible_length_is_noticed(
    engines: list[Any], fd: int, record: Record, apart: bool, used: int
) -> None:
    head = bytearray(record.head)
    head[64:68] = used.to_bytes(4, "little")
    write(fd, bytes(head) + record.payload)
    for engine in engines:
        result = outcome(engine, fd, record, record.key, apart=apart, copy=False)
        assert result == -errno.EBADMSG, engine.kind


@given(record=records, apart=st.booleans())
@examples(15)
def test_another_record_in_its_place_is_noticed(
    engines: list[Any], fd: int, record: Record, apart: bool
) -> None:
    write(fd, record.head + record.payload)
    other = bytes([record.key[0] ^ 1]) + record.key[1:]
    for engine in engines:
        result = outcome(engine, fd, record, other, apart=apart, copy=True)
        assert result == -errno.EBADMSG, engine.kind


@given(record=records, apart=st.booleans(), missing=st.integers(1, 200_000))
@examples(15)
def test_a_truncated_record_is_an_io_error(
    engines: list[Any], fd: int, record: Record, apart: bool, missing: int
) -> None:
    content = record.head + record.payload
    write(fd, content[: max(0, len(content) - missing)])
    allowed = {-errno.EIO} if missing <= len(record.payload) else {-errno.EIO, -errno.EBADMSG}
    for engine in engines:
        result = outcome(engine, fd, record, record.key, apart=apart, copy=True)
        assert result in allowed, engine.kind


@given(sizes=st.lists(st.integers(0, 40_000), max_size=12), seed=st.integers(0, 2**32))
@examples(15)
def test_plain_batches_and_copies_are_equal(
    engines: list[Any], fd: int, sizes: list[int], seed: int
) -> None:
    content = np.random.default_rng(seed).bytes(60_000)
    write(fd, content)
    for engine in engines:
        areas = [np.zeros((2, size), np.uint8) for size in sizes]
        ops = np.zeros(len(sizes), IO_DTYPE)
        for op, area, at in zip(ops, areas, range(0, 12_000, 1000), strict=False):
            op["fd"], op["offset"], op["nbytes"] = fd, at, area[0].nbytes
            op["address"] = op["payload_address"] = area.ctypes.data
            op["payload_bytes"], op["copy_target"] = area[1].nbytes, area[1].ctypes.data
        assert engine.run(ops, LONG_S) is None
        assert not ops["result"].any(), engine.kind
        for area, at in zip(areas, range(0, 12_000, 1000), strict=False):
            expected = content[at : at + area[0].nbytes]
            assert area[0].tobytes() == area[1].tobytes() == expected, engine.kind
