"""The prefix tree over rows.

A child names its parent in its key, so that it may arrive first; it is an orphan until the parent
has a row. A stamp is the time of a row's last use. A prefix counts as used when a continuation is;
that stamp is passed up when a child leaves (LeafOrder.leave), not on every use.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvdepot.core.keys import Keys
from kvdepot.index.table import FEW, NONE, Bools, KeyTable, Rows

HITS_MAX: Final = 65_535


class PrefixTree:
    """Parents, children and last use of every row of a KeyTable."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self.parent = table.column(np.int32, NONE)
        self.stamp = table.column(np.int64, 0)
        self.hits = table.column(np.uint16, 0)
        self._depth = table.column(np.int32, 0)
        self._first = table.column(np.int32, NONE)
        self._next = table.column(np.int32, NONE)
        self._previous = table.column(np.int32, NONE)
        self._orphans: dict[tuple[int, int], int] = {}
        self.now = 0

    def children(self, row: int) -> Iterator[int]:
        child = self._first.view[row]
        while child != NONE:
            yield child
            child = self._next.view[child]

    def descendants(self, row: int) -> Iterator[int]:
        """All rows below `row`, parents before children."""
        waiting = list(self.children(row))
        left = self._table.live
        while waiting and left:
            child = waiting.pop()
            left -= 1
            yield child
            waiting.extend(self.children(child))

    def depth(self, row: int) -> int:
        """The number of blocks of the prompt up to this one, which is cached unless a block before
        it is unknown.
        """
        depths, parents, path = self._depth.view, self.parent.view, list[int]()
        while row != NONE and not depths[row]:
            path.append(row)
            row = parents[row]
        depth: int = depths[row] if row != NONE else 0
        keep = bool(depth) or not path or not self._table.link(path[-1])
        for row in reversed(path):
            depth += 1
            if keep:
                depths[row] = depth
        return depth

    def only_children(self, rows: Rows) -> tuple[Rows, Bools]:
        """The first child of each row, or NONE, and True if that child has siblings."""
        first = self._first.array[rows].astype(np.int64)
        siblings: Bools = (first != NONE) & (self._next.array[first] != NONE)
        return first, siblings

    def attach(self, row: int) -> bool:
        """Link a new row to its parent and to the orphans that are its children. True if it has
        children.
        """
        name = self._table.parent_name(row)
        if name[1]:
            parent = self._table.find_name(*name)
            if parent == NONE:
                self._push(row, self._orphans.get(name, NONE))
                self._orphans[name] = row
            elif parent != row and not (self._orphans and self._is_below(parent, row)):
                first = self._first.view
                self.parent.view[row] = parent
                self._push(row, first[parent])
                first[parent] = row
        if not self._orphans:
            return False
        child = self._first.view[row] = self._orphans.pop(self._table.name(row), NONE)
        for other in self.children(row):
            self.parent.view[other] = row
        return child != NONE

    def attach_all(self, rows: list[int], words: Keys) -> list[int]:
        """`attach` for new rows with these keys. Returns those that have children."""
        parents, first = self.parent.view, self._first.view
        linked = (words[1:, 1] == words[:-1, 2]) & (words[1:, 1] != 0)
        follows = [False, *linked.tolist()]
        same_tag = bool((words[:, 0] == words[0, 0]).all())
        have_children, before = [], NONE
        for row, is_next in zip(rows, follows, strict=True):
            if is_next and same_tag and not self._orphans:
                parents[row] = before  # a new row: this is its first child
                first[before] = row
            elif self.attach(row):
                have_children.append(row)
            before = row
        return have_children

    def _is_below(self, row: int, new: int) -> bool:
        """True if `row` continues `new`, which is not linked yet. Only forged keys form cycles."""
        if self._table.name(new) not in self._orphans:
            return False
        while (parent := self.parent[row]) != NONE:
            row = parent
        return self._table.parent_name(row) == self._table.name(new)

    def attach_many(self, rows: Rows) -> None:
        """`attach` for the first rows of a table, oldest first."""
        words = self._table.words(rows)
        linked = rows[words[:, 1] != 0]
        names = self._table.words(linked)
        parents = self._table.find_names(names[:, 0], names[:, 1])
        self.parent.array[linked] = parents
        order = np.argsort(parents, kind="stable")
        children, groups = linked[order], parents[order]
        known = groups != NONE
        children, groups = children[known], groups[known]
        starts = np.r_[True, groups[1:] != groups[:-1]] if len(groups) else np.zeros(0, bool)
        self._first.array[groups[starts]] = children[starts]
        inner = ~starts
        self._previous.array[children[inner]] = children[np.flatnonzero(inner) - 1]
        self._next.array[children[np.flatnonzero(inner) - 1]] = children[inner]
        for row in linked[parents == NONE].tolist():
            name = self._table.parent_name(row)
            self._push(row, self._orphans.get(name, NONE))
            self._orphans[name] = row

    def detach(self, row: int) -> None:
        """Unlink a row; its children become orphans. Call before the row's key is hidden."""
        parents, firsts = self.parent.view, self._first.view
        previous, following = self._previous.view, self._next.view
        before, after, first = previous[row], following[row], firsts[row]
        if after != NONE:
            previous[after] = before
        if before != NONE:
            following[before] = after
        elif self._table.link(row):
            self._replace_first(row, after)
        if first != NONE:
            for child in self.children(row):
                parents[child] = NONE
            self._orphans[self._table.name(row)] = first
        parents[row] = firsts[row] = following[row] = previous[row] = NONE

    def use(self, rows: Sequence[int], *, hit: bool = True) -> None:
        """Stamp rows of one prompt, given head first: the head gets the newest stamp."""
        base = self.now
        self.now += len(rows)
        if len(rows) >= FEW:
            at = np.array(rows)
            self.stamp.array[at] = np.arange(self.now, base, -1)
            if hit:
                hits = self.hits.array
                hits[at] = np.minimum(hits[at], HITS_MAX - 1) + 1
            return
        stamp, counts = self.stamp.view, self.hits.view
        for age, row in enumerate(rows):
            stamp[row] = self.now - age
            if hit and counts[row] < HITS_MAX:
                counts[row] += 1

    def _push(self, row: int, first: int) -> None:
        self._next.view[row] = first
        self._previous.view[row] = NONE
        if first != NONE:
            self._previous.view[first] = row

    def _replace_first(self, row: int, after: int) -> None:
        parent = self.parent[row]
        if parent != NONE:
            self._first[parent] = after
            return
        name = self._table.parent_name(row)
        if self._orphans.get(name, NONE) != row:
            return
        if after != NONE:
            self._orphans[name] = after
        else:
            del self._orphans[name]
