"""Reads records as few large ranges, fetched in parallel, and verifies them.

Records are fetched and verified whole, even if only a range of the payload is wanted. After its
deadline a read does not write to the caller's memory any more.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.volume import SEGMENT_SHIFT, Array, Outcome, Outcomes, Priority
from kvdepot.format.record import HEAD_BYTES, PAGE, Kind, record_sizes, write_head
from kvdepot.io.breaker import Breaker
from kvdepot.io.speed import Profile
from kvdepot.native import COPY, TRANSFER_DTYPE, address_of, transfer
from kvdepot.native.memory import view_at
from kvdepot.volumes.log.reader import ThroughputMeter
from kvdepot.volumes.object.bucket import Bucket, BucketError, MissingObjectError
from kvdepot.volumes.object.contents import BucketContents, DataObject
from kvdepot.volumes.object.manifest import DATA, PROBE
from kvdepot.volumes.records import deliver

_PIECE_BYTES: Final = (1 << 20, 8 << 20)
"""Smallest and largest request. Requests begin and end at multiples of their size, because servers
store objects in chunks of such sizes."""
_GAP_BYTES: Final = 64 << 10
"""Ranges with a smaller gap are fetched in one request."""
_PROBE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 4096
_SMALL_READS: Final = 3
_ROUNDS: Final = 2
_PAGES_BITS: Final = (1 << SEGMENT_SHIFT) - 1


@dataclass(slots=True, eq=False)
class RangeRequest:
    """One request, for a range of an object."""

    source: DataObject
    start: int
    stop: int
    indexes: list[int]


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

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> "RangeReads":
        """Queue requests after those of other calls. `parallel` of them run at a time."""
        del priority  # requests are served in order
        return RangeReads(self, reads, timeout_s)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def measure(self, wall: Clock) -> Profile | None:
        """Measure the speed of the bucket: write a probe object, read it with `parallel` requests,
        and delete it. None: the bucket did not answer, or no time passed.

        If this process ends meanwhile, other nodes delete the probe as garbage.
        """
        path, now, bucket = f"{DATA}{self.contents.writer}/{PROBE}", self.clock.now, self.bucket

        def seconds_of(size: int, requests: int) -> float:
            began_s = now()
            bodies = self.pool.map(lambda _: bucket.get_range(path, 0, size), range(requests))
            if any(len(body) != size for body in bodies):
                raise BucketError("the answer is too short")
            return now() - began_s

        try:
            began_s = now()
            bucket.create(path, bytes(_PROBE_BYTES))
            write_s = max(now() - began_s, 1e-6)
            latency_s = median([seconds_of(_SMALL_BYTES, 1) for _ in range(_SMALL_READS)])
            alone_s = seconds_of(_PROBE_BYTES, 1)
            together_s = min(seconds_of(_PROBE_BYTES, self.parallel) for _ in range(_ROUNDS))
            bucket.delete([path])
        except BucketError:
            return None
        if min(latency_s, alone_s, together_s) <= 0:
            return None
        # A load waits for its first byte only once.
        moving_s = max(together_s - latency_s, together_s / 2)
        return Profile(
            read_bytes_per_s=int(self.parallel * _PROBE_BYTES / moving_s),
            write_bytes_per_s=int(_PROBE_BYTES / write_s),
            random_read_bytes_per_s=int(_PROBE_BYTES / alone_s),
            random_write_bytes_per_s=int(_PROBE_BYTES / write_s),
            random_bytes=_PROBE_BYTES,
            read_latency_us=int(latency_s * 1e6),
            write_latency_us=int(write_s * 1e6),
            direct_io=True,
            emulated=False,
            measured_at_s=int(wall.now()),
        )


class RangeReads:
    """Reads under way. Implements core.volume.PendingRead."""

    def __init__(self, reader: RangeReader, reads: Array, timeout_s: float) -> None:
        self._reader = reader
        self._reads = reads
        starts = (reads["place"] & _PAGES_BITS) * PAGE
        self._starts: list[int] = starts.tolist()
        """First byte of each record in its object."""
        self._stops: list[int] = (starts + record_sizes(reads["payload_bytes"])).tolist()
        self._deadline_s = reader.clock.now() + timeout_s
        self._outcomes: Outcomes = np.full(len(reads), Outcome.FAILED, np.uint8)
        self._parts_left: dict[int, int] = {}
        """Number of unanswered requests of records that need several."""
        self._changed = threading.Condition()
        """Guards the fields below; held briefly."""
        self._calls: list[Callable[[], None]] = []
        self._writing = 0
        """Number of requests that are writing to the caller's memory."""
        self._abandoned = threading.Event()
        """Set at the deadline: the caller's memory must not be written to any more."""
        requests = self._plan() if len(reads) and reader.breaker.closed else []
        for request in requests:
            self._outcomes[request.indexes] = Outcome.LATE
        self._left = len(requests)
        self._asked_bytes = sum(request.stop - request.start for request in requests)
        reader.meter.begin(self._asked_bytes)
        self._futures = [reader.pool.submit(self._fetch, request) for request in requests]

    def when_done(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._left:
                self._calls.append(call)
                return
        call()

    def result(self) -> Outcomes:
        """Ignores requests that were not answered before the deadline."""
        reader = self._reader
        with self._changed:
            left_s = max(0.0, self._deadline_s - reader.clock.now())
            self._changed.wait_for(lambda: not self._left, left_s)
            self._abandoned.set()
            self._changed.wait_for(lambda: not self._writing)
        for future in self._futures:
            future.cancel()
        good = int((self._outcomes == Outcome.OK).sum())
        reader.meter.end(self._asked_bytes if good else 0, good, self._asked_bytes)
        return self._outcomes

    def cancel(self) -> bool:
        return False

    def released(self, timeout_s: float) -> bool:
        """Always True: nothing is written to images after `result`."""
        del timeout_s
        return True

    def _plan(self) -> list[RangeRequest]:
        """Plan the requests: adjacent records together, in pieces of about equal size."""
        objects, slots = self._reader.contents.by_slot, self._reads["place"] >> SEGMENT_SHIFT
        wanted: list[tuple[int, int, int, DataObject]] = []
        total = 0
        stops = self._reads["stop"].tolist()
        for index, (slot, stop) in enumerate(zip(slots.tolist(), stops, strict=True)):
            source = objects.get(slot)
            if source is not None and not stop:
                self._answer_head(index, self._reads[index])
            elif source is not None:
                wanted.append((slot, self._starts[index], index, source))
                total += self._stops[index] - self._starts[index]
        piece_bytes = _piece_bytes(1 + total // self._reader.parallel)
        runs: list[RangeRequest] = []
        for _, start, index, source in sorted(wanted, key=lambda one: one[:3]):
            stop = self._stops[index]
            last = runs[-1] if runs else None
            if last is not None and last.source is source and start - last.stop <= _GAP_BYTES:
                last.stop = max(stop, last.stop)
                last.indexes.append(index)
            else:
                runs.append(RangeRequest(source, start, stop, [index]))
        return [piece for run in runs for piece in self._cut(run, piece_bytes)]

    def _answer_head(self, index: int, read: Any) -> None:
        """Write a head from the manifest, with token ids and without checksums."""
        key = BlockKey(read["key"].tobytes())
        tokens = self._reader.contents.tokens(key, int(read["place"]))
        if tokens is not None:
            image = view_at(int(read["image"]), HEAD_BYTES).data
            size = int(read["payload_bytes"])
            write_head(image, Kind.BLOCK, key, size, size, tokens)
            self._outcomes[index] = Outcome.OK

    def _cut(self, run: RangeRequest, piece_bytes: int) -> list[RangeRequest]:
        """Split a range into requests that end at multiples of their size,
        except for small rests.
        """
        rest = piece_bytes // 4
        first = -(-(run.start + rest) // piece_bytes) * piece_bytes
        ends = [*range(first, run.stop - rest + 1, piece_bytes), run.stop]
        starts = [run.start, *ends[:-1]]
        pieces = [
            RangeRequest(run.source, start, end, [])
            for start, end in zip(starts, ends, strict=True)
        ]
        at = 0
        for index in run.indexes:
            begin, stop = self._starts[index], self._stops[index]
            while pieces[at].stop <= begin:
                at += 1
            parts = [piece for piece in pieces[at:] if piece.start < stop]
            for piece in parts:
                piece.indexes.append(index)
            if len(parts) > 1:
                self._parts_left[index] = len(parts)
        return pieces

    def _fetch(self, request: RangeRequest) -> None:
        """Send a request and write its records to their images. Runs in a thread of the pool."""
        if self._abandoned.is_set():
            return
        reader = self._reader
        records: list[memoryview] | None = None
        try:
            body = reader.bucket.get_range(request.source.listing.path, request.start, request.stop)
            at = request.start
            records = [
                body[max(0, self._starts[index] - at) : self._stops[index] - at]
                for index in request.indexes
            ]
        except MissingObjectError:
            reader.contents.drop(request.source.listing.path)
        except BucketError as error:
            reader.breaker.failed(error.reason, at_once=True)
        else:
            if reader.breaker.troubled:
                reader.breaker.succeeded()
        with self._changed:
            if self._abandoned.is_set():
                return
            self._writing += 1
        try:
            self._hand_over(request, records)
        finally:
            with self._changed:
                self._writing -= 1
                self._left -= 1
                calls = [] if self._left else self._calls
                self._changed.notify_all()
        for call in calls:
            call()

    def _hand_over(self, request: RangeRequest, records: list[memoryview] | None) -> None:
        if records is None:
            self._outcomes[request.indexes] = Outcome.FAILED
            return
        for index, record in zip(request.indexes, records, strict=True):
            read = self._reads[index]
            if index not in self._parts_left:
                self._outcomes[index] = deliver(record, read)
            elif not self._copy_part(record, request, index):
                self._outcomes[index] = Outcome.CORRUPT
            elif self._is_whole(index):
                nbytes = self._stops[index] - self._starts[index]
                self._outcomes[index] = deliver(view_at(int(read["image"]), nbytes).data, read)

    def _is_whole(self, index: int) -> bool:
        """Count an answered part of a record. True: it was the last one."""
        with self._changed:
            self._parts_left[index] -= 1
            return not self._parts_left[index]

    def _copy_part(self, part: memoryview, request: RangeRequest, index: int) -> bool:
        """Copy a part of a record to its image. False: it is too short."""
        start, stop = self._starts[index], self._stops[index]
        first, last = max(start, request.start), min(stop, request.stop)
        if len(part) != last - first:
            return False
        target = int(self._reads[index]["image"]) + first - start
        source = address_of(part)[0]
        transfer(np.array([(0, source, target, len(part), 0, 0, COPY)], TRANSFER_DTYPE))
        return True


def _piece_bytes(share: int) -> int:
    """Bytes per request: the power of two next to an equal share."""
    least, most = _PIECE_BYTES
    return min(most, max(least, 1 << (share * 4 // 3).bit_length() - 1))
