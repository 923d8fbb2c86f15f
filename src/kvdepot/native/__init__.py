"""Checksums, copies and I/O: the C extension where it is built, else its numpy twin.

`NAME` says which ("c" or "python"). Both give the same results; a property test holds them to it.
In C, work on 64 KiB or more releases the interpreter lock. Addresses are plain integers: the caller
keeps the memory alive. What each function does is said in twin.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdepot.native import twin
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
from kvdepot.native.protocol import Engine, PendingOps

if TYPE_CHECKING:
    from kvdepot.native import _native as _chosen

    NAME: str
else:
    try:
        from kvdepot.native import _native as _chosen

        NAME = "c"
    except ImportError:
        _chosen = twin
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
    "Engine",
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
) -> Engine:
    """An engine of kind "uring", "threads" or "python"; "auto" takes the first of them that works.

    `depth` pieces of at most `split_bytes` are in flight for each call of `run`; `threads` is for
    the kinds that have them. OSError when "uring" is not allowed; without the extension "threads"
    is the Python engine too.
    """
    if kind == "python" or NAME == "python":
        return twin.Engine("python" if kind == "auto" else kind, depth, threads, split_bytes)
    if kind == "auto":
        kind = "uring" if uring_available()[0] else "threads"
    return _chosen.Engine(kind, depth, threads, split_bytes)
