"""The interface of eviction orders, and LRU.

The index keeps the evictable rows in queues (leaves.py: no children in the tier, not in use). An
`Order` chooses the queue of each row, and the row to evict first. It is called for every block that
enters the tier, is used or leaves.
"""

from collections.abc import Sequence
from typing import Protocol

from kvdepot.core.sessions import SessionState
from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import Column, KeyTable
from kvdepot.index.tree import PrefixTree


class Order(Protocol):
    """Chooses the evictable block to evict first. Not thread-safe; the store's lock guards it."""

    queues: int
    """Number of queues in each size class."""

    moves_on_use: bool
    """True if a used block moves to the warm end of its queue."""

    takes_chains: bool
    """True if blocks of one queue that were used together leave together, tail first."""

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        """Called once, before all other methods."""

    @property
    def stamps(self) -> Column:
        """The column that sorts rows in their queue, smallest first."""

    def queue(self, row: int) -> int:
        """The queue that the row belongs to now."""

    def entered(self, row: int) -> None:
        """Called when a block has entered the tier."""

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        """Called when blocks of one prompt were used, head first; some may be
        in other tiers only.
        """

    def left(self, row: int) -> None:
        """Called when a block has left the tier."""

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None:
        """Called when the engine has reported the state of the session of these blocks."""

    def victim(self, group: int) -> int:
        """The row of a size class to evict first, or NONE."""


class Lru:
    """Evicts the least recently used block first. Ignores session states."""

    queues = 1
    moves_on_use = True
    takes_chains = True

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        self._stamps = tree.stamp
        self._queues = queues

    @property
    def stamps(self) -> Column:
        return self._stamps

    def queue(self, row: int) -> int:
        return 0

    def entered(self, row: int) -> None:
        """Does nothing: the tree keeps the stamps."""

    def used(self, rows: Sequence[int], *, hit: bool) -> None: ...

    def left(self, row: int) -> None: ...

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None: ...

    def victim(self, group: int) -> int:
        return self._queues.first(group, 0)
