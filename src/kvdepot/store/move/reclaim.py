"""Makes room on a volume: chooses a segment, moves its valuable blocks, drops the others, frees it.

The lock is held for a few hundred blocks at a time, so that callers do not wait for a segment of
many small blocks. Each step checks again what may have changed meanwhile.
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
from kvdepot.policy.placing.reclaim import SegmentFacts, abandoned, most_garbage, rule_named
from kvdepot.store.move.demote import Demoter
from kvdepot.store.move.mover import PIECE_BYTES, BlockMover, CopyJob
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.lower_tier import LowerTier, has_bound
from kvdepot.store.state.state import StoreState

_OLDEST: Final = 8
_NEWEST: Final = 4
"""Number of the newest segments that are candidates too, for a prompt larger than the drive."""
_DESCENDANTS_MAX: Final = 4096
"""Most descendants of a segment's blocks that are counted."""
_STEP: Final = 256
"""Most blocks handled while the lock is held."""
_PATIENCE_S: Final = 2.0
"""Longest wait for leased room before write-back gives blocks up."""
_LOOK_AGAIN_S: Final = 0.05
_SHRINK_AGAIN_S: Final = 10.0
"""A volume that could not be shrunk because of leases is tried again after this time, or when there
are no leases."""


class VolumeRoom:
    """Keeps room on the volumes of one tier. One thread at a time works on a volume."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, demoter: Demoter | None
    ) -> None:
        self._state = state
        self._lower = lower
        self.reclaimer = Reclaimer(state, lower, mover, demoter)
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """One lock for each volume, held while it is reclaimed or reopened."""
        self._shrinking: dict[int, float] = {}
        """Volumes with surplus segments, and the time to try again even if there are leases."""

    def make(self, volume: int, nbytes: int) -> bool:
        """Make room for a refused append. False: that is not possible."""
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
        """`make`, after waiting for leases and writes that hold room. False:
        that is not possible.
        """
        state = self._state
        deadline_s = state.clock.now() + _PATIENCE_S
        while not self.make(volume, nbytes):
            with state.lock:
                waits = state.clock.now() < deadline_s and not state.closing.is_set()
                held_up = waits and self.reclaimer.is_held_up(volume)
                if held_up:
                    state.lock.room.wait(_LOOK_AGAIN_S)
            if not held_up:
                return self.make(volume, nbytes)  # room may have become free since
        return True

    def keep_spare(self, volume: int) -> None:
        """Reclaim ahead of need, while the open segment has room for the blocks that are moved."""
        with self._upkeep(volume, 0.0) as mine:
            while mine:
                facts = self._state.volumes.facts(volume)
                if not facts.up or facts.full or facts.lost or facts.spare_segments >= 1:
                    return
                if not self.reclaimer.reclaim(volume):
                    return

    def shrink(self, number: int, timeout_s: float = 0.0) -> None:
        """Reclaim until a volume has no surplus segments. If leases or another thread's reclaim
        prevent that, the watchdog tries again.

        Leased blocks are moved, not dropped. So it ends after as many reclaims as there are
        segments: more would only write the same blocks again.
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
        """Continue a `shrink` that could not be completed."""
        due_s = self._shrinking.get(volume)
        if due_s is not None and (
            not self._state.catalog.leased or self._state.clock.now() >= due_s
        ):
            self.shrink(volume)

    def restore(self, volume: int, timeout_s: float = 1.0) -> bool:
        """Reopen a lost volume, unless another thread does. True: it can be used."""
        with self._upkeep(volume, timeout_s) as mine:
            return mine and self._state.volumes.facts(volume).lost and self._open_again(volume)

    def _open_again(self, number: int) -> bool:
        state, volumes = self._state, self._state.volumes
        entry = volumes.entries[number]
        if not entry.volume.facts().may_reopen:
            return False
        with state.lock:  # before its locations become invalid
            entry.mounts += 1  # appends under way are lost, too
            self._lower.forget_volume(number)
        blocks = volumes.reopen(entry)
        if blocks is not None:
            with state.lock:
                blocks = volumes.without_removed(entry, blocks)
                self._lower.insert_recovered([blocks])
                for other in state.lower_tiers:
                    if other is not self._lower and not self._lower.volumes.is_remote:
                        other.queue.owed.recall(blocks.words, blocks.stamps)
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
    """Sync all working volumes, so that blocks copied to them are durable before their segment is
    freed.
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

    def enter(self, rows: list[int], locations: list[int]) -> None:
        for row, location in zip(rows, locations, strict=True):
            self.target.relocate(row, self._place(row), location)
        self.target.reset_hits(rows)

    def _place(self, row: int) -> int:
        return self.target.place_in(row, self._volume, self._segment)


class Reclaimer:
    """Frees segments. Used by one thread for each volume at a time (VolumeRoom)."""

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
        """Free one segment. False: none can be freed."""
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
        """True if a segment could be freed once its blocks are no longer leased
        or being written.
        """
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
        """Move or drop all blocks of a segment. False: there was no room for blocks in use, the
        volume failed, or the store closed before all blocks were demoted.
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
        """Choose a segment to free. Returns it, its live rows, and True for rows to be moved."""
        assert self._state.lock.held()
        garbage = self._garbage(volume, tried)
        if garbage is not None:
            rows = self._lower.live(volume, garbage)
            closed = self._state.catalog.closed.mask(rows)
            return garbage, rows, self._needed(rows) | ~closed
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

    def _garbage(self, number: int, tried: set[int]) -> int | None:
        """A full segment at least half of which is dead records, if there is one."""
        volume = self._volumes[number]
        facts, table = volume.facts(), volume.segments()
        if facts.is_remote:
            return None  # objects have no fixed size
        tried = tried | self._lower.unentered(number, table)
        mine = np.flatnonzero(table.sealed & ~np.isin(table.segments, list(tried)))
        at = most_garbage(table.live_bytes[mine], facts.segment_bytes)
        return None if at is None else int(table.segments[mine[at]])

    def _candidates(self, number: int, tried: set[int]) -> list[int]:
        """The candidates, oldest first: full segments with all of their records in the index."""
        volume = self._volumes[number]
        table = volume.segments()
        tried = tried | self._lower.unentered(number, table)
        sealed = [one for one in table.segments[table.sealed].tolist() if one not in tried]
        if has_bound(self._lower):  # else bound blocks could hide all reclaimable segments
            segment_bytes = volume.facts().segment_bytes
            live = self._lower.live
            loose = (one for one in sealed if not self._in_use(live(number, one), segment_bytes))
            oldest = list(itertools.islice(loose, _OLDEST))
            return oldest + [one for one in sealed[-_NEWEST:] if one not in oldest]
        return sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]

    def _in_use(self, rows: Rows, segment_bytes: int) -> bool:
        """True if more than half of a segment is leased or pinned, so that
        moving it gains little.
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
        """Return the last use of each block and its descendants, and the bytes of the descendants.

        Looks at _DESCENDANTS_MAX descendants outside the segment at most.
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
        """Move or drop some blocks of a segment. Blocks that cannot be moved are dropped, unless
        they are in use.
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
        writes = facts.up and not facts.full  # else the disk itself is full
        with state.lock:
            for row in kept:
                stuck = lower.place_in(row, volume, segment) != NONE
                if stuck and catalog.leases(row) == 1 and writes and not lower.is_bound(row):
                    self._evict([row])
            state.unlease(kept)

    def _drop(self, volume: int, segment: int, rows: list[int], kept: set[int]) -> None:
        """Evict blocks, and before each its descendants, which are useless without it.

        A block that a slower tier has too is evicted without its descendants.
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
        """True if a block is leased, or pinned to this tier."""
        return bool(self._state.catalog.leases(row)) or self._lower.is_bound(row)

    def _evict(self, rows: list[int]) -> None:
        for row in rows:
            self._state.writes.admission.left(row, self._lower)
        self._lower.drop_all(rows)
        self._state.events.count(f"evicted_{self._lower.name}", len(rows))
        for row in rows:
            self._state.catalog.forget_if_gone(row)
