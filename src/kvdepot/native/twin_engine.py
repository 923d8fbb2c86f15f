"""The engine in Python: a pool of daemon threads moves pieces, the calling thread checks them."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdepot.native.memory import address_of, view_at
from kvdepot.native.ops import HEAD_BYTES, HEAD_USED_AT, HEAD_USED_MIN, IO_DTYPE, READ, SYNC
from kvdepot.native.xxh3 import checksums_of, xxh3_64


@dataclass(frozen=True)
class _Op:
    """One record of IO_DTYPE without its result, as plain integers."""

    fd: int
    opcode: int
    offset: int
    address: int
    nbytes: int
    head_offset: int
    head_address: int
    head_bytes: int
    expect_address: int
    expect_bytes: int
    head_check: int
    table: int
    payload_address: int
    payload_bytes: int
    chunk_bytes: int
    copy_target: int

    def end_in_main(self, address: int, nbytes: int) -> int:
        """Where in the main I/O the range ends, or 0 when it does not begin inside it."""
        at = address - self.address
        return min(at + nbytes, self.nbytes) if 0 <= at < self.nbytes else 0


@dataclass(eq=False)
class _Piece:
    """A system call to make, and its outcome: 0 or -errno."""

    index: int
    number: int  # -1 is the head
    fd: int
    opcode: int
    offset: int
    address: int
    nbytes: int
    batch: _Batch
    result: int = 0

    def perform(self) -> None:
        try:
            if self.opcode == SYNC:
                os.fdatasync(self.fd)
            else:
                self.result = self._move()
        except OSError as error:
            self.result = -(error.errno or errno.EIO)

    def _move(self) -> int:
        memory, done = view_at(self.address, self.nbytes), 0
        while done < self.nbytes and not self.batch.abandoned:
            try:
                moved = self._call(memory[done:], self.offset + done)
            except OSError as error:
                if done and error.errno == errno.EINVAL:
                    return -errno.EIO
                raise
            if moved == 0:
                return -errno.EIO
            done += moved
        return 0

    def _call(self, memory: Any, offset: int) -> int:
        read = self.opcode == READ
        try:
            return (os.preadv if read else os.pwritev)(self.fd, [memory], offset)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
        return (os.readv if read else os.writev)(self.fd, [memory])


class _Pool:
    """Daemon threads, started when all others are busy; they sleep while there is nothing to do."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._wanted = threading.Condition()
        self._pieces: deque[_Piece] = deque()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, piece: _Piece) -> None:
        with self._wanted:
            self._pieces.append(piece)
            if len(self._pieces) > self._idle and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._serve, name="kvdepot-io", daemon=True).start()
            self._wanted.notify()

    def withdraw(self, batch: _Batch) -> int:
        with self._wanted:
            kept = [piece for piece in self._pieces if piece.batch is not batch]
            withdrawn = len(self._pieces) - len(kept)
            self._pieces = deque(kept)
            return withdrawn

    def close(self) -> None:
        with self._wanted:
            self._closed = True
            self._wanted.notify_all()

    def _next(self) -> _Piece | None:
        with self._wanted:
            self._idle += 1
            self._wanted.wait_for(lambda: self._pieces or self._closed)
            self._idle -= 1
            if self._pieces:
                return self._pieces.popleft()
            self._threads -= 1
            return None

    def _serve(self) -> None:
        while (piece := self._next()) is not None:
            piece.perform()
            piece.batch.landed.put(piece)


