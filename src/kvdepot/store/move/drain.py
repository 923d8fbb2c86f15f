"""Takes everything off a drive that is to go, while the store goes on."""

from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.core.tier import drive_of
from kvdepot.index.table import NONE
from kvdepot.store.move.append import MakeRoom, append
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import TEMPORARY, Stock

_PIECE_BYTES: Final = 4 << 20


class Evacuator:
    """Moves the blocks of one drive to the others of its tier."""

    def __init__(self, stock: Stock, level: Level, index: int, make_room: MakeRoom) -> None:
        self._stock = stock
        self._level = level
        self._index = index
        self._make_room = make_room
        self._turn = index

    def evacuate(self) -> int:
        """Move every block, and drop those that cannot be. Returns how many were moved.

        Afterwards the drive holds nothing, and nothing new goes there; unless the store closes
        meanwhile.
        """
        drive = self._level.tier.drives[self._index]
        drive.draining = True
        moved = 0
        self._await_writes()
        for slot in list(drive.segments):
            with self._stock.changed:
                rows = self._level.live(self._index, slot).tolist()
            while rows and not self._stock.closing:
                with self._stock.changed:
                    piece, rows = self._claim(rows)
                moved += self._move(piece)
            with self._stock.changed:
                if self._stock.closing:
                    break
                self._level.segment_rows.pop((self._index, slot), None)
        return moved

    def _await_writes(self) -> None:
        """Wait for blocks that were given a place on the drive before."""
        drive, stock = self._level.tier.drives[self._index], self._stock
        with stock.changed:
            stock.changed.wait_for(
                lambda: not any(s.runs or s.unentered for s in list(drive.segments.values())),
                self._level.config.write_timeout,
            )

    def _claim(self, rows: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Rows with a slot of staging for each, as far as there is room. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        piece: list[tuple[int, int]] = []
        budget = min(_PIECE_BYTES, stock.staging.capacity_bytes // 4)
        for number, row in enumerate(rows):
            nbytes = record_bytes(catalog.nbytes[row])
            if piece and nbytes > budget:
                return self._claimed(piece), rows[number:]
            if not self._is_here(row) or self._thinned_out(row):
                continue
            slot = stock.staging.allocate(nbytes, TEMPORARY)
            if slot is None:
                if not piece:
                    stock.changed.wait(0.1)
                return self._claimed(piece), rows[number:]
            piece.append((row, slot))
            budget -= nbytes
        return self._claimed(piece), []

    def _claimed(self, piece: list[tuple[int, int]]) -> list[tuple[int, int]]:
        rows = [row for row, _ in piece]
        self._stock.catalog.lease(rows)
        self._level.moving.update(rows)
        return piece

    def _is_here(self, row: int) -> bool:
        return self._place(row) != NONE

    def _place(self, row: int) -> int:
        """Where on this drive a block is, or NONE."""
        places = self._level.places(row)
        return next((place for place in places if drive_of(place) == self._index), NONE)

    def _thinned_out(self, row: int) -> bool:
        """Drop a copy whose block another drive has: it is mirrored anew from there. Lock held."""
        level = self._level
        if level.mirrors is None or not level.spared(row, self._place(row)):
            return False
        level.lose(row, self._place(row), again=True)
        return True

    def _move(self, piece: list[tuple[int, int]]) -> int:
        stock, level, catalog = self._stock, self._level, self._stock.catalog
        rows = [row for row, _ in piece]
        images = [
            stock.staging.image(slot, record_bytes(catalog.nbytes[row])) for row, slot in piece
        ]
        keys = [catalog.table.key(row) for row in rows]
        intact = level.tier.read_images(keys, [self._place(row) for row in rows], images)
        good = [index for index, fine in enumerate(intact) if fine]
        places = dict(zip(good, self._append([images[index] for index in good]), strict=True))
        moved = 0
        with stock.changed:
            for number, row in enumerate(rows):
                moved += self._enter(row, places.get(number))
            for _, slot in piece:
                stock.staging.free(slot)
            level.moving.difference_update(rows)
            stock.unlease(rows)
        return moved

    def _enter(self, row: int, location: int | None) -> bool:
        """A block is at a new place, or nowhere in this tier. Lock held."""
        level, stock = self._level, self._stock
        if location is None:
            level.lose(row, self._place(row))
            stock.counters.add("evicted", level.name)
            return False
        level.relocate(row, self._place(row), location)
        stock.counters.add("moved", level.name)
        return True

    def _append(self, images: list[memoryview]) -> list[int | None]:
        """To the other drives, in turns, until one takes it."""
        places: list[int | None] = [None] * len(images)
        left = list(range(len(images)))
        for drive in self._others():
            if not left:
                break
            some = [images[number] for number in left]
            found = append(self._level.tier, drive, some, self._make_room)
            for number, place in zip(left, found, strict=True):
                places[number] = place
            left = [number for number in left if places[number] is None]
        return places

    def _others(self) -> list[int]:
        drives = self._level.tier.drives
        self._turn = (self._turn + 1) % len(drives)
        order = [(self._turn + step) % len(drives) for step in range(len(drives))]
        return [n for n in order if not drives[n].draining and drives[n].breaker.closed]
