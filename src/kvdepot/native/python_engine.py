"""The engine for machines without the C extension: plain system calls, one after the other.

A thread of each batch makes the calls, so that a drive that stalls does not stall the caller. The
caller's thread verifies and copies what was read.
"""

from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvdepot.native.fallback import transfer_one
from kvdepot.native.memory import records_at, view_at
from kvdepot.native.ops import (
    COPY,
    HEAD_BYTES,
    HEAD_USED_AT,
    HEAD_USED_MIN,
    IO_DTYPE,
    READ,
    SYNC,
    VERIFY,
)
from kvdepot.native.xxh3 import xxh3_64


class PythonEngine:
    """Implements native.ops.IoEngine."""

    kind = "python"

    def __init__(self) -> None:
        self._closed = False
        self._pid = os.getpid()

    def run(self, ops: Any, timeout_s: float) -> PythonPendingOps | None:
        if not timeout_s >= 0:
            raise ValueError("timeout_s must be zero or more")
        self._check_usable()
        records = records_at(ops, IO_DTYPE, writable=True)
        names = IO_DTYPE.names or ()
        wanted = [SimpleNamespace(**dict(zip(names, op, strict=True))) for op in records.tolist()]
        for index, op in enumerate(wanted):
            if op.opcode > SYNC:
                raise ValueError(f"op {index} has opcode {op.opcode}, which is none of 0, 1, 2")
            if op.opcode == READ and op.table and not op.chunk_bytes:
                raise ValueError(f"op {index} has a table but chunk_bytes 0")
        records["result"] = -errno.ETIMEDOUT
        pending = PythonPendingOps(ops, wanted)
        if wanted and timeout_s:
            done = pending.run(timeout_s)
            results = [code or _check(op) for op, code in zip(wanted, done, strict=False)]
            records["result"][: len(results)] = results
        return None if pending.is_over else pending

    def register(self, address: int, nbytes: int) -> bool:
        self._check_usable()
        return False

    def close(self) -> None:
        self._closed = True

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the engine belongs to the parent process; open a new one")
        if self._closed:
            raise ValueError("the engine is closed")


class PythonPendingOps:
    """A running batch. Keeps the ops while a thread may be in a system call for them."""

    def __init__(self, ops: Any, wanted: list[Any]) -> None:
        self._ops, self._wanted = ops, wanted
        self._done: list[int] = []
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="kvdepot-io", daemon=True)

    @property
    def is_over(self) -> bool:
        return len(self._done) == len(self._wanted) and not self._given_up

    def run(self, timeout_s: float) -> list[int]:
        """Run the batch. Returns the results of the first ops, those that ended in time."""
        self._thread.start()
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        self._given_up = self._thread.is_alive()
        return self._done[:]

    def wait(self, timeout_s: float) -> bool:
        """Wait until no I/O is in flight; False after `timeout_s`. Late ops keep -ETIMEDOUT."""
        if self._thread.ident is not None:
            self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _work(self) -> None:
        for op in self._wanted:
            if self._given_up:
                return
            self._done.append(_perform(op))


def _perform(op: Any) -> int:
    """Execute the system calls of an op. Returns 0 or -errno."""
    try:
        if op.opcode == SYNC:
            os.fdatasync(op.fd)
        elif op.opcode == READ:
            _move(os.preadv, op.fd, view_at(op.head_address, op.head_bytes), op.head_offset)
            _move(os.preadv, op.fd, view_at(op.address, op.nbytes), op.offset)
        else:
            _move(os.pwritev, op.fd, view_at(op.address, op.nbytes), op.offset)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return 0


def _move(call: Any, fd: int, memory: Any, offset: int) -> None:
    done = 0
    while done < memory.nbytes:
        try:
            moved = call(fd, [memory[done:]], offset + done)
        except OSError as error:
            # With direct I/O a read that met the end of the file cannot be continued there.
            if done and error.errno == errno.EINVAL:
                raise OSError(errno.EIO, "end of file") from error
            raise
        if moved == 0:
            raise OSError(errno.EIO, "end of file")
        done += moved


def _check(op: Any) -> int:
    """Verify and copy the bytes of a read. Returns 0 or -EBADMSG."""
    if op.opcode != READ:
        return 0
    if op.head_check and not _head_is_sound(op):
        return -errno.EBADMSG
    mode = VERIFY if op.table else COPY
    payload = (op.payload_address, op.copy_target, op.payload_bytes)
    return transfer_one(*payload, op.chunk_bytes, op.table, mode)


def _head_is_sound(op: Any) -> bool:
    limit, end = HEAD_BYTES, op.address + op.nbytes
    if op.head_bytes:
        limit = min(limit, op.head_bytes)
    elif op.address <= op.head_address < end:
        limit = min(limit, end - op.head_address)
    if limit < HEAD_USED_AT + 4 or 8 + op.expect_bytes > limit:
        return False
    head = view_at(op.head_address, limit)
    used = int(head[HEAD_USED_AT : HEAD_USED_AT + 4].view("<u4")[0])
    if not HEAD_USED_MIN <= used <= limit or xxh3_64(head[8:used]) != int(head[:8].view("<u8")[0]):
        return False
    expected = view_at(op.expect_address, op.expect_bytes)
    return np.array_equal(head[8 : 8 + op.expect_bytes], expected)
