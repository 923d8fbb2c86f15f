"""Making room on a drive: pick a segment, move on what earned it, drop the rest, free it.

The lock is taken for a few hundred blocks at a time, so that callers are not held up by a segment
of many small ones; each step looks again at what may have changed meanwhile.
"""

import contextlib
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvdepot.core.tier import ChangesDrives, Purpose, SegmentInfo
from kvdepot.errors import KVDepotError
from kvdepot.format.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.policy.placing.reclaim import SegmentFacts, abandoned, rule_named
from kvdepot.store.move.demote import Demoter
from kvdepot.store.move.mover import PIECE_BYTES, BlockMover, CopyJob
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_OLDEST: Final = 8
_NEWEST: Final = 4
"""Segments looked at for each reclaim; the newest, in case one prompt outgrows the drive."""
_DESCENDANTS_MAX: Final = 4096
"""Blocks counted below a segment's own; more make no difference to the choice."""
_STEP: Final = 256
"""Blocks dealt with before other threads get the lock."""
_PATIENCE_S: Final = 2.0
"""How long write-back waits for room that leases hold, before blocks are given up."""
_LOOK_AGAIN_S: Final = 0.05
_SHRINK_AGAIN_S: Final = 10.0
"""A drive whose leased blocks do not fit into fewer segments is tried again after so long, or when
there are no leases."""
_log = logging.getLogger("kvdepot.store")


