"""The hard-drive tier: the log of any file tier, read in sweeps.

Each drive has an elevator: a queue and a thread. A round takes what waits when it begins, sorts it
by place and reads it from one end to the other, so that many readers cost one sweep and not a seek
for each of their blocks. What comes later has the next round.
"""

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.tier import Load, Loaded, Pending, drive_of
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import PAGE
from kvdepot.io.files import Files, Ops
from kvdepot.io.survey import HEAD
from kvdepot.native import COPY
from kvdepot.volumes.log.drive import Drive
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.tier import LogTier, Places, PlannedReads

_SEEK_BYTES: Final = 4 << 20
"""What a hard drive could read while it seeks."""
_ROUND_BYTES: Final = 256 << 20
"""A round is no longer than this, however much waits."""
_BATCH_BYTES: Final = 32 << 20
"""Handed to the drive at once; readers whose blocks are done go on meanwhile."""
_SLICE_S: Final = 60.0


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class DriveReads:
    """Reads of one caller from one drive. Implements core.tier.Pending."""

    ops: Ops
    places: Places
    deadline_s: float
    memory: object = None
    """In use until the reads have ended, beside what `ops` point to."""
    at_end: Callable[[], None] = _nothing
    """Called when the reads are answered, or given up in the queue."""
    at_release: Callable[[], None] = _nothing
    """Called when the I/O engine has let go of them, or never gets them."""
    results: npt.NDArray[Any] = field(init=False)
    left: int = field(init=False)
    abandoned: bool = False
    answered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    """Nothing is written to the reads' memory any more."""

    def __post_init__(self) -> None:
        self.results = np.full(len(self.ops), -errno.ETIMEDOUT, np.int64)
        self.left = len(self.ops)

    @property
    def nbytes(self) -> int:
        return int(self.ops["nbytes"].sum())

    def wait(self, timeout_s: float) -> bool:
        return self.released.wait(timeout_s)

    def answer(self) -> None:
        try:
            self.at_end()
        finally:
            self.answered.set()

    def release(self) -> None:
        if not self.released.is_set():
            self.released.set()
            self.at_release()

    def fail(self) -> None:
        """Answer with EIO what was not read."""
        try:
            if not self.answered.is_set():
                self.results[self.results == -errno.ETIMEDOUT] = -errno.EIO
                self.answer()
        finally:
            self.release()


