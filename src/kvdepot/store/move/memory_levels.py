"""Moves blocks between two memory tiers.

Keeps some of the faster memory free: the first blocks of the eviction order are moved down if they
are worth a slot there, and blocks that were read in the slower memory are moved up if they are
worth it (policy/placing/memory_levels.py). Blocks are copied without the lock and verified.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import HEAD_BYTES, TABLE_OFFSET, own_chunk_bytes, record_bytes
from kvdepot.index.table import NONE
from kvdepot.native import COPY, VERIFY, address_of
from kvdepot.policy.placing.memory_levels import ExpectedReuse, is_kept, is_promoted
from kvdepot.store.state.memory_tier import ArenaTier, SlotAllocator
from kvdepot.store.state.state import StoreState

_PIECE_BYTES: Final = 8 << 20
_BLOCKS_MAX: Final = 32
"""Most blocks copied in one batch, and examined while the lock is held."""
_PAUSE_S: Final = 0.05
"""Blocks that were read in the slower memory wait for this time before they move up."""
_SPARE_SHARE: Final = 64
"""1/64 of the faster memory is kept free, and twice that when there is time."""
_SPARE_SHARE_MAX: Final = 8
"""Up to 1/8 is kept free after blocks had to be evicted before they were copied."""


@dataclass(slots=True)
class MemoryMove:
    """Blocks being moved from one memory tier to the other, all leased."""

    rows: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    """Stamp of each block's last use, to detect a use during the copy."""
    copied: list[int] = field(default_factory=list)
    """The rows to copy; the others are only dropped."""


