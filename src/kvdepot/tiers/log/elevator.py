"""Reads of one hard drive in the order of their places, one round at a time.

Whoever wants something queues. A round takes what waits when it begins, sorts it by place and reads
it from one end to the other, so that many readers cost one sweep, not a seek for each of their
blocks. Who comes later has the next round: nobody is passed over.
"""

import errno
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.tiers.device.files import Files, Ops

_ROUND_BYTES: Final = 256 << 20
"""A round is no longer than this, however much waits."""
_BATCH_BYTES: Final = 32 << 20
"""Handed to the drive at once; readers whose blocks are done go on meanwhile."""
_SLICE_S: Final = 60.0
Places = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Request:
    """Reads of one caller. `released`: their memory is nobody's any more."""

    ops: Ops
    places: Places
    deadline_s: float
    results: npt.NDArray[Any] = field(init=False)
    left: int = field(init=False)
    abandoned: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.results = np.full(len(self.ops), -errno.ETIMEDOUT, np.int64)
        self.left = len(self.ops)

    @property
    def nbytes(self) -> int:
        return int(self.ops["nbytes"].sum())

    def wait(self, timeout_s: float) -> bool:
        """As core.tier.Pending."""
        return self.released.wait(timeout_s)

    def end(self) -> None:
        self.answered.set()
        self.released.set()


class Elevator:
    """The reading thread of one drive; it exists while there is something to read."""

    def __init__(self, files: Files, name: str, now: Any) -> None:
        self._files = files
        self._name = name
        self._now = now
        self._lock = threading.Lock()
        self._queue: deque[Request] = deque()
        self._at = 0
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; it is `answered` some time."""
        with self._lock:
            self._queue.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def abandon(self, request: Request) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            request.abandoned = True
            if request in self._queue:
                self._queue.remove(request)
                request.end()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the thread to end."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while requests := self._next_round():
            for batch in self._batches(requests):
                self._read(batch)
        # The thread has taken itself out under the lock: a new request starts another.

    def _next_round(self) -> list[Request]:
        taken: list[Request] = []
        total = 0
        with self._lock:
            while self._queue and (not taken or total < _ROUND_BYTES):
                taken.append(self._queue.popleft())
                total += taken[-1].nbytes
            if not taken:
                self._thread = None
        return taken

    def _batches(self, requests: list[Request]) -> list[list[tuple[Request, int]]]:
        """What is read at once, in order of place, beginning where the head is."""
        wanted = [
            (int(place), number, index)
            for number, request in enumerate(requests)
            for index, place in enumerate(request.places.tolist())
        ]
        wanted.sort(key=lambda one: (one[0] < self._at, one))
        batches: list[list[tuple[Request, int]]] = [[]]
        total = 0
        for _, number, index in wanted:
            if total >= _BATCH_BYTES:
                batches.append([])
                total = 0
            batches[-1].append((requests[number], index))
            total += int(requests[number].ops["nbytes"][index])
        if wanted:
            self._at = wanted[-1][0]
        return batches

    def _read(self, batch: list[tuple[Request, int]]) -> None:
        asked = [(request, index) for request, index in batch if not request.abandoned]
        late = None
        if asked:
            ops = np.concatenate([request.ops[index : index + 1] for request, index in asked])
            deadline_s = max(request.deadline_s for request, _ in asked)
            late = self._files.run(ops, max(0.0, deadline_s - self._now()))
            for (request, index), code in zip(asked, ops["result"].tolist(), strict=True):
                request.results[index] = code
        done = self._count_down(batch)
        for request in done:
            request.answered.set()
        while late is not None and not late.wait(_SLICE_S):
            pass
        for request in done:
            request.released.set()

    def _count_down(self, batch: list[tuple[Request, int]]) -> list[Request]:
        """The requests of which nothing is left."""
        done = []
        for request, _ in batch:
            request.left -= 1
            if not request.left:
                done.append(request)
        return done
