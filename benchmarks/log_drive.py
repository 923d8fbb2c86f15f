"""A drive that is one long log: segments, reclaimed whole, by the rules that the store uses.

Blocks of a prompt that are not there are appended. When no segment is free, one is chosen among
the oldest and the newest, as the store does, what the rule wants of it is written again, and the
rest is dropped with all that continues it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.index.table import Bools, Rows
from kvdepot.policy.placing.reclaim import ReclaimRule, SegmentFacts
from kvdepot.sim.hits_only import Progress
from kvdepot.sim.tiers import BlockIndex, leading
from kvdepot.sim.workload import Workload

SEGMENTS: Final = 32
_OLDEST: Final = 8
_NEWEST: Final = 4
_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class LogCounts:
    """What a workload hit on the drive, and what was written for it."""

    blocks_asked: int
    blocks_hit: int
    blocks_new: int
    blocks_again: int
    """Written once more because their segment went."""

    @property
    def hit_ratio(self) -> float:
        return self.blocks_hit / self.blocks_asked if self.blocks_asked else 0.0

    @property
    def written_per_read(self) -> float:
        """Blocks written for each block read."""
        return (self.blocks_new + self.blocks_again) / max(1, self.blocks_hit)


class LogDrive:
    """Room for SEGMENTS segments of equally large blocks."""

    def __init__(self, capacity_blocks: int, index: BlockIndex, rule: ReclaimRule) -> None:
        self._tree, self._rule = index.tree, rule
        self._segment_blocks = max(1, capacity_blocks // SEGMENTS)
        self._place = np.full(len(index.tree.stamp.array), _NOWHERE, dtype=np.int64)
        self._at = self._place.data
        self._listed: dict[int, list[int]] = {}
        """Segments, oldest first, and what was written to each; some of it is gone."""
        self._active: list[int] = []
        self._opened = _NOWHERE
        self.new = self.again = 0

    def has(self, rows: Rows) -> Bools:
        here: Bools = self._place[rows] != _NOWHERE
        return here

    def write(self, rows: list[int]) -> None:
        """Append blocks of a prompt that are not here, head first."""
        for row in rows:
            parent = self._tree.parent[row]
            if parent != _NOWHERE and self._at[parent] == _NOWHERE:
                return
            if not self._active or len(self._active) >= self._segment_blocks:
                self._open()
                if parent != _NOWHERE and self._at[parent] == _NOWHERE:
                    return
            self.new += 1
            self._append(row)

    def _append(self, row: int) -> None:
        self._active.append(row)
        self._at[row] = self._opened
        self._tree.hits[row] = 0

    def _open(self) -> None:
        """A new segment, for which an old one may have to go; what is kept of it comes first."""
        kept = self._reclaim() if len(self._listed) >= SEGMENTS else []
        self._opened += 1
        self._active = self._listed[self._opened] = []
        self.again += len(kept)
        for row in kept:
            self._append(row)

    def _reclaim(self) -> list[int]:
        sealed = list(self._listed)
        chosen = sealed[:_OLDEST] + sealed[max(_OLDEST, len(sealed) - _NEWEST) :]
        parts = [self._live(number) for number in chosen]
        facts = [self._facts(number, rows) for number, rows in zip(chosen, parts, strict=True)]
        at = self._rule.coldest(facts)
        rows, others = parts[at], facts[:at] + facts[at + 1 :]
        stays = self._rule.keep(facts[at], np.zeros(len(rows), dtype=bool), others)
        for row in rows[~stays].tolist():
            self._drop(row)
        del self._listed[chosen[at]]
        kept: list[int] = rows[stays & (self._place[rows] != _NOWHERE)].tolist()
        return kept

    def _live(self, number: int) -> Rows:
        rows = np.unique(np.array(self._listed[number], dtype=np.int64))
        live: Rows = rows[self._place[rows] == number]
        return live

    def _facts(self, number: int, rows: Rows) -> SegmentFacts:
        """As the store's reclaimer sees them: a head is as recent as what continues it."""
        stamps, below = self._tree.stamp.array[rows], np.zeros(len(rows), dtype=np.int64)
        first, siblings = self._tree.only_children(rows)
        leads_out = (first != _NOWHERE) & (siblings | (self._place[first] != number))
        for at in np.flatnonzero(leads_out).tolist():
            for child in self._below(int(rows[at]), number):
                below[at] += 1
                stamps[at] = max(stamps[at], self._tree.stamp[child])
        hits = self._tree.hits.array[rows].astype(np.int64)
        sizes = np.ones(len(rows), dtype=np.int64)
        return SegmentFacts(self._segment_blocks, sizes, stamps, hits, below)

    def _below(self, row: int, but: int = _NOWHERE) -> Iterator[int]:
        """What continues a block here, parents first, not following those in segment `but`."""
        waiting = list(self._tree.children(row))
        while waiting:
            child = waiting.pop()
            if self._at[child] not in (_NOWHERE, but):
                yield child
                waiting.extend(self._tree.children(child))

    def _drop(self, row: int) -> None:
        if self._at[row] != _NOWHERE:
            for gone in [row, *self._below(row)]:
                self._at[gone] = _NOWHERE


def play_log(
    workload: Workload, capacity_blocks: int, rule: ReclaimRule, progress: Progress
) -> LogCounts:
    """Every prompt's blocks are read if they are there, and written if not."""
    index = BlockIndex.of(workload)
    drive = LogDrive(capacity_blocks, index, rule)
    asked = found = 0
    for number, request in enumerate(workload):
        rows = request.blocks
        hit = leading(drive.has(rows))
        asked, found = asked + len(rows), found + hit
        prompt = rows.tolist()
        index.tree.use(prompt[:hit])
        index.tree.use(prompt, hit=False)
        drive.write(prompt[hit:])
        if number % 256 == 0:
            progress(number)
    return LogCounts(asked, found, drive.new, drive.again)
