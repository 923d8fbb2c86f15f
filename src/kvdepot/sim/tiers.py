"""The tiers of a simulated store: the production index over the blocks of a workload.

Every block of the trace has its row from the start; a tier's contents are in its LeafOrder, which
is the store's own code, as are the table, the tree and the eviction orders.

With times, each tier has drives, and the tiers of one worker form a stack, fastest first. Every
request's blocks go into the first tier. With write-through they go into all others at once; with
write-back a block goes into the next tier when it leaves the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from kvdepot.core.order import Order
from kvdepot.errors import StateError
from kvdepot.index.leaves import LeafOrder
from kvdepot.index.table import NONE, Bools, Keys, KeyTable, Rows
from kvdepot.index.tree import PrefixTree
from kvdepot.sim.drives import DriveQueue
from kvdepot.sim.workload import Workload

_TAG = 1
_GROUP = 1


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Table and tree with a row for each block; the row of a block is its number."""

    table: KeyTable
    tree: PrefixTree

    @classmethod
    def of(cls, workload: Workload) -> "BlockIndex":
        table = KeyTable()
        tree = PrefixTree(table)
        if workload.block_count:
            rows = table.add_many(_keys(workload))
            tree.attach_many(rows)
        return cls(table, tree)


class SimulatedTier:
    """Room for so many blocks, and the order in which they leave it."""

    def __init__(self, name: str, capacity_blocks: int, index: BlockIndex, order: Order) -> None:
        self.name = name
        self.capacity_blocks = capacity_blocks
        self.leaves = LeafOrder(index.table, index.tree, order)
        self.count = 0
        self.entered = 0
        self.evicted = 0

    def has(self, rows: Rows) -> Bools:
        """Which of the blocks are here."""
        return self.leaves.resident_rows(rows)

    def take_in(self, rows: Rows, gone: list[int] | None = None) -> int:
        """Bring in those blocks of a prompt that are not here, head first, as far as they fit.

        Call with all of the prompt held, so that it does not push itself out. Returns how many
        came in; `gone` gets the blocks that left for them.
        """
        fresh = rows[~self.has(rows)]
        self.shrink(max(0, self.capacity_blocks - len(fresh)), gone)
        enter = self.leaves.enter
        taken = fresh[: self.capacity_blocks - self.count].tolist()
        for row in taken:
            enter(row, _GROUP)
        self.count += len(taken)
        self.entered += len(taken)
        return len(taken)

    def shrink(self, blocks: int, gone: list[int] | None = None) -> bool:
        """Let blocks leave until no more than `blocks` are here; False if some may not."""
        while self.count > blocks:
            if not self._evict(gone):
                return False
        return True

    def _evict(self, gone: list[int] | None) -> bool:
        victim = self.leaves.coldest(_GROUP)
        if victim == NONE:
            return False
        if not self.leaves.resident(victim):
            raise StateError("the order chose a block that is not in the tier")
        self.leaves.leave(victim)
        self.count -= 1
        self.evicted += 1
        if gone is not None:
            gone.append(victim)
        return True


def _keys(workload: Workload) -> Keys:
    """Keys for block numbers: spread like digests, linked like prefixes."""
    numbers = np.arange(workload.block_count, dtype=np.uint64)
    parents = np.array(workload.parents, dtype=np.int64)
    words = np.empty((len(numbers), 4), dtype=np.uint64)
    words[:, 0] = _TAG
    words[:, 2] = _spread(numbers)
    words[:, 1] = np.where(parents == NONE, 0, words[parents, 2])
    words[:, 3] = numbers
    return words


def _spread(numbers: Keys) -> Keys:
    """Distinct uniform words for distinct numbers (the finalizer of SplitMix64)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


WriteMode = Literal["through", "back"]
NOWHERE: Final = -1


@dataclass(slots=True)
class TimedTier:
    """One tier: its blocks in the order of the index, and its drives."""

    tier: SimulatedTier
    index: BlockIndex
    drives: DriveQueue
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


class TierStack:
    """The tiers that one worker reaches: its node's own, then the shared ones."""

    def __init__(self, shelves: Sequence[TimedTier], mode: WriteMode) -> None:
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
