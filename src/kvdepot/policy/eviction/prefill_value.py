"""The `value` order: evicts the block that saves the fewest GPU seconds for its place.

A reuse of a block saves the prefill of its tokens, which takes longer the more context they attend
to; so a block deep in a prompt is worth more than one at its head. `ReuseDensity` estimates the
chance of a reuse. Each class of depth has its own queues, and both the expected reuses and the
recency of a block are multiplied by the worth of its class.
"""

from bisect import bisect_right
from typing import Final

import numpy as np

from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import KeyTable
from kvdepot.index.tree import PrefixTree
from kvdepot.policy.eviction.reuse_density import QUEUES, ReuseDensity

CROSSOVER_TOKENS: Final = 30_000.0
"""The context at which attention takes as long as the rest of a token's prefill; about right for a
model of eight billion parameters, larger for larger models."""
_BOUNDS: Final = (1.25, 1.75, 2.5, 3.5)
"""Upper bounds of the classes of depth, in costs of a token without context."""
_WORTHS: Final = tuple(cost**0.5 for cost in (1.1, 1.5, 2.1, 3.0, 4.5))
"""The square root of a token's cost in each class. The root, because deep blocks are reused less
often than their kind, which ignores depth, predicts."""


class PrefillValue(ReuseDensity):
    """Evicts the block with the fewest expected GPU seconds saved per place and time."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(_WORTHS)
        per_block = CROSSOVER_TOKENS / block_tokens
        self._bounds = [(bound - 1.0) * per_block for bound in _BOUNDS]

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        super().bind(rows, tree, queues)
        self._first = rows.column(np.uint8, 0)
        """The first queue of the row's class."""

    def queue(self, row: int) -> int:
        return super().queue(row) + self._first.view[row]

    def entered(self, row: int) -> None:
        depth_class = bisect_right(self._bounds, self._tree.depth(row))
        self._first.view[row] = depth_class * QUEUES
        super().entered(row)
