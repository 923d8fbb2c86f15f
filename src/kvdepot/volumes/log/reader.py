"""Reads records of a log volume: plans them as operations of the I/O engine, verifies, times.

Flash is read in the caller's thread or in a few threads of the volume; a hard drive in sweeps
(elevator.py). A read that races with the reuse of a segment fails its check of the segment id.
"""

import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from kvdepot.core.clock import Clock
from kvdepot.core.volume import SEGMENT_SHIFT, Array, Ints, Outcome, Outcomes, Priority
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import (
    HEAD_BYTES,
    IDENTITY_DTYPE,
    PAGE,
    TABLE_OFFSET,
    identities,
    parse_head,
    payload_intact,
    record_bytes,
    record_sizes,
)
from kvdepot.io.files import Ops, Pending, aligned, io_ops
from kvdepot.io.speed import ThroughputMeter
from kvdepot.native import COPY, READ, address_of
from kvdepot.native.memory import view_at
from kvdepot.volumes.log.elevator import Elevator, QueuedReads
from kvdepot.volumes.log.health import TOO_SLOW
from kvdepot.volumes.log.segments import Segment, SegmentSet

_THREADS: Final = 2
_BEGIN_S: Final = 0.002
"""How long to wait for a thread to begin a read: else the planner of the next one would keep the
interpreter to itself while the drive idles."""
_STALL_S: Final = 1.0
"""A read with a shorter deadline does not tell whether the drive stalls or is slow."""
_SEEK_BYTES: Final = 4 << 20
"""What a hard drive could read while it seeks."""
_STANDS_OUT: Final = 4.0
_TRIAL_TIMEOUT_S: Final = 2.0
_TRIAL_UNIT: Final = 256 << 10
_TRIAL_BYTES: Final = 4 << 20
_PAGES_BITS: Final = (1 << SEGMENT_SHIFT) - 1


class PlannedReads:
    """Reads as operations of the I/O engine. Those that cannot be tried have none."""

    def __init__(self, reads: Array, segments: Mapping[int, Segment]) -> None:
        self.reads = reads
        places = reads["place"]
        slots = places >> SEGMENT_SHIFT
        fds, bases, ids = (np.zeros(len(reads), np.int64) for _ in range(3))
        known = np.zeros(len(reads), bool)
        for slot in dict.fromkeys(slots.tolist()):
            segment = segments.get(slot)
            if segment is not None:
                here = slots == slot
                known |= here
                (fds[here], bases[here]), ids[here] = segment.extent, segment.segment_id
        self.asked = np.flatnonzero(known)
        """The reads that have an operation, in order."""
        self.places = places[self.asked]
        reads = reads[self.asked]
        self.expected = identities(reads["key"], ids[self.asked])
        """What the engine compares the heads with; in use until the last read has ended."""
        self.ops = _read_ops(reads, bases[self.asked] + (self.places & _PAGES_BITS) * PAGE)
        self.ops["fd"] = fds[self.asked]
        if len(self.ops):
            step = IDENTITY_DTYPE.itemsize
            first = address_of(self.expected)[0]
            self.ops["expect_address"] = first + step * np.arange(len(self.ops))

    def outcomes(self) -> Outcomes:
        """What became of the reads, by the results of the operations."""
        codes = self.ops["result"]
        outcomes = np.full(len(self.reads), Outcome.FAILED, np.uint8)
        outcomes[self.asked[codes == 0]] = Outcome.OK
        if codes.any():
            outcomes[self.asked[codes == -errno.EBADMSG]] = Outcome.CORRUPT
            outcomes[self.asked[codes == -errno.ETIMEDOUT]] = Outcome.LATE
        unsure = (self.reads["chunk_bytes"] == 0) & (self.reads["stop"] > 0)
        for index in np.flatnonzero(unsure & (outcomes == Outcome.OK)).tolist():
            if not _is_intact(self.reads[index]):
                outcomes[index] = Outcome.CORRUPT
        return outcomes


