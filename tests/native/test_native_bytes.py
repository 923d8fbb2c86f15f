"""Checksums, copies, addresses: known answers and refusals, of the C extension and its fallback."""

from __future__ import annotations

import ctypes
import errno
import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvdepot.core import requests
from kvdepot.native import HEAD_BYTES, KEY_AT, TABLE_AT, checksum, chunk_checksums
from kvdepot.native.fallback import CopyRectangle
from kvdepot.native.ops import (
    BLOCK_DTYPE,
    RECTANGLE_DTYPE,
    STRIDED_DTYPE,
    TRANSFER_DTYPE,
    VERIFY,
)


@pytest.fixture(params=["_native", "fallback"])
def native(request: pytest.FixtureRequest) -> ModuleType:
    try:
        return importlib.import_module(f"kvdepot.native.{request.param}")
    except ImportError:
        pytest.skip("kvdepot.native._native is not built")


def test_chunk_checksums_end_with_a_short_one() -> None:
    source = np.arange(2500, dtype=np.uint16)
    sums = np.zeros(3, np.uint64)
    chunk_checksums(source, 2048, sums)
    raw = source.tobytes()
    assert sums.tolist() == [checksum(raw[at : at + 2048]) for at in (0, 2048, 4096)]


@pytest.mark.parametrize(("chunk_bytes", "entries"), [(0, 1), (100, 9), (100, 11)])
def test_chunk_checksums_need_one_entry_a_chunk(chunk_bytes: int, entries: int) -> None:
    sums = np.zeros(entries, np.uint64)
    with pytest.raises(ValueError, match="chunk"):
        chunk_checksums(bytes(1000), chunk_bytes, sums)
    assert not sums.any()


