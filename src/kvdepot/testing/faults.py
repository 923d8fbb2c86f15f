"""Faults between a drive and its disk: errors, torn writes, flipped bits, stalls and kills.

    files = FaultyFiles()
    store = assemble(config, files=files)
    files.add(Fault(Call.RUN_WRITE, Fail(errno.ENOSPC), skip=3, times=2))

Operations are counted by kind, those of a batch one by one. RUN_WRITE, WRITE and ALLOCATE change
the disk and are the *write boundaries*: `files.boundaries` counts them, and `Fault.at_boundary`
applies an effect at the nth. The first fault that matches an operation applies. If an operation of
a batch has a fault, the operations of the batch run one by one, in order.
"""

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NoReturn

from kvdepot.format.record import PAGE
from kvdepot.io.files import EngineKind, Files, Ops, Pending
from kvdepot.native import READ, WRITE
from kvdepot.native.memory import view_at


class Call(Enum):
    """Operations of a drive on its disk."""

    RUN_READ = "run-read"
    RUN_WRITE = "run-write"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    ALLOCATE = "allocate"


BOUNDARIES: Final = frozenset({Call.RUN_WRITE, Call.WRITE, Call.ALLOCATE})


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; the argument of a fault's `where`."""

    call: Call
    number: int
    """The number among operations of this kind, from 1."""
    boundary: int
    """The number of the write boundary, from 1; 0 if the operation does not change the disk."""
    fd: int
    offset: int
    nbytes: int

    @property
    def path(self) -> str:
        return os.readlink(f"/proc/self/fd/{self.fd}")


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation fails with this errno; nothing is transferred."""

    code: int


@dataclass(frozen=True, slots=True)
class Tear:
    """Only the first bytes of a write reach the disk; then it fails, or the process is killed."""

    nbytes: int
    code: int = errno.EIO
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flips these bits of byte `at` in the result of a read. The disk does not change."""

    at: int = 0
    mask: int = 1


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to this process before, during or after the operation.

    "without": after all other operations of its batch, as if the disk had reordered them.
    """

    when: Literal["before", "torn", "after", "without"]


@dataclass(eq=False, slots=True)
class Stall:
    """The operation blocks until `release`, or fails with ETIMEDOUT at its deadline.

    An operation of a batch is still carried out on release, as by a slow disk; its memory is in
    use until then.
    """

    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        self.released.set()


Effect = Fail | Tear | Corrupt | Kill | Stall


@dataclass(eq=False, slots=True)
class Fault:
    """An effect on `times` operations of some kinds, after the first `skip` of them.

    `times` None: no limit. `where`: a filter; operations that do not pass are not counted.
    """

    calls: Call | frozenset[Call]
    effect: Effect
    skip: int = 0
    times: int | None = 1
    where: Callable[[Operation], bool] = lambda operation: True
    hits: int = 0

    @classmethod
    def at_boundary(cls, number: int, effect: Effect) -> "Fault":
        """`effect` at the nth write boundary, counted from 1."""
        return cls(BOUNDARIES, effect, where=lambda operation: operation.boundary == number)

    def meets(self, operation: Operation) -> bool:
        """True if the fault applies to the operation; counts it. Not thread-safe."""
        kinds = self.calls if isinstance(self.calls, frozenset) else {self.calls}
        if operation.call not in kinds or self.times == 0 or not self.where(operation):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True


class FaultyFiles(Files):
    """Files with injected faults. Thread-safe."""

    def __init__(
        self,
        kind: EngineKind = "auto",
        depth: int = 32,
        timeout_s: float = 10.0,
        *,
        faults: Iterable[Fault] = (),
    ) -> None:
        super().__init__(kind, depth, timeout_s)
        self._stall_timeout_s = timeout_s
        self.counts: Counter[Call] = Counter()
        self.boundaries = 0
        self._faults = list(faults)
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults and release stalled operations."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            if isinstance(fault.effect, Stall):
                fault.effect.release()

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        effects = [self._meet(*_describe(op)) for op in ops]
        if not any(effects):
            return super().run(ops, timeout_s)
        return self._apply_all(ops, effects, time.monotonic() + timeout_s)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        effect = self._meet(Call.READ, fd, offset, nbytes)
        self._before(effect)
        data = super().read(fd, offset, nbytes)
        if isinstance(effect, Corrupt) and data:
            data[effect.at % len(data)] ^= effect.mask
        return data

    def write(self, fd: int, offset: int, data: bytes) -> None:
        effect = self._meet(Call.WRITE, fd, offset, len(data))
        self._before(effect)
        torn = _torn(effect, len(data) // 2)
        if torn is not None:
            write_part(fd, offset, data, torn.nbytes)
            _end(torn)
        super().write(fd, offset, data)
        self._after(effect)

    def sync(self, fd: int) -> None:
        effect = self._meet(Call.SYNC, fd, 0, 0)
        self._before(effect)
        super().sync(fd)
        self._after(effect)

    def allocate(self, fd: int, nbytes: int) -> None:
        effect = self._meet(Call.ALLOCATE, fd, 0, nbytes)
        self._before(effect)
        torn = _torn(effect, nbytes // 2 // PAGE * PAGE or PAGE)
        if torn is not None:
            super().allocate(fd, torn.nbytes)
            _end(torn)
        super().allocate(fd, nbytes)
        self._after(effect)

    def _meet(self, call: Call, fd: int, offset: int, nbytes: int) -> Effect | None:
        """Count an operation. Returns the effect of the first fault that applies."""
        with self._lock:
            self.counts[call] += 1
            boundary = 0
            if call in BOUNDARIES:
                self.boundaries += 1
                boundary = self.boundaries
            operation = Operation(call, self.counts[call], boundary, fd, offset, nbytes)
            for fault in self._faults:
                if fault.meets(operation):
                    return fault.effect
            return None

    def _before(self, effect: Effect | None) -> None:
        if isinstance(effect, Fail):
            raise OSError(effect.code, os.strerror(effect.code))
        if isinstance(effect, Stall) and not effect.released.wait(self._stall_timeout_s):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if isinstance(effect, Kill) and effect.when in ("before", "without"):
            kill_process()

    def _after(self, effect: Effect | None) -> None:
        if isinstance(effect, Kill):
            kill_process()

    def _apply_all(self, ops: Ops, effects: list[Effect | None], deadline: float) -> Pending | None:
        """Run a batch in order and apply effects; "without" and stalls come last."""
        late = _LateBatch(self, [], deadline)
        last: list[int] = []
        for index, effect in enumerate(effects):
            if isinstance(effect, Stall):
                rest = ops[index : index + 1].copy()
                rest["copy_target"] = 0  # the caller may have returned by then
                late.stalls.append((effect, rest))
                ops["result"][index] = -errno.ETIMEDOUT
            elif isinstance(effect, Kill) and effect.when == "without":
                last.append(index)
            else:
                late.take(self._apply(ops[index : index + 1], effect, deadline))
        if last:
            kill_process()
        for index, effect in enumerate(effects):
            if isinstance(effect, Stall) and effect.released.wait(_left(deadline)):
                late.forget(effect)
                late.take(super().run(ops[index : index + 1], _left(deadline)))
        return late if late.busy else None

    def _apply(self, op: Ops, effect: Effect | None, deadline: float) -> Pending | None:
        if isinstance(effect, Fail):
            op["result"] = -effect.code
            return None
        if isinstance(effect, Corrupt):
            return self._apply_corrupt(op, effect, deadline)
        torn = _torn(effect, int(op["nbytes"][0]) // 2)
        if torn is not None:
            data = bytes(view_at(int(op["address"][0]), int(op["nbytes"][0])))
            write_part(int(op["fd"][0]), int(op["offset"][0]), data, torn.nbytes)
            if torn.kill:
                kill_process()
            op["result"] = -torn.code
            return None
        if isinstance(effect, Kill) and effect.when == "before":
            kill_process()
        pending = super().run(op, _left(deadline))
        self._after(effect)
        return pending

    def _apply_corrupt(self, op: Ops, corrupt: Corrupt, deadline: float) -> Pending | None:
        """Read from a damaged copy of the range, so that the I/O engine finds the damage itself."""
        fd, nbytes = int(op["fd"][0]), int(op["nbytes"][0])
        copy_fd = os.memfd_create("kvdepot-damaged", os.MFD_CLOEXEC)
        try:
            for offset, length in (("offset", "nbytes"), ("head_offset", "head_bytes")):
                at, size = int(op[offset][0]), int(op[length][0])
                if size:
                    os.pwrite(copy_fd, super().read(fd, at, size), at)
            at = int(op["offset"][0]) + corrupt.at % nbytes
            os.pwrite(copy_fd, bytes([os.pread(copy_fd, 1, at)[0] ^ corrupt.mask]), at)
            op["fd"] = copy_fd
            pending = super().run(op, max(_left(deadline), 1.0))
        finally:
            op["fd"] = fd
            os.close(copy_fd)
        return pending


@dataclass(slots=True)
class _LateBatch:
    """The unfinished operations of a batch at its deadline. Implements io.files.Pending."""

    files: FaultyFiles
    stalls: list[tuple[Stall, Ops]]
    deadline: float
    others: list[Pending] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.stalls or self.others)

    def take(self, pending: Pending | None) -> None:
        if pending is not None:
            self.others.append(pending)

    def forget(self, stall: Stall) -> None:
        self.stalls = [(other, op) for other, op in self.stalls if other is not stall]

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.stalls:
            stall, op = self.stalls[0]
            if not stall.released.wait(_left(deadline)):
                return False
            self.stalls.pop(0)
            self.take(Files.run(self.files, op, 60.0))
        while self.others:
            if not self.others[0].wait(_left(deadline)):
                return False
            self.others.pop(0)
        return True


def write_part(fd: int, offset: int, data: bytes, nbytes: int) -> None:
    """Write only the first `nbytes` of `data`, through the page cache."""
    plain_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(plain_fd, data[:nbytes], offset)
    finally:
        os.close(plain_fd)


def kill_process() -> NoReturn:
    """End this process as the out-of-memory killer would."""
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def _torn(effect: Effect | None, half: int) -> Tear | None:
    if isinstance(effect, Kill) and effect.when == "torn":
        return Tear(half, kill=True)
    return effect if isinstance(effect, Tear) else None


def _end(tear: Tear) -> NoReturn:
    if tear.kill:
        kill_process()
    raise OSError(tear.code, os.strerror(tear.code))


def _describe(op: Ops) -> tuple[Call, int, int, int]:
    calls = {READ: Call.RUN_READ, WRITE: Call.RUN_WRITE}
    call = calls.get(int(op["opcode"]), Call.SYNC)
    return call, int(op["fd"]), int(op["offset"]), int(op["nbytes"])


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