class MemoryLevels:
    """The background thread of a store with two memories."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._upper, self._lower = state.memory_tiers
        self._return_times = state.return_times
        self._slots = SlotAllocator(state, self._lower)
        self._upper.spare_bytes = max(1, self._upper.arena.capacity_bytes // _SPARE_SHARE)
        self._full = 0
        self._since_s = 0.0
        self.thread = threading.Thread(target=self._run, name="kvdepot-memory-levels", daemon=True)

    def wake(self) -> None:
        self._upper.wake.set()

    def _run(self) -> None:
        try:
            while not self._state.closing.is_set():
                if not self._bring_down() and not (self._is_time() and self._bring_up()):
                    self._upper.wake.wait(_PAUSE_S if self._upper.hits else None)
                    self._upper.wake.clear()
        finally:
            self._upper.spare_bytes = 0  # nothing keeps memory free any more

    def _is_time(self) -> bool:
        """True if blocks that were read in the slower memory have waited for _PAUSE_S."""
        now_s = self._state.clock.now()
        if not self._upper.hits:
            self._since_s = now_s
        return now_s - self._since_s >= _PAUSE_S

    def _bring_down(self) -> bool:
        """Move blocks down. False: there was nothing to do."""
        with self._state.lock:
            self._adjust_spare()
            move = self._choose_leaving()
        if move.rows:
            self._move(move, self._upper, self._lower)
        return bool(move.rows)

    def _bring_up(self) -> bool:
        """Move up blocks that were read in the slower memory. False: there was nothing to do."""
        with self._state.lock:
            tried = bool(self._upper.hits)
            move = self._choose_returning()
        if move.rows:
            self._move(move, self._lower, self._upper)
        return tried

    def _adjust_spare(self) -> None:
        """Keep more memory free after blocks were evicted that had not been copied."""
        assert self._state.lock.held()
        upper = self._upper
        if upper.overruns != self._full:
            self._full = upper.overruns
            most = upper.arena.capacity_bytes // _SPARE_SHARE_MAX
            upper.spare_bytes = max(1, min(most, 2 * upper.spare_bytes))

    def _choose_leaving(self) -> MemoryMove:
        """Choose and lease the next blocks to leave the faster memory, tail first."""
        assert self._state.lock.held()
        upper = self._upper
        for group in list(upper.short):
            row = upper.leaves.coldest(group)
            if upper.arena.room(group) >= 2 * upper.spare(group) or row == NONE:
                del upper.short[group]
                continue
            rows = upper.leaves.chain(row, min(_BLOCKS_MAX, max(1, _PIECE_BYTES // group)))
            move = self._leased(rows)
            for row in rows:
                if self._lower.copies.absent(row) and self._reserve_below(row, group):
                    move.copied.append(row)
            return move
        return MemoryMove()

    def _choose_returning(self) -> MemoryMove:
        """Choose and lease blocks of the slower memory that are worth a slot in the faster one."""
        assert self._state.lock.held()
        upper, lower, catalog = self._upper, self._lower, self._state.catalog
        rows: list[int] = []
        total = 0
        for _ in range(min(len(upper.hits), _BLOCKS_MAX)):
            row = upper.hits.popleft()
            wanted = lower.copies.ready(row) and upper.copies.absent(row) and catalog.is_live(row)
            if not wanted or not self._belongs_above(row):
                continue
            nbytes = record_bytes(catalog.nbytes[row])
            slot = upper.arena.allocate(nbytes, row)
            upper.note_allocation(nbytes, full=False)
            if slot is None:
                continue
            upper.copies.reserve(row, slot)
            rows.append(row)
            total += nbytes
            if total >= _PIECE_BYTES:
                break
        move = self._leased(rows)
        move.copied = list(rows)
        return move

    def _leased(self, rows: list[int]) -> MemoryMove:
        catalog = self._state.catalog
        catalog.lease(rows)
        return MemoryMove(rows, [catalog.tree.stamp[row] for row in rows])

    def _reserve_below(self, row: int, group: int) -> bool:
        """Reserve a slot in the slower memory for a block that is worth it. False: it is not
        copied.
        """
        assert self._state.lock.held()
        lower = self._lower
        if row in self._state.catalog.closed:
            return False  # its session will not come back
        if lower.arena.room(group) < group:
            incumbent = lower.leaves.coldest(group)
            if incumbent != NONE and not is_kept(self._outlook(row), self._outlook(incumbent)):
                return False
        slot = self._slots.allocate(group, row)
        if slot is None:
            return False
        lower.copies.reserve(row, slot)
        return True

    def _belongs_above(self, row: int) -> bool:
        upper = self._upper
        if row in self._state.catalog.closed:
            return False
        group = upper.arena.slot_bytes(record_bytes(self._state.catalog.nbytes[row]))
        if upper.arena.room(group) > 2 * upper.spare(group) + _PIECE_BYTES:
            return True  # more than is kept free
        incumbent = upper.leaves.coldest(group)
        return incumbent != NONE and is_promoted(self._outlook(row), self._outlook(incumbent))

    def _move(self, move: MemoryMove, source: ArenaTier, target: ArenaTier) -> None:
        """Copy blocks without the lock, then make the copies visible and drop the originals."""
        intact: dict[int, bool] = {}
        try:
            intact = {row: self._copy(row, source, target) for row in move.copied}
        finally:
            with self._state.lock:
                self._settle(move, source, target, intact)

    def _copy(self, row: int, source: ArenaTier, target: ArenaTier) -> bool:
        """Copy and verify a record. False: it is damaged."""
        catalog = self._state.catalog
        image, copy = source.image(row), target.image(row)
        key, nbytes = catalog.table.key(row), catalog.nbytes[row]
        chunk_bytes = own_chunk_bytes(image, key, nbytes)
        if not chunk_bytes:
            return False
        at, to = address_of(image)[0], address_of(copy)[0]
        body, end = HEAD_BYTES, HEAD_BYTES + nbytes
        ops: list[tuple[Any, ...]] = [
            (0, at, to, body, 0, 0, COPY),
            (0, at + body, to + body, nbytes, chunk_bytes, at + TABLE_OFFSET, VERIFY),
        ]
        if len(image) > end:
            ops.append((0, at + end, to + end, len(image) - end, 0, 0, COPY))
        return not transfers(ops).any()

    def _settle(
        self, move: MemoryMove, source: ArenaTier, target: ArenaTier, intact: dict[int, bool]
    ) -> None:
        """Make the intact copies visible in the target, and drop the originals that may go."""
        assert self._state.lock.held()
        state, counts = self._state, Counter[str]()
        for row in move.copied:
            if intact.get(row) and state.catalog.is_live(row):
                target.seal(row)
                counts["promoted" if target is self._upper else "demoted"] += 1
            else:
                target.drop(row)
                counts["quarantined"] += intact.get(row) is False
        stamps = state.catalog.tree.stamp
        used = [stamps[row] != stamp for row, stamp in zip(move.rows, move.stamps, strict=True)]
        for row, again in zip(move.rows, used, strict=True):
            damaged = intact.get(row) is False
            if self._may_go(row, source, damaged=damaged, used=again):
                source.drop(row)
                counts["evicted_dram"] += source is self._upper and not damaged
        for name, count in counts.items():
            state.events.count(name, count)
        state.unlease(move.rows)

    def _may_go(self, row: int, source: ArenaTier, *, damaged: bool, used: bool) -> bool:
        """True if the original copy is no longer needed."""
        assert self._state.lock.held()
        state = self._state
        if state.catalog.leases(row) != 1 or not source.copies.ready(row):
            return False
        if source is self._lower:
            return damaged or self._upper.copies.ready(row)
        return source.leaves.may_leave(row) and (damaged or not used)

    def _outlook(self, row: int) -> ExpectedReuse:
        return self._return_times.expect(row)
