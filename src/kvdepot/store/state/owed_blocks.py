"""The blocks that are owed to one tier: they could not be written to it while it was away.

They are written when the tier works again. Until then they stay on the drives of this node, up to
half of the room there. A mark on these drives has the stamp from which blocks may be missing on the
tier, so that the debt is found again after a restart or a kill.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.keys import Keys
from kvdepot.format.record import record_bytes, record_sizes
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.table import NONE, Bools, Rows


class OwedBlocks:
    """Guarded by the store's lock."""

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self._catalog = catalog
        self._copies = copies
        self.any = False
        """False: no block is owed."""
        self.waiting: deque[int] = deque()
        """Rows to be written now, because the tier works."""
        self.since = 0
        """Blocks with this stamp or a later one may be missing on the tier; 0: unknown."""
        self.limit_bytes: Callable[[], int] = _no_limit
        """The most bytes of owed blocks."""
        self._nbytes = 0
        """Bytes of owed blocks; some may have left since."""
        self._given_up = 0

    def has(self, rows: Rows) -> Bools:
        """True for rows that are owed."""
        found: Bools = self._copies.owed.array[rows] != 0
        return found

    def rows(self) -> Rows:
        """All owed rows. Rows that left or were removed do not count any more."""
        owed = self._copies.owed.array
        rows: Rows = np.flatnonzero(owed)
        live = np.isin(rows, self._catalog.live_rows())
        live &= self._copies.state.array[rows] != int(CopyState.READY)
        owed[rows[~live]] = 0
        rows = rows[live]
        self.any = bool(len(rows))
        self._nbytes = int(record_sizes(self._catalog.nbytes.array[rows]).sum())
        return rows

    def add(self, row: int) -> None:
        """Owe a block, if all owed blocks then have at most `limit_bytes`; else give it up."""
        if self._copies.owed.view[row]:
            return
        limit_bytes = self.limit_bytes()
        nbytes = record_bytes(self._catalog.nbytes[row])
        if self._nbytes + nbytes > limit_bytes:
            self.rows()
        if self._nbytes + nbytes > limit_bytes:
            self._given_up += 1
            return
        self._copies.owed.view[row] = 1
        self._nbytes += nbytes
        self.any = True

    def trim(self) -> None:
        """Give up the blocks above the limit, after a tier has become smaller."""
        limit_bytes = self.limit_bytes()
        if self._nbytes > limit_bytes:
            rows = self.rows()
            ends = np.cumsum(record_sizes(self._catalog.nbytes.array[rows]))
            self.give_up(rows[ends > limit_bytes].tolist())

    def recall(self, words: Keys, stamps: Rows) -> None:
        """Owe the recovered blocks of this node that the tier may lack, oldest first."""
        if not self.since:
            return
        order = np.argsort(stamps, kind="stable")
        rows = self._catalog.table.find_many(words[order[stamps[order] >= self.since]])
        for row in rows[rows != NONE].tolist():
            if self._copies.absent(row) and self._catalog.is_live(row):
                self.add(row)

    def give_up(self, rows: Sequence[int]) -> None:
        """Owe these blocks no more, although they were not written."""
        for row in rows:
            if self._copies.owed.view[row]:
                self._copies.owed.view[row] = 0
                self._given_up += 1

    def take_given_up(self) -> int:
        """Number of blocks that were given up since the last call."""
        count = self._given_up + self._copies.left_owed
        self._given_up = self._copies.left_owed = 0
        return count


def _no_limit() -> int:
    return 1 << 62
