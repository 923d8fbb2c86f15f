"""Predicts reuse intervals of blocks, and chooses between two memory levels.

A block belongs in the tier whose latency matches its expected reuse interval. It replaces the next
victim of a tier if that victim's reuse is expected later than its own.

The interval of a block is estimated from its own reuses; a new block starts with the interval of
the prompt that it continues. The gaps of all blocks together give the share that comes back at all,
and after how long, for blocks that have been idle as long as this one. Gaps are counted in uses of
blocks, in octaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.index.order import Lru
from kvdepot.index.queues import LinkedQueues
from kvdepot.index.table import NONE, KeyTable
from kvdepot.index.tree import PrefixTree

_OCTAVES: Final = 48
_BREATH: Final = 8
"""A use within this many times the prompt's own length, in uses, is not a return: the prompt was
leased and then delivered."""
_RETURNS_MAX: Final = 15
_CROWD: Final = 2.0
"""The weight of the gaps of all blocks, in returns of one block."""
_GROWTH: Final = 1.001
"""The weight of an observation relative to the previous one."""
_WEIGHT_MAX: Final = 1e9
_STALE: Final = 64
"""Number of observations after which the sums are computed again."""
PROMOTE_MARGIN: Final = 2.0
"""A block is promoted if its reuse rate is more than this times the victim's, because a promotion
costs two copies."""


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """The expected next use of a block."""

    chance: float
    """The chance that the block is used again."""
    interval: float
    """The expected time until then, in uses of blocks."""

    @property
    def rate(self) -> float:
        """Expected reuses of the block per use of any block."""
        return self.chance / max(1.0, self.interval)


def is_kept(leaving: ExpectedReuse, incumbent: ExpectedReuse) -> bool:
    """True if a block that leaves a tier should replace `incumbent` in the next one.

    Of equals the leaving one is kept, because it was used more recently.
    """
    return leaving.rate >= incumbent.rate


def is_promoted(used: ExpectedReuse, incumbent: ExpectedReuse) -> bool:
    """True if a block that was used should replace `incumbent` in the faster tier."""
    return used.rate > PROMOTE_MARGIN * incumbent.rate


_NEVER: Final = ExpectedReuse(0.0, float("inf"))


def octave(gap: int) -> int:
    """0 for no gap, then one more for each doubling."""
    return min(_OCTAVES - 1, gap.bit_length())


def middle(number: int) -> float:
    """The mean gap of an octave."""
    return 0.75 * float(1 << number) if number else 0.5


class ReturnTimes(Lru):
    """LRU for the second memory; also predicts the next use of blocks of any tier."""

    def __init__(self) -> None:
        self._gaps = [0.0] * _OCTAVES
        self._uses = 0.0
        self._weight = 1.0
        self._unseen = _STALE
        self._later = self._later_sum = [0.0] * (_OCTAVES + 1)

    def bind(self, rows: KeyTable, tree: PrefixTree, queues: LinkedQueues) -> None:
        super().bind(rows, tree, queues)
        self._tree = tree
        self._since = rows.column(np.int64, 0)
        self._returns = rows.column(np.uint8, 0)
        self._octave = rows.column(np.uint8, 0)

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        if hit:
            self._came_back(rows)
            return
        for row in rows:
            # A new block starts with the interval of its prompt.
            self._since.view[row] = self._stamps.view[row]
            self._count()
            parent = self._tree.parent.view[row]
            if parent != NONE and self._returns.view[parent]:
                self._returns.view[row] = 1
                self._octave.view[row] = self._octave.view[parent]

    def expect(self, row: int) -> ExpectedReuse:
        """The expected next use of the block, counted from now."""
        idle = max(0, self._tree.now - self._since.view[row])
        first = octave(idle)
        if middle(first) <= idle:
            first = min(first + 1, _OCTAVES)
        if self._unseen >= _STALE:
            self._add_up()
        scale = _CROWD / max(self._uses, self._weight)
        weight, total = self._later[first] * scale, self._later_sum[first] * scale
        silent = max(0.0, self._uses - self._later[0]) * scale
        returns, own = self._returns.view[row], self._octave.view[row]
        if returns and own >= first:
            weight += returns
            total += returns * middle(own)
        if not weight:
            return _NEVER
        return ExpectedReuse(weight / (weight + silent), total / weight - idle)

    def _came_back(self, rows: Sequence[int]) -> None:
        since, stamps = self._since.view, self._stamps.view
        returns, octaves = self._returns.view, self._octave.view
        breath = _BREATH * len(rows)
        for row in rows:
            gap, known = stamps[row] - since[row], since[row]
            since[row] = stamps[row]
            if known and gap <= breath:
                continue
            self._count()
            if not known:
                continue
            number = octave(gap)
            self._gaps[number] += self._weight
            octaves[row] = (octaves[row] + number + 1) // 2 if returns[row] else number
            returns[row] = min(returns[row] + 1, _RETURNS_MAX)

    def _count(self) -> None:
        """Count a use of a block, first or later, after which it may return."""
        self._weight *= _GROWTH
        self._uses += self._weight
        self._unseen += 1
        if self._weight > _WEIGHT_MAX:
            self._gaps = [count / self._weight for count in self._gaps]
            self._uses /= self._weight
            self._weight = 1.0
            self._unseen = _STALE

    def _add_up(self) -> None:
        """Compute for each octave the number and the sum of gaps in it and in longer ones."""
        self._unseen = 0
        later, later_sum = [0.0] * (_OCTAVES + 1), [0.0] * (_OCTAVES + 1)
        for number in range(_OCTAVES - 1, -1, -1):
            count = self._gaps[number]
            later[number] = later[number + 1] + count
            later_sum[number] = later_sum[number + 1] + count * middle(number)
        self._later, self._later_sum = later, later_sum
