"""Copies blocks from one file tier to the slower one below it, a prompt in one piece.

Blocks of a path are gathered from wherever they lie and appended one behind the other, up to
`run_bytes` on one drive, then on the next. So a returning prompt is a few long reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.codec.record import record_bytes
from kvdepot.index.paths import path_order
from kvdepot.index.table import NONE, Rows
from kvdepot.policy.placing.extra_copies import DemotionFacts, worth_demoting
from kvdepot.store.move.append import MakeRoom, append
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import TEMPORARY, Stock
from kvdepot.store.state.yielding import FLASH_SHARE, HEAD_SHARE, Stride, rest_s

_PIECE_BYTES: Final = 4 << 20
"""Copied in one go at most: a read which comes meanwhile should not notice."""
_GATHER_MAX: Final = 4096
"""Blocks looked at in one go, lock held."""


@dataclass(slots=True)
class Piece:
    """Blocks on their way down: rows, their images, and the staging slots among these."""

    rows: list[int]
    images: list[memoryview]
    slots: list[int]
    fetch: list[int]
    """Which of them are not in memory, and must be read."""


class Demoter:
    """Between two tiers. Threads may share it."""

    def __init__(self, stock: Stock, upper: Level, lower: Level, make_room: MakeRoom) -> None:
        self._stock = stock
        self.upper = upper
        self.lower = lower
        self._make_room = make_room
        self._stride = Stride(_PIECE_BYTES)

    def demote(self, rows: Sequence[int], *, urgent: bool) -> None:
        """Copy down what is worth it of `rows` and of their paths. They stay where they are.

        `urgent`: somebody waits for room; else it rests while others read.
        """
        for start in range(0, len(rows), _GATHER_MAX):
            with self._stock.changed:
                gathered = self._gather(rows[start : start + _GATHER_MAX])
            for run in self._runs(gathered):
                if self._stock.closing or not self._copy_run(run, urgent=urgent):
                    return

    def _gather(self, rows: Iterable[int]) -> list[int]:
        """The rows and what is above and below them in the upper tier, in path order."""
        tree, copies = self._stock.catalog.tree, self.upper.copies
        seen: dict[int, None] = {}
        for row in rows:
            above: list[int] = []
            while row != NONE and row not in seen and len(above) < _GATHER_MAX:
                above.append(row)
                seen[row] = None
                row = tree.parent[row]
            waiting = above[:1]
            while waiting and len(seen) < _GATHER_MAX:
                for child in tree.children(waiting.pop()):
                    if child not in seen:
                        seen[child] = None
                        waiting.append(child)
        found = np.array([row for row in seen if copies.ready(row)], dtype=np.int64)
        if not len(found):
            return []
        return path_order(tree, found[worth_demoting(self._facts(found))].tolist())

    def _facts(self, rows: Rows) -> DemotionFacts:
        tree = self._stock.catalog.tree
        return DemotionFacts(
            below=self.lower.copies.state.array[rows] != 0,
            hits=tree.hits.array[rows].astype(np.int64),
            continues=tree.parent.array[rows] != NONE,
            continued=tree.only_children(rows)[0] != NONE,
            closed=self._stock.catalog.closed.mask(rows),
        )

    def _runs(self, rows: list[int]) -> Iterator[list[int]]:
        """Rows that go to one drive."""
        nbytes = self._stock.catalog.nbytes
        run: list[int] = []
        total = 0
        for row in rows:
            run.append(row)
            total += record_bytes(nbytes[row])
            if total >= max(self.lower.run_bytes, 1):
                yield run
                run, total = [], 0
        if run:
            yield run

    def _copy_run(self, rows: list[int], *, urgent: bool) -> bool:
        """Copy rows to the next drive. False: no drive takes them."""
        stock, turns = self._stock, self.lower.turns
        with stock.changed:
            nbytes = sum(record_bytes(stock.catalog.nbytes[row]) for row in rows)
            drive = turns.next()
            if drive is None:
                return False
            turns.take(drive, nbytes, stock.clock.now())
        try:
            return self._copy_to(drive, rows, urgent=urgent)
        finally:
            with stock.changed:
                turns.done(drive, nbytes)

    def _copy_to(self, drive: int, rows: list[int], *, urgent: bool) -> bool:
        left = rows
        while left and not self._stock.closing:
            started_s = self._stock.clock.now()
            with self._stock.changed:
                piece, left = self._claim(left)
                if not piece.rows and left:
                    return False
            if piece.rows:
                if not self._copy(piece, drive):
                    return False
                self._stride.took(sum(map(len, piece.images)), self._stock.clock.now() - started_s)
            if not urgent:
                rest(self._stock, [self.upper, self.lower], started_s)
        return True

    def _claim(self, rows: list[int]) -> tuple[Piece, list[int]]:
        """Take as many rows as there is memory for. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        budget = min(self._stride.nbytes, max(1, stock.staging.capacity_bytes // 4))
        piece = Piece([], [], [], [])
        for index, row in enumerate(rows):
            nbytes = record_bytes(catalog.nbytes[row])
            if piece.rows and nbytes > budget:
                return self._claimed(piece), rows[index:]
            if not self._wanted(row):
                continue
            if catalog.memory.ready(row):
                image = stock.arena.image(catalog.memory.location[row], nbytes)
            else:
                slot = stock.staging.allocate(nbytes, TEMPORARY)
                if slot is None:
                    return self._claimed(piece), rows[index:]
                image = stock.staging.image(slot, nbytes)
                piece.slots.append(slot)
                piece.fetch.append(len(piece.rows))
            piece.rows.append(row)
            piece.images.append(image)
            budget -= nbytes
        return self._claimed(piece), []

    def _wanted(self, row: int) -> bool:
        catalog, lower = self._stock.catalog, self.lower
        return (
            catalog.is_live(row)
            and self.upper.usable(row)
            and lower.copies.absent(row)
            and row not in lower.tickets
        )

    def _claimed(self, piece: Piece) -> Piece:
        for row in piece.rows:
            self.lower.copies.reserve(row, 0)
        self.lower.moving.update(piece.rows)
        self._stock.catalog.lease(piece.rows)
        return piece

    def _copy(self, piece: Piece, drive: int) -> bool:
        """Read and append. False: the drive took nothing."""
        upper, table = self.upper, self._stock.catalog.table
        intact = [True] * len(piece.rows)
        if piece.fetch:
            rows = [piece.rows[index] for index in piece.fetch]
            found = upper.tier.read_images(
                [table.key(row) for row in rows],
                [upper.readable(row) for row in rows],
                [piece.images[index] for index in piece.fetch],
            )
            for index, good in zip(piece.fetch, found, strict=True):
                intact[index] = good
        images = [image for image, good in zip(piece.images, intact, strict=True) if good]
        places = iter(append(self.lower.tier, drive, images, self._make_room))
        locations = [next(places) if good else None for good in intact]
        self._commit(piece, locations)
        return not images or any(location is not None for location in locations)

    def _commit(self, piece: Piece, locations: list[int | None]) -> None:
        """Enter what was written; removals that came meanwhile are written down too."""
        stock, lower, catalog = self._stock, self.lower, self._stock.catalog
        removed = []
        with stock.changed:
            for row, location in zip(piece.rows, locations, strict=True):
                if location is None:
                    lower.copies.drop(row)
                    continue
                lower.copies.location[row] = location
                lower.copies.seal(row)
                lower.enter(row, location)
                stock.counters.demoted += 1
                if catalog.is_doomed(row):
                    removed.append(lower.tier.removal(catalog.table.key(row)))
        unrecorded = bool(removed) and bool(lower.tier.erase(removed))
        with stock.changed:
            stock.counters.removal_unrecorded += unrecorded
            for slot in piece.slots:
                stock.staging.free(slot)
            lower.moving.difference_update(piece.rows)
            stock.unlease(piece.rows)


def rest(stock: Stock, levels: Sequence[Level], since_s: float) -> None:
    """Leave drives that were worked on `since_s` to those who read, if there are any."""
    busy = [level for level in levels if level.pace.busy_since(since_s)]
    if not busy:
        return
    share = HEAD_SHARE if any(level.run_bytes for level in busy) else FLASH_SHARE
    pause_s = rest_s(stock.clock.now() - since_s, share)
    with stock.changed:
        stock.changed.wait_for(lambda: stock.closing, pause_s)
