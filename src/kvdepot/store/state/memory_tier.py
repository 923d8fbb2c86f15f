"""One memory tier as the store sees it: its arena, its copies, and what leaves it first."""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import Got
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.leaves import LeafOrder
from kvdepot.tiers.memory.arena import Arena

_HITS_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class ArenaTier:
    """Guarded by the store's lock."""

    arena: Arena
    catalog: Catalog
    copies: Copies
    leaves: LeafOrder
    spare_bytes: int = 0
    """How much move/memory_levels.py keeps free, where there is a slower memory tier; else 0."""
    overruns: int = 0
    """How often nothing was free, and a block had to leave at once."""
    short: dict[int, None] = field(default_factory=dict)
    """Slot sizes of which little is left."""
    hits: deque[int] = field(default_factory=lambda: deque(maxlen=_HITS_MAX))
    """Rows that were read in the memory tier below, and may belong here."""
    wake: threading.Event = field(default_factory=threading.Event)
    """Set when there is something to move between the memory tiers."""
    name: str = field(init=False)
    served: Got = field(init=False)
    """The answer for a block that is here."""

    def __post_init__(self) -> None:
        self.name = self.copies.tier
        self.served = Got(self.name)

    def image(self, row: int) -> memoryview:
        """The record of a block that is here."""
        nbytes = record_bytes(self.catalog.nbytes[row])
        return self.arena.image(self.copies.location[row], nbytes)

    def seal(self, row: int) -> None:
        """A slot that was reserved for a block is filled."""
        self.copies.seal(row)
        self.leaves.enter(row, self.arena.slot_bytes(record_bytes(self.catalog.nbytes[row])))

    def drop(self, row: int, *, keep_slot: bool = False) -> int:
        """Drop a block's copy and, unless asked not to, free its slot. Returns the slot."""
        if self.copies.ready(row):
            self.leaves.leave(row)
        location = self.copies.drop(row)
        if not keep_slot:
            self.arena.free(location)
        return location

    def note_hits_below(self, rows: list[int]) -> None:
        """Blocks were read in the memory tier below."""
        if not self.hits:
            self.wake.set()
        self.hits.extend(rows)

    def spare(self, nbytes: int) -> int:
        """How much is to be free for blocks of this size: two of them, at the least."""
        return max(self.spare_bytes, 2 * nbytes)

    def note_allocation(self, nbytes: int, *, full: bool) -> None:
        """A slot was asked for: wake move/memory_levels.py where few are left."""
        self.overruns += full
        group = self.arena.slot_bytes(nbytes)
        if full or self.arena.room(group) < self.spare(group):
            self.short[group] = None
            self.wake.set()
