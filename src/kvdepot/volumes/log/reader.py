"""Reads records of a log volume: plans I/O operations, verifies records, measures speeds.

Flash is read in the caller's thread or in a few threads of the volume, a hard drive in sweeps
(elevator.py). A read that races with the reuse of a segment fails its check of the segment id.
"""

import errno
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from kvdepot.core.clock import Clock
from kvdepot.core.volume import SEGMENT_SHIFT, Array, Ints, Outcome, Outcomes, Priority
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
from kvdepot.io.speed import Profile
from kvdepot.native import COPY, READ, TRANSFER_DTYPE, address_of, transfer
from kvdepot.native.memory import view_at
from kvdepot.volumes.log.elevator import Elevator, QueuedReads
from kvdepot.volumes.log.segments import Segment, SegmentSet

_TOO_SLOW: Final = "reads are many times slower than they were"
_THREADS: Final = 2
_BEGIN_S: Final = 0.002
"""Longest wait for a thread to begin a read. Without it the planning of the next read would keep
the interpreter busy while the drive is idle."""
_STALL_S: Final = 1.0
"""A late read with a shorter deadline does not show that the drive stalls."""
_SEEK_BYTES: Final = 4 << 20
"""Bytes that a hard drive could read during one seek."""
_STANDS_OUT: Final = 4.0
_TRIAL_TIMEOUT_S: Final = 2.0
_TRIAL_UNIT: Final = 256 << 10
_TRIAL_BYTES: Final = 4 << 20
_LARGE_BYTES: Final = 1 << 20
"""Smaller requests do not reach the full speed of a drive, so they are not compared with it."""
_WINDOW_S: Final = 0.2
"""The drive must be busy for at least this time before its speed is judged."""
_TRIAL_S: Final = 0.02
"""The same time for a drive on trial."""
_SLOW: Final = 8.0
"""A drive that is this factor slower than before, twice in a row, is taken out of use."""
_FORGET: Final = 0.995
"""The best speed decays by this factor each time the drive is judged."""

_KEEP: Final = 0.7
"""Weight of earlier comparisons with the profile; the last one has 1 - _KEEP."""

LoadShape = tuple[int, int, int]
"""Reads of one shape are compared: bytes per read, bytes per call, calls at once, as powers of
two."""


_PAGES_BITS: Final = (1 << SEGMENT_SHIFT) - 1


