"""Appends records to the segments of a log volume, seals full ones, and makes both durable.

Places are given out one after the other; records are written without a lock, several batches side
by side. Reads need no lock: every record names its segment and carries its checksums, so that a
read which races with the reuse of an extent fails its check.
"""

import errno
import os
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.core.volume import NO_PLACE, SEGMENT_SHIFT, Array, Ints, Purpose
from kvdepot.format.record import PAGE, Kind, place_records, record_sizes
from kvdepot.format.segment import ENTRY, Trailer, footer_bytes, footer_sizes
from kvdepot.io.files import io_ops
from kvdepot.native import WRITE, checksum
from kvdepot.volumes.log.metadata import MetadataLog
from kvdepot.volumes.log.segments import Segment, SegmentSet
from kvdepot.volumes.log.wear import Wear

_WRITES_END_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class SegmentWrites:
    """Records that go into one segment: their indexes in the batch, and their offsets."""

    segment: Segment
    indexes: Ints
    offsets: Ints


class Syncer:
    """Makes the segments and the metadata of one volume durable."""

    def __init__(self, segments: SegmentSet, metadata: MetadataLog) -> None:
        self._segments = segments
        self._metadata = metadata
        self._lock = threading.Lock()
        """One fsync at a time; taken before `state_lock`."""
        self._unsynced: set[int] = set()
        """Slots that were written to since they were last made durable."""
        self._unproven: set[int] = set()
        """Slots that could not be made durable: until they are reused, `sync` is false."""
        self._has_failed = False
        """The last sync failed: while the volume is down, none is tried."""

    @property
    def is_proven(self) -> bool:
        return not self._unproven

    def written(self, slots: set[int]) -> None:
        """Slots were written to."""
        with self._segments.state_lock:
            self._unsynced |= slots

    def forget(self, slot: int) -> None:
        """A segment was released."""
        with self._segments.state_lock:
            self._unsynced.discard(slot)
            self._unproven.discard(slot)

    def sync(self, timeout_s: float) -> bool:
        """Make everything written so far durable, but for slots that failed before."""
        segments, health = self._segments, self._segments.health
        if not self._lock.acquire(timeout=min(timeout_s, segments.settings.write_timeout_s)):
            return False
        try:
            if health.lost or not segments.medium.intact():
                health.lose()
                return False
            with segments.state_lock:
                slots = list(self._unsynced)
            if slots and self._has_failed and not health.breaker.closed:
                return False
            self._has_failed = True
            with segments.files.descriptors.use():
                for slot in slots:
                    self._sync_slot(slot)
                if segments.settings.writable:
                    self._metadata.sync()
            self._has_failed = False
        except OSError as error:
            health.write_failed(error)
            return False
        else:
            return True
        finally:
            self._lock.release()

    def sync_slot(self, slot: int) -> None:
        """Make one segment durable. Raises OSError, ETIMEDOUT if another fsync takes too long."""
        if not self._lock.acquire(timeout=self._segments.settings.write_timeout_s):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        try:
            self._sync_slot(slot)
        finally:
            self._lock.release()

    def _sync_slot(self, slot: int) -> None:
        """Make a slot durable; the lock is held. Behind a page cache a failure is final: the kernel
        forgets what it could not write, and a second sync would succeed without it.
        """
        segments = self._segments
        with segments.state_lock:
            if slot not in self._unsynced:
                return
            self._unsynced.discard(slot)  # what is written from now on may not be covered
            fd, _ = segments.medium.extent(slot)
        if segments.settings.fsync == "never":
            return
        try:
            segments.files.sync(fd)
        except OSError:
            with segments.state_lock:
                if slot not in segments.by_slot:
                    return  # released meanwhile
                (self._unsynced if segments.medium.direct else self._unproven).add(slot)
            raise


