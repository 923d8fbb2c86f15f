"""Reads of records: planned as few large ranges, fetched side by side, verified, handed over.

After its deadline a read touches no memory of the caller any more, whatever the network does.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.codec.record import HEAD_BYTES, record_bytes
from kvdepot.core.clock import Clock
from kvdepot.core.tier import Load, Loaded, Outcome
from kvdepot.tiers.device.breaker import Breaker
from kvdepot.tiers.device.speed import Gauge
from kvdepot.tiers.object.bucket import Bucket, BucketError
from kvdepot.tiers.object.contents import BucketContents, DataObject, span_of
from kvdepot.tiers.records import deliver

_PIECE_BYTES: Final = (1 << 20, 4 << 20)
"""Least and most that one request asks for, if there is so much."""
_GAP_BYTES: Final = 64 << 10
"""Ranges that lie nearer than this are fetched as one."""


@dataclass(slots=True, eq=False)
class RangeRead:
    """What one request, or one set of small ranges, brings."""

    source: DataObject
    start: int
    stop: int
    indices: list[int]
    partial: bool = False
    """Ranges of payloads: the head and the range of each are fetched, not what is between."""
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
        self.gauge = Gauge(clock)
        self.pool = ThreadPoolExecutor(parallel, thread_name_prefix="kvdepot-object-fetch")

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        outcomes = [Outcome.FAILED] * len(loads)
        if not loads or not self._breaker.closed:
            return outcomes, None
        deadline_s = self._clock.now() + timeout_s
        reads = self._plan(loads)
        asked = sum(read.stop - read.start for read in reads)
        self.gauge.begin(asked)
        answers: dict[int, Outcome] = {}
        futures = [self.pool.submit(self._fetch, read, loads, answers) for read in reads]
        self._wait(futures, max(0.0, deadline_s - self._clock.now()))
        for read in reads:
            with read.lock:
                read.abandoned = True
        for index in [index for read in reads for index in read.indices]:
            outcomes[index] = answers.get(index, Outcome.LATE)
        good = sum(outcome is Outcome.OK for outcome in outcomes)
        self.gauge.end(asked if good else 0, good, asked)
        return outcomes, Finished() if Outcome.LATE in outcomes else None

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _wait(self, futures: list[Future[None]], timeout_s: float) -> None:
        if wait(futures, timeout_s).not_done:
            for future in futures:
                future.cancel()

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
        least, most = _PIECE_BYTES
        size = min(most, max(least, -(-total // self._parallel)))
        found: list[RangeRead] = []
        for _, start, index, source in sorted(whole, key=lambda one: one[:3]):
            stop = start + record_bytes(loads[index].payload_bytes)
            last = found[-1] if found else None
            if (
                last is not None
                and last.source is source
                and start - last.stop <= _GAP_BYTES
                and max(stop, last.stop) - last.start <= size
            ):
                last.stop = max(stop, last.stop)
                last.indices.append(index)
            else:
                found.append(RangeRead(source, start, stop, [index]))
        return [*found, *reads.values()]

    def _fetch(self, read: RangeRead, loads: Sequence[Load], answers: dict[int, Outcome]) -> None:
        if read.is_abandoned():
            return
        try:
            records = self._partial(read, loads) if read.partial else self._whole(read, loads)
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
                answers[index] = deliver(record, loads[index])

    def _whole(self, read: RangeRead, loads: Sequence[Load]) -> list[memoryview]:
        body = self._bucket.get_range(read.source.path, read.start, read.stop)
        records = []
        for index in read.indices:
            start, stop = span_of(loads[index].location, loads[index].payload_bytes)
            records.append(body[start - read.start : stop - read.start])
        return records

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
