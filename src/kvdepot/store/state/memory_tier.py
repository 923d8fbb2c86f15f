"""A memory tier, and the allocation of its slots by eviction.

A slot is a free one, else that of the coldest leaf of the same size; else the coldest stretch of
the arena is emptied for a new slab.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.format.record import record_bytes
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.leaves import LeafOrder
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.memory.arena import UNOWNED, Arena, Slab
from kvdepot.policy.placing.reclaim import FREE, HELD, coldest_stretch

if TYPE_CHECKING:
    from kvdepot.store.state.state import StoreState

_HITS_MAX: Final = 4096
_EVICTIONS_BETWEEN_LOOKS: Final = 64
"""Least evictions within a size class between two checks if another class is colder. The cost of a
check grows with the number of blocks in memory, and so does the number of evictions between two."""
_STRETCHES: Final = 64
"""At least 1/64 of the memory changes its class at a time, for the same reason."""


@dataclass(slots=True, eq=False)
class ArenaTier:
    """A memory tier. Guarded by the store's lock."""

    arena: Arena
    catalog: Catalog
    copies: Copies
    leaves: LeafOrder
    spare_bytes: int = 0
    """Bytes that move/memory_levels.py keeps free if there is a slower memory tier; else 0."""
    overruns: int = 0
    """Number of allocations without a free slot, which had to evict a block at once."""
    full_s: float = -inf
    """Time at which an allocation last failed."""
    short: dict[int, None] = field(default_factory=dict)
    """Slot sizes with few free slots."""
    hits: deque[int] = field(default_factory=lambda: deque(maxlen=_HITS_MAX))
    """Rows that were read in the memory tier below, and may be moved here."""
    wake: threading.Event = field(default_factory=threading.Event)
    """Set when there is something to move between the memory tiers."""
    name: str = field(init=False)
    address: int = field(init=False)
    """Address of the arena."""

    def __post_init__(self) -> None:
        self.name = self.copies.tier
        self.address = self.arena.address

    def holds(self, addresses: Rows) -> Bools:
        """True for addresses in this memory tier."""
        end = self.address + self.arena.memory.nbytes
        here: Bools = (addresses >= self.address) & (addresses < end)
        return here

    def image(self, row: int) -> memoryview:
        """The record of a block of this tier."""
        nbytes = record_bytes(self.catalog.nbytes[row])
        return self.arena.image(self.copies.location[row], nbytes)

    def seal(self, row: int) -> None:
        """Make a filled slot visible as a block."""
        self.copies.seal(row)
        self.leaves.enter(row, record_bytes(self.catalog.nbytes[row]))

    def drop(self, row: int) -> None:
        """Drop a block's copy and free its slot, unless the slot belongs to another block after a
        wrong entry in the index.
        """
        if self.copies.ready(row):
            self.leaves.leave(row)
        location = self.copies.drop(row)
        if self.arena.owner(location) == row:
            self.arena.free(location)

    def note_hits_below(self, rows: list[int]) -> None:
        """Record that blocks were read in the memory tier below."""
        if not self.hits:
            self.wake.set()
        self.hits.extend(rows)

    def spare(self, nbytes: int) -> int:
        """The bytes to keep free for blocks of this size, at least two blocks."""
        return max(self.spare_bytes, 2 * nbytes)

    def note_allocation(self, nbytes: int, *, full: bool) -> None:
        """Record an allocation, and wake move/memory_levels.py if few slots are free."""
        self.overruns += full
        group = self.arena.slot_bytes(nbytes)
        if full or self.arena.room(group) < self.spare(group):
            self.short[group] = None
            self.wake.set()