class Elevator:
    """The reading thread of one drive; it exists while there is something to read."""

    def __init__(self, files: Files, name: str, now: Callable[[], float]) -> None:
        self._files = files
        self._name = name
        self._now = now
        self._lock = threading.Lock()
        self._queue: deque[DriveReads] = deque()
        self._at = 0
        self._thread: threading.Thread | None = None

    def submit(self, reads: DriveReads) -> None:
        """Queue reads. They are answered some time, also after their deadline."""
        with self._lock:
            self._queue.append(reads)
            if self._thread is None:
                self._start()

    def abandon(self, reads: DriveReads) -> None:
        """The answer is not waited for any more."""
        with self._lock:
            reads.abandoned = True
            queued = reads in self._queue
            if queued:
                self._queue.remove(reads)
        if queued:
            reads.release()
            reads.answer()

    def close(self, timeout_s: float = 5.0) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        taken: list[DriveReads] = []
        over = False
        try:
            while taken := self._next_round():
                for batch in self._batches(taken):
                    self._read(batch)
            over = True
        finally:
            if not over:
                self._fail_round(taken)

    def _fail_round(self, taken: Sequence[DriveReads]) -> None:
        """An exception ends this thread: another one goes on, and the round fails, all of it."""
        with self._lock:
            self._thread = None
            if self._queue:
                self._start()
        with contextlib.ExitStack() as each:
            for reads in taken:
                each.callback(reads.fail)

    def _next_round(self) -> list[DriveReads]:
        """What waits, up to the length of a round. Nothing: the thread is to end."""
        taken: list[DriveReads] = []
        total = 0
        with self._lock:
            while self._queue and (not taken or total < _ROUND_BYTES):
                taken.append(self._queue.popleft())
                total += taken[-1].nbytes
            if not taken:
                self._thread = None
        return taken

    def _batches(self, taken: list[DriveReads]) -> list[list[tuple[DriveReads, int]]]:
        """What is read at once, in order of place, beginning where the head is."""
        wanted = [
            (int(place), number, index)
            for number, reads in enumerate(taken)
            for index, place in enumerate(reads.places.tolist())
        ]
        wanted.sort(key=lambda one: (one[0] < self._at, one))
        batches: list[list[tuple[DriveReads, int]]] = [[]]
        total = 0
        for _, number, index in wanted:
            if total >= _BATCH_BYTES:
                batches.append([])
                total = 0
            batches[-1].append((taken[number], index))
            total += int(taken[number].ops["nbytes"][index])
        if wanted:
            self._at = wanted[-1][0]
        return batches

    def _read(self, batch: list[tuple[DriveReads, int]]) -> None:
        asked = [(reads, index) for reads, index in batch if not reads.abandoned]
        late = None
        if asked:
            ops = np.concatenate([reads.ops[index : index + 1] for reads, index in asked])
            deadline_s = max(reads.deadline_s for reads, _ in asked)
            late = self._files.run(ops, max(0.0, deadline_s - self._now()))
            for (reads, index), code in zip(asked, ops["result"].tolist(), strict=True):
                reads.results[index] = code
        done = []
        for reads, _ in batch:
            reads.left -= 1
            if not reads.left:
                done.append(reads)
        try:
            for reads in done:
                reads.answer()
        finally:  # no memory is given back that the kernel may still write to
            while late is not None and not late.wait(_SLICE_S):
                pass
        for reads in done:
            reads.release()


@dataclass(frozen=True, slots=True)
class LateReads:
    """Reads of one load that outlived their deadline. Implements core.tier.Pending."""

    parts: list[DriveReads]

    def wait(self, timeout_s: float) -> bool:
        return all(part.wait(timeout_s) for part in self.parts)


@dataclass(frozen=True, slots=True)
class QueuedLoads:
    """Loads under way. Implements core.tier.Reading."""

    tier: "HardDriveTier"
    planned: PlannedReads
    timeout_s: float
    parts: "list[QueuedPart]"

    def result(self) -> Loaded:
        return self.tier.collect_loads(self)


@dataclass(frozen=True, slots=True)
class QueuedPart:
    """What one load reads from one drive."""

    elevator: Elevator
    mine: npt.NDArray[np.int64]
    """Which operations of the load these are."""
    reads: DriveReads
    slow: list[Drive]
    """Has the drive once it has become too slow to be used."""


