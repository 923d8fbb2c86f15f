"""The depot's tiers of one worker, fastest first: what they hold, and what moving it takes.

Every request's blocks go into the first tier. With write-through they go into all others at once;
with write-back a block goes into the next tier when it leaves the one before. What was fetched from
a slow tier goes into the faster ones too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from kvdepot.index.table import Rows
from kvdepot.sim.drives import Drives
from kvdepot.sim.tiers import Index, Tier

WriteMode = Literal["through", "back"]
NOWHERE: Final = -1


@dataclass(slots=True)
class Shelf:
    """One tier: its blocks in the order of the index, and its drives."""

    tier: Tier
    index: Index
    drives: Drives
    block_bytes: float
    memory: bool = False
    """Copied from before any drive is asked, as the store does."""

    bytes_read: float = 0.0
    bytes_written: float = 0.0
    blocks_dropped: int = 0
    """Not written because too many writes were waiting."""

    reads: list[tuple[float, float]] = field(default_factory=list)
    """Times and bytes of what was asked for, and of what was written."""

    writes: list[tuple[float, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.tier.name

    def fetch(self, now_s: float, blocks: int) -> float:
        """Read blocks. Returns when the last one is there."""
        nbytes = blocks * self.block_bytes
        self.bytes_read += nbytes
        self.reads.append((now_s, nbytes))
        return self.drives.read(now_s, blocks, self.block_bytes)

    def put(self, now_s: float, rows: Rows) -> list[int]:
        """Take blocks in and write those that are new here. Returns who left for them."""
        leaves, held = self.tier.leaves, rows.tolist()
        gone: list[int] = []
        fresh = rows[~self.tier.has(rows)]
        if len(fresh):
            taken = self.drives.write(now_s, len(fresh), self.block_bytes)
            if taken < len(fresh):
                self.blocks_dropped += len(fresh) - taken
                fresh = fresh[:taken]
            leaves.hold_all(held)
            entered = self.tier.take_in(fresh, gone)
            leaves.release_all(held)
            self.bytes_written += entered * self.block_bytes
            self.writes.append((now_s, entered * self.block_bytes))
        return gone


class Shelves:
    """The tiers that one worker reaches: its node's own, then the shared ones."""

    def __init__(self, shelves: Sequence[Shelf], mode: WriteMode) -> None:
        self.shelves = list(shelves)
        self._through = mode == "through"

    def where(self, rows: Rows) -> Rows:
        """For each block the number of the fastest tier that has it, or NOWHERE."""
        found = np.full(len(rows), NOWHERE, dtype=np.int64)
        for number in range(len(self.shelves) - 1, -1, -1):
            found[self.shelves[number].tier.has(rows)] = number
        return found

    def keep(self, now_s: float, rows: Rows) -> None:
        """A prompt is computed: its blocks go where the write mode says."""
        if self._through:
            for shelf in self.shelves:
                shelf.put(now_s, rows)
            return
        for shelf in self.shelves:
            rows = np.array(shelf.put(now_s, rows)[::-1], dtype=np.int64)
            if not len(rows):
                return

    def hold(self, rows: list[int]) -> None:
        """Nobody of them leaves until `release`."""
        for shelf in self.shelves:
            shelf.tier.leaves.hold_all(rows)

    def release(self, rows: list[int]) -> None:
        for shelf in self.shelves:
            shelf.tier.leaves.release_all(rows)

    def use(self, rows: list[int], *, hit: bool) -> None:
        """Blocks of one prompt were used, head first; their trees have stamped them."""
        for shelf in self.shelves:
            shelf.tier.leaves.used(rows, hit=hit)
