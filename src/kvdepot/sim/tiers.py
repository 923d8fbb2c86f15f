"""The tiers of a simulated store: the store's own index over the blocks of a workload.

Every block of the workload has a row from the start; the LeafOrder of a tier has its blocks. Table,
tree, LeafOrder and eviction orders are the store's own code. A TimedTier also has drives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from kvdepot.core.keys import Keys
from kvdepot.errors import StateError
from kvdepot.index.leaves import LeafOrder
from kvdepot.index.order import Order
from kvdepot.index.table import NONE, Bools, KeyTable, Rows
from kvdepot.index.tree import PrefixTree
from kvdepot.sim.drives import SimulatedDrives
from kvdepot.sim.workload import Workload

WriteMode = Literal["through", "back"]
NOWHERE: Final = -1
_TAG: Final = 1
_GROUP: Final = 1


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Table and tree; the row of a block is its number."""

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
    """A number of blocks, and the order of their eviction."""

    def __init__(self, name: str, capacity_blocks: int, index: BlockIndex, order: Order) -> None:
        self.name = name
        self.capacity_blocks = capacity_blocks
        self.index = index
        self.leaves = LeafOrder(index.table, index.tree, order)
        self.count = 0
        self.entered = 0
        self.evicted = 0

    def has(self, rows: Rows) -> Bools:
        return self.leaves.resident_rows(rows)

    def insert(self, rows: Rows, gone: list[int] | None = None) -> int:
        """Insert the missing blocks of a prompt, head first, as far as they fit.

        Call with all of the prompt held, so that it does not evict itself. Returns the number of
        inserted blocks; `gone` gets the evicted ones.
        """
        fresh = rows[~self.has(rows)]
        self.shrink(max(0, self.capacity_blocks - len(fresh)), gone)
        taken = fresh[: self.capacity_blocks - self.count].tolist()
        self.leaves.enter_all(taken, [_GROUP] * len(taken))
        self.count += len(taken)
        self.entered += len(taken)
        return len(taken)

    def shrink(self, blocks: int, gone: list[int] | None = None) -> bool:
        """Evict until at most `blocks` are left; False if held blocks prevent it."""
        while self.count > blocks:
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


class TimedTier(SimulatedTier):
    """A tier with drives. `memory` is copied before drives are read, as in the store."""

    def __init__(
        self,
        name: str,
        capacity_blocks: int,
        index: BlockIndex,
        order: Order,
        drives: SimulatedDrives,
        block_bytes: float,
        *,
        memory: bool = False,
    ) -> None:
        super().__init__(name, capacity_blocks, index, order)
        self.drives = drives
        self.block_bytes = block_bytes
        self.memory = memory
        self.blocks_dropped = 0
        """Blocks that were not written because too many writes were waiting."""
        self.bytes_read = 0.0
        self.bytes_written = 0.0

    def fetch(self, now_s: float, blocks: int) -> float:
        """Read blocks. Returns the time when the last one arrives."""
        self.bytes_read += blocks * self.block_bytes
        return self.drives.read(now_s, blocks, self.block_bytes)

    def put(self, now_s: float, rows: Rows) -> list[int]:
        """Write the blocks that are new. Returns the evicted ones."""
        gone: list[int] = []
        fresh = rows[~self.has(rows)]
        if len(fresh):
            taken = self.drives.write(now_s, len(fresh), self.block_bytes)
            self.blocks_dropped += len(fresh) - taken
            held = rows.tolist()
            self.leaves.hold_all(held)
            entered = self.insert(fresh[:taken], gone)
            self.leaves.release_all(held)
            self.bytes_written += entered * self.block_bytes
        return gone


def fastest_tier(tiers: Sequence[SimulatedTier], rows: Rows) -> Rows:
    """The number of the fastest tier that has each block, or NOWHERE."""
    found = np.full(len(rows), NOWHERE, dtype=np.int64)
    for number in range(len(tiers) - 1, -1, -1):
        found[tiers[number].has(rows)] = number
    return found


def leading(here: Bools) -> int:
    """The number of true values before the first false one."""
    return len(here) if here.all() else int(np.argmin(here))


def write_blocks(tiers: Sequence[TimedTier], mode: WriteMode, now_s: float, rows: Rows) -> None:
    """Write the blocks of a computed prompt to the tiers, fastest first.

    With write-through they are written to all tiers; with write-back to the first, and to the next
    tier on eviction.
    """
    for tier in tiers:
        gone = tier.put(now_s, rows)
        if mode == "back":
            rows = np.array(gone[::-1], dtype=np.int64)
            if not gone:
                return


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
