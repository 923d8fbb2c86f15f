"""Least often used first, and of those the least recently used."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.core.order import NO_ROW, ColumnView, EvictionQueues, RowTable, SessionState, TreeView

_USES_MAX: Final = 255


class Lfu:
    """The block with the fewest hits since it came leaves first."""

    queues = _USES_MAX + 1
    moves_on_use = True

    def bind(self, rows: RowTable, tree: TreeView, queues: EvictionQueues) -> None:
        self._queues = queues
        self._stamps = tree.stamp
        self._uses = rows.column(np.uint8, 0)

    @property
    def stamps(self) -> ColumnView:
        return self._stamps

    def queue(self, row: int) -> int:
        uses: int = self._uses.view[row]
        return uses

    def entered(self, row: int) -> None:
        self._uses.view[row] = 0

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if hit:
            at = np.asarray(rows, dtype=np.int64)
            uses = self._uses.array
            uses[at] = np.minimum(uses[at], _USES_MAX - 1) + 1

    def left(self, row: int) -> None:
        """Nothing to remember."""

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None:
        """Session states do not count."""

    def victim(self, group: int) -> int:
        occupied = self._queues.occupied(group)
        if not occupied:
            return NO_ROW
        return self._queues.first(group, (occupied & -occupied).bit_length() - 1)
