"""Making room on a drive.

Pick a segment, move on what earned it, drop the rest, reuse the extent.
"""

from typing import Final

import numpy as np

from kvdepot.codec.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.index.table import Rows
from kvdepot.policy.reclaim import SegmentFacts, coldest, keep
from kvdepot.store.stock import TEMPORARY, Stock
from kvdepot.tiers.drive import Segment
from kvdepot.tiers.ssd import SegmentTier

_OLDEST: Final = 8
_NEWEST: Final = 4
"""Segments looked at for each reclaim.

The newest are good victims where one prompt outgrows the drive.
"""
_ORPHANS_MAX: Final = 4096
"""Blocks counted below a segment's own; more make no difference to the choice."""


class Reclaimer:
    """Frees segments of one drive. Called from that drive's writer thread only."""

    def __init__(self, stock: Stock, ssd: SegmentTier, index: int) -> None:
        self._stock = stock
        self._ssd = ssd
        self._index = index

    def reclaim(self) -> bool:
        """Free one segment. False: there is none that could be."""
        with self._stock.changed:
            choice = self._choose()
            if choice is None:
                return False
            segment, rows, facts = choice
            kept = self._sort_out(rows, facts)
            self._stock.catalog.lease(kept)
        try:
            self._move(kept)
        finally:
            with self._stock.changed:
                self._drop([row for row in kept if self._in(segment, row)])
                self._stock.unlease(kept)
                self._stock.segment_rows.pop((self._index, segment.slot), None)
        carried = self._ssd.release(self._index, segment.slot)
        with self._stock.changed:
            self._stock.counters.reclaimed_segments += 1
            self._stock.counters.removal_unrecorded += not carried
        return True

    def _choose(self) -> tuple[Segment, list[int], SegmentFacts] | None:
        """The segment to go, its live rows and what is known of them."""
        sealed = self._ssd.drives[self._index].sealed()
        candidates = []
        for segment in sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]:
            rows = self._live(segment)
            if not rows or self._movable(rows):
                candidates.append((segment, rows, self._facts(segment, rows)))
        if not candidates:
            return None
        return candidates[
            coldest([facts for *_, facts in candidates], self._stock.catalog.tree.now)
        ]

    def _live(self, segment: Segment) -> list[int]:
        rows = self._stock.segment_rows.get((self._index, segment.slot), ())
        return [row for row in dict.fromkeys(rows) if self._in(segment, row)]

    def _in(self, segment: Segment, row: int) -> bool:
        disk = self._stock.catalog.disk
        return disk.ready(row) and disk.location[row] >> 32 == self._index << 24 | segment.slot

    def _movable(self, rows: list[int]) -> bool:
        """Whether what must be kept surely fits into what is free."""
        catalog = self._stock.catalog
        segment_bytes = self._ssd.drives[self._index].settings.segment_bytes
        leased = sum(record_bytes(catalog.nbytes[row]) for row in rows if catalog.leases(row))
        return leased <= segment_bytes // 2

    def _facts(self, segment: Segment, rows: list[int]) -> SegmentFacts:
        catalog = self._stock.catalog
        at = np.array(rows, dtype=np.int64)
        stamps, orphaned_bytes = self._look_below(segment, rows)
        return SegmentFacts(
            capacity_bytes=self._ssd.drives[self._index].settings.segment_bytes,
            sizes=HEAD_BYTES + -(-catalog.nbytes.array[at].astype(np.int64) // PAGE) * PAGE,
            stamps=stamps,
            hits=catalog.tree.hits.array[at].astype(np.int64),
            orphaned_bytes=orphaned_bytes,
        )

    def _look_below(self, segment: Segment, rows: list[int]) -> tuple[Rows, int]:
        """How recently each block or what continues it was used, and the size of what would be
        orphaned.

        Looks at _ORPHANS_MAX blocks at most.
        """
        catalog = self._stock.catalog
        stamp = catalog.tree.stamp.view
        newest = [stamp[row] for row in rows]
        total, steps = 0, 0
        for index, row in enumerate(rows):
            waiting = list(catalog.tree.children(row))
            while waiting and steps < _ORPHANS_MAX:
                child = waiting.pop()
                if self._in(segment, child) or not catalog.disk.ready(child):
                    continue
                steps += 1
                total += record_bytes(catalog.nbytes[child])
                newest[index] = max(newest[index], stamp[child])
                waiting.extend(catalog.tree.children(child))
        return np.array(newest, dtype=np.int64), total

    def _sort_out(self, rows: list[int], facts: SegmentFacts) -> list[int]:
        """Drop what is not kept, tails before heads; returns what is."""
        forced = np.array([self._needed(row) for row in rows], dtype=bool)
        kept = keep(facts, forced)
        dropped = [row for row, stays in zip(rows, kept.tolist(), strict=True) if not stays]
        self._drop(dropped)
        survivors = [row for row, stays in zip(rows, kept.tolist(), strict=True) if stays]
        return [row for row in survivors if self._stock.catalog.disk.ready(row)]

    def _needed(self, row: int) -> bool:
        """Leased, or above a leased block."""
        catalog = self._stock.catalog
        if catalog.leases(row):
            return True
        return bool(catalog.leased) and any(
            catalog.leases(b) for b in catalog.tree.descendants(row)
        )

    def _drop(self, rows: list[int]) -> None:
        """Evict blocks from disk, and before each what continues it.

        A tail without its head is of no use.
        """
        stock, catalog = self._stock, self._stock.catalog
        for row in rows:
            for victim in [row, *catalog.tree.descendants(row)][::-1]:
                if catalog.disk.ready(victim) and not catalog.leases(victim):
                    stock.drop_disk(victim)
                    stock.counters.evicted_ssd += 1
                    catalog.forget_if_gone(victim)

    def _move(self, rows: list[int]) -> None:
        """Write leased blocks again at the log's end.

        Those that cannot be are dropped by the caller.
        """
        stock, catalog = self._stock, self._stock.catalog
        for row in rows:
            nbytes = record_bytes(catalog.nbytes[row])
            with stock.changed:
                slot = stock.staging.allocate(nbytes, TEMPORARY)
                source = catalog.disk.location[row]
            if slot is None:
                continue
            image = stock.staging.image(slot, nbytes)
            if self._ssd.read_image(catalog.table.key(row), source, image):
                self._rewrite(row, image)
            with stock.changed:
                stock.staging.free(slot)

    def _rewrite(self, row: int, image: memoryview) -> None:
        stock, catalog = self._stock, self._stock.catalog
        (location,) = self._ssd.append(self._index, [image])
        if location is None:
            return
        with stock.changed:
            old = catalog.disk.location[row]
            catalog.disk.move(row, location)
            self._ssd.discard([old], [catalog.nbytes[row]])
            stock.on_disk(row, location)
            stock.counters.moved_ssd += 1
            catalog.tree.hits[row] = 0
