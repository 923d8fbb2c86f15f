"""Reads of records: planned as few large ranges, fetched side by side, verified, handed over.

After its deadline a read touches no memory of the caller any more, whatever the network does.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.volume import Array, Outcome, Outcomes
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import HEAD_BYTES, Kind, record_bytes, write_head
from kvdepot.io.breaker import Breaker
from kvdepot.io.speed import ThroughputMeter
from kvdepot.native import COPY, address_of
from kvdepot.native.memory import view_at
from kvdepot.volumes.object.bucket import Bucket, BucketError
from kvdepot.volumes.object.contents import BucketContents, DataObject, span_of
from kvdepot.volumes.records import deliver

_PIECE_BYTES: Final = (1 << 20, 8 << 20)
"""Least and most that one request asks for, if there is that much. Requests begin and end at
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
class RangeRequest:
    """What one request, or one set of small ranges, brings."""

    source: DataObject
    start: int
    stop: int
    indexes: list[int]
    partial: bool = False
    """Ranges of payloads: the head and the range of each are fetched, not what is between."""
    assemblies: dict[int, Assembly] = field(default_factory=dict)
    """Of those of `indexes` that other requests bring parts of."""
    abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory of the caller is written to."""

    def is_abandoned(self) -> bool:
        """Whether the caller has gone on without it."""
        return self.abandoned


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
        self.bucket = bucket
        self.contents = contents
        self.breaker = breaker
        self.clock = clock
        self.parallel = parallel
        self.meter = ThroughputMeter(clock)
        self.pool = ThreadPoolExecutor(parallel, thread_name_prefix="kvdepot-object-fetch")

    def read(self, reads: Array, timeout_s: float) -> "RangeReads":
        """Queue requests behind those of other calls: there are always `parallel` under way."""
        return RangeReads(self, reads, timeout_s)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


class RangeReads:
    """Reads under way. Implements core.volume.PendingRead."""

    def __init__(self, reader: RangeReader, reads: Array, timeout_s: float) -> None:
        self._reader = reader
        self._reads = reads
        self._deadline_s = reader.clock.now() + timeout_s
        self._answers: dict[int, Outcome] = {}
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._requests = self._plan() if len(reads) and reader.breaker.closed else []
        self._left = len(self._requests)
        self._asked_bytes = sum(request.stop - request.start for request in self._requests)
        reader.meter.begin(self._asked_bytes)
        self._futures: list[Future[None]] = []
        for request in self._requests:
            future = reader.pool.submit(self._fetch, request)
            self._futures.append(future)
            future.add_done_callback(self._one_less)

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._left:
                self._calls.append(call)
                return
        call()

    def result(self) -> Outcomes:
        """What has not come until the deadline is left behind."""
        reader = self._reader
        if wait(self._futures, max(0.0, self._deadline_s - reader.clock.now())).not_done:
            for future in self._futures:
                future.cancel()
        for request in self._requests:
            with request.lock:
                request.abandoned = True
        outcomes = np.full(len(self._reads), Outcome.FAILED, np.uint8)
        outcomes[[index for request in self._requests for index in request.indexes]] = Outcome.LATE
        for index, outcome in self._answers.items():
            outcomes[index] = outcome
        good = int((outcomes == Outcome.OK).sum())
        reader.meter.end(self._asked_bytes if good else 0, good, self._asked_bytes)
        return outcomes

    def cancel(self) -> bool:
        return False

    def released(self, timeout_s: float) -> bool:
        """True: reads that were given up do not touch their images."""
        del timeout_s
        return True

    def _one_less(self, future: Future[None]) -> None:
        with self._lock:
            self._left -= 1
            calls = self._calls if not self._left and not future.cancelled() else []
        for call in calls:
            call()

    def _plan(self) -> list[RangeRequest]:
        """Ranges to fetch: records that lie together in pieces that all requests share evenly."""
        whole: list[tuple[int, int, int, DataObject]] = []
        partial: dict[int, RangeRequest] = {}
        for index, read in enumerate(self._reads):
            source = self._reader.contents.at(int(read["place"]))
            if source is None:
                continue
            start, stop = int(read["start"]), int(read["stop"])
            if not stop:
                self._answer_head(index, read)
            elif 2 * (stop - start) >= int(read["payload_bytes"]):
                whole.append((source.slot, self._span(index)[0], index, source))
            else:
                request = partial.setdefault(
                    source.slot, RangeRequest(source, 0, 0, [], partial=True)
                )
                request.indexes.append(index)
                request.stop += HEAD_BYTES + stop - start
        total = sum(stop - start for start, stop in (self._span(index) for _, _, index, _ in whole))
        piece_bytes = _piece_bytes(1 + total // self._reader.parallel)
        runs: list[RangeRequest] = []
        for _, start, index, source in sorted(whole, key=lambda one: one[:3]):
            stop = self._span(index)[1]
            last = runs[-1] if runs else None
            if last is not None and last.source is source and start - last.stop <= _GAP_BYTES:
                last.stop = max(stop, last.stop)
                last.indexes.append(index)
            else:
                runs.append(RangeRequest(source, start, stop, [index]))
        pieces = [piece for run in runs for piece in self._cut(run, piece_bytes)]
        return [*pieces, *partial.values()]

    def _span(self, index: int) -> tuple[int, int]:
        read = self._reads[index]
        return span_of(int(read["place"]), int(read["payload_bytes"]))

    def _answer_head(self, index: int, read: Any) -> None:
        """Write a head by what the manifests say, with token ids and without checksums."""
        key = BlockKey(read["key"].tobytes())
        tokens = self._reader.contents.tokens(key, int(read["place"]))
        if tokens is not None:
            image = view_at(int(read["image"]), HEAD_BYTES).data
            size = int(read["payload_bytes"])
            write_head(image, Kind.BLOCK, key, size, size, tokens)
            self._answers[index] = Outcome.OK

    def _cut(self, run: RangeRequest, piece_bytes: int) -> list[RangeRequest]:
        """Requests for a run of records; all but small rests end at multiples of their size."""
        rest = piece_bytes // 4
        first = -(-(run.start + rest) // piece_bytes) * piece_bytes
        ends = [*range(first, run.stop - rest + 1, piece_bytes), run.stop]
        pieces, start = [], run.start
        for end in ends:
            pieces.append(RangeRequest(run.source, start, end, []))
            start = end
        first_piece = 0
        for index in run.indexes:
            begin, stop = self._span(index)
            while pieces[first_piece].stop <= begin:
                first_piece += 1
            parts = [piece for piece in pieces[first_piece:] if piece.start < stop]
            assembly = Assembly(len(parts)) if len(parts) > 1 else None
            for piece in parts:
                piece.indexes.append(index)
                if assembly is not None:
                    piece.assemblies[index] = assembly
        return pieces

    def _fetch(self, request: RangeRequest) -> None:
        if request.is_abandoned():
            return
        reader = self._reader
        try:
            if request.partial:
                records = self._fetch_parts(request)
            else:
                body = reader.bucket.get_range(request.source.path, request.start, request.stop)
                records = [self._part(body, request, index) for index in request.indexes]
        except BucketError as error:
            if error.missing:
                reader.contents.drop(request.source.path)
            else:
                reader.breaker.failed(error.reason, at_once=True)
            self._answers.update(dict.fromkeys(request.indexes, Outcome.FAILED))
            return
        if reader.breaker.troubled:
            reader.breaker.succeeded()
        with request.lock:
            if request.is_abandoned():
                return
            for index, record in zip(request.indexes, records, strict=True):
                read, assembly = self._reads[index], request.assemblies.get(index)
                if assembly is None:
                    self._answers[index] = deliver(record, read)
                elif not self._copy_part(record, request, index):
                    self._answers[index] = Outcome.CORRUPT
                elif assembly.is_whole():
                    nbytes = record_bytes(int(read["payload_bytes"]))
                    self._answers[index] = deliver(view_at(int(read["image"]), nbytes).data, read)

    def _fetch_parts(self, request: RangeRequest) -> list[memoryview]:
        spans = []
        for index in request.indexes:
            read, (start, _) = self._reads[index], self._span(index)
            first = start + HEAD_BYTES + int(read["start"])
            spans.append((start, start + HEAD_BYTES))
            spans.append((first, first + int(read["stop"] - read["start"])))
        parts = self._reader.bucket.get_ranges(request.source.path, spans)
        records = []
        for number, index in enumerate(request.indexes):
            read, head, body = self._reads[index], parts[2 * number], parts[2 * number + 1]
            first = HEAD_BYTES + int(read["start"])
            if len(head) != HEAD_BYTES or len(body) != read["stop"] - read["start"]:
                records.append(memoryview(b""))
                continue
            record = np.empty(record_bytes(int(read["payload_bytes"])), np.uint8)
            record[:HEAD_BYTES] = np.frombuffer(head, np.uint8)
            record[first : first + len(body)] = np.frombuffer(body, np.uint8)
            records.append(record.data)
        return records

    def _part(self, body: memoryview, request: RangeRequest, index: int) -> memoryview:
        """What a request has brought of a record."""
        start, stop = self._span(index)
        return body[max(0, start - request.start) : stop - request.start]

    def _copy_part(self, part: memoryview, request: RangeRequest, index: int) -> bool:
        """Write a part of a record to its place. False: it is too short."""
        start, stop = self._span(index)
        first, last = max(start, request.start), min(stop, request.stop)
        if len(part) != last - first:
            return False
        target = int(self._reads[index]["image"]) + first - start
        transfers([(0, address_of(part)[0], target, len(part), 0, 0, COPY)])
        return True


def _piece_bytes(share: int) -> int:
    """What one request asks for where each of them has this share: the power of two next to it."""
    least, most = _PIECE_BYTES
    return min(most, max(least, 1 << (share * 4 // 3).bit_length() - 1))