@dataclass(eq=False)
class _State:
    """How far one op has come; `prefix` counts the pieces that arrived without a gap."""

    op: _Op
    pieces: int
    head_arrived: bool
    arrived: set[int] = field(default_factory=set)
    prefix: int = 0
    submitted: int = 0
    in_flight: int = 0
    checked: int = 0
    error: int = 0
    head_submitted: bool = False
    head_checked: bool = False
    finished: bool = False

    @property
    def all_arrived(self) -> bool:
        return self.prefix == self.pieces and self.head_arrived

    def land(self, piece: _Piece) -> None:
        self.in_flight -= 1
        self.error = self.error or piece.result
        if piece.number < 0:
            self.head_arrived = True
        else:
            self.arrived.add(piece.number)
        while self.prefix in self.arrived:
            self.arrived.remove(self.prefix)
            self.prefix += 1

    def check(self, split_bytes: int) -> None:
        """Verify and copy whatever has arrived and was not done before."""
        prefix = min(self.prefix * split_bytes, self.op.nbytes)
        if self.error or self.op.opcode != READ or not self._head_ready(prefix):
            return
        if self.op.head_check and not self.head_checked:
            self.head_checked = True
            self.error = _check_head(self.op)
        if not self.error and (self.op.table or self.op.copy_target):
            self.error = self._check_payload(prefix)

    def _head_ready(self, prefix: int) -> bool:
        op = self.op
        if not self.head_arrived:
            return False
        in_main = op.head_check and op.head_bytes == 0
        if in_main and op.end_in_main(op.head_address, HEAD_BYTES) > prefix:
            return False
        if not op.table:
            return True
        entries = -(-op.payload_bytes // op.chunk_bytes)
        return op.end_in_main(op.table, 8 * entries) <= prefix

    def _available(self, prefix: int) -> int:
        """Payload bytes that have arrived, in whole chunks unless it is all of them."""
        op = self.op
        if self.all_arrived:
            return op.payload_bytes
        at = op.payload_address - op.address
        if not 0 <= at < op.nbytes or prefix <= at:
            return 0
        arrived = min(prefix - at, op.payload_bytes)
        if arrived == op.payload_bytes or not op.table:
            return arrived
        return arrived // op.chunk_bytes * op.chunk_bytes

    def _check_payload(self, prefix: int) -> int:
        op, first, end = self.op, self.checked, self._available(prefix)
        if end <= first:
            return 0
        self.checked = end
        source = view_at(op.payload_address + first, end - first)
        if op.table:
            sums = checksums_of(source, op.chunk_bytes)
            entries = view_at(op.table + 8 * (first // op.chunk_bytes), sums.nbytes)
            if not np.array_equal(entries.view("<u8"), sums):
                return -errno.EBADMSG
        if op.copy_target:
            ctypes.memmove(op.copy_target + first, source.ctypes.data, end - first)
        return 0


def _check_head(op: _Op) -> int:
    limit, end = HEAD_BYTES, op.end_in_main(op.head_address, HEAD_BYTES)
    if op.head_bytes:
        limit = min(op.head_bytes, HEAD_BYTES)
    elif end:
        limit = end - (op.head_address - op.address)
    if limit < HEAD_USED_AT + 4 or 8 + op.expect_bytes > limit:
        return -errno.EBADMSG
    head = view_at(op.head_address, limit)
    used = int(head[HEAD_USED_AT : HEAD_USED_AT + 4].view("<u4")[0])
    if not HEAD_USED_MIN <= used <= limit or xxh3_64(head[8:used]) != int(head[:8].view("<u8")[0]):
        return -errno.EBADMSG
    expected = view_at(op.expect_address, op.expect_bytes)
    return 0 if np.array_equal(head[8 : 8 + op.expect_bytes], expected) else -errno.EBADMSG


class _Batch:
    def __init__(self, records: Any, pool: _Pool, depth: int, split_bytes: int) -> None:
        self.landed: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self.abandoned = False
        self.in_flight = 0
        self._records, self._pool = records, pool
        self._depth, self._split_bytes = depth, split_bytes
        self._states = [self._state(_Op(*record[1:])) for record in records.tolist()]
        self._cursor = 0
        self._unfinished = len(self._states)

    def _state(self, op: _Op) -> _State:
        pieces = 1 if op.opcode == SYNC else -(-op.nbytes // self._split_bytes)
        return _State(op, pieces, head_arrived=op.opcode != READ or op.head_bytes == 0)

    def run(self, deadline_s: float) -> bool:
        """True when every op has its result; else the unfinished ones have -ETIMEDOUT."""
        if self._unfinished and time.monotonic() >= deadline_s:
            return self._give_up()
        while True:
            self._fill()
            if self._unfinished == 0:
                return True
            try:
                piece = self.landed.get(timeout=_left(deadline_s))
            except queue.Empty:
                return self._give_up()
            self.in_flight -= 1
            self._states[piece.index].land(piece)
            self._advance(piece.index)
            if time.monotonic() >= deadline_s and self._unfinished:
                return self._give_up()

    def drain(self, deadline_s: float) -> bool:
        while self.in_flight:
            try:
                self.landed.get(timeout=_left(deadline_s))
            except queue.Empty:
                return False
            self.in_flight -= 1
        return True

    def _fill(self) -> None:
        while self.in_flight < self._depth and self._cursor < len(self._states):
            state = self._states[self._cursor]
            if state.op.opcode == SYNC and self.in_flight:
                return
            if not state.error and not state.head_arrived and not state.head_submitted:
                state.head_submitted = True
                self._send(state, -1)
            elif not state.error and state.submitted < state.pieces:
                self._send(state, state.submitted)
                state.submitted += 1
            else:
                self._advance(self._cursor)
                self._cursor += 1

    def _send(self, state: _State, number: int) -> None:
        op, at = state.op, number * self._split_bytes
        if number < 0:
            offset, address, nbytes = op.head_offset, op.head_address, op.head_bytes
        else:
            offset, address = op.offset + at, op.address + at
            nbytes = min(self._split_bytes, op.nbytes - at)
        state.in_flight += 1
        self.in_flight += 1
        self._pool.submit(
            _Piece(self._cursor, number, op.fd, op.opcode, offset, address, nbytes, self)
        )

    def _advance(self, index: int) -> None:
        state = self._states[index]
        if state.finished:
            return
        state.check(self._split_bytes)
        if state.in_flight == 0 if state.error else state.all_arrived:
            state.finished = True
            self._records[index]["result"] = state.error
            self._unfinished -= 1

    def _give_up(self) -> bool:
        self.abandoned = True
        self.in_flight -= self._pool.withdraw(self)
        for record, state in zip(self._records, self._states, strict=True):
            if not state.finished:
                record["result"] = -errno.ETIMEDOUT
        return False


def _left(deadline_s: float) -> float | None:
    return None if math.isinf(deadline_s) else max(0.0, deadline_s - time.monotonic())


def _deadline_s(timeout_s: float) -> float:
    if math.isnan(timeout_s) or timeout_s < 0:
        raise ValueError("timeout_s must be zero or more")
    return math.inf if timeout_s > 1e9 else time.monotonic() + timeout_s


def _check_ops(records: Any) -> None:
    for index, record in enumerate(records):
        if record["opcode"] > SYNC:
            raise ValueError(f"op {index} has opcode {record['opcode']}, which is none of 0, 1, 2")
        if record["opcode"] == READ and record["table"] and not record["chunk_bytes"]:
            raise ValueError(f"op {index} has a table but chunk_bytes 0")


class TwinPendingOps:
    """Ops that missed their deadline. Keeps the ops alive while their memory may still change."""

    def __init__(self, ops: Any, batch: _Batch) -> None:
        self._ops, self._batch, self._pid = ops, batch, os.getpid()

    def wait(self, timeout_s: float) -> bool:
        """True once no I/O is in flight any more; the late ops keep -ETIMEDOUT."""
        _check_process(self._pid)
        return self._batch.drain(_deadline_s(timeout_s))


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError("the engine belongs to the parent process; open a new one")


class TwinEngine:
    """Same contract as the C engine; see `kvdepot.native.protocol.Engine`."""

    def __init__(
        self, kind: str = "python", depth: int = 32, threads: int = 8, split_bytes: int = 512 << 10
    ) -> None:
        if kind == "uring":
            raise OSError(errno.ENOSYS, "kvdepot.native._native is not built")
        if kind not in ("python", "threads"):
            raise ValueError(f"unknown engine kind '{kind}': python or threads")
        if not (1 <= depth <= 4096 and 1 <= threads <= 1024):
            raise ValueError("depth must be 1 to 4096 and threads 1 to 1024")
        if split_bytes < 4096 or split_bytes % 4096 or split_bytes > 1 << 30:
            raise ValueError("split_bytes must be a multiple of 4096 up to 1 GiB")
        self._depth, self._split_bytes = depth, split_bytes
        self._pool = _Pool(threads)
        self._closed = False
        self._pid = os.getpid()

    @property
    def kind(self) -> str:
        return "python"

    def run(self, ops: Any, timeout_s: float) -> TwinPendingOps | None:
        deadline_s = _deadline_s(timeout_s)
        self._check_usable()
        address, nbytes = address_of(ops, writable=True)
        if nbytes % IO_DTYPE.itemsize:
            raise ValueError(
                f"{nbytes} bytes are not a whole number of records of {IO_DTYPE.itemsize} bytes"
            )
        records = view_at(address, nbytes).view(IO_DTYPE)
        _check_ops(records)
        batch = _Batch(records, self._pool, self._depth, self._split_bytes)
        return None if batch.run(deadline_s) else TwinPendingOps(ops, batch)

    def register(self, address: int, nbytes: int) -> bool:
        self._check_usable()
        return False

    def unregister(self, address: int, nbytes: int) -> None:
        self._check_usable()

    def close(self) -> None:
        self._closed = True
        self._pool.close()

    def _check_usable(self) -> None:
        _check_process(self._pid)
        if self._closed:
            raise ValueError("the engine is closed")
