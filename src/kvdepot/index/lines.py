"""Rows standing in lines: linked lists in columns, so that a row joins and leaves in no time."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.core.order import Column
from kvdepot.index.table import NONE, KeyTable

_STEPS_MAX: Final = 8
"""How far a row is moved from an end to find its place."""
OUT: Final = -1


class Lines:
    """`width` lines for each group of rows, coldest row first."""

    def __init__(self, table: KeyTable, width: int) -> None:
        self._width = width
        self.line = table.column(np.int32, OUT)
        """The number of the line in which a row stands, or OUT."""
        self._colder = table.column(np.int32, NONE)
        self._warmer = table.column(np.int32, NONE)
        self._base: dict[int, int] = {}
        self._cold: list[int] = []
        self._warm: list[int] = []
        self._occupied: list[int] = []

    def first(self, group: int, line: int) -> int:
        base = self._base.get(group)
        return NONE if base is None else self._cold[base + line]

    def last(self, group: int, line: int) -> int:
        base = self._base.get(group)
        return NONE if base is None else self._warm[base + line]

    def ends(self, group: int) -> tuple[Sequence[int], Sequence[int]]:
        """The coldest and the warmest row of each line."""
        base = self._base.get(group)
        if base is None:
            return (), ()
        end = base + self._width
        return self._cold[base:end], self._warm[base:end]

    def occupied(self, group: int) -> int:
        """The lines of a group that are not empty, as bits."""
        base = self._base.get(group)
        return 0 if base is None else self._occupied[base // self._width]

    def to_end(self, row: int, line: int) -> None:
        """Move a row that is in line to the warm end of a line of its group."""
        base = self.line.view[row] // self._width * self._width
        self.remove(row)
        self._insert_before(row, NONE, base + line)

    def append(self, row: int, group: int, line: int) -> None:
        """Put a row at the warm end."""
        self._insert_before(row, NONE, self._base_of(group) + line)

    def place(self, row: int, group: int, line: int, stamps: Column) -> None:
        """Put a row where its stamp belongs, if that is near an end; else at the warm end."""
        at = self._base_of(group) + line
        view, warmer = stamps.view, self._warmer.view
        stamp, place = view[row], self._cold[at]
        for _ in range(_STEPS_MAX):
            if place == NONE or view[place] >= stamp:
                break
            place = warmer[place]
        else:
            place = NONE
        self._insert_before(row, place, at)

    def remove(self, row: int) -> None:
        line = self.line.view
        colders, warmers = self._colder.view, self._warmer.view
        at, colder, warmer = line[row], colders[row], warmers[row]
        if colder == NONE:
            self._cold[at] = warmer
        else:
            warmers[colder] = warmer
        if warmer == NONE:
            self._warm[at] = colder
            if colder == NONE:
                self._occupied[at // self._width] ^= 1 << at % self._width
        else:
            colders[warmer] = colder
        line[row] = OUT

    def _insert_before(self, row: int, place: int, at: int) -> None:
        """Put `row` on the cold side of `place`; NONE is the warm end."""
        colders, warmers = self._colder.view, self._warmer.view
        colder = colders[place] if place != NONE else self._warm[at]
        colders[row], warmers[row] = colder, place
        if colder == NONE:
            self._cold[at] = row
            if place == NONE:
                self._occupied[at // self._width] |= 1 << at % self._width
        else:
            warmers[colder] = row
        if place == NONE:
            self._warm[at] = row
        else:
            colders[place] = row
        self.line.view[row] = at

    def _base_of(self, group: int) -> int:
        base = self._base.get(group)
        if base is None:
            base = self._base[group] = len(self._cold)
            self._cold.extend([NONE] * self._width)
            self._warm.extend([NONE] * self._width)
            self._occupied.append(0)
        return base