class HardDriveTier(LogTier):
    """The `hdd` tier. Implements core.tier.QueuesReads too."""

    survey_limits = HEAD

    def __init__(
        self,
        paths: Sequence[Path],
        files: Files,
        settings: MountSettings,
        clock: Clock,
        stamps: StampClock | None = None,
    ) -> None:
        self._elevators: dict[int, Elevator] = {}
        self._elevators_lock = threading.Lock()
        super().__init__(paths, files, settings, clock, stamps)

    def close(self) -> None:
        for elevator in list(self._elevators.values()):
            elevator.close()
        super().close()

    def submit(
        self, loads: Sequence[Load], timeout_s: float, done: Callable[[], None]
    ) -> QueuedLoads:
        with self._files.descriptors.use():
            planned = self._plan(loads)
            parts = self._queue(planned.ops, planned.locations, timeout_s, planned.expected, done)
        if not parts:
            done()
        return QueuedLoads(self, planned, timeout_s, parts)

    def collect_loads(self, loads: QueuedLoads) -> Loaded:
        """The answer to loads; blocks until it is there or their deadline has passed."""
        planned = loads.planned
        pending, slow = self._collect(planned.ops, loads.parts)
        return self._answer(planned, loads.timeout_s, pending, slow)

    def _timed_read(
        self,
        drives: Sequence[Drive],
        ops: Ops,
        locations: Sequence[int],
        timeout_s: float,
        memory: object = None,
    ) -> tuple[Pending | None, Collection[Drive]]:
        del drives  # the locations tell
        return self._collect(ops, self._queue(ops, locations, timeout_s, memory, _nothing))

    def _queue(
        self,
        ops: Ops,
        locations: Sequence[int],
        timeout_s: float,
        memory: object,
        done: Callable[[], None],
    ) -> list[QueuedPart]:
        """Queue reads at the drives' elevators; `done` is called when all are answered."""
        places = np.array(locations, dtype=np.int64)
        drives = np.array([drive_of(location) for location in locations])
        deadline_s = self._clock.now() + timeout_s
        numbers: list[int] = np.unique(drives).tolist()
        left, lock = [len(numbers)], threading.Lock()

        def count_down(reads: DriveReads) -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last and not reads.abandoned:
                done()

        parts = []
        for number in numbers:
            mine = np.flatnonzero(drives == number)
            # Targets are left alone: the caller may be gone when a round comes to its reads.
            mine_ops = ops[mine]
            mine_ops["copy_target"] = 0
            reads = DriveReads(mine_ops, places[mine], deadline_s, memory)
            reads.at_release = partial(self._files.descriptors.end, self._files.descriptors.begin())
            part = QueuedPart(self._elevator(number), mine, reads, [])
            self._time_until_answered(self.drives[number], part, count_down)
            parts.append(part)
        for part in parts:
            part.elevator.submit(part.reads)
        return parts

    def _time_until_answered(
        self, drive: Drive, part: QueuedPart, then: Callable[[DriveReads], None]
    ) -> None:
        reads = part.reads
        trial = self._begin_timing(drive, reads.ops)

        def at_end() -> None:
            if self._end_timing(drive, reads.ops, reads.places, reads.results, trial=trial):
                part.slow.append(drive)
            then(reads)

        reads.at_end = at_end

    def _collect(
        self, ops: Ops, parts: Sequence[QueuedPart]
    ) -> tuple[Pending | None, Collection[Drive]]:
        """Wait for the answers until the deadline; copy what has come to where it is wanted."""
        late: list[DriveReads] = []
        for part in parts:
            reads = part.reads
            if not reads.answered.wait(max(0.0, reads.deadline_s - self._clock.now())):
                part.elevator.abandon(reads)
            results = reads.results.copy()
            ops["result"][part.mine] = results
            _copy(ops[part.mine[results == 0]])
            if (results == -errno.ETIMEDOUT).any():
                late.append(reads)
        return LateReads(late) if late else None, [drive for part in parts for drive in part.slow]

    def _work_bytes(self, ops: Ops, places: Places) -> int:
        order = np.argsort(places)
        pages = -(-ops["nbytes"][order].astype(np.int64) // PAGE)
        ends = places[order] + pages
        jumps = 1 + int((places[order][1:] != ends[:-1]).sum()) if len(ops) else 0
        return int(ops["nbytes"].sum()) + jumps * _SEEK_BYTES

    def _elevator(self, drive: int) -> Elevator:
        with self._elevators_lock:
            if drive not in self._elevators:
                name = f"kvdepot-{self.name}-elevator-{drive}"
                self._elevators[drive] = Elevator(self._files, name, self._clock.now)
            return self._elevators[drive]


def _copy(ops: Ops) -> None:
    wanted = ops[ops["copy_target"] != 0]
    columns = [
        wanted[name].tolist() for name in ("payload_address", "copy_target", "payload_bytes")
    ]
    if len(wanted):
        transfers([(0, *row, 0, 0, COPY) for row in zip(*columns, strict=True)])
