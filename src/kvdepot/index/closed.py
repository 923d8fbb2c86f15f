"""Blocks of closed sessions: the first that may leave, until they are used again.

A row and the moment of its closing. A use after that, or another block in the same row, has a newer
stamp and voids the entry, so neither has to be reported here.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from kvdepot.index.table import Bools, Rows
from kvdepot.index.tree import PrefixTree

ROWS_MAX: Final = 1 << 20
"""Beyond these the ones closed first are forgotten."""


class Closed:
    """Which rows of a catalog are closed."""

    def __init__(self, tree: PrefixTree, rows_max: int = ROWS_MAX) -> None:
        self._tree = tree
        self._rows_max = rows_max
        self._moments: dict[int, int] = {}
        self._sorted: tuple[Rows, Rows] | None = None
        """Rows and their moments, for `mask`; None: to be made anew."""

    def __contains__(self, row: int) -> bool:
        """Whether a row in use is closed."""
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
        """The session of these rows is closed."""
        for row in rows:
            self._moments.pop(row, None)
            self._moments[row] = self._tree.now
        self._sorted = None
        if len(self._moments) > self._rows_max:
            left = [row for row in self._moments if row in self][-self._rows_max // 2 :]
            self._moments = {row: self._moments[row] for row in left}

    def discard(self, rows: Iterable[int]) -> None:
        """The session of these rows may come back after all."""
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
        """Of the rows of one prompt, head first, the last ones that no other session shares.

        A block is shared if a block that is not closed continues it, or if it is among the `ends`
        of other prompts; and so are all blocks above a shared one.
        """
        own: set[int] = set()
        for row in reversed(rows):
            others = (child not in own and child not in self for child in self._tree.children(row))
            if row in ends or any(others):
                break
            own.add(row)
        return [row for row in rows if row in own]
