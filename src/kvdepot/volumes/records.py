"""Helpers for volumes: verified reads of whole records, and the newest record of each key."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvdepot.core.volume import Array, Contents, Ints, Outcome, Outcomes
from kvdepot.format.record import (
    HEAD_BYTES,
    TABLE_OFFSET,
    Kind,
    parse_head,
    payload_intact,
    record_bytes,
    record_sizes,
)
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, address_of, transfer
from kvdepot.native.memory import Bytes, view_at


class BlockingReads:
    """Reads in the thread that waits for the result. Implements core.volume.PendingRead.

    `fetch` returns the record at a place, or None after an error of the medium. It must be quick,
    because the deadline is only checked between records.
    """

    def __init__(
        self, reads: Array, fetch: Callable[[int], bytes | None], timeout_s: float
    ) -> None:
        self._reads = reads
        self._fetch = fetch
        self._deadline = time.monotonic() + timeout_s
        self._outcomes: Outcomes = np.full(len(reads), Outcome.LATE, np.uint8)
        self._taken = threading.Lock()
        """Acquired by the first caller that reads or cancels; never released."""
        self._ended = threading.Event()

    def when_done(self, call: Callable[[], None]) -> None:
        self.result()
        call()

    def result(self) -> Outcomes:
        if self._taken.acquire(blocking=False):
            self._outcomes[:] = [self._read(read) for read in self._reads]
            self._ended.set()
        self._ended.wait()
        return self._outcomes

    def cancel(self) -> bool:
        if not self._taken.acquire(blocking=False):
            return False
        self._ended.set()
        return True

    def released(self, timeout_s: float) -> bool:
        return not self._taken.locked() or self._ended.wait(timeout_s)

    def _read(self, read: Any) -> Outcome:
        if time.monotonic() > self._deadline:
            return Outcome.LATE
        record = self._fetch(int(read["place"]))
        return Outcome.FAILED if record is None else deliver(record, read)


def images_of(records: Array) -> list[Bytes]:
    """The whole records that an array of RECORD_DTYPE points to."""
    sizes = record_sizes(records["payload_bytes"]).tolist()
    addresses = records["image"].tolist()
    return [view_at(address, nbytes) for address, nbytes in zip(addresses, sizes, strict=True)]


def newest_records(words: Array, places: Ints, payload_bytes: Array, stamps: Array) -> Contents:
    """The record of each key with the greatest stamp; the last one of several with that stamp."""
    stamps = stamps.astype(np.int64)
    order = np.argsort(stamps, kind="stable")
    backwards = words[order[::-1]]
    _, first, key = np.unique(backwards[:, 2], return_index=True, return_inverse=True)
    if not np.array_equal(backwards[first[key]], backwards):  # two keys share this word
        _, first = np.unique(backwards, axis=0, return_index=True)
    newest = order[np.sort(len(order) - 1 - first)]
    return Contents(
        np.ascontiguousarray(words[newest], np.uint64),
        places[newest],
        payload_bytes[newest].astype(np.int64),
        stamps[newest],
        token=0,
    )


def deliver(record: bytes | memoryview, read: Any) -> Outcome:
    """Serve a row of READ_DTYPE from a whole record. Returns OK, or CORRUPT if it is not the intact
    block. The record may be the image of the read.
    """
    head = parse_head(memoryview(record))
    if head is None or len(record) < record_bytes(head.payload_bytes):
        return Outcome.CORRUPT
    if (head.kind, head.key) != (Kind.BLOCK, read["key"].tobytes()):
        return Outcome.CORRUPT
    start, stop, chunk_bytes = int(read["start"]), int(read["stop"]), int(read["chunk_bytes"])
    source, image = address_of(record)[0], int(read["image"])
    copies = [(0, source, image, HEAD_BYTES, 0, 0, COPY)] if source != image else []
    if stop and head.payload_bytes != read["payload_bytes"]:
        return Outcome.CORRUPT
    if stop and chunk_bytes not in (0, head.chunk_bytes):
        return Outcome.CORRUPT
    if stop and not chunk_bytes and not payload_intact(memoryview(record), head):
        return Outcome.CORRUPT
    if stop:
        payload, nbytes = HEAD_BYTES + start, stop - start
        table = source + TABLE_OFFSET + 8 * (start // head.chunk_bytes)
        kept = image + payload if source != image else 0
        copies.append((0, source + payload, kept, nbytes, head.chunk_bytes, table, VERIFY))
        if read["target"]:  # the operation before has verified these bytes
            copies.append((0, source + payload, int(read["target"]), nbytes, 0, 0, COPY))
    done = np.array(copies, TRANSFER_DTYPE)
    transfer(done)
    return Outcome.CORRUPT if done["result"].any() else Outcome.OK
