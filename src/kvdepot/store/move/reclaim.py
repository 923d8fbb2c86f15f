"""Makes room on a volume: picks a segment, moves what earned it, drops the rest, frees it.

The lock is taken for a few hundred blocks at a time, so that callers are not held up by a segment
of many small ones; each step looks again at what may have changed meanwhile.
"""

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvdepot.core.volume import SEGMENT_SHIFT, Purpose
from kvdepot.format.record import record_bytes, record_sizes
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
"""Longest wait of write-back for room that leases hold, before blocks are dropped."""
_LOOK_AGAIN_S: Final = 0.05
_SHRINK_AGAIN_S: Final = 10.0
"""A volume whose leased blocks do not fit into fewer segments is tried again after this time, or
when there are no leases."""


class VolumeRoom:
    """Keeps room on the volumes of one tier. One thread at a time works on a volume."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, demoter: Demoter | None
    ) -> None:
        self._state = state
        self._lower = lower
        self.reclaimer = Reclaimer(state, lower, mover, demoter)
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """Held by the thread that reclaims on a volume or opens it."""
        self._shrinking: dict[int, float] = {}
        """Volumes that have more segments than they may, and when to go on although there are
        leases."""

    def make(self, volume: int, nbytes: int) -> bool:
        """Do what lets a refused append succeed. False: nothing helps."""
        with self._upkeep(volume, self._lower.config.write_timeout) as mine:
            if not mine:
                return False
            facts = self._state.volumes.facts(volume)
            if facts.lost:
                return self._open_again(volume)
            if not facts.up or facts.full:
                return False
            return facts.room_bytes >= nbytes or self.reclaimer.reclaim(volume)

    def wait_for(self, volume: int, nbytes: int) -> bool:
        """`make`, once leases and writes let go of room that they hold. False: nothing helps."""
        state = self._state
        deadline_s = state.clock.now() + _PATIENCE_S
        while not self.make(volume, nbytes):
            with state.lock:
                waits = state.clock.now() < deadline_s and not state.closing.is_set()
                held_up = waits and self.reclaimer.is_held_up(volume)
                if held_up:
                    state.lock.room.wait(_LOOK_AGAIN_S)
            if not held_up:
                return self.make(volume, nbytes)  # it may have become free just now
        return True

    def keep_spare(self, volume: int) -> None:
        """Reclaim ahead of need, while the new segment still has room for what is kept."""
        with self._upkeep(volume, 0.0) as mine:
            while mine:
                facts = self._state.volumes.facts(volume)
                if not facts.up or facts.full or facts.lost or facts.spare_segments >= 1:
                    return
                if not self.reclaimer.reclaim(volume):
                    return

    def shrink(self, number: int, timeout_s: float = 0.0) -> None:
        """Reclaim until a volume has no more segments than it may. What leases hold up, or another
        thread's reclaim, is left to the watchdog, which tries again.

        Leased blocks are moved, not dropped: where as many reclaims as there are segments have not
        made them fewer, the next would only write the same blocks again.
        """
        volume = self._state.volumes[number]
        self._shrinking[number] = 0.0
        with self._upkeep(number, timeout_s) as mine:
            fewest, in_vain = len(volume.segments().segments), 0
            while mine and not self._state.closing.is_set():
                if not volume.facts().surplus_segments:
                    self._shrinking.pop(number, None)
                    return
                if in_vain > fewest:
                    self._shrinking[number] = self._state.clock.now() + _SHRINK_AGAIN_S
                    return
                if not self.reclaimer.reclaim(number):
                    return
                left = len(volume.segments().segments)
                in_vain = 0 if left < fewest else in_vain + 1
                fewest = min(left, fewest)

    def shrink_again(self, volume: int) -> None:
        """Go on with what `shrink` could not end."""
        due_s = self._shrinking.get(volume)
        if due_s is not None and (
            not self._state.catalog.leased or self._state.clock.now() >= due_s
        ):
            self.shrink(volume)

    def restore(self, volume: int, timeout_s: float = 1.0) -> bool:
        """Open a volume that was lost again, unless another thread does. True: it can be used."""
        with self._upkeep(volume, timeout_s) as mine:
            return mine and self._state.volumes.facts(volume).lost and self._open_again(volume)

    def _open_again(self, number: int) -> bool:
        state, volumes = self._state, self._state.volumes
        entry = volumes.entries[number]
        if not entry.volume.facts().may_reopen:
            return False
        with state.lock:  # before its locations become invalid
            entry.mounts += 1  # what is being appended to it now is gone, too
            self._lower.forget_volume(number)
        blocks = volumes.reopen(entry)
        if blocks is not None:
            with state.lock:
                self._lower.insert_recovered([blocks])
                self._lower.pinned.renew()
            volumes.entered(entry)
        return blocks is not None

    @contextlib.contextmanager
    def _upkeep(self, volume: int, timeout_s: float | None) -> Iterator[bool]:
        lock = self._locks[volume]
        mine = lock.acquire(timeout=-1 if timeout_s is None else timeout_s)
        try:
            yield mine
        finally:
            if mine:
                lock.release()


def make_durable(state: StoreState) -> None:
    """Blocks that were copied to other volumes and tiers are durable, as far as these work, before
    the segment that they came from goes.
    """
    for lower in state.lower_tiers:
        if lower.writable:
            lower.volumes.sync(lower.config.write_timeout)


class MoveOut(CopyJob):
    """Writes blocks of a segment again at the end of the same volume's log."""

    purpose = Purpose.MOVE
    from_memory = False

    def __init__(self, state: StoreState, lower: LowerTier, volume: int, segment: int) -> None:
        super().__init__(lower)
        self._state = state
        self._volume = volume
        self._segment = segment

    def is_wanted(self, row: int) -> bool:
        return self._place(row) != NONE

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self.target, self._place(row)

    def enter(self, row: int, location: int) -> None:
        self.target.relocate(row, self._place(row), location)
        self.target.reset_hits(row)

    def _place(self, row: int) -> int:
        return self.target.place_in(row, self._volume, self._segment)


