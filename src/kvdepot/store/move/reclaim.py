"""Making room on a drive: pick a segment, move on what earned it, drop the rest, reuse it.

The lock is taken for a few hundred blocks at a time, so that callers are not held up by a segment
of many small ones; each step looks again at what may have changed meanwhile.
"""

from typing import Final

import numpy as np

from kvdepot.codec.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.core.tier import Purpose
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.policy.placing.reclaim import SegmentFacts, abandoned, rule_named
from kvdepot.store.move.demote import Demoter
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import TEMPORARY, Stock
from kvdepot.tiers.log.segments import Segment

_OLDEST: Final = 8
_NEWEST: Final = 4
"""Segments looked at for each reclaim; the newest, in case one prompt outgrows the drive."""
_ORPHANS_MAX: Final = 4096
"""Blocks counted below a segment's own; more make no difference to the choice."""
_STEP: Final = 256
"""Blocks dealt with before others get the lock."""


class Reclaimer:
    """Frees segments of one drive. Called from that drive's writer thread only."""

    def __init__(
        self, stock: Stock, level: Level, index: int, demoter: Demoter | None = None
    ) -> None:
        self._stock = stock
        self._demoter = demoter
        self._level = level
        self._tier = level.tier
        self._rule = rule_named(level.config.eviction)
        self._index = index

    def reclaim(self) -> bool:
        """Free one segment. False: there is none that could be."""
        tried: set[int] = set()
        while True:
            with self._stock.changed:
                choice = self._choose(tried)
                if choice is None:
                    return False
                segment, rows, stays = choice
            if self._empty(segment, rows, stays):
                break
            tried.add(segment.slot)
        self._tier.release(self._index, segment.slot)
        with self._stock.changed:
            self._stock.counters.reclaimed_segments += 1
        return True

    def _empty(self, segment: Segment, rows: Rows, stays: Bools) -> bool:
        """Take everything out of a segment. False: some of it is needed and found no room."""
        if not self._tier.carry(self._index, segment.slot):
            return False
        if self._demoter is not None:
            self._demoter.demote(rows[~stays].tolist(), urgent=True)
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            self._clear(segment, rows[part].tolist(), stays[part].tolist())
        with self._stock.changed:
            if len(self._live(segment)):
                return False
            self._level.segment_rows.pop((self._index, segment.slot), None)
        return True

    def _choose(self, tried: set[int]) -> tuple[Segment, Rows, Bools] | None:
        """The segment to go, its live rows and which of them are written again."""
        candidates = []
        for segment in self._looked_at(tried):
            rows = self._live(segment)
            if not self._in_use(rows):
                candidates.append((segment, rows, self._facts(segment, rows)))
        if not candidates:
            return None
        looked_at = [facts for *_, facts in candidates]
        at = abandoned(looked_at)
        if at is None:
            at = self._rule.coldest(looked_at)
        segment, rows, facts = candidates[at]
        others = looked_at[:at] + looked_at[at + 1 :]
        return segment, rows, self._rule.keep(facts, self._needed(rows), others)

    def is_held_up(self) -> bool:
        """Whether a segment could go once others have done with its blocks. Lock held."""
        drive = self._tier.drives[self._index]
        if not drive.breaker.closed or drive.lost:
            return False
        if any(segment.sealed and segment.unentered for segment in list(drive.segments.values())):
            return True
        return any(self._in_use(self._live(segment)) for segment in self._looked_at(set()))

    def _looked_at(self, tried: set[int]) -> list[Segment]:
        """The segments that may be chosen from, oldest first."""
        sealed = [s for s in self._tier.drives[self._index].sealed() if s.slot not in tried]
        return sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]

    def _in_use(self, rows: Rows) -> bool:
        """Whether so much of a segment is leased that emptying it would gain nothing."""
        leased = rows[self._stock.catalog.leased_rows(rows)]
        half = self._tier.drives[self._index].settings.segment_bytes // 2
        return bool(self._sizes(leased).sum() > half)

    def _sizes(self, rows: Rows) -> Rows:
        """Of the blocks' records."""
        payload_bytes = self._stock.catalog.nbytes.array[rows].astype(np.int64)
        sizes: Rows = HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE
        return sizes

    def _live(self, segment: Segment) -> Rows:
        return self._level.live(self._index, segment.slot)

    def _place(self, segment: Segment) -> int:
        return self._index << 24 | segment.slot

    def _in(self, segment: Segment, row: int) -> bool:
        return self._level.place_in(row, self._index, segment.slot) != NONE

    def _spared(self, segment: Segment, row: int) -> bool:
        """Whether another drive that works has a block of the segment too."""
        level = self._level
        place = level.place_in(row, self._index, segment.slot) if level.mirrors else NONE
        return place != NONE and level.spared(row, place)

    def _facts(self, segment: Segment, rows: Rows) -> SegmentFacts:
        catalog = self._stock.catalog
        stamps, below = self._look_below(segment, rows)
        hits = self._hits(rows)
        closed = catalog.closed.mask(rows)
        stamps[closed] = hits[closed] = 0
        sizes = self._sizes(rows)
        return SegmentFacts(
            capacity_bytes=self._tier.drives[self._index].settings.segment_bytes,
            sizes=sizes,
            stamps=stamps,
            hits=hits,
            below=below,
            closed_bytes=int(sizes[closed].sum()),
        )

    def _hits(self, rows: Rows) -> Rows:
        """How often blocks were asked for; what one copy has earned counts for the other too."""
        hits = self._level.hits(rows)
        if self._level.mirrors is not None:
            hits = np.maximum(hits, [row in self._level.mirrors.owed for row in rows.tolist()])
        return hits

    def _look_below(self, segment: Segment, rows: Rows) -> tuple[Rows, Rows]:
        """When each block or what continues it was last used, and how many bytes continue it.

        Follows prefixes out of the segment, _ORPHANS_MAX blocks at most.
        """
        catalog = self._stock.catalog
        stamps = catalog.tree.stamp.array[rows]
        below, steps = np.zeros(len(rows), dtype=np.int64), 0
        for index in np.flatnonzero(self._leads_out(segment, rows)).tolist():
            if self._spared(segment, int(rows[index])):
                continue
            waiting = list(catalog.tree.children(int(rows[index])))
            while waiting and steps < _ORPHANS_MAX:
                child = waiting.pop()
                if self._in(segment, child) or not self._level.copies.ready(child):
                    continue
                steps += 1
                below[index] += record_bytes(catalog.nbytes[child])
                stamps[index] = max(stamps[index], catalog.tree.stamp[child])
                waiting.extend(catalog.tree.children(child))
        return stamps, below

    def _leads_out(self, segment: Segment, rows: Rows) -> Bools:
        """Which rows may have a child outside: not those whose only child is in the segment."""
        catalog = self._stock.catalog
        first, siblings = catalog.tree.only_children(rows)
        places = self._level.copies.location.array[first] >> 32
        leads_out: Bools = (first != NONE) & (siblings | (places != self._place(segment)))
        return leads_out

    def _needed(self, rows: Rows) -> Bools:
        """Which rows are leased, or above a leased one."""
        catalog = self._stock.catalog
        if not catalog.leased:
            return np.zeros(len(rows), dtype=bool)
        above: set[int] = set()
        for row in catalog.all_leased():
            while row != NONE and row not in above:
                above.add(row)
                row = catalog.tree.parent[row]
        return np.array([row in above for row in rows.tolist()], dtype=bool)

    def _clear(self, segment: Segment, rows: list[int], stays: list[bool]) -> None:
        """Move or drop some of a segment's blocks.

        Those that cannot be moved are dropped too, unless somebody else uses them.
        """
        stock, catalog = self._stock, self._stock.catalog
        with stock.changed:
            kept = [
                row
                for row, stay in zip(rows, stays, strict=True)
                if self._in(segment, row)
                and (stay or (catalog.leases(row) and not self._spared(segment, row)))
            ]
            catalog.lease(kept)
            self._level.moving.update(kept)
            self._drop(segment, rows)
        for row in kept:
            self._move(segment, row)
        with stock.changed:
            for row in kept:
                if self._spared(segment, row):
                    self._thin_out(segment, row)
                elif self._in(segment, row) and catalog.leases(row) == 1:
                    self._evict(row)
            self._level.moving.difference_update(kept)
            stock.unlease(kept)

    def _drop(self, segment: Segment, rows: list[int]) -> None:
        """Evict blocks, and before each what continues it: a tail without its head is no use.

        What a slower tier has too leaves alone.
        """
        catalog = self._stock.catalog
        for row in rows:
            if not self._in(segment, row) or row in self._level.moving:
                continue
            if len(self._level.places(row)) > 1:
                self._thin_out(segment, row)
                continue
            if catalog.leases(row):
                continue
            below = [] if self._is_below(row) else catalog.tree.descendants(row)
            for victim in [row, *below][::-1]:
                if self._level.copies.ready(victim) and not catalog.leases(victim):
                    self._evict(victim)

    def _is_below(self, row: int) -> bool:
        return self._demoter is not None and self._demoter.lower.copies.ready(row)

    def _evict(self, row: int) -> None:
        self._stock.admission.left(row, self._level)
        self._level.drop(row)
        self._stock.counters.add("evicted", self._level.name)
        self._stock.catalog.forget_if_gone(row)

    def _thin_out(self, segment: Segment, row: int) -> None:
        """Drop one of two copies: the block stays."""
        self._level.lose(row, self._level.place_in(row, self._index, segment.slot))

    def _move(self, segment: Segment, row: int) -> None:
        """Write a leased block again at the log's end."""
        stock, catalog = self._stock, self._stock.catalog
        nbytes = record_bytes(catalog.nbytes[row])
        with stock.changed:
            slot = stock.staging.allocate(nbytes, TEMPORARY)
            source = self._level.place_in(row, self._index, segment.slot)
        if slot is None:
            return
        image = stock.staging.image(slot, nbytes)
        if self._tier.read_image(catalog.table.key(row), source, image):
            self._rewrite(segment, row, image)
        with stock.changed:
            stock.staging.free(slot)

    def _rewrite(self, segment: Segment, row: int, image: memoryview) -> None:
        stock, level = self._stock, self._level
        (location,) = self._tier.append(self._index, [image], Purpose.MOVE)
        if location is None:
            return
        with stock.changed:
            level.relocate(row, level.place_in(row, self._index, segment.slot), location)
            stock.counters.add("moved", level.name)
            level.count_anew(row)