class DriveRoom:
    """Keeps room on the drives of one tier. One thread at a time works on a drive."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, demoter: Demoter | None
    ) -> None:
        self._state = state
        self._lower = lower
        self.reclaimer = Reclaimer(state, lower, mover, demoter)
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """Held by the thread that reclaims or mounts a drive."""
        self._shrinking: dict[int, float] = {}
        """Drives that have more segments than they may, and when to go on although there are
        leases."""

    def make(self, drive: int, nbytes: int) -> bool:
        """Do what lets a refused append succeed. False: nothing helps."""
        with self._upkeep(drive, self._lower.config.write_timeout) as mine:
            if not mine:
                return False
            facts = self._lower.tier.drive(drive)
            if facts.lost:
                return self._mount_again(drive)
            if not facts.up or facts.full:
                return False
            return self._lower.tier.has_room(drive, nbytes) or self.reclaimer.reclaim(drive)

    def wait_for(self, drive: int, nbytes: int) -> bool:
        """`make`, once leases and writes let go of room that they hold. False: nothing helps."""
        state = self._state
        deadline_s = state.clock.now() + _PATIENCE_S
        while not self.make(drive, nbytes):
            with state.lock:
                waits = state.clock.now() < deadline_s and not state.closing.is_set()
                held_up = waits and self.reclaimer.is_held_up(drive)
                if held_up:
                    state.room.wait(_LOOK_AGAIN_S)
            if not held_up:
                return self.make(drive, nbytes)  # it may have become free just now
        return True

    def keep_spare(self, drive: int) -> None:
        """Reclaim ahead of need, while the new segment still has room for what is kept."""
        with self._upkeep(drive, 0.0) as mine:
            while mine:
                facts = self._lower.tier.drive(drive)
                if not facts.up or facts.full or facts.lost or facts.spare_segments >= 1:
                    return
                if not self.reclaimer.reclaim(drive):
                    return

    def shrink(self, drive: int, timeout_s: float = 0.0) -> None:
        """Reclaim until the drive has no more segments than it may. What leases hold up, or
        another thread's reclaim, is left to the watchdog, which tries again.

        Leased blocks are moved, not dropped: where as many reclaims as there are segments have not
        made them fewer, the next would only write the same blocks again.
        """
        tier = self._lower.tier
        assert isinstance(tier, ChangesDrives)
        self._shrinking[drive] = 0.0
        with self._upkeep(drive, timeout_s) as mine:
            fewest, in_vain = self._segments_in_use(drive), 0
            while mine and not self._state.closing.is_set():
                if tier.trim(drive):
                    self._shrinking.pop(drive, None)
                    return
                if in_vain > fewest:
                    self._shrinking[drive] = self._state.clock.now() + _SHRINK_AGAIN_S
                    return
                if not self.reclaimer.reclaim(drive):
                    return
                left = self._segments_in_use(drive)
                in_vain = 0 if left < fewest else in_vain + 1
                fewest = min(left, fewest)

    def shrink_again(self, drive: int) -> None:
        """Go on with what `shrink` could not end."""
        due_s = self._shrinking.get(drive)
        if due_s is not None and (
            not self._state.catalog.leased or self._state.clock.now() >= due_s
        ):
            self.shrink(drive)

    def _segments_in_use(self, drive: int) -> int:
        return len(self._lower.tier.segments(drive, reclaimable=False))

    def restore(self, drive: int, timeout_s: float = 1.0) -> bool:
        """Mount a drive that was lost anew, unless another thread does. True: it can be used."""
        with self._upkeep(drive, timeout_s) as mine:
            return mine and self._lower.tier.drive(drive).lost and self._mount_again(drive)

    def _mount_again(self, drive: int) -> bool:
        tier, state = self._lower.tier, self._state
        if not isinstance(tier, ChangesDrives):
            return False

        def forget() -> None:
            with state.lock:
                self._lower.forget_drive(drive)

        try:
            contents = tier.remount(drive, forget)
        except (OSError, KVDepotError) as error:
            _log.debug("%s: drive %d cannot be mounted: %s", self._lower.name, drive, error)
            return False
        if contents is not None:
            with state.lock:
                self._lower.insert_recovered(contents)
                self._lower.promises.renew()
        return contents is not None

    @contextlib.contextmanager
    def _upkeep(self, drive: int, timeout_s: float | None) -> Iterator[bool]:
        lock = self._locks[drive]
        mine = lock.acquire(timeout=-1 if timeout_s is None else timeout_s)
        try:
            yield mine
        finally:
            if mine:
                lock.release()


def make_durable(state: StoreState) -> None:
    """Blocks that were copied to other drives and tiers are durable, as far as these work, before
    the segment that they came from goes.
    """
    for lower in state.lower_tiers:
        if lower.tier.writable:
            lower.tier.flush(lower.config.write_timeout)


class MoveOut(CopyJob):
    """Writes blocks of a segment again at the end of the same drive's log."""

    purpose = Purpose.MOVE
    from_memory = False

    def __init__(self, state: StoreState, lower: LowerTier, drive: int, slot: int) -> None:
        super().__init__(lower)
        self._state = state
        self._drive = drive
        self._slot = slot

    def is_wanted(self, row: int) -> bool:
        return self._place(row) != NONE

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self.target, self._place(row)

    def enter(self, row: int, location: int) -> None:
        self.target.relocate(row, self._place(row), location)
        self.target.reset_hits(row)
        self._state.counters.add("moved", self.target.name)

    def _place(self, row: int) -> int:
        return self.target.place_in(row, self._drive, self._slot)