class Appender:
    """Appends to one volume."""

    def __init__(self, segments: SegmentSet, syncer: Syncer, wear: Wear) -> None:
        self._segments = segments
        self._syncer = syncer
        self._wear = wear
        self.may_write = segments.settings.writable

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        """See Volume.append. Blocks for `write_timeout_s`, on a stalled medium until it ends."""
        segments = self._segments
        places = np.full(len(records), NO_PLACE, np.int64)
        full: list[Segment] = []
        runs: list[SegmentWrites] = []
        with segments.files.descriptors.use():
            # Without the lock in time the medium stalls, and nothing more is given to it.
            if segments.append_lock.acquire(timeout=segments.settings.write_timeout_s):
                try:
                    runs = self._reserve(records, purpose, full)
                finally:
                    segments.append_lock.release()
            written = self._write(runs, records) if runs else np.zeros(0, bool)
            if segments.settings.fsync == "always" and written.any():
                timeout_s = segments.settings.write_timeout_s
                written &= self._syncer.sync(timeout_s) and self._syncer.is_proven
            with segments.state_lock:
                for run in runs:
                    self._settle(run, records, written, places)
                    if segments.begin_sealing(run.segment):
                        full.append(run.segment)
            for segment in full:
                self.finish(segment, sealed=True)
                with segments.state_lock:
                    segment.writes -= 1
        with segments.writes_done:
            segments.writes_done.notify_all()
        return places

    def finish(self, segment: Segment, *, sealed: bool) -> None:
        """Write a segment's footer. Without it the next start scans the segment."""
        segments, nbytes = self._segments, self._segments.settings.segment_bytes
        with segments.state_lock:
            if segments.by_slot.get(segment.slot) is not segment:
                return
            fd, base = segment.extent
            offset, footer, trailer = closing_pages(segment, nbytes, segments.store, sealed=sealed)
        if segments.append_lock.acquire(timeout=segments.settings.write_timeout_s):
            try:
                self._spend(PAGE + len(footer) + len(trailer))
            finally:
                segments.append_lock.release()
        try:
            if footer:
                segments.files.write(fd, base + offset, footer)
                self._syncer.written({segment.slot})
            self._syncer.sync_slot(segment.slot)  # the trailer speaks of what is on disk
            segments.files.write(fd, base + nbytes - PAGE, trailer)
        except OSError as error:
            segments.health.write_failed(error)
        with segments.state_lock:
            segment.sealed = sealed
            segment.entries = []

    def _reserve(
        self, records: Array, purpose: Purpose, full: list[Segment]
    ) -> list[SegmentWrites]:
        """Give records their places, as far as there is room. `append_lock` held."""
        segments, health = self._segments, self._segments.health
        fine = health.breaker.closed and health.room.closed and not health.lost
        if not self.may_write or not (fine or health.allows_writes()):
            return []
        if not segments.medium.intact():
            health.lose()
            return []
        sizes = record_sizes(records["payload_bytes"])
        left = np.flatnonzero(sizes <= segments.record_bytes_max)
        runs: list[SegmentWrites] = []
        while len(left):
            segment = segments.segment_for(int(sizes[left[0]]), purpose, full)
            if segment is None:
                break
            with segments.state_lock:
                ends = segment.tail + np.cumsum(sizes[left])
                counts = segment.count + 1 + np.arange(len(left))
                fits = ends <= segments.settings.segment_bytes - footer_sizes(counts)
                count = len(left) if fits.all() else int(fits.argmin())
                mine, ends = left[:count], ends[:count]
                runs.append(SegmentWrites(segment, mine, ends - sizes[mine]))
                segment.tail = int(ends[-1])
                segment.count += count
                segment.writes += 1
            place_records(records["image"][mine], segment.segment_id)
            left = left[count:]
        self._spend(sum(int(sizes[run.indexes].sum()) for run in runs))
        return runs

    def _spend(self, nbytes: int) -> None:
        """Bytes are about to be written. `append_lock` held."""
        self._wear.written_bytes += nbytes
        if self._wear.limited:
            self._wear.take(nbytes)

    def _write(self, runs: list[SegmentWrites], records: Array) -> Array:
        """Write what was given a place; returns for each record whether it is on disk."""
        segments, timeout_s = self._segments, self._segments.settings.write_timeout_s
        indexes = np.concatenate([run.indexes for run in runs])
        ops = io_ops(len(indexes))
        ops["opcode"] = WRITE
        ops["address"] = records["image"][indexes]
        ops["nbytes"] = record_sizes(records["payload_bytes"][indexes])
        start = 0
        for run in runs:
            part = ops[start : start + len(run.indexes)]
            part["fd"], base = run.segment.extent
            part["offset"] = base + run.offsets
            start += len(part)
        pending = segments.files.run(ops, timeout_s)
        while pending is not None:
            segments.health.breaker.failed("writes do not finish", at_once=True)
            if pending.wait(_WRITES_END_S):
                break
        health, codes = segments.health, ops["result"]
        if codes.any() or health.breaker.troubled or not health.room.closed:
            health.judge_writes(codes)
        self._syncer.written({run.segment.slot for run in runs})
        written = np.zeros(len(records), bool)
        written[indexes] = codes == 0
        return written

    def _settle(self, run: SegmentWrites, records: Array, written: Array, places: Ints) -> None:
        """Enter what was written into its segment and its footer. `state_lock` held."""
        segment, good = run.segment, written[run.indexes]
        indexes, pages = run.indexes[good], run.offsets[good] // PAGE
        payload_bytes = records["payload_bytes"][indexes]
        entries = np.zeros(len(indexes), ENTRY)
        entries["key"] = np.ascontiguousarray(records["key"][indexes]).view("V32")[:, 0]
        entries["page"], entries["kind"] = pages, Kind.BLOCK
        entries["payload_bytes"] = entries["stored_bytes"] = payload_bytes
        entries["stamp"] = records["stamp"][indexes]
        segment.entries.append(entries)
        segment.count -= len(run.indexes) - len(indexes)
        segment.writes -= 1
        nbytes = int(record_sizes(payload_bytes).sum())
        self._segments.count(segment.slot, nbytes, len(indexes))
        places[indexes] = segment.slot << SEGMENT_SHIFT | pages


def closing_pages(
    segment: Segment, segment_bytes: int, store: bytes, *, sealed: bool
) -> tuple[int, bytes, bytes]:
    """Where a segment's footer begins, the footer, and the trailer, which is its last page."""
    footer = b"".join(part.tobytes() for part in segment.entries)
    segment.count = len(footer) // ENTRY.itemsize
    offset = segment_bytes - footer_bytes(segment.count)
    trailer = Trailer(
        segment.segment_id, segment.slot, segment_bytes, offset,
        segment.tail, segment.count, sealed, checksum(footer), store,
    )  # fmt: skip
    return offset, footer.ljust(segment_bytes - PAGE - offset, b"\0"), trailer.pack()
