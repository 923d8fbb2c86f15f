"""The functions of the C extension in numpy, for machines without a compiler."""

from __future__ import annotations

import ctypes
import errno
from typing import Any, Final

import numpy as np

from kvdepot.native.memory import Bytes, address_of, records_at, rows_at, view_at
from kvdepot.native.ops import (
    BLOCK_DTYPE,
    COPY,
    FILL,
    HEAD_BYTES,
    KEY_AT,
    RECTANGLE_DTYPE,
    STRIDED_DTYPE,
    TABLE_AT,
    TRANSFER_DTYPE,
    VERIFY,
)
from kvdepot.native.xxh3 import checksums_of, xxh3_64

__all__ = ["address_of"]


def uring_available() -> tuple[bool, str]:
    """True if an engine of kind "uring" can be opened here; else False and the reason."""
    return False, "kvdepot.native._native is not built"


def _held(buffer: Any, *, writable: bool = False) -> Bytes:
    address, nbytes = address_of(buffer, writable=writable)
    return view_at(address, nbytes)


def checksum(buffer: Any) -> int:
    """XXH3, 64 bits, seed 0."""
    return xxh3_64(_held(buffer))


def transfer(ops: Any, threads: int = 1) -> None:
    """Run a batch of copies, a writable buffer of TRANSFER_DTYPE. Each byte is read once.

    In C, `threads` share the work by chunks. Here the caller's thread does all of it.

    Afterwards every `result` is 0, or -EBADMSG for a VERIFY with a wrong checksum; its target is
    then undefined. In C a batch of 1 MiB or more bypasses the cache.
    """
    records = records_at(ops, TRANSFER_DTYPE, writable=True)
    for index, mode in enumerate(records["mode"]):
        if mode > VERIFY:
            raise ValueError(f"op {index} has mode {mode}, which is none of 0, 1, 2")
    for index, fields in enumerate(records.tolist()):
        records[index]["result"] = transfer_one(*fields[1:])


def transfer_one(
    source: int, target: int, nbytes: int, chunk_bytes: int, table: int, mode: int
) -> int:
    """Run one record of TRANSFER_DTYPE. Returns its result."""
    if mode != COPY and chunk_bytes and nbytes:
        sums = checksums_of(view_at(source, nbytes), chunk_bytes)
        entries = view_at(table, sums.nbytes).view("<u8")
        if mode == FILL:
            entries[:] = sums
        elif not np.array_equal(entries, sums):
            return -errno.EBADMSG
    if target:
        ctypes.memmove(target, source, nbytes)
    return 0


def copy_out(blocks: Any, records: Any, verify: bool, threads: int = 1) -> bytes:
    """Copy payload[start:stop] of the records at these addresses (i64) to the addresses of their
    blocks (BLOCK_DTYPE), if they have one. In C, `threads` share the work by chunks.

    Returns a byte for each block: 1 if its record has the key of the block and, with `verify`, the
    right checksums in all chunks of that range; else 0, and its target is undefined.
    """
    return bytes(
        _copy_record(row, place, verify=verify) for row, place in _with_records(blocks, records)
    )


def copy_in(blocks: Any, records: Any) -> None:
    """Copy the payloads of blocks (BLOCK_DTYPE) from their addresses into the records at these
    addresses (i64), and write their checksums.
    """
    for (_, nbytes, chunk_bytes, source, *_), record in _with_records(blocks, records):
        table = record + TABLE_AT
        transfer_one(source, record + HEAD_BYTES, nbytes, chunk_bytes, table, FILL)


def _with_records(blocks: Any, records: Any) -> list[tuple[tuple[Any, ...], int]]:
    rows = records_at(blocks, BLOCK_DTYPE, writable=False).tolist()
    places = records_at(records, np.dtype([("at", "<i8")]), writable=False)["at"].tolist()
    if len(rows) != len(places) or not all(
        chunk > 0 and 0 <= start <= stop <= size for _, size, chunk, _, start, stop, _ in rows
    ):
        raise ValueError("not one record for each block, or an invalid range")
    return list(zip(rows, places, strict=True))


def _copy_record(row: tuple[Any, ...], record: int, *, verify: bool) -> bool:
    key, payload_bytes, chunk, target, start, stop, _ = row
    if view_at(record + KEY_AT, len(key)).tobytes() != key:
        return False
    if verify:
        first, last = start // chunk * chunk, min(-(-stop // chunk) * chunk, payload_bytes)
        table = record + TABLE_AT + 8 * (first // chunk)
        if transfer_one(record + HEAD_BYTES + first, 0, last - first, chunk, table, VERIFY):
            return False
    return not transfer_one(record + HEAD_BYTES + start, target, stop - start, 0, 0, COPY)


def _pieces(pieces: Any, nbytes: int) -> list[tuple[int, int, int, int]]:
    records = records_at(pieces, STRIDED_DTYPE, writable=False)
    shapes = [(int(a), int(n), int(row), int(stride)) for a, n, row, stride in records.tolist()]
    if sum(rows * row_bytes for _, rows, row_bytes, _ in shapes) != nbytes:
        raise ValueError("the pieces do not add up to the buffer")
    return [shape for shape in shapes if shape[1] and shape[2]]


def gather(target: Any, pieces: Any) -> None:
    """Pack the rows of `pieces` (STRIDED_DTYPE) into `target`, one after the other.

    ValueError if their bytes do not add up to the buffer; then nothing is copied.
    """
    whole, at = _held(target, writable=True), 0
    for address, rows, row_bytes, stride in _pieces(pieces, whole.nbytes):
        packed = whole[at : at + rows * row_bytes].reshape(rows, row_bytes)
        packed[:] = rows_at(address, rows, row_bytes, stride)
        at += rows * row_bytes


def scatter(pieces: Any, source: Any) -> None:
    """The inverse of `gather`: spread `source` over the rows of `pieces`."""
    whole, at = _held(source), 0
    for address, rows, row_bytes, stride in _pieces(pieces, whole.nbytes):
        packed = whole[at : at + rows * row_bytes].reshape(rows, row_bytes)
        rows_at(address, rows, row_bytes, stride)[:] = packed
        at += rows * row_bytes


CopyRectangle: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, *(6 * [ctypes.c_size_t]), ctypes.c_int, ctypes.c_size_t
)
"""The type of cudaMemcpy2DAsync."""


def copy_rectangles(function: int, rectangles: Any, kind: int, stream: int) -> int:
    """Call the device's `cudaMemcpy2DAsync`, whose address is `function`, for each of `rectangles`
    (RECTANGLE_DTYPE). Stops at the first code that is not 0. Returns the last code.
    """
    copy = CopyRectangle(function)
    for fields in records_at(rectangles, RECTANGLE_DTYPE, writable=False).tolist():
        code: int = copy(*fields, kind, stream)
        if code:
            return code
    return 0
