"""The interface of eviction policies, and LRU.

The index keeps the evictable rows in queues (index/leaves.py: no children in the tier, not in use).
An `Order` chooses the queue of each row, and the row to evict first. It is called for every block
that enters the tier, is used or leaves.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

NO_ROW: Final = -1
"""No row: the queue is empty, the block has no parent, nothing can leave."""


class SessionState(IntEnum):
    """The state of a block's session, as the engine reported it, until the block's next use."""

    NONE = 0
    ALIVE = 1
    PENDING = 2
    """A tool call is under way: the session comes back within seconds."""

    CLOSED = 3
    """The session will not come back."""


class ColumnView(Protocol):
    """A value for each row. Use `view` for single values: it is faster."""

    array: npt.NDArray[Any]
    view: memoryview


class RowTable(Protocol):
    """The table with the rows."""

    def column(self, dtype: npt.DTypeLike, fill: int) -> ColumnView:
        """Add a column that grows with the table; freed rows return to `fill`."""

    def digest(self, row: int) -> int:
        """Eight uniform bytes of the row's key."""

    def digests(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]: ...


class TreeView(Protocol):
    """The prefix tree over the rows."""

    now: int
    """Block uses so far: the clock of every order."""

    @property
    def parent(self) -> ColumnView: ...

    @property
    def stamp(self) -> ColumnView:
        """Time of each row's last use; a head's is newer than its tail's."""

    def depth(self, row: int) -> int:
        """The number of blocks of the prompt up to this one."""


class EvictionQueues(Protocol):
    """Rows in queues, coldest first; `group` is a size class."""

    def first(self, group: int, queue: int) -> int: ...

    def ends(self, group: int) -> tuple[Sequence[int], Sequence[int]]:
        """The coldest and the warmest row of each queue."""

    def occupied(self, group: int) -> int:
        """The queues of a group that are not empty, as bits."""

    def to_end(self, row: int, queue: int) -> None:
        """Move a row that is in a queue to the warm end of a queue of its group."""


class Order(Protocol):
    """Chooses the evictable block to evict first. Not thread-safe; the store's lock guards it."""

    queues: int
    """Number of queues in each size class."""

    moves_on_use: bool
    """True if a used block moves to the warm end of its queue."""

    takes_chains: bool
    """True if blocks of one queue that were used together leave together, tail first."""

    def bind(self, rows: RowTable, tree: TreeView, queues: EvictionQueues) -> None:
        """Called once, before all other methods."""

    @property
    def stamps(self) -> ColumnView:
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
        """The row of a size class to evict first, or NO_ROW."""


class Lru:
    """Evicts the least recently used block first. Ignores session states."""

    queues = 1
    moves_on_use = True
    takes_chains = True

    def bind(self, rows: RowTable, tree: TreeView, queues: EvictionQueues) -> None:
        self._stamps = tree.stamp
        self._queues = queues

    @property
    def stamps(self) -> ColumnView:
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
