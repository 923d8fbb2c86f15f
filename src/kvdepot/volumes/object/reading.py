"""Reads of records: planned as few large ranges, fetched side by side, verified, handed over.

After its deadline a read touches no memory of the caller any more, whatever the network does.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.clock import Clock
from kvdepot.core.tier import Load, Loaded, Outcome
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import HEAD_BYTES, record_bytes
from kvdepot.io.breaker import Breaker
from kvdepot.io.speed import ThroughputMeter
from kvdepot.native import COPY, address_of
from kvdepot.volumes.object.bucket import Bucket, BucketError
from kvdepot.volumes.object.contents import BucketContents, DataObject, span_of
from kvdepot.volumes.records import deliver

_PIECE_BYTES: Final = (1 << 20, 8 << 20)
"""Least and most that one request asks for, if there is so much. Requests begin and end at
multiples of their size: servers keep objects in chunks of such sizes."""
_GAP_BYTES: Final = 64 << 10
"""Ranges that lie nearer than this are fetched as one."""


@dataclass(slots=True, eq=False)
class Assembly:
    """A record that comes in several requests, each of which writes its part of the image."""

    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_whole(self) -> bool:
        """Whether the part that has come is the last one."""
        with self.lock:
            self.left -= 1
            return not self.left


@dataclass(slots=True, eq=False)
class RangeRead:
    """What one request, or one set of small ranges, brings."""

    source: DataObject
    start: int
    stop: int
    indices: list[int]
    partial: bool = False
    """Ranges of payloads: the head and the range of each are fetched, not what is between."""
    assemblies: dict[int, Assembly] = field(default_factory=dict)
    """Of those of `indices` that other requests bring parts of."""
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory of the caller is written to."""

    def is_abandoned(self) -> bool:
        """Whether the caller has gone on without it."""
        return self.abandoned


class Finished:
    """Reads that were given up, and will not touch their images. Implements core.tier.Pending."""

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return True


