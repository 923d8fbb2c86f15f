"""Drives that this machine does not have: real I/O, delayed as such a drive would delay it.

The bytes are really read and written; then the caller sleeps until a drive of that bandwidth, seek
time and latency would have been done. One head a drive: transfers queue up, and one that does not
begin where the last one ended pays for a seek.
"""

import errno
import threading
import time
from dataclasses import dataclass, field

from kvdepot.core.config import EmulateConfig
from kvdepot.core.tier import Pending
from kvdepot.native import READ
from kvdepot.tiers.device.files import EngineKind, Files, Ops


@dataclass(slots=True)
class EmulatedHead:
    """Where an emulated drive is, and until when it is busy."""

    model: EmulateConfig
    free_at_s: float = 0.0
    at: tuple[int, int] = (-1, 0)
    """A descriptor and an offset in it."""
    slowdown: float = 1.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def move(self, fd: int, offset: int, nbytes: int, *, read: bool, now_s: float) -> float:
        """Transfer after everything before; returns when it will be done."""
        model = self.model
        bandwidth = model.read_bandwidth if read else model.write_bandwidth
        with self.lock:
            seek_s = model.seek if self.at != (fd, offset) else 0.0
            busy_s = (seek_s + nbytes / bandwidth) * self.slowdown
            self.free_at_s = max(now_s, self.free_at_s) + busy_s
            self.at = (fd, offset + nbytes)
            return self.free_at_s + model.latency


@dataclass(frozen=True, slots=True)
class Delayed:
    """Ops that an emulated drive has not finished; the real ones have ended."""

    done_at_s: float
    real: Pending | None

    def wait(self, timeout_s: float) -> bool:
        left_s = self.done_at_s - time.monotonic()
        time.sleep(max(0.0, min(left_s, timeout_s)))
        if left_s > timeout_s:
            return False
        return self.real is None or self.real.wait(max(0.0, timeout_s - left_s))


class EmulatedFiles(Files):
    """Files of drives that behave like `model`."""

    emulated = True

    def __init__(
        self,
        model: EmulateConfig,
        kind: EngineKind = "auto",
        depth: int = 32,
        timeout_s: float = 10.0,
    ) -> None:
        super().__init__(kind, depth, timeout_s)
        self._model = model
        self._heads: dict[str, EmulatedHead] = {}
        self._head_of: dict[int, EmulatedHead] = {}

    def attach(self, fd: int, drive: str) -> None:
        self._head_of[fd] = self._heads.setdefault(drive, EmulatedHead(self._model))

    def slow_down(self, drive: str, factor: float) -> None:
        """From now on a drive takes `factor` times as long; 1 is as new."""
        self._heads.setdefault(drive, EmulatedHead(self._model)).slowdown = factor

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        started_s = time.monotonic()
        pending = super().run(ops, timeout_s)
        if timeout_s <= 0.0:
            return pending  # nothing has started
        ends_s = [
            self._move(int(op["fd"]), int(op["offset"]), int(op["nbytes"]), started_s, read=read)
            for op, read in zip(ops, (ops["opcode"] == READ).tolist(), strict=True)
        ]
        deadline_s = started_s + timeout_s
        late = [index for index, end_s in enumerate(ends_s) if end_s > deadline_s]
        last_s = max(ends_s, default=started_s)
        time.sleep(max(0.0, min(last_s, deadline_s) - time.monotonic()))
        if not late:
            return pending
        ops["result"][late] = -errno.ETIMEDOUT
        return Delayed(last_s, pending)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        started_s = time.monotonic()
        found = super().read(fd, offset, nbytes)
        self._sleep(self._move(fd, offset, len(found), started_s, read=True))
        return found

    def write(self, fd: int, offset: int, data: bytes) -> None:
        started_s = time.monotonic()
        super().write(fd, offset, data)
        self._sleep(self._move(fd, offset, len(data), started_s, read=False))

    def _move(self, fd: int, offset: int, nbytes: int, now_s: float, *, read: bool) -> float:
        """When the drive would be done with what was asked of it at `now_s`."""
        head = self._head_of.get(fd)
        if head is None or not nbytes:
            return now_s
        return head.move(fd, offset, nbytes, read=read, now_s=now_s)

    def _sleep(self, until_s: float) -> None:
        time.sleep(max(0.0, until_s - time.monotonic()))
