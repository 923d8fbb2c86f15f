"""Checksums, copies and I/O: the C extension where it is built, else Python and numpy.

`NAME` is "c" or "python". Both give the same results, which a property test checks.
In C, work on 64 KiB or more releases the interpreter lock. Addresses are plain integers: the caller
keeps the memory alive. fallback.py documents each function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.native import fallback
from kvdepot.native.ops import (
    BLOCK_DTYPE,
    COPY,
    FILL,
    HEAD_BYTES,
    IO_DTYPE,
    KEY_AT,
    READ,
    RECTANGLE_DTYPE,
    STRIDED_DTYPE,
    SYNC,
    TABLE_AT,
    TRANSFER_DTYPE,
    VERIFY,
    WRITE,
    IoEngine,
    PendingOps,
)
from kvdepot.native.python_engine import PythonEngine

if TYPE_CHECKING:
    from kvdepot.native import _native as _chosen

    NAME: str
else:
    try:
        from kvdepot.native import _native as _chosen

        NAME = "c"
    except ImportError:
        _chosen = fallback
        NAME = "python"

__all__ = [
    "BLOCK_DTYPE", "COPY", "FILL", "HEAD_BYTES", "IO_DTYPE", "KEY_AT", "NAME", "READ",
    "RECTANGLE_DTYPE", "STRIDED_DTYPE", "SYNC", "TABLE_AT", "TRANSFER_DTYPE", "VERIFY", "WRITE",
    "IoEngine", "PendingOps", "address_of", "checksum", "chunk_checksums", "copy_in", "copy_out",
    "copy_rectangles", "gather", "open_engine", "scatter", "transfer", "uring_available",
]  # fmt: skip

address_of, uring_available = _chosen.address_of, _chosen.uring_available
checksum, transfer = _chosen.checksum, _chosen.transfer
copy_in, copy_out = _chosen.copy_in, _chosen.copy_out
gather, scatter, copy_rectangles = _chosen.gather, _chosen.scatter, _chosen.copy_rectangles


def chunk_checksums(source: Any, chunk_bytes: int, target_u64: Any) -> None:
    """Fill `target_u64` with the checksum of each chunk of `source`; the last may be short.

    ValueError unless the target has exactly one u64 for each chunk.
    """
    address, nbytes = address_of(source)
    table, table_bytes = address_of(target_u64, writable=True)
    if chunk_bytes <= 0:
        raise ValueError("chunk_bytes must be positive")
    if table_bytes != 8 * -(-nbytes // chunk_bytes):
        raise ValueError("the target must have one u64 for each chunk")
    transfer(np.array([(0, address, 0, nbytes, chunk_bytes, table, FILL)], TRANSFER_DTYPE))


def open_engine(
    kind: str = "auto", depth: int = 32, threads: int = 8, split_bytes: int = 512 << 10
) -> IoEngine:
    """Open an engine of kind "uring", "threads" or "python"; "auto" is the first that works.

    Each call of `run` has up to `depth` pieces of at most `split_bytes` in flight; `threads` is for
    kind "threads". OSError if "uring" is not allowed. Without the extension every kind is "python",
    which executes one op of a batch at a time.
    """
    if kind == "python" or NAME == "python":
        return PythonEngine()
    if kind == "auto":
        kind = "uring" if uring_available()[0] else "threads"
    return _chosen.Engine(kind, depth, threads, split_bytes)