class Reclaimer:
    """Frees segments. For one thread a drive at a time (DriveRoom)."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, demoter: Demoter | None
    ) -> None:
        self._state = state
        self._lower = lower
        self._tier = lower.tier
        self._mover = mover
        self._demoter = demoter
        self._rule = rule_named(lower.config.eviction)

    def reclaim(self, drive: int) -> bool:
        """Free one segment. False: there is none that could be."""
        tried: set[int] = set()
        while True:
            with self._state.lock:
                choice = self._choose(drive, tried)
            if choice is None or self._state.closing.is_set():
                return False
            segment, rows, stays = choice
            if self._empty(drive, segment, rows, stays):
                make_durable(self._state)
                if self._tier.release(drive, segment.slot):
                    break
            tried.add(segment.slot)
        with self._state.lock:
            self._state.counters.reclaimed_segments += 1
        return True

    def is_held_up(self, drive: int) -> bool:
        """Whether a segment could go once its blocks are no longer leased or being written."""
        assert self._state.held()
        facts = self._tier.drive(drive)
        if not facts.up or facts.lost:
            return False
        if self._tier.has_unentered(drive):
            return True
        leased, live = self._state.catalog.leased_rows, self._lower.live
        candidates = self._candidates(drive, set())
        return any(leased(live(drive, segment.slot)).any() for segment in candidates)

    def _empty(self, drive: int, segment: SegmentInfo, rows: Rows, stays: Bools) -> bool:
        """Take every block out of a segment. False: blocks in use found no room, the
        drive fails, or the store closes before all that should be demoted is.
        """
        if self._demoter is not None:
            self._demoter.demote(rows[~stays].tolist(), urgent=True)
            if self._state.closing.is_set():
                return False
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            self._clear(drive, segment.slot, rows[part].tolist(), stays[part].tolist())
        with self._state.lock:
            if len(self._lower.live(drive, segment.slot)):
                return False
            self._lower.segment_rows.pop((drive, segment.slot), None)
        return True

    def _choose(self, drive: int, tried: set[int]) -> tuple[SegmentInfo, Rows, Bools] | None:
        """The segment to go, its live rows and which of them are written again."""
        assert self._state.held()
        candidates = []
        for segment in self._candidates(drive, tried):
            rows = self._lower.live(drive, segment.slot)
            if not self._in_use(drive, rows):
                candidates.append((segment, rows, self._facts(drive, segment.slot, rows)))
        if not candidates:
            return None
        looked_at = [facts for *_, facts in candidates]
        at = abandoned(looked_at)
        if at is None:
            at = self._rule.coldest(looked_at)
        segment, rows, facts = candidates[at]
        others = looked_at[:at] + looked_at[at + 1 :]
        return segment, rows, self._rule.keep(facts, self._needed(rows), others)

    def _candidates(self, drive: int, tried: set[int]) -> list[SegmentInfo]:
        """The segments that may be chosen from, oldest first."""
        sealed = [one for one in self._tier.segments(drive) if one.slot not in tried]
        if self._lower.promises.total:  # else contracts could hide all that may go
            free = (one for one in sealed if not self._in_use(drive, self._live(drive, one)))
            oldest = list(itertools.islice(free, _OLDEST))
            return oldest + [one for one in sealed[-_NEWEST:] if one not in oldest]
        return sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]

    def _live(self, drive: int, segment: SegmentInfo) -> Rows:
        return self._lower.live(drive, segment.slot)

    def _in_use(self, drive: int, rows: Rows) -> bool:
        """Whether so much of a segment is leased, or under contract, that emptying it would gain
        nothing.
        """
        held = self._state.catalog.leased_rows(rows) | self._lower.bound(rows)
        used_bytes = self._sizes(rows[held]).sum()
        return bool(used_bytes > self._tier.drive(drive).segment_bytes // 2)

    def _sizes(self, rows: Rows) -> Rows:
        """Of the blocks' records."""
        payload_bytes = self._state.catalog.nbytes.array[rows].astype(np.int64)
        sizes: Rows = HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE
        return sizes

    def _facts(self, drive: int, slot: int, rows: Rows) -> SegmentFacts:
        stamps, below = self._look_below(drive, slot, rows)
        hits = self._lower.hits(rows)
        closed = self._state.catalog.closed.mask(rows)
        stamps[closed] = hits[closed] = 0
        sizes = self._sizes(rows)
        return SegmentFacts(
            capacity_bytes=self._tier.drive(drive).segment_bytes,
            sizes=sizes,
            stamps=stamps,
            hits=hits,
            below=below,
            closed_bytes=int(sizes[closed].sum()),
        )

    def _look_below(self, drive: int, slot: int, rows: Rows) -> tuple[Rows, Rows]:
        """When each block or what continues it was last used, and how many bytes continue it.

        Follows prefixes out of the segment, _DESCENDANTS_MAX blocks at most.
        """
        catalog, lower = self._state.catalog, self._lower
        stamps = catalog.tree.stamp.array[rows]
        below, steps = np.zeros(len(rows), dtype=np.int64), 0
        for index in np.flatnonzero(self._leads_out(drive, slot, rows)).tolist():
            waiting = list(catalog.tree.children(int(rows[index])))
            while waiting and steps < _DESCENDANTS_MAX:
                child = waiting.pop()
                inside = lower.place_in(child, drive, slot) != NONE
                if inside or not lower.copies.ready(child):
                    continue
                steps += 1
                below[index] += record_bytes(catalog.nbytes[child])
                stamps[index] = max(stamps[index], catalog.tree.stamp[child])
                waiting.extend(catalog.tree.children(child))
        return stamps, below

    def _leads_out(self, drive: int, slot: int, rows: Rows) -> Bools:
        """Which rows may have a child outside: not those whose only child is in the segment."""
        first, siblings = self._state.catalog.tree.only_children(rows)
        places = self._lower.copies.location.array[first] >> 32
        leads_out: Bools = (first != NONE) & (siblings | (places != (drive << 24 | slot)))
        return leads_out

    def _needed(self, rows: Rows) -> Bools:
        """Which rows are under contract, leased, or above a leased one."""
        catalog = self._state.catalog
        bound = self._lower.bound(rows)
        if not catalog.leased:
            return bound
        above: set[int] = set()
        for row in catalog.all_leased():
            while row != NONE and row not in above:
                above.add(row)
                row = catalog.tree.parent[row]
        needed: Bools = bound | np.array([row in above for row in rows.tolist()], dtype=bool)
        return needed

    def _clear(self, drive: int, slot: int, rows: list[int], stays: list[bool]) -> None:
        """Move or drop some of a segment's blocks.

        Those that cannot be moved are dropped too, unless they are in use.
        """
        state, catalog, lower = self._state, self._state.catalog, self._lower
        with state.lock:
            kept = [
                row
                for row, stay in zip(rows, stays, strict=True)
                if lower.place_in(row, drive, slot) != NONE and (stay or self._is_held(row))
            ]
            catalog.lease(kept)
            self._drop(drive, slot, rows, set(kept))
        job = MoveOut(state, lower, drive, slot)
        left, size = kept, ChunkSizer(PIECE_BYTES)
        while left:
            with state.lock:
                piece, left = self._mover.claim(job, left, size.nbytes)
            if not piece.rows or not self._mover.copy(job, piece, [drive], None):
                break
        facts = self._tier.drive(drive)
        writes = facts.up and not facts.full  # else it is the disk that has no room for them
        with state.lock:
            for row in kept:
                stuck = lower.place_in(row, drive, slot) != NONE
                if stuck and catalog.leases(row) == 1 and writes and not lower.is_bound(row):
                    self._evict(row)
            state.unlease(kept)

    def _drop(self, drive: int, slot: int, rows: list[int], kept: set[int]) -> None:
        """Evict blocks, and before each what continues it: a tail without its head is no use.

        What a slower tier has too leaves alone.
        """
        catalog, lower = self._state.catalog, self._lower
        for row in rows:
            if lower.place_in(row, drive, slot) == NONE or row in kept or row in lower.moving:
                continue
            if self._is_held(row):
                continue
            demoted = self._demoter is not None and self._demoter.lower.copies.ready(row)
            below = [] if demoted else catalog.tree.descendants(row)
            for victim in [row, *below][::-1]:
                if lower.copies.ready(victim) and not self._is_held(victim):
                    self._evict(victim)

    def _is_held(self, row: int) -> bool:
        """Whether a block is leased, or under a contract that rests on this tier."""
        return bool(self._state.catalog.leases(row)) or self._lower.is_bound(row)

    def _evict(self, row: int) -> None:
        self._state.admission.left(row, self._lower)
        self._lower.drop(row)
        self._state.counters.add("evicted", self._lower.name)
        self._state.catalog.forget_if_gone(row)
