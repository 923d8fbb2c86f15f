"""A drive whose directory was taken away: forget its blocks, and start it anew when it can be."""

import numpy as np

from kvdepot.errors import KVDepotError
from kvdepot.index.table import NONE
from kvdepot.store.stock import Stock
from kvdepot.tiers.ssd import SegmentTier


class Restorer:
    """Brings one lost drive back. Called from that drive's writer thread only."""

    def __init__(self, stock: Stock, ssd: SegmentTier, index: int) -> None:
        self._stock = stock
        self._ssd = ssd
        self._index = index

    def restore(self) -> bool:
        """Mount the drive again. True: it can be written to."""
        try:
            contents = self._ssd.remount(self._index, before=self._forget)
        except (OSError, KVDepotError):
            return False
        if contents is not None:
            with self._stock.changed:
                self._stock.take_in(contents)
        return contents is not None

    def _forget(self) -> None:
        """Drop every block of the drive from the books."""
        stock, catalog = self._stock, self._stock.catalog
        with stock.changed:
            places = catalog.disk.location.array
            rows = np.flatnonzero((places != NONE) & (places >> 56 == self._index))
            for row in rows.tolist():
                if catalog.disk.ready(row):
                    catalog.disk.drop(row)
                    catalog.forget_if_gone(row)
            for place in [place for place in stock.segment_rows if place[0] == self._index]:
                del stock.segment_rows[place]
