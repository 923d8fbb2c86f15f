"""The interface of native code: record types of batches, and I/O engines."""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

COPY: Final = 0
FILL: Final = 1
VERIFY: Final = 2

READ: Final = 0
WRITE: Final = 1
SYNC: Final = 2

# A head is at most this long; `used` in a head may not exceed it.
HEAD_BYTES: Final = 4096
# Offset of the number of used bytes in a head (little-endian u32), and the least valid number.
HEAD_USED_AT: Final = 64
HEAD_USED_MIN: Final = 64
# Offsets of the key and of the checksums in a record.
KEY_AT: Final = 16
TABLE_AT: Final = 192


def _record(*fields: tuple[str, str]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


def _unsigned(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "<u8") for name in names)


_SIZES: Final = ("payload_bytes", "chunk_bytes", "address", "start", "stop")

TRANSFER_DTYPE: Final = _record(
    ("result", "<i8"), *_unsigned("source", "target", "nbytes", "chunk_bytes", "table", "mode")
)
"""`source` to `target` (0: no copy); `mode` COPY, FILL or VERIFY of `table`, one u64 a chunk."""

BLOCK_DTYPE: Final = _record(
    ("key", "V32"), *((name, "<i8") for name in _SIZES), ("producer", "<u8")
)
"""A block of `copy_out`, as core.requests.BLOCK_DTYPE."""

STRIDED_DTYPE: Final = _record(*_unsigned("address", "rows", "row_bytes"), ("stride", "<i8"))
"""`rows` rows of `row_bytes`, the next one `stride` bytes after the start of the last."""

RECTANGLE_DTYPE: Final = _record(
    *_unsigned("target", "target_pitch", "source", "source_pitch", "width", "height")
)
"""`height` rows of `width` bytes, the next one a pitch after the start of the last."""

IO_DTYPE: Final = _record(
    ("result", "<i8"),
    ("fd", "<i8"),
    *_unsigned("opcode", "offset", "address", "nbytes"),
    *_unsigned("head_offset", "head_address", "head_bytes"),
    *_unsigned("expect_address", "expect_bytes", "head_check"),
    *_unsigned("table", "payload_address", "payload_bytes", "chunk_bytes", "copy_target"),
)
"""One READ, WRITE or SYNC. Fields from `head_offset` on are for reads only; see `IoEngine.run`."""


class PendingOps(Protocol):
    """Ops that missed their deadline; the kernel may still write to their memory.

    It owns the ops buffer and the ring. If it is dropped before `wait` has returned True, both are
    leaked, so that the kernel never writes to freed memory. The caller must keep the memory that
    the ops point to.
    """

    def wait(self, timeout_s: float) -> bool:
        """Wait until no I/O is in flight; False after `timeout_s`. Late ops keep -ETIMEDOUT;
        nothing is verified or copied after the deadline. RuntimeError if another thread is
        waiting."""


class IoEngine(Protocol):
    """Runs batches of I/O. Threads may share it; a child after fork may not (RuntimeError)."""

    @property
    def kind(self) -> str: ...

    def run(self, ops: Any, timeout_s: float) -> PendingOps | None:
        """Execute `ops`, a writable buffer of IO_DTYPE; blocks up to `timeout_s`.

        Afterwards every `result` is 0 or -errno: -EIO at the end of the file, -EBADMSG if a head or
        a chunk is wrong (its copy is then undefined), -ETIMEDOUT after the deadline. Nothing is
        started after the deadline; with 0 seconds nothing at all. Returns None if nothing timed
        out, else a PendingOps. Ops run in any order, except that a SYNC starts after all ops before
        it have finished.

        A read whose `head_check` is set compares the checksum in the head at `head_address` (which
        `head_bytes` > 0 says to read from `head_offset`) and `expect_bytes` bytes after it; with a
        `table` each chunk of the payload must have its checksum there; with a `copy_target` the
        payload is copied in the same pass. This starts while the rest is still being read.

        ValueError for a malformed batch, of which nothing was started, and after `close`.
        """

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory, so that reads and writes need no mapping per call. False: the kernel refuses,
        and nothing has changed. Close the engine before the memory is unmapped."""

    def close(self) -> None:
        """Close the engine. Running batches finish. May be called twice."""
