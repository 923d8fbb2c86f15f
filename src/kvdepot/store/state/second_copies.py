"""The books of second copies: where the blocks of one tier lie besides their first place.

There only where a tier mirrors. A block with a second place has a first one, on another drive.
"""

import numpy as np

from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.table import NONE, Rows


class Mirrors:
    """Second places of one tier. Guarded by the stock's lock."""

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self.location = catalog.table.column(np.int64, NONE)
        """The second place of each row, or NONE."""
        self.count = 0
        self.fresh: dict[int, None] = {}
        """Rows that came to a new place, and may be worth a second one."""
        self.look_at_all = True
        """Blocks may have lost a copy: every one is looked at again when all drives work."""
        self.writing: set[int] = set()
        """Rows whose second copy is being written."""
        self.owed: set[int] = set()
        """Rows of which one copy was written again because it was asked for: the other is too."""
        self._copies = copies

    def enter(self, row: int, location: int) -> None:
        """A block has a second copy now."""
        assert self.location[row] == NONE
        self.location[row] = location
        self.count += 1

    def leave(self, row: int) -> int:
        """A block has one place again. Returns the second one, NONE if it had none."""
        location = self.location[row]
        if location != NONE:
            self.location[row] = NONE
            self.count -= 1
            self.owed.discard(row)
        return location

    def take_in(self, rows: Rows, locations: Rows) -> Rows:
        """Enter copies found on drives, of known rows. Returns which were taken, as indices."""
        first = self._copies.location.array[rows]
        fits = (
            (self._copies.bit & self._copies.residency.array[rows] != 0)
            & (self.location.array[rows] == NONE)
            & (first >> 56 != locations >> 56)
        )
        taken = np.flatnonzero(fits)
        self.location.array[rows[taken]] = locations[taken]
        self.count += len(taken)
        return taken

    def forget_drive(self, drive: int) -> None:
        """A drive's copies are gone: what has another place lies only there now."""
        first, second = self._copies.location.array, self.location.array
        rows = np.flatnonzero((second != NONE) & ((first >> 56 == drive) | (second >> 56 == drive)))
        places = np.where(first[rows] >> 56 == drive, second[rows], first[rows])
        first[rows] = places
        second[rows] = NONE
        self.count -= len(rows)
        self.owed.difference_update(rows.tolist())
        self.look_at_all = True
