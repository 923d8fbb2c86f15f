"""First in, first out: use counts for nothing."""

from collections.abc import Sequence

import numpy as np

from kvdepot.core.order import ColumnView, EvictionQueues, RowTable, SessionState, TreeView


class Fifo:
    """The block that came first leaves first."""

    queues = 1
    moves_on_use = False

    def bind(self, rows: RowTable, tree: TreeView, queues: EvictionQueues) -> None:
        self._queues = queues
        self._came = rows.column(np.int64, 0)
        self._arrivals = 0

    @property
    def stamps(self) -> ColumnView:
        return self._came

    def queue(self, row: int) -> int:
        return 0

    def entered(self, row: int) -> None:
        self._arrivals += 1
        self._came.view[row] = self._arrivals

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        """Use counts for nothing."""

    def left(self, row: int) -> None:
        """Nothing to remember."""

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None:
        """Session states do not count."""

    def victim(self, group: int) -> int:
        return self._queues.first(group, 0)