class CountDown:
    """Calls `done` when the last of several futures has ended. Thread-safe."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done
        self._lock = threading.Lock()

    def one_less(self, future: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last and not future.cancelled():
            self._done()


@dataclass(slots=True, eq=False)
class RangeLoads:
    """Loads under way. Implements core.tier.Reading."""

    reader: "RangeReader"
    loads: Sequence[Load]
    reads: list[RangeRead]
    deadline_s: float
    asked_bytes: int
    futures: list[Future[None]] = field(default_factory=list)
    answers: dict[int, Outcome] = field(default_factory=dict)

    def result(self) -> Loaded:
        return self.reader.collect(self)


def _tell_nothing() -> None:
    """The caller waits for the result."""


class RangeReader:
    """Reads from one bucket, `parallel` requests at a time. Thread-safe."""

    def __init__(
        self,
        bucket: Bucket,
        contents: BucketContents,
        breaker: Breaker,
        clock: Clock,
        parallel: int,
    ) -> None:
        self._bucket = bucket
        self._contents = contents
        self._breaker = breaker
        self._clock = clock
        self._parallel = parallel
        self.gauge = ThroughputMeter(clock)
        self.pool = ThreadPoolExecutor(parallel, thread_name_prefix="kvdepot-object-fetch")

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        return self.submit(loads, timeout_s, _tell_nothing).result()

    def submit(
        self, loads: Sequence[Load], timeout_s: float, done: Callable[[], None]
    ) -> "RangeLoads":
        """Queue requests behind those of other calls: there are always `parallel` under way."""
        up = bool(loads) and self._breaker.closed
        reads = self._plan(loads) if up else []
        asked = sum(read.stop - read.start for read in reads)
        mine = RangeLoads(self, loads, reads, self._clock.now() + timeout_s, asked)
        self.gauge.begin(asked)
        left = CountDown(len(reads), done)
        for read in reads:
            future = self.pool.submit(self._fetch, read, loads, mine.answers)
            future.add_done_callback(left.one_less)
            mine.futures.append(future)
        if not reads:
            done()
        return mine

    def collect(self, mine: "RangeLoads") -> Loaded:
        """What came of loads; what has not come until their deadline is left behind."""
        if wait(mine.futures, max(0.0, mine.deadline_s - self._clock.now())).not_done:
            for future in mine.futures:
                future.cancel()
        for read in mine.reads:
            with read.lock:
                read.abandoned = True
        outcomes = [Outcome.FAILED] * len(mine.loads)
        for index in [index for read in mine.reads for index in read.indices]:
            outcomes[index] = mine.answers.get(index, Outcome.LATE)
        good = sum(outcome is Outcome.OK for outcome in outcomes)
        self.gauge.end(mine.asked_bytes if good else 0, good, mine.asked_bytes)
        return outcomes, Finished() if Outcome.LATE in outcomes else None

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _plan(self, loads: Sequence[Load]) -> list[RangeRead]:
        """Ranges to fetch: records that lie together in pieces that all requests share evenly."""
        whole: list[tuple[int, int, int, DataObject]] = []
        reads: dict[int, RangeRead] = {}
        for index, load in enumerate(loads):
            source = self._contents.at(load.location)
            if source is None:
                continue
            start, stop = span_of(load.location, load.payload_bytes)
            if 2 * (load.stop - load.start) >= load.payload_bytes:
                whole.append((source.slot, start, index, source))
            else:
                read = reads.setdefault(source.slot, RangeRead(source, 0, 0, [], partial=True))
                read.indices.append(index)
                read.stop += HEAD_BYTES + load.stop - load.start
        total = sum(record_bytes(loads[index].payload_bytes) for _, _, index, _ in whole)
        piece_bytes = _piece_bytes(1 + total // self._parallel)
        runs: list[RangeRead] = []
        for _, start, index, source in sorted(whole, key=lambda one: one[:3]):
            stop = start + record_bytes(loads[index].payload_bytes)
            last = runs[-1] if runs else None
            if last is not None and last.source is source and start - last.stop <= _GAP_BYTES:
                last.stop = max(stop, last.stop)
                last.indices.append(index)
            else:
                runs.append(RangeRead(source, start, stop, [index]))
        pieces = [piece for run in runs for piece in _cut(run, loads, piece_bytes)]
        return [*pieces, *reads.values()]

    def _fetch(self, read: RangeRead, loads: Sequence[Load], answers: dict[int, Outcome]) -> None:
        if read.is_abandoned():
            return
        try:
            if read.partial:
                records = self._partial(read, loads)
            else:
                body = self._bucket.get_range(read.source.path, read.start, read.stop)
                records = [_part(body, read, loads[index]) for index in read.indices]
        except BucketError as error:
            if error.missing:
                self._contents.drop(read.source.path)
            else:
                self._breaker.failed(error.reason, at_once=True)
            answers.update(dict.fromkeys(read.indices, Outcome.FAILED))
            return
        if self._breaker.troubled:
            self._breaker.succeeded()
        with read.lock:
            if read.is_abandoned():
                return
            for index, record in zip(read.indices, records, strict=True):
                assembly = read.assemblies.get(index)
                if assembly is None:
                    answers[index] = deliver(record, loads[index])
                elif not _copy_part(record, read, loads[index]):
                    answers[index] = Outcome.CORRUPT
                elif assembly.is_whole():
                    answers[index] = deliver(loads[index].image, loads[index])

    def _partial(self, read: RangeRead, loads: Sequence[Load]) -> list[memoryview]:
        spans = []
        for index in read.indices:
            load = loads[index]
            start, _ = span_of(load.location, load.payload_bytes)
            spans.append((start, start + HEAD_BYTES))
            spans.append((start + HEAD_BYTES + load.start, start + HEAD_BYTES + load.stop))
        parts = self._bucket.get_ranges(read.source.path, spans)
        records = []
        for place, index in enumerate(read.indices):
            load, head, body = loads[index], parts[2 * place], parts[2 * place + 1]
            if len(head) != HEAD_BYTES or len(body) != load.stop - load.start:
                records.append(memoryview(b""))
                continue
            record = np.empty(record_bytes(load.payload_bytes), np.uint8)
            record[:HEAD_BYTES] = np.frombuffer(head, np.uint8)
            record[HEAD_BYTES + load.start : HEAD_BYTES + load.stop] = np.frombuffer(body, np.uint8)
            records.append(record.data)
        return records


def _piece_bytes(share: int) -> int:
    """What one request asks for where each of them has this share: the power of two next to it."""
    least, most = _PIECE_BYTES
    return min(most, max(least, 1 << (share * 4 // 3).bit_length() - 1))


def _cut(run: RangeRead, loads: Sequence[Load], piece_bytes: int) -> list[RangeRead]:
    """Requests for a run of records, with ends at multiples of their size but for small rests."""
    rest = piece_bytes // 4
    first = -(-(run.start + rest) // piece_bytes) * piece_bytes
    ends = [*range(first, run.stop - rest + 1, piece_bytes), run.stop]
    pieces, start = [], run.start
    for end in ends:
        pieces.append(RangeRead(run.source, start, end, []))
        start = end
    at = 0
    for index in run.indices:
        begin, stop = span_of(loads[index].location, loads[index].payload_bytes)
        while pieces[at].stop <= begin:
            at += 1
        parts = [piece for piece in pieces[at:] if piece.start < stop]
        assembly = Assembly(len(parts)) if len(parts) > 1 else None
        for piece in parts:
            piece.indices.append(index)
            if assembly is not None:
                piece.assemblies[index] = assembly
    return pieces


def _part(body: memoryview, read: RangeRead, load: Load) -> memoryview:
    """What a request has brought of a record."""
    start, stop = span_of(load.location, load.payload_bytes)
    return body[max(0, start - read.start) : stop - read.start]


def _copy_part(part: memoryview, read: RangeRead, load: Load) -> bool:
    """Write a part of a record to its place. False: it is too short."""
    start, stop = span_of(load.location, load.payload_bytes)
    first, last = max(start, read.start), min(stop, read.stop)
    if len(part) != last - first:
        return False
    target = address_of(load.image, writable=True)[0] + first - start
    transfers([(0, address_of(part)[0], target, len(part), 0, 0, COPY)])
    return True
