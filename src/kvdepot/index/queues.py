"""Eviction queues as linked lists in columns: a row joins and leaves in constant time."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.index.table import NONE, Column, KeyTable

_STEPS_MAX: Final = 8
"""Most steps from an end of a queue to the place of a row."""
OUT: Final = -1


class LinkedQueues:
    """`width` queues for each group of rows, coldest first; a group is a size class."""

    def __init__(self, table: KeyTable, width: int) -> None:
        self._width = width
        self.queue = table.column(np.int32, OUT)
        """The number of the queue in which a row stands, or OUT."""
        self._colder = table.column(np.int32, NONE)
        self._warmer = table.column(np.int32, NONE)
        self._base: dict[int, int] = {}
        self._cold: list[int] = []
        self._warm: list[int] = []
        self._occupied: list[int] = []

    def first(self, group: int, queue: int) -> int:
        base = self._base.get(group)
        return NONE if base is None else self._cold[base + queue]

    def ends(self, group: int) -> tuple[Sequence[int], Sequence[int]]:
        """The coldest and the warmest row of each queue."""
        base = self._base.get(group)
        if base is None:
            return (), ()
        end = base + self._width
        return self._cold[base:end], self._warm[base:end]

    def occupied(self, group: int) -> int:
        """The queues of a group that are not empty, as bits."""
        base = self._base.get(group)
        return 0 if base is None else self._occupied[base // self._width]

    def to_end(self, row: int, queue: int) -> None:
        """Move a row that is in a queue to the warm end of a queue of its group."""
        now = self.queue.view[row]
        at = now // self._width * self._width + queue
        if at != now or self._warm[at] != row:
            self.remove(row)
            self._insert_before(row, NONE, at)

    def append(self, row: int, group: int, queue: int) -> None:
        base = self._base.get(group)
        self._insert_before(row, NONE, (self._add(group) if base is None else base) + queue)

    def place(self, row: int, group: int, queue: int, stamps: Column) -> None:
        """Put a row where its stamp belongs, if that is near an end; else at the warm end."""
        base = self._base.get(group)
        at = (self._add(group) if base is None else base) + queue
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
        queue = self.queue.view
        colders, warmers = self._colder.view, self._warmer.view
        at, colder, warmer = queue[row], colders[row], warmers[row]
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
        queue[row] = OUT

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
        self.queue.view[row] = at

    def _add(self, group: int) -> int:
        """Make the queues of a group. Returns the number of the first one."""
        base = self._base[group] = len(self._cold)
        self._cold.extend([NONE] * self._width)
        self._warm.extend([NONE] * self._width)
        self._occupied.append(0)
        return base