class SlotAllocator:
    """Allocates slots of one memory tier. Call with the store's lock held."""

    def __init__(self, state: "StoreState", memory: ArenaTier) -> None:
        self._state = state
        self._memory = memory
        self._since_look = 0

    def allocate(self, nbytes: int, owner: int, *, may_wait: bool = False) -> int | None:
        """Allocate a slot for `owner`, evicting blocks if needed. None: all blocks are in use.

        `may_wait`: also return None if move/memory_levels.py will free slots without a loss.
        """
        found = self._take(nbytes, [owner], may_wait=may_wait)
        return found[0] if found else None

    def allocate_more(self, nbytes: int, owners: list[int], *, may_wait: bool = False) -> list[int]:
        """Allocate slots of one size after `Arena.allocate_all`, evicting blocks if needed. Returns
        slots for the first of the owners, as many as fit. Without owners it only keeps slots free
        in the fastest of two memory tiers.
        """
        if not owners:
            self._memory.note_allocation(nbytes, full=False)
        slots: list[int] = []
        while len(slots) < len(owners):
            found = self._take(nbytes, owners[len(slots) :], may_wait=may_wait)
            if not found:
                break
            slots += found
        return slots

    def _take(self, nbytes: int, owners: list[int], *, may_wait: bool = False) -> list[int]:
        """Allocate slots for the first of the owners; empty if all blocks are in use."""
        assert self._state.lock.held()
        arena = self._memory.arena
        location = arena.allocate(nbytes, owners[0])
        if self._memory.spare_bytes:
            self._memory.note_allocation(nbytes, full=location is None)
            if location is None and may_wait and self._memory.leaves.coldest(nbytes) != NONE:
                return []
        if location is None:
            found = self._reuse(arena.slot_bytes(nbytes), owners)
            if found:
                return found
            if arena.has_others(nbytes) and self._empty_stretch(nbytes):
                location = arena.allocate(nbytes, owners[0])
        if location is None:
            self._memory.full_s = self._state.clock.now()
            self._state.lock.work.notify_all()
            return []
        return [location]

    def _reuse(self, group: int, owners: list[int]) -> list[int]:
        """Evict the coldest block of this size and its chain, and reuse their slots."""
        memory = self._memory
        row = memory.leaves.coldest(group)
        if row == NONE:
            return []
        rows = memory.leaves.chain(row, len(owners)) if len(owners) > 1 else [row]
        self._since_look += len(rows)
        if self._since_look >= max(_EVICTIONS_BETWEEN_LOOKS, memory.copies.count // 4):
            self._since_look = 0
            stamp = memory.catalog.tree.stamp[row]
            if memory.arena.has_others(group) and self._empty_stretch(group, colder_than=stamp):
                location = memory.arena.allocate(group, owners[0])
                return [] if location is None else [location]
        memory.leaves.leave_chain(rows)
        if len(rows) == 1:
            slots = [memory.copies.drop(row)]
            memory.arena.set_owner(slots[0], owners[0])
        else:
            slots = memory.copies.drop_all(rows)
            for slot, owner in zip(slots, owners, strict=False):
                memory.arena.set_owner(slot, owner)
        self._gone(rows)
        return slots

    def _gone(self, rows: list[int]) -> None:
        """Count evicted blocks, and free the rows of those that no tier has."""
        memory = self._memory
        self._state.events.count(f"evicted_{memory.name}", len(rows))
        residency = memory.catalog.residency.view
        for lower in self._state.lower_tiers:
            for row in rows if lower.queue.deferred else ():
                if not memory.catalog.memory.ready(row):
                    lower.queue.deferred.pop(row, None)
        for row in rows:
            if not residency[row]:
                memory.catalog.forget_if_gone(row)

    def _empty_stretch(self, nbytes: int, colder_than: int = HELD) -> bool:
        """Evict all blocks in the coldest run of chunks that is large enough for a slab."""
        arena = self._memory.arena
        chunks = arena.chunks_for(nbytes)
        if not chunks:
            return False
        chunks = max(chunks, arena.chunk_count // _STRETCHES)
        stamps = self._chunk_stamps(arena.slot_bytes(nbytes))
        start = coldest_stretch(stamps, chunks)
        if start is None or stamps[start : start + chunks].max() >= colder_than:
            return False
        for slab in arena.slabs_in(start, chunks):
            for row in [owner for owner in slab.owners if owner != UNOWNED]:
                self._evict_subtree(row)
        return True

    def _chunk_stamps(self, group: int) -> Rows:
        """The newest stamp of the slab of each chunk; slabs of `group` itself count as HELD."""
        arena = self._memory.arena
        stamps = np.full(arena.chunk_count, FREE, dtype=np.int64)
        newest = self._newest_below()
        for slab in arena.slabs():
            stamps[slab.start : slab.start + slab.chunks] = (
                HELD if slab.slot_bytes == group else self._slab_stamp(slab, newest)
            )
        return stamps

    def _newest_below(self) -> dict[int, int]:
        """The newest stamp of each block in memory and its descendants; HELD if one is held.

        Goes from the newest block to the oldest. Each marks its ancestors up to the first marked
        one.
        """
        memory, tree = self._memory, self._memory.catalog.tree
        rows = np.flatnonzero(memory.copies.state.array == CopyState.READY).tolist()
        heat = {row: HELD if memory.leaves.held(row) else tree.stamp[row] for row in rows}
        newest: dict[int, int] = {}
        parents = tree.parent.view
        for row in sorted(rows, key=heat.__getitem__, reverse=True):
            above = row
            while above != NONE and above not in newest:
                newest[above] = heat[row]
                above = parents[above]
        return newest

    def _slab_stamp(self, slab: Slab, newest: dict[int, int]) -> int:
        """The newest stamp of a slab's blocks; HELD while a slot is being filled."""
        owners = [row for row in slab.owners if row != UNOWNED]
        return max((newest.get(row, HELD) for row in owners), default=FREE)

    def _evict_subtree(self, row: int) -> None:
        """Evict a block after its descendants."""
        memory = self._memory
        for other in [row, *memory.catalog.tree.descendants(row)][::-1]:
            if memory.copies.ready(other):
                memory.drop(other)
                self._gone([other])
