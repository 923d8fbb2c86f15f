"""Reads a hard drive in sweeps.

A drive has one queue and one thread. A round takes the queued reads, sorts them by place and reads
from one end to the other, so that many readers cost one sweep and not a seek for each block. Later
reads wait for the next round. Foreground reads enter a round first; at least one other read enters
each round, so that none waits forever.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.volume import Ints, Priority
from kvdepot.io.files import Files, Ops

_ROUND_BYTES: Final = 256 << 20
"""Most bytes of a round."""
_BATCH_BYTES: Final = 32 << 20
"""Bytes given to the drive at once. Readers continue when their blocks are read."""
_SLICE_S: Final = 60.0


class QueuedReads:
    """Reads of one caller. Implements io.files.Pending."""

    def __init__(self, ops: Ops, places: Ints, deadline_s: float, priority: Priority) -> None:
        self.ops = ops
        self.places = places
        self.deadline_s = deadline_s
        self.priority = priority
        self.results: npt.NDArray[Any] = np.full(len(ops), -errno.ETIMEDOUT, np.int64)
        self.nbytes = int(ops["nbytes"].sum())
        self.left = len(ops)
        self.abandoned = False
        self.answered = threading.Event()
        self.let_go = threading.Event()
        """Set when nothing is written to the reads' memory any more."""

    def on_answer(self) -> None:
        """Called when the reads were answered, or withdrawn from the queue."""

    def on_release(self) -> None:
        """Called when the I/O engine does not use the reads' memory any more."""

    def wait(self, timeout_s: float) -> bool:
        return self.let_go.wait(timeout_s)

    def answer(self) -> None:
        try:
            self.on_answer()
        finally:
            self.answered.set()

    def release(self) -> None:
        if not self.let_go.is_set():
            self.let_go.set()
            self.on_release()

    def fail(self) -> None:
        """Answer reads that have not ended with EIO."""
        try:
            if not self.answered.is_set():
                self.results[self.results == -errno.ETIMEDOUT] = -errno.EIO
                self.answer()
        finally:
            self.release()


class Elevator:
    """The reading thread of one drive, which exists while reads are queued."""

    def __init__(self, files: Files, name: str, now: Callable[[], float]) -> None:
        self._files = files
        self._name = name
        self._now = now
        self._lock = threading.Lock()
        self._queue: list[QueuedReads] = []
        self._head_at = 0
        self._thread: threading.Thread | None = None

    def submit(self, reads: QueuedReads) -> None:
        """Queue reads. They may be answered after their deadline. Does not block."""
        with self._lock:
            self._queue.append(reads)
            if self._thread is None:
                self._start()

    def withdraw(self, reads: QueuedReads) -> bool:
        """Take reads off the queue. False: their round has begun."""
        with self._lock:
            queued = reads in self._queue
            if queued:
                self._queue.remove(reads)
                reads.abandoned = True
        if queued:
            reads.release()
            reads.answer()
        return queued

    def abandon(self, reads: QueuedReads) -> None:
        """Withdraw reads whose caller does not wait any more."""
        reads.abandoned = True
        self.withdraw(reads)

    def close(self, timeout_s: float = 5.0) -> None:
        with self._lock:  # it is started with the lock held
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        taken: list[QueuedReads] = []
        over = False
        try:
            while taken := self._next_round():
                for batch in self._batches(taken):
                    self._read(batch)
            over = True
        finally:
            if not over:
                self._fail_round(taken)

    def _fail_round(self, taken: Sequence[QueuedReads]) -> None:
        """Fail all reads of a round after an exception. Another thread continues with the queue."""
        with self._lock:
            self._thread = None
            if self._queue:
                self._start()
        with contextlib.ExitStack() as each:
            for reads in taken:
                each.callback(reads.fail)

    def _next_round(self) -> list[QueuedReads]:
        """Take the reads of a round off the queue. Empty: the thread ends."""
        with self._lock:
            self._queue.sort(key=lambda reads: reads.priority)
            taken, total = self._queue[:1], 0
            for reads in self._queue[1:]:
                total += taken[-1].nbytes
                if total >= _ROUND_BYTES:
                    break
                taken.append(reads)
            others = [reads for reads in self._queue if reads.priority and reads not in taken]
            taken += others[:1]
            self._queue = [reads for reads in self._queue if reads not in taken]
            if not taken:
                self._thread = None
        return taken

    def _batches(self, taken: list[QueuedReads]) -> list[list[tuple[QueuedReads, int]]]:
        """Split a round into batches in the order of places, beginning at the drive's head."""
        wanted = [
            (int(place), number, index)
            for number, reads in enumerate(taken)
            for index, place in enumerate(reads.places.tolist())
        ]
        wanted.sort(key=lambda read: (read[0] < self._head_at, read))
        batches: list[list[tuple[QueuedReads, int]]] = [[]]
        total = 0
        for _, number, index in wanted:
            if total >= _BATCH_BYTES:
                batches.append([])
                total = 0
            batches[-1].append((taken[number], index))
            total += int(taken[number].ops["nbytes"][index])
        self._head_at = wanted[-1][0]
        return batches

    def _read(self, batch: list[tuple[QueuedReads, int]]) -> None:
        wanted = [(reads, index) for reads, index in batch if not reads.abandoned]
        late = None
        if wanted:
            ops = np.concatenate([reads.ops[index : index + 1] for reads, index in wanted])
            deadline_s = max(reads.deadline_s for reads, _ in wanted)
            late = self._files.run(ops, max(0.0, deadline_s - self._now()))
            for (reads, index), code in zip(wanted, ops["result"].tolist(), strict=True):
                reads.results[index] = code
        done = []
        for reads, _ in batch:
            reads.left -= 1
            if not reads.left:
                done.append(reads)
        try:
            for reads in done:
                reads.answer()
        finally:  # memory must not be released while the kernel may write to it
            while late is not None and not late.wait(_SLICE_S):
                pass
        for reads in done:
            reads.release()
