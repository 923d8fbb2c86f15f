"""The interface of all I/O engines."""

from __future__ import annotations

from typing import Any, Protocol


class PendingOps(Protocol):
    """Ops that missed their deadline; the kernel may still write to their memory.

    It keeps the ops buffer and the ring. Dropped before `wait` has said True, it leaves the ops
    alive for ever and gives the ring back later: a leak, never a write into freed memory of its
    own. The memory that the ops point to is the caller's to keep.
    """

    def wait(self, timeout_s: float) -> bool:
        """True once no I/O is in flight any more. Late ops keep -ETIMEDOUT; nothing is verified or
        copied after the deadline. RuntimeError when another thread is waiting."""


class IoEngine(Protocol):
    """Runs batches of I/O. Threads may share it; a child after fork may not (RuntimeError)."""

    @property
    def kind(self) -> str: ...

    def run(self, ops: Any, timeout_s: float) -> PendingOps | None:
        """Execute `ops`, a writable buffer of IO_DTYPE; blocks up to `timeout_s`.

        Afterwards every `result` is 0 or -errno: -EIO at the end of the file, -EBADMSG when a head
        or a chunk is not what it should be (its copy is then undefined), -ETIMEDOUT when the
        deadline came first, after which nothing is started: with 0 seconds, nothing at all. None
        when nothing timed out, else a PendingOps. Order is free, except that a SYNC starts after
        all ops before it have finished.

        A read whose `head_check` is set compares the checksum in the head at `head_address` (which
        `head_bytes` > 0 says to read from `head_offset`) and `expect_bytes` bytes after it; with a
        `table` each chunk of the payload must have its checksum there; with a `copy_target` the
        payload is copied in the same pass. All of it starts while the rest is still being read.

        ValueError for a malformed batch, of which nothing has then been started, and once closed.
        """

    def register(self, address: int, nbytes: int) -> bool:
        """Pin a range for reads and writes without per-call mapping. False, and no harm, when the
        kernel refuses. `unregister` it before the memory is unmapped."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Forget every registered range that overlaps this one."""

    def close(self) -> None:
        """Idempotent. Batches that are running finish."""
