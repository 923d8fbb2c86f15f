"""Which blocks are under a contract of retention.

A column beside the catalog's: a row that is freed is under none any more.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvdepot.index.table import KeyTable, Rows

_COUNT_MAX: Final = 65_535


class PinnedRows:
    """Of the rows of one table. The store's lock guards it."""

    def __init__(self, table: KeyTable) -> None:
        self.contracts = table.column(np.uint16, 0)
        """How many contracts of retention each block is under."""
        self.total = 0
        """Blocks under contract, each counted as often as it is."""
        self.renew: Callable[[], None] = lambda: None
        """Blocks have come back with rows of their own: count anew."""

    def add(self, rows: Rows) -> None:
        """Distinct rows are under one more contract."""
        counts = self.contracts.array
        counts[rows] = np.minimum(counts[rows], _COUNT_MAX - 1) + 1
        self.total += len(rows)

    def clear(self) -> None:
        """No row is under any."""
        self.contracts.array[:] = 0
        self.total = 0

    def take_off(self, rows: Rows) -> None:
        """Undo one `add`. A row that was another block's then has none to lose."""
        counts = self.contracts.array
        counts[rows] = np.maximum(counts[rows], 1) - 1
        self.total -= len(rows)