class Reclaimer:
    """Frees segments. For one thread a volume at a time (VolumeRoom)."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, demoter: Demoter | None
    ) -> None:
        self._state = state
        self._lower = lower
        self._volumes = state.volumes
        self._mover = mover
        self._demoter = demoter
        self._rule = rule_named(lower.config.eviction)

    def reclaim(self, volume: int) -> bool:
        """Free one segment. False: there is none that could be."""
        tried: set[int] = set()
        while True:
            with self._state.lock:
                choice = self._choose(volume, tried)
            if choice is None or self._state.closing.is_set():
                return False
            segment, rows, stays = choice
            if self._empty(volume, segment, rows, stays):
                make_durable(self._state)
                if self._volumes[volume].release(segment):
                    break
            tried.add(segment)
        self._volumes.metadata.segment_released()
        self._state.events.count("reclaimed_segments")
        return True

    def is_held_up(self, number: int) -> bool:
        """True if a segment could go once its blocks are no longer leased or being written."""
        assert self._state.lock.held()
        volume = self._volumes[number]
        facts = volume.facts()
        if not facts.up or facts.lost:
            return False
        if facts.writes or self._lower.appending[number]:
            return True
        leased, live = self._state.catalog.leased_rows, self._lower.live
        return any(
            leased(live(number, segment)).any() for segment in self._candidates(number, set())
        )

    def _empty(self, volume: int, segment: int, rows: Rows, stays: Bools) -> bool:
        """Take every block out of a segment. False: blocks in use found no room, the volume fails,
        or the store closes before all that should be demoted is.
        """
        if self._demoter is not None:
            self._demoter.demote(rows[~stays].tolist(), urgent=True)
            if self._state.closing.is_set():
                return False
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            self._clear(volume, segment, rows[part].tolist(), stays[part].tolist())
        with self._state.lock:
            if len(self._lower.live(volume, segment)):
                return False
            self._lower.forget_segment(volume, segment)
        return True

    def _choose(self, volume: int, tried: set[int]) -> tuple[int, Rows, Bools] | None:
        """The segment to go, its live rows and which of them are written again."""
        assert self._state.lock.held()
        candidates = []
        segment_bytes = self._volumes.facts(volume).segment_bytes
        for segment in self._candidates(volume, tried):
            rows = self._lower.live(volume, segment)
            if not self._in_use(rows, segment_bytes):
                facts = self._facts(volume, segment, rows, segment_bytes)
                candidates.append((segment, rows, facts))
        if not candidates:
            return None
        looked_at = [facts for *_, facts in candidates]
        at = abandoned(looked_at)
        if at is None:
            at = self._rule.coldest(looked_at)
        segment, rows, facts = candidates[at]
        others = looked_at[:at] + looked_at[at + 1 :]
        return segment, rows, self._rule.keep(facts, self._needed(rows), others)

    def _candidates(self, number: int, tried: set[int]) -> list[int]:
        """The segments that may be chosen from, oldest first: full ones all of whose records are in
        the index.
        """
        volume = self._volumes[number]
        table = volume.segments()
        tried = tried | self._lower.unentered(number, table)
        sealed = [one for one in table.segments[table.sealed].tolist() if one not in tried]
        if self._lower.pinned.total:  # else pins could hide all that may go
            segment_bytes = volume.facts().segment_bytes
            live = self._lower.live
            loose = (one for one in sealed if not self._in_use(live(number, one), segment_bytes))
            oldest = list(itertools.islice(loose, _OLDEST))
            return oldest + [one for one in sealed[-_NEWEST:] if one not in oldest]
        return sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]

    def _in_use(self, rows: Rows, segment_bytes: int) -> bool:
        """True if so much of a segment is leased or pinned that emptying it would gain
        nothing.
        """
        held = self._state.catalog.leased_rows(rows) | self._lower.bound(rows)
        return bool(self._sizes(rows[held]).sum() > segment_bytes // 2)

    def _sizes(self, rows: Rows) -> Rows:
        """Lengths of the blocks' records."""
        return record_sizes(self._state.catalog.nbytes.array[rows])

    def _facts(self, volume: int, segment: int, rows: Rows, segment_bytes: int) -> SegmentFacts:
        stamps, below = self._look_below(volume, segment, rows)
        hits = self._lower.hits(rows)
        closed = self._state.catalog.closed.mask(rows)
        stamps[closed] = hits[closed] = 0
        sizes = self._sizes(rows)
        return SegmentFacts(
            capacity_bytes=segment_bytes,
            sizes=sizes,
            stamps=stamps,
            hits=hits,
            below=below,
            closed_bytes=int(sizes[closed].sum()),
        )

    def _look_below(self, volume: int, segment: int, rows: Rows) -> tuple[Rows, Rows]:
        """Return each block's last use, with that of its descendants, and the descendants' bytes.

        Follows prefixes out of the segment, _DESCENDANTS_MAX blocks at most.
        """
        catalog, lower = self._state.catalog, self._lower
        stamps = catalog.tree.stamp.array[rows]
        below, steps = np.zeros(len(rows), dtype=np.int64), 0
        for index in np.flatnonzero(self._leads_out(volume, segment, rows)).tolist():
            waiting = list(catalog.tree.children(int(rows[index])))
            while waiting and steps < _DESCENDANTS_MAX:
                child = waiting.pop()
                inside = lower.place_in(child, volume, segment) != NONE
                if inside or not lower.copies.ready(child):
                    continue
                steps += 1
                below[index] += record_bytes(catalog.nbytes[child])
                stamps[index] = max(stamps[index], catalog.tree.stamp[child])
                waiting.extend(catalog.tree.children(child))
        return stamps, below

    def _leads_out(self, volume: int, segment: int, rows: Rows) -> Bools:
        """True for rows that may have a child outside the segment."""
        first, siblings = self._state.catalog.tree.only_children(rows)
        places = self._lower.copies.location.array[first] >> SEGMENT_SHIFT
        elsewhere = places != (volume << SEGMENT_SHIFT | segment)
        leads_out: Bools = (first != NONE) & (siblings | elsewhere)
        return leads_out

    def _needed(self, rows: Rows) -> Bools:
        """True for rows that are pinned, leased, or ancestors of a leased one."""
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

    def _clear(self, volume: int, segment: int, rows: list[int], stays: list[bool]) -> None:
        """Move or drop some of a segment's blocks.

        Those that cannot be moved are dropped too, unless they are in use.
        """
        state, catalog, lower = self._state, self._state.catalog, self._lower
        with state.lock:
            kept = [
                row
                for row, stay in zip(rows, stays, strict=True)
                if lower.place_in(row, volume, segment) != NONE and (stay or self._is_held(row))
            ]
            catalog.lease(kept)
            self._drop(volume, segment, rows, set(kept))
        job = MoveOut(state, lower, volume, segment)
        left, size = kept, ChunkSizer(PIECE_BYTES)
        while left:
            with state.lock:
                piece, left = self._mover.claim(job, left, size.nbytes)
            if not piece.rows or not self._mover.copy(job, piece, [volume], None):
                break
        facts = self._volumes.facts(volume)
        writes = facts.up and not facts.full  # else it is the disk that has no room for them
        with state.lock:
            for row in kept:
                stuck = lower.place_in(row, volume, segment) != NONE
                if stuck and catalog.leases(row) == 1 and writes and not lower.is_bound(row):
                    self._evict([row])
            state.unlease(kept)

    def _drop(self, volume: int, segment: int, rows: list[int], kept: set[int]) -> None:
        """Evict blocks, and before each what continues it: a tail without its head is no use.

        What a slower tier has too leaves alone.
        """
        catalog, lower = self._state.catalog, self._lower
        victims: dict[int, None] = {}
        for row in rows:
            if lower.place_in(row, volume, segment) == NONE or row in kept or row in lower.moving:
                continue
            if row in victims or self._is_held(row):
                continue
            demoted = self._demoter is not None and self._demoter.lower.copies.ready(row)
            below = [] if demoted else catalog.tree.descendants(row)
            for victim in [row, *below][::-1]:
                if lower.copies.ready(victim) and not self._is_held(victim):
                    victims[victim] = None
        self._evict(list(victims))

    def _is_held(self, row: int) -> bool:
        """True if a block is leased, or under a pin that rests on this tier."""
        return bool(self._state.catalog.leases(row)) or self._lower.is_bound(row)

    def _evict(self, rows: list[int]) -> None:
        for row in rows:
            self._state.writes.admission.left(row, self._lower)
        self._lower.drop_all(rows)
        self._state.events.count(f"evicted_{self._lower.name}", len(rows))
        for row in rows:
            self._state.catalog.forget_if_gone(row)
