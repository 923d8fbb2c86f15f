"""First in, first out: use counts for nothing."""

from collections.abc import Sequence

import numpy as np

from kvdepot.core.order import Column, Family, Hint, Lines, Rows


class Fifo:
    """The block that came first leaves first."""

    lines = 1
    moves_on_use = False

    def bind(self, rows: Rows, tree: Family, lines: Lines) -> None:
        self._lines = lines
        self._came = rows.column(np.int64, 0)
        self._arrivals = 0

    @property
    def stamps(self) -> Column:
        return self._came

    def line(self, row: int) -> int:
        return 0

    def entered(self, row: int) -> None:
        self._arrivals += 1
        self._came.view[row] = self._arrivals

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        """Use counts for nothing."""

    def left(self, row: int) -> None:
        """Nothing to remember."""

    def hinted(self, rows: Sequence[int], hint: Hint) -> None:
        """Hints count for nothing."""

    def victim(self, group: int) -> int:
        return self._lines.first(group, 0)
