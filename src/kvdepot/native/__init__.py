"""Checksums, copies and I/O: the C extension where it is built, else Python and numpy.

`NAME` says which ("c" or "python"). Both give the same results; a property test holds them to it.
In C, work on 64 KiB or more releases the interpreter lock. Addresses are plain integers: the caller
keeps the memory alive. What each function does is said in fallback.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdepot.native import fallback
from kvdepot.native.ops import (
    COPY,
    FILL,
    HEAD_BYTES,
    IO_DTYPE,
    READ,
    RECTANGLE_DTYPE,
    STRIDED_DTYPE,
    SYNC,
    TRANSFER_DTYPE,
    VERIFY,
    WRITE,
)
from kvdepot.native.protocol import IoEngine, PendingOps
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
    "COPY",
    "FILL",
    "HEAD_BYTES",
    "IO_DTYPE",
    "NAME",
    "READ",
    "RECTANGLE_DTYPE",
    "STRIDED_DTYPE",
    "SYNC",
    "TRANSFER_DTYPE",
    "VERIFY",
    "WRITE",
    "IoEngine",
    "PendingOps",
    "address_of",
    "checksum",
    "chunk_checksums",
    "copy_rectangles",
    "gather",
    "open_engine",
    "scatter",
    "transfer",
    "uring_available",
]


address_of, uring_available = _chosen.address_of, _chosen.uring_available
checksum, chunk_checksums = _chosen.checksum, _chosen.chunk_checksums
transfer, gather, scatter = _chosen.transfer, _chosen.gather, _chosen.scatter
copy_rectangles = _chosen.copy_rectangles


def open_engine(
    kind: str = "auto", depth: int = 32, threads: int = 8, split_bytes: int = 512 << 10
) -> IoEngine:
    """An engine of kind "uring", "threads" or "python"; "auto" takes the first of them that works.

    `depth` pieces of at most `split_bytes` are in flight for each call of `run`; `threads` is for
    "threads". OSError when "uring" is not allowed. Without the extension every kind is "python",
    which moves one op of a batch at a time.
    """
    if kind == "python" or NAME == "python":
        return PythonEngine()
    if kind == "auto":
        kind = "uring" if uring_available()[0] else "threads"
    return _chosen.Engine(kind, depth, threads, split_bytes)
