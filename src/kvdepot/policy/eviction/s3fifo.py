"""S3-FIFO: new blocks pass a short probation; those that were used there stay long.

Two lines, first in first out. From the short one a used block moves to the long one, an unused one
leaves and is remembered; if it comes back soon it goes to the long line at once. In the long line
a used block goes round again, three times at most for each time around.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.core.order import NOBODY, Column, Family, Hint, Lines, Rows
from kvdepot.policy.eviction.ghosts import Ghosts

PROBATION_SHARE: Final = 0.1
_SHORT, _LONG = 0, 1
_USES_MAX: Final = 3
_GHOSTS_PER_BLOCK: Final = 1.0


class S3Fifo:
    """Probation for new blocks, long stay for those that were used on probation."""

    lines = 2
    moves_on_use = False

    def bind(self, rows: Rows, tree: Family, lines: Lines) -> None:
        self._rows = rows
        self._lines = lines
        self._came = rows.column(np.int64, 0)
        self._line = rows.column(np.uint8, _SHORT)
        self._uses = rows.column(np.uint8, 0)
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK)
        self._arrivals = 0
        self._count = [0, 0]

    @property
    def stamps(self) -> Column:
        return self._came

    def line(self, row: int) -> int:
        line: int = self._line.view[row]
        return line

    def entered(self, row: int) -> None:
        known = self._ghosts.recall(self._rows.digest(row))
        self._uses.view[row] = 0
        self._join(row, _SHORT if known is None else _LONG)
        self._ghosts.fit(sum(self._count))

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if hit:
            at = np.asarray(rows, dtype=np.int64)
            uses = self._uses.array
            uses[at] = np.minimum(uses[at], _USES_MAX - 1) + 1

    def left(self, row: int) -> None:
        line = self._line.view[row]
        self._count[line] -= 1
        if line == _SHORT:
            self._ghosts.remember(self._rows.digest(row), self._came.view[row], 0)

    def hinted(self, rows: Sequence[int], hint: Hint) -> None:
        """Hints count for nothing."""

    def victim(self, group: int) -> int:
        uses = self._uses.view
        while (row := self._candidate(group)) != NOBODY:
            if not uses[row]:
                return row
            if self._line.view[row] == _SHORT:
                uses[row] = 0
            else:
                uses[row] -= 1
            self._count[self._line.view[row]] -= 1
            self._join(row, _LONG)
            self._lines.to_end(row, _LONG)
        return NOBODY

    def _candidate(self, group: int) -> int:
        short, long = self._count
        first = self._lines.first(group, _SHORT)
        if first != NOBODY and short > (short + long) * PROBATION_SHARE:
            return first
        main = self._lines.first(group, _LONG)
        return first if main == NOBODY else main

    def _join(self, row: int, line: int) -> None:
        self._arrivals += 1
        self._came.view[row] = self._arrivals
        self._line.view[row] = line
        self._count[line] += 1