class PlannedReads:
    """Reads as operations of the I/O engine. Reads of unknown segments have no operation."""

    def __init__(self, reads: Array, segments: Mapping[int, Segment], *, trial: bool) -> None:
        self.trial = trial
        """True if they show whether a failed volume works again."""
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
        """The identities that the engine compares with the heads. Used until the last read ends."""
        self.ops = _read_ops(reads, bases[self.asked] + (self.places & _PAGES_BITS) * PAGE)
        self.ops["fd"] = fds[self.asked]
        if len(self.ops):
            step = IDENTITY_DTYPE.itemsize
            first = address_of(self.expected)[0]
            self.ops["expect_address"] = first + step * np.arange(len(self.ops))

    def outcomes(self) -> Outcomes:
        """Convert the results of the operations to outcomes of the reads."""
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
    """Operations for records at these offsets of their files: a whole record in one read, or head
    and range of the payload in two, or only the head.
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
    """True if a record that was read whole matches the checksums in its head."""
    image = view_at(int(read["image"]), record_bytes(int(read["payload_bytes"]))).data
    head = parse_head(image)
    return (
        head is not None
        and head.payload_bytes == read["payload_bytes"]
        and payload_intact(image, head)
    )


class ThroughputMeter:
    """Measures the read throughput of one drive while it is busy. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.running = 0
        """Number of calls that wait for reads of the drive."""
        self._peak = 0
        self._began_s = 0.0
        self._busy_s = 0.0
        self._work_bytes = 0
        self._reads = 0
        self._calls = 0
        self._slow_in_a_row = 0
        self._best: dict[LoadShape, float] = {}
        self.bytes_per_s = 0.0
        self.slowdown = 1.0
        """Factor by which the drive was slower than before when it was last judged."""
        self.profile: Profile | None = None
        """The measured speeds of the drive, if there are any."""
        self.of_profile: float | None = None
        """Recent speed of large reads as a fraction of the measured speed."""
        self.queued_bytes = 0
        """Bytes of reads that have begun and not ended."""

    def begin(self, nbytes: int = 0, *, trial: bool = False) -> None:
        """Record the begin of reads. `trial`: ignore earlier reads."""
        with self._lock:
            if trial and not self.running:
                self._begin_anew()
            self.queued_bytes += nbytes
            if not self.running:
                self._began_s = self._clock.now()
            self.running += 1
            self._peak = max(self._peak, self.running)

    def end(self, work_bytes: int, reads: int, asked: int = 0, *, trial: bool = False) -> bool:
        """Record the end of reads. False: the drive has become slow.

        `asked`: the bytes given to `begin`. `trial`: the drive was slow before, and only these
        reads are judged.
        """
        with self._lock:
            now_s = self._clock.now()
            self.running -= 1
            self.queued_bytes -= asked
            self._busy_s += now_s - self._began_s
            self._began_s = now_s
            self._work_bytes += work_bytes
            self._reads += reads
            self._calls += 1
            if self._busy_s < (_TRIAL_S if trial else _WINDOW_S) or not self._reads:
                return True
            self._slow_in_a_row = self._slow_in_a_row + 1 if self._is_slow(trial) else 0
            return self._slow_in_a_row < (1 if trial else 2)

    def _is_slow(self, trial: bool) -> bool:
        self.bytes_per_s = self._work_bytes / max(self._busy_s, 1e-9)
        sizes = (self._work_bytes // self._reads, self._work_bytes // self._calls, self._peak)
        self._compare(sizes[1])
        kind = (sizes[0].bit_length(), sizes[1].bit_length(), sizes[2].bit_length())
        best = self._best.get(kind, 0.0) * _FORGET
        usual = (
            max(best, 0.0 if trial else self._nearby(kind) / 2)
            or self._measured(sizes[1])
            or (trial and max(self._best.values(), default=0.0))
        )
        self.slowdown = max(1.0, usual / max(self.bytes_per_s, 1e-9))
        if best or self.slowdown <= _SLOW:
            self._best[kind] = max(best, self.bytes_per_s)
        self._begin_anew()
        return self.slowdown > _SLOW

    def _nearby(self, kind: LoadShape) -> float:
        """The best speed of reads of a similar shape, since the first reads of a new shape may be
        slow already."""
        return max(
            (
                speed
                for other, speed in self._best.items()
                if other[2] == kind[2] and all(abs(other[at] - kind[at]) <= 1 for at in (0, 1))
            ),
            default=0.0,
        )

    def _begin_anew(self) -> None:
        self._busy_s, self._work_bytes, self._reads, self._calls = 0.0, 0, 0, 0
        self._peak = self.running

    def _measured(self, asked_bytes: int) -> float:
        """The measured speed; 0 if reads of this size cannot be compared with it."""
        if self.profile is None or asked_bytes < _LARGE_BYTES or not self.profile.direct_io:
            return 0.0
        return float(self.profile.read_bytes_per_s)

    def _compare(self, asked_bytes: int) -> None:
        measured = self._measured(asked_bytes)
        if measured:
            last = self.bytes_per_s / measured
            before = last if self.of_profile is None else self.of_profile
            self.of_profile = round(_KEEP * before + (1 - _KEEP) * last, 3)


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
        """`meters` are those of comparable volumes, to which the own one is added. `has_head`: the
        drive is a hard drive.
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
        """Number of reads that are running in threads or queued for them."""
        self.elevator = (
            Elevator(segments.files, f"{name}-elevator", clock.now) if has_head else None
        )

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> "FlashRead | SweptRead":
        if self.elevator is None:
            return FlashRead(self, reads, self.clock.now() + timeout_s)
        return SweptRead(self, self.elevator, reads, priority, timeout_s)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self.elevator is not None:
            self.elevator.close()
        if self.meter in self._meters:
            self._meters.remove(self.meter)

    def plan(self, reads: Array) -> PlannedReads:
        """Plan reads; without operations if the volume is down. The time of the operations counts
        until `end_timing`.
        """
        trial = not self.health.breaker.closed
        allowed = not trial or self.health.breaker.allows()
        planned = PlannedReads(reads, self.segments.by_slot if allowed else {}, trial=trial)
        if len(planned.ops):
            self.meter.begin(int(planned.ops["nbytes"].sum()), trial=trial)
        return planned

    def end_timing(self, ops: Ops, places: Ints, results: Ops, *, trial: bool) -> bool:
        """Record the end of reads. True: the volume has become too slow to be used."""
        done = np.flatnonzero(results == 0)
        work_bytes = int(ops["nbytes"][done].sum())
        if self.elevator is not None and len(done):
            work_bytes += _seek_bytes(ops[done], places[done])
        fine = self.meter.end(work_bytes, len(done), int(ops["nbytes"].sum()), trial=trial)
        slow = not fine and self._stands_out()
        if slow:
            self.health.breaker.failed(_TOO_SLOW, at_once=True, slow=True)
        return slow

    def judge(self, codes: Ints, timeout_s: float, *, slow: bool) -> None:
        """Report the results of reads to the breaker. Successes of a slow volume do not count."""
        if slow:
            codes = codes[codes != 0]
        if timeout_s < _STALL_S:
            codes = codes[codes != -errno.ETIMEDOUT]
        if codes.any() or self.health.breaker.troubled:
            self.health.judge_reads(codes)

    def try_to_read(self) -> bool:
        """Read from the fullest segment to test a volume that is down. False: there is nothing to
        read.
        """
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
        trial = not self.health.breaker.closed
        self.meter.begin(whole, trial=trial)
        pending = self.segments.files.run(ops, _TRIAL_TIMEOUT_S)
        slow = self.end_timing(ops, places, ops["result"], trial=trial)
        if pending is not None:
            self.segments.files.keep(pending, ops, memory)
        self.judge(ops["result"], _TRIAL_TIMEOUT_S, slow=slow)
        return True

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
        """True if the other drives have not slowed down as much; else the machine is slow."""
        others = [meter.slowdown for meter in list(self._meters) if meter is not self.meter]
        return bool(others) and self.meter.slowdown >= _STANDS_OUT * median(others)


def _seek_bytes(ops: Ops, places: Ints) -> int:
    """The cost of the seeks of a hard drive, as bytes that it could read meanwhile."""
    order = np.argsort(places)
    ends = places[order] + -(-ops["nbytes"][order].astype(np.int64) // PAGE)
    return (1 + int((places[order][1:] != ends[:-1]).sum())) * _SEEK_BYTES


@dataclass(slots=True, eq=False)
class FlashRead:
    """Reads of flash. Implements core.volume.PendingRead."""

    _reader: LogReader
    _reads: Array
    _deadline_s: float
    _future: Future[Outcomes] | None = None
    _late: tuple[Pending, PlannedReads] | None = None

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
        if timeout_s <= 0:  # begin nothing
            return np.full(len(self._reads), Outcome.LATE, np.uint8)
        pending, use = None, descriptors.begin()
        try:
            planned = reader.plan(self._reads)
            if not len(planned.ops):
                return planned.outcomes()
            pending = reader.segments.files.run(planned.ops, timeout_s)
            results = planned.ops["result"]
            slow = reader.end_timing(planned.ops, planned.places, results, trial=planned.trial)
        finally:
            descriptors.end(use, pending)
        if results.any() or reader.health.breaker.troubled:
            reader.judge(results, timeout_s, slow=slow)
        if pending is not None:
            self._late = pending, planned
        return planned.outcomes()


class SweptRead(QueuedReads):
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
        self._descriptors = reader.segments.files.descriptors
        with self._descriptors.use():
            self._planned = planned = reader.plan(reads)
            ops = planned.ops.copy()
            ops["copy_target"] = 0  # the caller may have returned before its round
            super().__init__(ops, planned.places, reader.clock.now() + timeout_s, priority)
            if not len(ops):
                self.answered.set()
                return
            self._use = self._descriptors.begin()
            elevator.submit(self)

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.answered.is_set():
                self._calls.append(call)
                return
        call()

    def result(self) -> Outcomes:
        planned = self._planned
        if not self.answered.wait(max(0.0, self.deadline_s - self._reader.clock.now())):
            self._elevator.abandon(self)
        results = planned.ops["result"] = self.results.copy()
        _copy_to_targets(planned.ops[results == 0])
        self._reader.judge(results, self._timeout_s, slow=self._is_slow)
        return planned.outcomes()

    def cancel(self) -> bool:
        return self._elevator.withdraw(self)

    def released(self, timeout_s: float) -> bool:
        return not (self.results == -errno.ETIMEDOUT).any() or self.wait(timeout_s)

    def on_answer(self) -> None:
        self._is_slow = self._reader.end_timing(
            self.ops, self.places, self.results, trial=self._planned.trial
        )
        with self._lock:
            self.answered.set()
            calls = self._calls if not self.abandoned else []
        for call in calls:
            call()

    def on_release(self) -> None:
        self._descriptors.end(self._use)


def _copy_to_targets(ops: Ops) -> None:
    wanted = ops[ops["copy_target"] != 0]
    copies = np.zeros(len(wanted), TRANSFER_DTYPE)
    copies["source"], copies["target"] = wanted["payload_address"], wanted["copy_target"]
    copies["nbytes"], copies["mode"] = wanted["payload_bytes"], COPY
    transfer(copies)
