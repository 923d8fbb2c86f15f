"""What the parts of a store share: the catalog, the memory, the disk tier, one lock.

`changed` is that lock; it is notified whenever room, work or an outcome appears that somebody may
wait for. It is held for bookkeeping only, never across I/O or copies.
"""

import threading
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.codec.record import record_bytes
from kvdepot.core.clock import Clock
from kvdepot.core.config import Config
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.store.counters import Counters
from kvdepot.tiers.arena import Arena
from kvdepot.tiers.contents import Contents
from kvdepot.tiers.ssd import SegmentTier, drive_of, slot_of

TEMPORARY: Final = -2
"""Owner of a slot that belongs to a transfer, not to a block."""


@dataclass(slots=True)
class Stock:
    """Shared state of one store."""

    config: Config
    clock: Clock
    catalog: Catalog
    arena: Arena
    staging: Arena
    ssd: SegmentTier | None
    counters: Counters = field(default_factory=Counters)
    changed: threading.Condition = field(init=False)
    work: threading.Condition = field(init=False)
    """The same lock; notified when there is something to write, or the store closes."""
    dirty: deque[int] = field(default_factory=deque)
    """Rows in memory that wait to be written down, oldest first."""
    dirty_bytes: int = 0
    dirty_tickets: dict[int, int] = field(default_factory=dict)
    """Rows waiting or being written, oldest first, with the number of their arrival."""
    tickets: int = 0
    segment_rows: "dict[tuple[int, int], array[int]]" = field(default_factory=dict)
    """(drive, slot) to the rows once written there; some have left since."""
    moving: set[int] = field(default_factory=set)
    """Rows whose record is being written again by a reclaim."""
    writers: int = 0
    """Threads that write dirty blocks down; without any, blocks stay in memory."""
    closing: bool = False

    def __post_init__(self) -> None:
        lock = threading.Lock()
        self.changed, self.work = threading.Condition(lock), threading.Condition(lock)

    def drop_memory(self, row: int, *, keep_slot: bool = False) -> int:
        """Drop a block's copy in memory and, unless asked not to, free its slot.

        Returns the slot.
        """
        catalog = self.catalog
        if catalog.memory.ready(row):
            catalog.leaves.leave(row)
        location = catalog.memory.drop(row)
        if not keep_slot:
            self.arena.free(location)
        return location

    def drop_disk(self, row: int) -> None:
        """Drop a block's copy on disk from the books; its bytes die with their segment."""
        location = self.catalog.disk.drop(row)
        if self.ssd is not None:
            self.ssd.discard([location], [self.catalog.nbytes[row]])

    def drop_if_unreadable(self, row: int) -> None:
        """Drop a copy on a drive that is down, so that the block can be kept in memory anew."""
        if not self.disk_usable(self.catalog.disk.location[row]):
            self.drop_disk(row)

    def drop_all(self, row: int) -> None:
        """Drop a block nobody uses from every tier."""
        if self.catalog.memory.ready(row):
            self.drop_memory(row)
        if self.catalog.disk.ready(row):
            self.drop_disk(row)
        self.catalog.forget_if_gone(row)

    def unlease(self, rows: list[int]) -> None:
        """End the use of rows, and let go of those that were removed meanwhile."""
        for row in self.catalog.unlease(rows):
            if self.catalog.nbytes.view[row]:
                self.drop_all(row)
        self.changed.notify_all()

    def disk_usable(self, location: int) -> bool:
        """Whether the drive of a location works, as far as is known."""
        return self.ssd is not None and self.ssd.drives[drive_of(location)].breaker.health().ok

    def mark_dirty(self, row: int) -> None:
        """A sealed block in memory waits to be written; it cannot be evicted before."""
        self.catalog.leaves.hold(row)
        self.tickets += 1
        self.dirty_tickets[row] = self.tickets
        self.dirty.append(row)
        self.dirty_bytes += record_bytes(self.catalog.nbytes[row])

    def take_in(self, contents: Contents) -> None:
        """Enter blocks found on disk, those already known excepted."""
        known = self.catalog.table.find_many(contents.words)
        new = known == NONE
        for row, location in zip(
            known[~new].tolist(), contents.locations[~new].tolist(), strict=True
        ):
            self._enter_known(row, location)
        locations = contents.locations[new]
        rows = self.catalog.recover(contents.words[new], contents.payload_bytes[new], locations)
        if not len(rows):
            return
        order = np.argsort(locations >> 32, kind="stable")
        places, starts = np.unique(locations[order] >> 32, return_index=True)
        for place, part in zip(places.tolist(), np.split(rows[order], starts[1:]), strict=True):
            listed = self.segment_rows.setdefault((place >> 24, place & 0xFFFFFF), array("i"))
            listed.frombytes(part.astype(np.int32).tobytes())

    def on_disk(self, row: int, location: int) -> None:
        """A block's record is at `location` now: count it, and let reclaim find it."""
        if self.ssd is not None:
            self.ssd.count(location, self.catalog.nbytes[row])
        self._list(row, location)

    def _list(self, row: int, location: int) -> None:
        self.segment_rows.setdefault((drive_of(location), slot_of(location)), array("i")).append(
            row
        )

    def _enter_known(self, row: int, location: int) -> None:
        if self.catalog.disk.absent(row):
            self.catalog.disk.reserve(row, location)
            self.catalog.disk.seal(row)
            self._list(row, location)
        elif self.ssd is not None:
            self.ssd.discard([location], [self.catalog.nbytes[row]])
