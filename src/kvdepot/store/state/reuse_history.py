"""What each block has been through, as far as it tells whether it will be asked for again."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.codec.record import record_bytes
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.policy.placing.admission import ReuseChance, kind_of

_COUNT_MAX: Final = 255


class History:
    """Turns and uses of every block since this was made, and what blocks like it came to."""

    def __init__(self, catalog: Catalog, capacity_bytes: int) -> None:
        self._catalog = catalog
        self._promise = ReuseChance(capacity_bytes)
        self._turns = catalog.table.column(np.uint8, 0)
        """How many times the session of a block had come back when the block was made."""
        self._uses = catalog.table.column(np.uint8, 0)
        self._kind = catalog.table.column(np.uint8, 0)

    def chance(self, row: int) -> float:
        """How likely the block is asked for again while the tier would keep it."""
        return self._promise.chance(self._kind.view[row])

    def made(self, row: int) -> None:
        """A block was put."""
        parent = self._catalog.tree.parent.view[row]
        turns = 0
        if parent != NONE:
            turns = self._turns.view[parent] + (self._uses.view[parent] > 0)
        self._turns.view[row], self._uses.view[row] = min(turns, _COUNT_MAX), 0
        self._see(row, turns, 0)

    def asked(self, rows: Sequence[int]) -> None:
        """Blocks of one prompt were asked for, head first: its session has come back."""
        if not rows:
            return
        turns, uses = self._turns.view[rows[-1]] + 1, self._uses.view
        for row in rows:
            uses[row] = min(uses[row] + 1, _COUNT_MAX)
            self._see(row, turns, uses[row])

    def _see(self, row: int, turns: int, uses: int) -> None:
        kind = self._kind.view[row] = kind_of(turns, uses)
        nbytes = record_bytes(self._catalog.nbytes.view[row])
        self._promise.seen(self._catalog.table.digest(row), kind, nbytes)
