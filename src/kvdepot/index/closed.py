"""Blocks of closed sessions, which are evicted first until they are used again.

An entry is a row and the time of its closing. A later use, or another block in the same row, has a
newer stamp and makes the entry invalid, so neither has to be reported here.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from kvdepot.index.table import Bools, Rows
from kvdepot.index.tree import PrefixTree

ROWS_MAX: Final = 1 << 20
"""Most entries; beyond it those closed first are dropped."""


class Closed:
    """The closed rows of a catalog."""

    def __init__(self, tree: PrefixTree, rows_max: int = ROWS_MAX) -> None:
        self._tree = tree
        self._rows_max = rows_max
        self._moments: dict[int, int] = {}
        self._sorted: tuple[Rows, Rows] | None = None
        """Sorted rows and their times, for `mask`; None if they changed since."""

    def __contains__(self, row: int) -> bool:
        """True if a row in use is closed."""
        moment = self._moments.get(row)
        return moment is not None and 0 < self._tree.stamp.view[row] <= moment

    def mask(self, rows: Rows) -> Bools:
        known, moments = self._arrays()
        if not len(known):
            return np.zeros(len(rows), dtype=bool)
        at = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        stamps = self._tree.stamp.array[rows]
        found: Bools = (known[at] == rows) & (stamps > 0) & (stamps <= moments[at])
        return found

    def add(self, rows: Iterable[int]) -> None:
        """Add the rows of a closed session."""
        for row in rows:
            self._moments.pop(row, None)
            self._moments[row] = self._tree.now
        self._sorted = None
        if len(self._moments) > self._rows_max:
            left = [row for row in self._moments if row in self][-self._rows_max // 2 :]
            self._moments = {row: self._moments[row] for row in left}

    def discard(self, rows: Iterable[int]) -> None:
        """Remove rows: their session may come back."""
        for row in rows:
            self._moments.pop(row, None)
        self._sorted = None

    def _arrays(self) -> tuple[Rows, Rows]:
        """Sorted by row; void entries are dropped."""
        if self._sorted is None:
            known = np.fromiter(self._moments, dtype=np.int64, count=len(self._moments))
            moments = np.fromiter(self._moments.values(), dtype=np.int64, count=len(known))
            stamps = self._tree.stamp.array[known]
            good = (stamps > 0) & (stamps <= moments)
            for row in known[~good].tolist():
                del self._moments[row]
            known, moments = known[good], moments[good]
            order = np.argsort(known)
            self._sorted = known[order], moments[order]
        return self._sorted

    def unshared(self, rows: Sequence[int], ends: Collection[int]) -> list[int]:
        """The last rows of a prompt, given head first, that no other session shares.

        A block is shared if a block that is not closed continues it, or if it is among the `ends`
        of other prompts; so are all blocks before a shared one.
        """
        own: set[int] = set()
        for row in reversed(rows):
            others = (child not in own and child not in self for child in self._tree.children(row))
            if row in ends or any(others):
                break
            own.add(row)
        return [row for row in rows if row in own]
