"""`value`: the block that saves the fewest GPU seconds for its place leaves first.

A reuse of a block saves the prefill of its tokens. That takes longer the more context they attend
to, so a block far down a prompt is worth more than one at its head. How likely a reuse is comes
from `ReuseDensity`; each class of depth has queues of its own, and a reuse counts for its savings,
in what is promised as in the recency that promises are held against.
"""

from bisect import bisect_right
from typing import Final

import numpy as np

from kvdepot.core.order import EvictionQueues, RowTable, TreeView
from kvdepot.policy.eviction.reuse_density import QUEUES, ReuseDensity

CROSSOVER_TOKENS: Final = 30_000.0
"""The context at which attention takes as long as all the rest of a token's prefill: about that of
a model of eight billion parameters; larger ones have more."""
_BOUNDS: Final = (1.25, 1.75, 2.5, 3.5)
"""Where classes of depth end, in costs of a token without context."""
_WORTHS: Final = tuple(cost**0.5 for cost in (1.1, 1.5, 2.1, 3.0, 4.5))
"""The roots of what a token costs in each class: deep blocks are reused less often than their kind,
which knows no depth, says."""


class PrefillValue(ReuseDensity):
    """Fewest expected GPU seconds saved per place and time first."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(_WORTHS)
        per_block = CROSSOVER_TOKENS / block_tokens
        self._bounds = [(bound - 1.0) * per_block for bound in _BOUNDS]

    def bind(self, rows: RowTable, tree: TreeView, queues: EvictionQueues) -> None:
        super().bind(rows, tree, queues)
        self._first = rows.column(np.uint8, 0)
        """The first queue of the row's class."""

    def queue(self, row: int) -> int:
        return super().queue(row) + self._first.view[row]

    def entered(self, row: int) -> None:
        at = bisect_right(self._bounds, self._tree.depth(row))
        self._first.view[row] = at * QUEUES
        super().entered(row)
