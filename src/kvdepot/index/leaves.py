"""The order in which blocks leave a memory tier: least recently used first, tails before heads.

Only leaves are in line: blocks with no child in the same tier, not leased, not waiting to be
written down. A parent enters when its last child left, at the place its stamp gives it. So a
victim is always at the front, and finding it costs the same for ten blocks or ten million.

Blocks stand in one line per size class, because a slot can only be reused by its own class.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvdepot.index.table import NONE, KeyTable
from kvdepot.index.tree import FEW, PrefixTree

_OUT: Final = -1
_STEPS_MAX: Final = 8
"""How far a parent is moved back to find its place; hotter ones go to the warm end."""


class LeafOrder:
    """Lines of evictable rows of one tier."""

    def __init__(self, table: KeyTable, tree: PrefixTree) -> None:
        self._tree = tree
        self._line = table.column(np.int32, _OUT)
        self._group = table.column(np.int32, _OUT)
        self._kids = table.column(np.int32, 0)
        self._holds = table.column(np.int32, 0)
        self._colder = table.column(np.int32, NONE)
        self._warmer = table.column(np.int32, NONE)
        self._cold: dict[int, int] = {}
        self._warm: dict[int, int] = {}

    def adopt(self, row: int) -> None:
        """Count the children of a new row that are in this tier."""
        self._kids.view[row] = sum(
            self._group.view[child] != _OUT for child in self._tree.children(row)
        )

    def enter(self, row: int, group: int) -> None:
        """The block is in the tier now, in size class `group`."""
        self._group.view[row] = group
        parent = self._tree.parent.view[row]
        if parent != NONE:
            self._kids.view[parent] += 1
            if self._line.view[parent] != _OUT:
                self._unlink(parent)
        if not self._kids.view[row] and not self._holds.view[row]:
            self._insert_before(row, NONE)

    def leave(self, row: int) -> None:
        """The block is no longer in the tier."""
        if self._line.view[row] != _OUT:
            self._unlink(row)
        self._group.view[row] = _OUT
        parent = self._tree.parent.view[row]
        if parent != NONE:
            self._kids.view[parent] -= 1
            stamps = self._tree.stamp.view
            if stamps[parent] < stamps[row]:
                stamps[parent] = stamps[row]
            self._settle(parent)

    def detach(self, row: int) -> None:
        """The row is about to lose its place in the tree."""
        parent = self._tree.parent.view[row]
        if parent != NONE and self._group.view[row] != _OUT:
            self._kids.view[parent] -= 1
            self._settle(parent)
        self._kids.view[row] = 0

    def hold(self, row: int) -> None:
        """Keep the block out of line until the same number of `release` calls."""
        self._holds.view[row] += 1
        if self._line.view[row] != _OUT:
            self._unlink(row)

    def release(self, row: int) -> None:
        self._holds.view[row] -= 1
        self._settle(row)

    def hold_all(self, rows: Sequence[int]) -> None:
        """`hold` for each of many rows."""
        if len(rows) < FEW:
            for row in rows:
                self.hold(row)
            return
        at = np.array(rows)
        np.add.at(self._holds.array, at, 1)
        for row in at[self._line.array[at] != _OUT].tolist():
            if self._line.view[row] != _OUT:
                self._unlink(row)

    def release_all(self, rows: Sequence[int]) -> None:
        """`release` for each of many rows."""
        if len(rows) < FEW:
            for row in rows:
                self.release(row)
            return
        at = np.array(rows)
        np.subtract.at(self._holds.array, at, 1)
        idle = (self._group.array[at] != _OUT) & (self._kids.array[at] == 0)
        for row in at[idle].tolist():
            self._settle(row)

    def held(self, row: int) -> bool:
        return bool(self._holds.view[row])

    def used(self, rows: Iterable[int]) -> None:
        """Rows were stamped: those in line go to the warm end."""
        line = self._line.view
        for row in rows:
            if line[row] != _OUT:
                self._unlink(row)
                self._insert_before(row, NONE)

    def coldest(self, group: int) -> int:
        """The row that should leave first from a size class, or NONE."""
        return self._cold.get(group, NONE)

    def _settle(self, row: int) -> None:
        """Put a row in line if nothing keeps it out any more."""
        if (
            self._group.view[row] == _OUT
            or self._kids.view[row]
            or self._holds.view[row]
            or self._line.view[row] != _OUT
        ):
            return
        group = self._group.view[row]
        stamps, warmer = self._tree.stamp.view, self._warmer.view
        place = self._cold.get(group, NONE)
        for _ in range(_STEPS_MAX):
            if place == NONE or stamps[place] >= stamps[row]:
                break
            place = warmer[place]
        else:
            place = NONE
        self._insert_before(row, place)

    def _insert_before(self, row: int, place: int) -> None:
        """Put `row` on the cold side of `place`; NONE is the warm end."""
        group = self._group.view[row]
        colder = self._colder.view[place] if place != NONE else self._warm.get(group, NONE)
        self._colder.view[row], self._warmer.view[row] = colder, place
        if colder == NONE:
            self._cold[group] = row
        else:
            self._warmer.view[colder] = row
        if place == NONE:
            self._warm[group] = row
        else:
            self._colder.view[place] = row
        self._line.view[row] = group

    def _unlink(self, row: int) -> None:
        group, colder, warmer = self._line.view[row], self._colder.view[row], self._warmer.view[row]
        if colder == NONE:
            self._cold[group] = warmer
        else:
            self._warmer.view[colder] = warmer
        if warmer == NONE:
            self._warm[group] = colder
        else:
            self._colder.view[warmer] = colder
        self._line.view[row] = _OUT
