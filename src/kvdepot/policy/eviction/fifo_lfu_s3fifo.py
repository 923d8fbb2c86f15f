"""Eviction orders for comparison: FIFO, LFU, S3-FIFO. LRU is in index/order.py."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.index.order import Lru
from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import NONE, KeyTable
from kvdepot.index.tree import PrefixTree
from kvdepot.policy.eviction.ghosts import Ghosts

_COUNT_MAX: Final = 255
_SHORT, _LONG = 0, 1
_PROBATION_SHARE: Final = 0.1
_LAPS_MAX: Final = 3
_GHOSTS_PER_BLOCK: Final = 1.0


class Fifo(Lru):
    """Evicts the block that came first; uses do not count."""

    moves_on_use = False

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        super().bind(rows, tree, queues)
        self._stamps = rows.column(np.int64, 0)
        self._arrivals = 0

    def entered(self, row: int) -> None:
        self._arrivals += 1
        self._stamps.view[row] = self._arrivals


class Lfu(Lru):
    """Evicts the block with the fewest hits since it came; of equals the least recent one."""

    queues = _COUNT_MAX + 1

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        super().bind(rows, tree, queues)
        self._uses = rows.column(np.uint8, 0)

    def queue(self, row: int) -> int:
        uses: int = self._uses.view[row]
        return uses

    def entered(self, row: int) -> None:
        self._uses.view[row] = 0

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if hit:
            at = np.asarray(rows, dtype=np.int64)
            uses = self._uses.array
            uses[at] = np.minimum(uses[at], _COUNT_MAX - 1) + 1

    def victim(self, group: int) -> int:
        occupied = self._queues.occupied(group)
        if not occupied:
            return NONE
        return self._queues.first(group, (occupied & -occupied).bit_length() - 1)


class S3Fifo(Lru):
    """S3-FIFO: a short queue for new blocks, a long one for blocks that were used there.

    Both queues are first in first out. A used block moves from the short to the long queue; an
    unused one is evicted, and if it comes back soon it enters the long queue at once. In the long
    queue a used block is queued again, at most three times.
    """

    queues = 2
    moves_on_use = False
    takes_chains = False

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        super().bind(rows, tree, queues)
        self._rows = rows
        self._stamps = rows.column(np.int64, 0)
        self._queue = rows.column(np.uint8, _SHORT)
        self._uses = rows.column(np.uint8, 0)
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK)
        self._arrivals = 0
        self._count = [0, 0]

    def queue(self, row: int) -> int:
        queue: int = self._queue.view[row]
        return queue

    def entered(self, row: int) -> None:
        known = self._ghosts.recall(self._rows.digest(row))
        self._uses.view[row] = 0
        self._join(row, _SHORT if known is None else _LONG)
        self._ghosts.fit(sum(self._count))

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if hit:
            at = np.asarray(rows, dtype=np.int64)
            uses = self._uses.array
            uses[at] = np.minimum(uses[at], _LAPS_MAX - 1) + 1

    def left(self, row: int) -> None:
        queue = self._queue.view[row]
        self._count[queue] -= 1
        if queue == _SHORT:
            self._ghosts.remember(self._rows.digest(row), self._stamps.view[row], 0)

    def victim(self, group: int) -> int:
        uses = self._uses.view
        while (row := self._candidate(group)) != NONE:
            if not uses[row]:
                return row
            queue = self._queue.view[row]
            uses[row] = 0 if queue == _SHORT else uses[row] - 1
            self._count[queue] -= 1
            self._join(row, _LONG)
            self._queues.to_end(row, _LONG)
        return NONE

    def _candidate(self, group: int) -> int:
        first, main = self._queues.first(group, _SHORT), self._queues.first(group, _LONG)
        crowded = self._count[_SHORT] > sum(self._count) * _PROBATION_SHARE
        return first if main == NONE or (first != NONE and crowded) else main

    def _join(self, row: int, queue: int) -> None:
        self._arrivals += 1
        self._stamps.view[row] = self._arrivals
        self._queue.view[row] = queue
        self._count[queue] += 1
