"""A drive whose directory was taken away: forget its blocks, and start it anew when it can be."""

import numpy as np

from kvdepot.errors import KVDepotError
from kvdepot.index.table import NONE
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock


class Restorer:
    """Brings one lost drive back. For one thread at a time."""

    def __init__(self, stock: Stock, level: Level, index: int) -> None:
        self._stock = stock
        self._level = level
        self._index = index

    def restore(self) -> bool:
        """Mount the drive again. True: it can be written to."""
        try:
            contents = self._level.tier.remount(self._index, self._forget)
        except (OSError, KVDepotError):
            return False
        if contents is not None:
            with self._stock.changed:
                self._level.take_in(contents)
        return contents is not None

    def _forget(self) -> None:
        """Drop every block of the drive from the books."""
        level, catalog = self._level, self._stock.catalog
        with self._stock.changed:
            if level.mirrors is not None:
                level.mirrors.forget_drive(self._index)
            places = level.copies.location.array
            rows = np.flatnonzero((places != NONE) & (places >> 56 == self._index))
            for row in rows.tolist():
                if level.copies.ready(row):
                    level.copies.drop(row)
                    catalog.forget_if_gone(row)
            for place in [place for place in level.segment_rows if place[0] == self._index]:
                del level.segment_rows[place]
