"""The evictable blocks of a tier: tails before heads, and none that is in use.

Only leaves are in a queue: blocks without a child in the same tier. A parent is queued when its
last child has left, at the position of its stamp. So the victim is at an end of a queue, and is
found in constant time. A block that is leased or waits to be written is held. It stays in its queue
until it would be the victim, because most leases end before that; then it is queued again when its
last hold ends.

An `Order` (order.py, policy/eviction) chooses the leaf that is evicted first. Each size class
has queues of its own, because a slot can only be reused for a block of the same class.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.core.sessions import SessionState
from kvdepot.index.order import Lru, Order
from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import FEW, NONE, Bools, KeyTable, Rows
from kvdepot.index.tree import PrefixTree

_OUT: Final = -1
_ONE: Final = np.int32(1)
"""Has the type of the column: with a plain 1 `ufunc.at` takes thirty times as long."""


class LeafOrder:
    """The evictable rows of one tier."""

    def __init__(self, table: KeyTable, tree: PrefixTree, order: Order | None = None) -> None:
        self._tree = tree
        self._order: Order = Lru() if order is None else order
        self._queues = LinkedQueues(table, self._order.queues)
        self._order.bind(table, tree, self._queues)
        self._queue = self._queues.queue
        self._group = table.column(np.int32, _OUT)
        self._kids = table.column(np.int32, 0)
        self._holds = table.column(np.int32, 0)

    def adopt(self, row: int) -> None:
        """Count the children of a new row, if it has any, that are in this tier."""
        groups, kids = self._group.view, 0
        for child in self._tree.children(row):
            kids += groups[child] != _OUT
        self._kids.view[row] = kids

    def enter(self, row: int, group: int) -> None:
        """Add a block that is in the tier now, in size class `group`."""
        self.enter_all([row], [group])

    def enter_all(self, rows: Sequence[int], groups: Sequence[int]) -> None:
        """`enter` for distinct rows; those of one prompt are given head first."""
        group_of, kids, queue = self._group.view, self._kids.view, self._queue.view
        parents, entered = self._tree.parent.view, self._order.entered
        for row, group in zip(rows, groups, strict=True):
            group_of[row] = group
            parent = parents[row]
            if parent != NONE:
                kids[parent] += 1
                if queue[parent] != _OUT:
                    self._queues.remove(parent)
            entered(row)
        for row, group in zip(rows, groups, strict=True):
            if not kids[row]:
                self._queues.append(row, group, self._order.queue(row))

    def leave(self, row: int) -> None:
        """Remove a block that is no longer in the tier."""
        if self._queue.view[row] != _OUT:
            self._queues.remove(row)
        if self._group.view[row] != _OUT:
            self._group.view[row] = _OUT
            self._order.left(row)
        parent = self._tree.parent.view[row]
        if parent != NONE:
            self._kids.view[parent] -= 1
            stamps = self._tree.stamp.view
            if stamps[parent] < stamps[row]:
                stamps[parent] = stamps[row]
            self._settle(parent)

    def leave_chain(self, rows: Sequence[int]) -> None:
        """`leave` for the rows that `chain` returned, tail first."""
        groups, kids, stamps = self._group.view, self._kids.view, self._tree.stamp.view
        left, stamp = self._order.left, 0
        self._queues.remove(rows[0])
        for row in rows:
            if stamps[row] < stamp:
                stamps[row] = stamp
            stamp = stamps[row]
            kids[row] = 0
            groups[row] = _OUT
            left(row)
        parent = self._tree.parent.view[rows[-1]]
        if parent != NONE:
            kids[parent] -= 1
            if stamps[parent] < stamp:
                stamps[parent] = stamp
            self._settle(parent)

    def detach(self, row: int) -> None:
        """Call before a row is unlinked from the tree."""
        parent = self._tree.parent.view[row]
        if parent != NONE and self._group.view[row] != _OUT:
            self._kids.view[parent] -= 1
            self._settle(parent)
        self._kids.view[row] = 0

    def hold(self, row: int) -> None:
        """Keep the block in the tier until the same number of `release` calls."""
        self._holds.view[row] += 1

    def release(self, row: int) -> None:
        self._holds.view[row] -= 1
        self._settle(row)

    def hold_all(self, rows: Sequence[int]) -> None:
        if len(rows) < FEW:
            holds = self._holds.view
            for row in rows:
                holds[row] += 1
            return
        np.add.at(self._holds.array, np.array(rows), _ONE)

    def release_all(self, rows: Sequence[int]) -> None:
        if len(rows) < FEW:
            holds, kids, queue = self._holds.view, self._kids.view, self._queue.view
            for row in rows:
                holds[row] -= 1
                if queue[row] == _OUT and not kids[row]:
                    self._settle(row)
            return
        at = np.array(rows)
        np.subtract.at(self._holds.array, at, _ONE)
        for row in at[(self._queue.array[at] == _OUT) & (self._kids.array[at] == 0)].tolist():
            self._settle(row)

    def held(self, row: int) -> bool:
        return bool(self._holds.view[row])

    def resident(self, row: int) -> bool:
        return bool(self._group.view[row] != _OUT)

    def resident_rows(self, rows: Rows) -> Bools:
        here: Bools = self._group.array[rows] != _OUT
        return here

    def used(self, rows: Sequence[int], *, hit: bool = True) -> None:
        """Record the use of stamped rows, head first. `hit`: a lookup, not a put.

        Queued rows move to the warm end if the order moves used blocks.
        """
        self._order.used(rows, hit=hit)
        if not self._order.moves_on_use:
            return
        queue = self._queue.view
        for row in rows:
            if queue[row] != _OUT:
                self._queues.to_end(row, self._order.queue(row))

    def session_changed(self, rows: Sequence[int], state: SessionState) -> None:
        self._order.session_changed(rows, state)
        queue = self._queue.view
        for row in rows:
            if queue[row] != _OUT:
                self._queues.remove(row)
                self._settle(row)

    def coldest(self, group: int) -> int:
        """The row of a size class to evict first, or NONE."""
        while (row := self._order.victim(group)) != NONE and self._holds.view[row]:
            self._queues.remove(row)
        return row

    def chain(self, row: int, count: int) -> list[int]:
        """A queued row and the rows above it that become leaves in turn, at most `count`, tail
        first.

        Ends at a row that was not used together with them. Only the row itself if the order does
        not evict chains.
        """
        rows = [row]
        stamps, parents, groups = self._tree.stamp.view, self._tree.parent.view, self._group.view
        kids, holds, queue_of = self._kids.view, self._holds.view, self._order.queue
        if not self._order.takes_chains:
            return rows
        group, queue = groups[row], queue_of(row)
        while len(rows) < count:
            parent = parents[row]
            if (
                parent == NONE
                or groups[parent] != group
                or kids[parent] != 1
                or holds[parent]
                or stamps[parent] - stamps[row] > 1
                or queue_of(parent) != queue
            ):
                break
            rows.append(parent)
            row = parent
        return rows

    def may_leave(self, row: int) -> bool:
        """True if the block is a leaf with at most one hold."""
        return not self._kids.view[row] and self._holds.view[row] <= 1

    def _settle(self, row: int) -> None:
        """Queue a row if it is evictable now."""
        group = self._group.view[row]
        if (
            group == _OUT
            or self._kids.view[row]
            or self._holds.view[row]
            or self._queue.view[row] != _OUT
        ):
            return
        self._queues.place(row, group, self._order.queue(row), self._order.stamps)
