"""Counts the pins of each block. A freed row has none."""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvdepot.index.table import KeyTable, Rows

_COUNT_MAX: Final = 65_535


class PinnedRows:
    """The pin counts of the rows of one table. Guarded by the store's lock."""

    def __init__(self, table: KeyTable) -> None:
        self.pins = table.column(np.uint16, 0)
        """Number of pins of each block."""
        self.total = 0
        """The sum of these numbers."""
        self.renew: Callable[[], None] = lambda: None
        """Called when a volume returned with blocks, so that pins are counted again."""

    def add(self, rows: Rows) -> None:
        """Count one more pin for each of these distinct rows."""
        counts = self.pins.array
        counts[rows] = np.minimum(counts[rows], _COUNT_MAX - 1) + 1
        self.total += len(rows)

    def clear(self) -> None:
        """Set all counts to 0."""
        self.pins.array[:] = 0
        self.total = 0

    def take_off(self, rows: Rows) -> None:
        """Undo one `add`. The count of a row that was given to another block since stays 0."""
        counts = self.pins.array
        counts[rows] = np.maximum(counts[rows], 1) - 1
        self.total -= len(rows)