def _read_ops(reads: Array, offsets: Ints) -> Ops:
    """Operations for records at these offsets of their files: each whole record at once, or head
    and range of the payload apart, or the head alone.
    """
    ops, image = io_ops(len(reads)), reads["image"]
    start, stop, payload_bytes = reads["start"], reads["stop"], reads["payload_bytes"]
    ops["opcode"], ops["head_check"], ops["expect_bytes"] = READ, 1, IDENTITY_DTYPE.itemsize
    ops["head_address"], ops["offset"], ops["address"] = image, offsets, image
    ops["nbytes"] = np.where(stop > 0, record_sizes(payload_bytes), HEAD_BYTES)
    verified = (stop > 0) & (reads["chunk_bytes"] > 0)
    some = verified if not verified.all() else slice(None)
    chunk_bytes = reads["chunk_bytes"][some]
    ops["table"][some] = (
        image[some] + TABLE_OFFSET + 8 * (start[some] // np.maximum(chunk_bytes, 1))
    )
    ops["payload_address"][some] = image[some] + HEAD_BYTES + start[some]
    ops["payload_bytes"][some] = stop[some] - start[some]
    ops["chunk_bytes"][some], ops["copy_target"][some] = chunk_bytes, reads["target"][some]
    part = np.flatnonzero(verified & (stop - start != payload_bytes))
    if len(part):
        first = start[part] // PAGE * PAGE
        last = -(-stop[part] // PAGE) * PAGE
        ops["head_offset"][part], ops["head_bytes"][part] = offsets[part], HEAD_BYTES
        ops["offset"][part] = offsets[part] + HEAD_BYTES + first
        ops["address"][part] = image[part] + HEAD_BYTES + first
        ops["nbytes"][part] = last - first
    return ops


def _is_intact(read: Any) -> bool:
    """Whether a record that was read whole matches the checksums in its head."""
    image = view_at(int(read["image"]), record_bytes(int(read["payload_bytes"]))).data
    head = parse_head(image)
    return (
        head is not None
        and head.payload_bytes == read["payload_bytes"]
        and payload_intact(image, head)
    )


class LogReader:
    """Reads one volume. Thread-safe."""

    def __init__(
        self,
        segments: SegmentSet,
        clock: Clock,
        meters: list[ThroughputMeter],
        *,
        name: str,
        has_head: bool,
    ) -> None:
        """`meters` are those of the volumes to compare this one with; its own is added. `has_head`:
        the drive seeks.
        """
        self.segments = segments
        self.health = segments.health
        self.clock = clock
        self.meter = ThroughputMeter(clock)
        self._meters = meters
        meters.append(self.meter)
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._submitted = 0
        """Reads in the threads and before them."""
        self.elevator = (
            Elevator(segments.files, f"{name}-elevator", clock.now) if has_head else None
        )

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> "FlashRead | SweptRead":
        if self.elevator is None:
            return FlashRead(self, reads, timeout_s)
        return SweptRead(self, self.elevator, reads, priority, timeout_s)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self.elevator is not None:
            self.elevator.close()
        if self.meter in self._meters:
            self._meters.remove(self.meter)

    def plan(self, reads: Array) -> PlannedReads:
        """Plan reads; none if the volume is down."""
        allowed = self.health.breaker.closed or self.health.breaker.allows()
        return PlannedReads(reads, self.segments.by_slot if allowed else {})

    def begin_timing(self, ops: Ops) -> bool:
        """Reads begin. Returns whether the volume is on trial."""
        trial = not self.health.breaker.closed
        self.meter.begin(int(ops["nbytes"].sum()), trial=trial)
        return trial

    def end_timing(self, ops: Ops, places: Ints, results: Ops, *, trial: bool) -> bool:
        """Reads have ended. True: the volume has become too slow to be used."""
        done = np.flatnonzero(results == 0)
        work_bytes = self._work_bytes(ops[done], places[done])
        fine = self.meter.end(work_bytes, len(done), int(ops["nbytes"].sum()), trial=trial)
        slow = not fine and self._stands_out()
        if slow:
            self.health.breaker.failed(TOO_SLOW, at_once=True, slow=True)
        return slow

    def judge(self, codes: Ints, timeout_s: float, *, slow: bool) -> None:
        """Tell the breaker how reads ended. Success of a slow volume does not count."""
        if slow:
            codes = codes[codes != 0]
        if timeout_s < _STALL_S:
            codes = codes[codes != -errno.ETIMEDOUT]
        if codes.any() or self.health.breaker.troubled:
            self.health.judge_reads(codes)

    def try_to_read(self) -> bool:
        """Read what does not matter from the fullest segment. False: there is nothing to read."""
        segment = max(list(self.segments.by_slot.values()), key=lambda one: one.tail, default=None)
        if segment is None or segment.tail <= PAGE:
            return False
        fd, base = segment.extent
        whole = min(_TRIAL_BYTES, segment.tail - PAGE)
        starts = np.arange(PAGE, PAGE + whole, _TRIAL_UNIT)
        memory = aligned(whole)
        ops = io_ops(len(starts))
        ops["fd"], ops["opcode"] = fd, READ
        ops["offset"] = base + starts
        ops["address"] = address_of(memory)[0] + starts - PAGE
        ops["nbytes"] = np.minimum(_TRIAL_UNIT, PAGE + whole - starts)
        places = (segment.slot << SEGMENT_SHIFT) + starts // PAGE
        files = self.segments.files
        if self.elevator is None:
            trial = self.begin_timing(ops)
            pending = files.run(ops, _TRIAL_TIMEOUT_S)
            slow = self.end_timing(ops, places, ops["result"], trial=trial)
        else:
            swept = QueuedReads(
                ops, places, self.clock.now() + _TRIAL_TIMEOUT_S, Priority.BACKGROUND, memory
            )
            pending, slow = self._sweep(swept)
            ops["result"] = swept.results
        if pending is not None:
            files.keep(pending, ops, memory)
        self.judge(ops["result"], _TRIAL_TIMEOUT_S, slow=slow)
        return True

    def _sweep(self, swept: QueuedReads) -> tuple[Pending | None, bool]:
        """Run reads in a sweep and wait for them. Returns them if they are late."""
        assert self.elevator is not None
        slow: list[bool] = []
        trial = self.begin_timing(swept.ops)
        swept.at_end = lambda: slow.append(
            self.end_timing(swept.ops, swept.places, swept.results, trial=trial)
        )
        self.elevator.submit(swept)
        if not swept.answered.wait(max(0.0, swept.deadline_s - self.clock.now())):
            self.elevator.abandon(swept)
        late = (swept.results == -errno.ETIMEDOUT).any()
        return (swept if late else None), any(slow)

    def submit(self, work: Callable[[], Outcomes], done: Callable[[], None]) -> "Future[Outcomes]":
        """Run a read in one of the volume's threads, and wait a moment for it to begin."""
        begun = threading.Event()

        def run() -> Outcomes:
            begun.set()
            return work()

        def ended(_: object) -> None:
            with self._lock:
                self._submitted -= 1
            done()

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, f"{self._name}-read")
            self._submitted += 1
            has_thread = self._submitted <= _THREADS
        future = self._pool.submit(run)
        future.add_done_callback(ended)
        if has_thread:
            begun.wait(_BEGIN_S)
        return future

    def _stands_out(self) -> bool:
        """Whether a slow drive is slower than the others have become: else it is the machine."""
        others = [meter.slowdown for meter in list(self._meters) if meter is not self.meter]
        return bool(others) and self.meter.slowdown >= _STANDS_OUT * median(others)

    def _work_bytes(self, ops: Ops, places: Ints) -> int:
        """What reads cost a drive, in bytes: seeks count as what could be read meanwhile."""
        nbytes = int(ops["nbytes"].sum())
        if self.elevator is None or not len(ops):
            return nbytes
        order = np.argsort(places)
        ends = places[order] + -(-ops["nbytes"][order].astype(np.int64) // PAGE)
        return nbytes + (1 + int((places[order][1:] != ends[:-1]).sum())) * _SEEK_BYTES


class FlashRead:
    """Reads of flash. Implements core.volume.PendingRead."""

    def __init__(self, reader: LogReader, reads: Array, timeout_s: float) -> None:
        self._reader = reader
        self._reads = reads
        self._deadline_s = reader.clock.now() + timeout_s
        self._future: Future[Outcomes] | None = None
        self._late: tuple[Pending, PlannedReads] | None = None

    def when_done(self, call: Callable[[], None]) -> None:
        self._future = self._reader.submit(self._run, call)

    def result(self) -> Outcomes:
        return self._run() if self._future is None else self._future.result()

    def cancel(self) -> bool:
        return self._future is None or self._future.cancel()

    def released(self, timeout_s: float) -> bool:
        return self._late is None or self._late[0].wait(timeout_s)

    def _run(self) -> Outcomes:
        reader, descriptors = self._reader, self._reader.segments.files.descriptors
        timeout_s = self._deadline_s - reader.clock.now()
        if timeout_s <= 0:  # nothing is begun
            return np.full(len(self._reads), Outcome.LATE, np.uint8)
        pending, use = None, descriptors.begin()
        try:
            planned = reader.plan(self._reads)
            if not len(planned.ops):
                return planned.outcomes()
            trial = reader.begin_timing(planned.ops)
            pending = reader.segments.files.run(planned.ops, timeout_s)
            results = planned.ops["result"]
            slow = reader.end_timing(planned.ops, planned.places, results, trial=trial)
        finally:
            descriptors.end(use, pending)
        reader.judge(results, timeout_s, slow=slow)
        if pending is not None:
            self._late = pending, planned
        return planned.outcomes()


class SweptRead:
    """Reads of a hard drive. Implements core.volume.PendingRead."""

    def __init__(
        self,
        reader: LogReader,
        elevator: Elevator,
        reads: Array,
        priority: Priority,
        timeout_s: float,
    ) -> None:
        self._reader = reader
        self._elevator = elevator
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._is_slow = False
        descriptors = reader.segments.files.descriptors
        with descriptors.use():
            self._planned = planned = reader.plan(reads)
            ops = planned.ops.copy()
            ops["copy_target"] = 0  # the caller may be gone when a round comes to its reads
            deadline_s = reader.clock.now() + timeout_s
            swept = QueuedReads(ops, planned.places, deadline_s, priority, planned)
            self._swept = swept
            if not len(ops):
                swept.answered.set()
                return
            swept.at_release = partial(descriptors.end, descriptors.begin())
            self._trial = reader.begin_timing(ops)
            swept.at_end = self._ended
            elevator.submit(swept)

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._swept.answered.is_set():
                self._calls.append(call)
                return
        call()

    def result(self) -> Outcomes:
        swept, planned = self._swept, self._planned
        left_s = max(0.0, swept.deadline_s - self._reader.clock.now())
        if not swept.answered.wait(left_s):
            self._elevator.abandon(swept)
        results = planned.ops["result"] = swept.results.copy()
        _copy_to_targets(planned.ops[results == 0])
        self._reader.judge(results, self._timeout_s, slow=self._is_slow)
        return planned.outcomes()

    def cancel(self) -> bool:
        return self._elevator.withdraw(self._swept)

    def released(self, timeout_s: float) -> bool:
        late = (self._swept.results == -errno.ETIMEDOUT).any()
        return not late or self._swept.wait(timeout_s)

    def _ended(self) -> None:
        swept = self._swept
        results, trial = swept.results, self._trial
        self._is_slow = self._reader.end_timing(swept.ops, swept.places, results, trial=trial)
        with self._lock:
            swept.answered.set()
            calls = self._calls if not swept.abandoned else []
        for call in calls:
            call()


def _copy_to_targets(ops: Ops) -> None:
    wanted = ops[ops["copy_target"] != 0]
    columns = ("payload_address", "copy_target", "payload_bytes")
    rows = zip(*(wanted[name].tolist() for name in columns), strict=True)
    if len(wanted):
        transfers([(0, *row, 0, 0, COPY) for row in rows])
