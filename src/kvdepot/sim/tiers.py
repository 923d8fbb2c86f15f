"""The tiers of a simulated store: the production index over the blocks of a workload.

Every block of the trace has its row from the start; what a tier holds is known to its LeafOrder,
which is the store's own code, as are the table, the tree and the eviction orders.
"""

from dataclasses import dataclass

import numpy as np

from kvdepot.core.order import Order
from kvdepot.errors import StateError
from kvdepot.index.leaves import LeafOrder
from kvdepot.index.table import NONE, Bools, Keys, KeyTable, Rows
from kvdepot.index.tree import PrefixTree
from kvdepot.sim.requests import Workload

_TAG = 1
_GROUP = 1


@dataclass(frozen=True, slots=True)
class Index:
    """Table and tree with a row for each block; the row of a block is its number."""

    table: KeyTable
    tree: PrefixTree

    @classmethod
    def of(cls, workload: Workload) -> "Index":
        table = KeyTable()
        tree = PrefixTree(table)
        if workload.block_count:
            rows = table.add_many(_keys(workload))
            tree.attach_many(rows)
        return cls(table, tree)


class Tier:
    """Room for so many blocks, and the order in which they leave it."""

    def __init__(self, name: str, capacity_blocks: int, index: Index, order: Order) -> None:
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
