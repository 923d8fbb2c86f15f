"""Checksums, copies and I/O: the C extension where it is built, else its numpy twin.

`NAME` says which ("c" or "python"). Both give the same results; a property test holds them to it.
In C, work on 64 KiB or more releases the interpreter lock. Addresses are plain integers: the caller
keeps the memory alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdepot.native import twin
from kvdepot.native.ops import (
    COPY,
    FILL,
    HEAD_BYTES,
    IO_DTYPE,
    READ,
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
    "gather",
    "open_engine",
    "scatter",
    "transfer",
    "uring_available",
]


def address_of(buffer: Any, writable: bool = False) -> tuple[int, int]:
    """Address and length of a contiguous buffer; an empty one is at 0.

    ValueError when it is not contiguous, BufferError when it is read-only and `writable` is asked
    for, TypeError when it is no buffer. The address is good while the caller keeps the buffer.
    """
    return _chosen.address_of(buffer, writable)


def checksum(buffer: Any) -> int:
    """XXH3, 64 bits, seed 0."""
    return _chosen.checksum(buffer)


def chunk_checksums(source: Any, chunk_bytes: int, target_u64: Any) -> None:
    """Fill `target_u64` with the checksum of each chunk of `source`; the last may be short.

    ValueError when the target does not have exactly one u64 for each chunk.
    """
    _chosen.chunk_checksums(source, chunk_bytes, target_u64)


def transfer(ops: Any) -> None:
    """Run a batch of copies, a writable buffer of TRANSFER_DTYPE, each byte read once.

    Afterwards every `result` is 0, or -EBADMSG for a VERIFY that found another checksum; its target
    is then undefined. A batch of 1 MiB or more is stored past the cache.
    """
    _chosen.transfer(ops)


def gather(target: Any, pieces: Any) -> None:
    """Pack the rows of `pieces` (STRIDED_DTYPE) into `target`, one after the other.

    ValueError, and nothing is copied, when they do not add up to exactly the buffer.
    """
    _chosen.gather(target, pieces)


def scatter(pieces: Any, source: Any) -> None:
    """The inverse of `gather`: spread `source` over the rows of `pieces`."""
    _chosen.scatter(pieces, source)


def uring_available() -> tuple[bool, str]:
    """Whether an engine of kind "uring" can be opened here, else why not."""
    return _chosen.uring_available()


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