def test_address_of_tells_where_and_how_long(native: ModuleType) -> None:
    array = np.zeros((3, 5), np.float32)
    assert native.address_of(array, writable=True) == (array.ctypes.data, 60)
    assert native.address_of(array.data[1:]) == (array.ctypes.data + 20, 40)
    assert native.address_of(b"") == (0, 0)
    assert native.address_of(bytearray(7))[1] == 7


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (np.zeros(8, np.uint8)[::2], ValueError),
        (memoryview(bytearray(8))[::2], ValueError),
        (np.zeros((4, 4)).T, ValueError),
        (b"constant", BufferError),
        (memoryview(b"constant"), BufferError),
        (np.frombuffer(b"constant", np.uint8), BufferError),
        (42, TypeError),
    ],
)
def test_address_of_refuses(native: ModuleType, buffer: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        native.address_of(buffer, writable=True)


def _one_transfer(**fields: int) -> Any:
    ops = np.zeros(1, TRANSFER_DTYPE)
    for name, value in fields.items():
        ops[name] = value
    return ops


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("wrong", [None, 0, 5 << 20, (7 << 20) - 1])
def test_threads_share_a_transfer(native: ModuleType, threads: int, wrong: int | None) -> None:
    """Two ops of several shares each, one of them with a bit flipped somewhere, or not."""
    sizes, chunk = (7 << 20, (3 << 20) + 100), 65536
    sources = [np.arange(size, dtype=np.uint32).astype(np.uint8) for size in sizes]
    targets = [np.zeros_like(source) for source in sources]
    tables = [np.zeros(-(-size // chunk), np.uint64) for size in sizes]
    for source, table in zip(sources, tables, strict=True):
        chunk_checksums(source, chunk, table)
    if wrong is not None:
        sources[0][wrong] ^= 1
    ops = np.zeros(2, TRANSFER_DTYPE)
    ops["source"] = [source.ctypes.data for source in sources]
    ops["target"] = [target.ctypes.data for target in targets]
    ops["table"] = [table.ctypes.data for table in tables]
    ops["nbytes"], ops["chunk_bytes"], ops["mode"] = sizes, chunk, VERIFY
    native.transfer(ops, threads)
    assert ops["result"].tolist() == [0 if wrong is None else -errno.EBADMSG, 0]
    good = range(2) if wrong is None else range(1, 2)
    assert all(np.array_equal(targets[at], sources[at]) for at in good)


def test_transfer_refuses_an_unknown_mode_and_half_a_record(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="mode 3"):
        native.transfer(_one_transfer(mode=3))
    with pytest.raises(ValueError, match="whole number"):
        native.transfer(bytearray(TRANSFER_DTYPE.itemsize - 1))
    with pytest.raises(BufferError):
        native.transfer(bytes(TRANSFER_DTYPE.itemsize))


def test_gather_refuses_pieces_of_another_size(native: ModuleType) -> None:
    memory, target = np.arange(64, dtype=np.uint8), np.zeros(16, np.uint8)
    pieces = np.array([(memory.ctypes.data, 3, 5, 10)], STRIDED_DTYPE)
    with pytest.raises(ValueError, match="add up"):
        native.gather(target, pieces)
    with pytest.raises(ValueError, match="add up"):
        native.scatter(pieces, target)
    huge = np.array(
        [(memory.ctypes.data, 1 << 63, 2, 1), (memory.ctypes.data, 1, 16, 0)], STRIDED_DTYPE
    )
    with pytest.raises(ValueError, match="add up"):
        native.gather(target, huge)
    assert not target.any()


def test_rectangles_end_at_the_first_refusal(native: ModuleType) -> None:
    """The function gets all fields as they are; a code that is not 0 is passed on at once."""
    seen: list[tuple[int, ...]] = []

    def refuses_the_second(*fields: int) -> int:
        seen.append(fields)
        return 7 if len(seen) == 2 else 0

    function = CopyRectangle(refuses_the_second)
    address = ctypes.cast(function, ctypes.c_void_p).value
    rectangles = np.arange(18, dtype=np.uint64).view(RECTANGLE_DTYPE)
    assert native.copy_rectangles(address, rectangles, 2, 1 << 40) == 7
    assert seen == [(0, 1, 2, 3, 4, 5, 2, 1 << 40), (6, 7, 8, 9, 10, 11, 2, 1 << 40)]
    assert native.copy_rectangles(address, rectangles, 2, 0) == 0
    assert len(seen) == 5
    with pytest.raises(ValueError, match="whole number"):
        native.copy_rectangles(address, b"x" * 47, 2, 0)


CHUNK = 1024
PAYLOAD = 4 * CHUNK + 100


def _record(key: bytes) -> Any:
    """A record in memory, with the key and the checksums in its head."""
    record = np.zeros(HEAD_BYTES + PAYLOAD, np.uint8)
    record[HEAD_BYTES:] = np.random.default_rng(1).integers(0, 256, PAYLOAD, np.uint8)
    record[KEY_AT : KEY_AT + len(key)] = np.frombuffer(key, np.uint8)
    sums = record[TABLE_AT : TABLE_AT + 8 * -(-PAYLOAD // CHUNK)].view("<u8")
    chunk_checksums(record[HEAD_BYTES:], CHUNK, sums)
    return record


def _wanted(key: bytes, target: Any, start: int = 0, stop: int = PAYLOAD) -> Any:
    block = np.zeros(1, BLOCK_DTYPE)
    block["key"], block["start"], block["stop"] = key, start, stop
    block["payload_bytes"], block["chunk_bytes"] = PAYLOAD, CHUNK
    block["address"] = 0 if target is None else target.ctypes.data
    return block


def test_a_block_of_a_call_is_the_same_for_native_code() -> None:
    ours = requests.BLOCK_DTYPE
    assert ours.names == BLOCK_DTYPE.names and ours.itemsize == BLOCK_DTYPE.itemsize
    assert ours.fields is not None and BLOCK_DTYPE.fields is not None
    for name in ours.names or ():
        assert ours.fields[name][1] == BLOCK_DTYPE.fields[name][1]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, PAYLOAD), (CHUNK, 3 * CHUNK), (5, CHUNK + 7), (4 * CHUNK, PAYLOAD)]
)
def test_a_range_is_copied_out(
    native: ModuleType, start: int, stop: int, threads: int, verify: bool
) -> None:
    key = bytes(range(32))
    record, target = _record(key), np.full(PAYLOAD + 1, 0xEE, np.uint8)
    blocks, at = _wanted(key, target, start, stop), np.array([record.ctypes.data])
    assert native.copy_out(blocks, at, verify, threads) == b"\1"
    assert np.array_equal(target[: stop - start], record[HEAD_BYTES + start : HEAD_BYTES + stop])
    assert (target[stop - start :] == 0xEE).all()


def test_copy_out_finds_damage_and_the_key_of_another_block(native: ModuleType) -> None:
    key, other = bytes(32), bytes([1]) * 32
    records = [_record(key) for _ in range(4)]
    records[1][HEAD_BYTES + 3 * CHUNK] ^= 1
    targets = [np.full(PAYLOAD, 0xEE, np.uint8) for _ in records]
    blocks = np.concatenate([_wanted(key, target) for target in targets])
    blocks["key"][2] = other
    blocks["address"][3] = 0
    at = np.array([record.ctypes.data for record in records])
    assert native.copy_out(blocks, at, True) == bytes([1, 0, 0, 1])
    assert (targets[2] == 0xEE).all(), "bytes of another block were copied"
    assert (targets[3] == 0xEE).all()
    assert native.copy_out(blocks, at, False) == bytes([1, 1, 0, 1]), "only keys are compared"
    part = _wanted(key, targets[0], 0, CHUNK)
    assert native.copy_out(part, at[1:2], True) == b"\1", "the damage is in another chunk"
    part["start"], part["stop"] = 3 * CHUNK + 5, 3 * CHUNK + 9
    assert native.copy_out(part, at[1:2], True) == b"\0"


def test_copy_out_refuses_a_range_outside_the_payload(native: ModuleType) -> None:
    key = bytes(32)
    record = _record(key)
    at = np.array([record.ctypes.data])
    assert native.copy_out(np.zeros(0, BLOCK_DTYPE), at[:0], True) == b""
    for field, value in (("stop", PAYLOAD + 1), ("start", -1), ("chunk_bytes", 0)):
        block = _wanted(key, None)
        block[field] = value
        with pytest.raises(ValueError, match="invalid range"):
            native.copy_out(block, at, True)
    with pytest.raises(ValueError, match="one record for each block"):
        native.copy_out(_wanted(key, None), at[:0], True)


def test_a_payload_is_copied_in_with_its_checksums(native: ModuleType) -> None:
    key = bytes(range(32))
    expected = _record(key)
    payload, record = expected[HEAD_BYTES:].copy(), np.zeros_like(expected)
    record[KEY_AT : KEY_AT + len(key)] = expected[KEY_AT : KEY_AT + len(key)]
    assert native.copy_in(_wanted(key, payload), np.array([record.ctypes.data])) is None
    assert np.array_equal(record, expected)
    with pytest.raises(ValueError, match="one record for each block"):
        native.copy_in(_wanted(key, payload), np.zeros(0, np.int64))
