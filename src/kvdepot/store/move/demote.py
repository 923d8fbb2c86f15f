"""Copies blocks from a lower tier to the slower one below it, prompts in one piece.

The blocks of a path are gathered and appended one after the other, up to `contiguous_bytes` on one
drive, then on the next, so that a returning prompt is read in a few long reads. Blocks that will be
evicted next are copied ahead, so that a reclaim only has to drop them.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from kvdepot.core.volume import Volume
from kvdepot.format.record import record_bytes
from kvdepot.index.paths import path_order
from kvdepot.index.table import NONE, Rows
from kvdepot.policy.placing.demotion import DemotionFacts, worth_demoting
from kvdepot.store.move.mover import PIECE_BYTES, BlockMover, CopyJob
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_GATHER_MAX: Final = 4096
"""Most blocks gathered while the lock is held."""
_LOOK_S: Final = 1.0
_FULL_SHARE: Final = 0.5
"""Blocks are copied ahead when this share of a volume's segments is used."""
_AHEAD_SHARE: Final = 0.25
"""Share of the segments, the oldest ones, that is copied ahead."""


class Demote(CopyJob):
    in_place = True
    counter = "demoted"

    def __init__(self, state: StoreState, upper: LowerTier, lower: LowerTier) -> None:
        super().__init__(lower)
        self._state = state
        self._upper = upper

    def is_wanted(self, row: int) -> bool:
        return (
            self._state.catalog.is_live(row)
            and self._upper.usable(row)
            and self.target.copies.absent(row)
            and row not in self.target.queue.tickets
        )

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self._upper, self._upper.place(row)

    def claim(self, rows: list[int]) -> None:
        super().claim(rows)
        self.target.copies.reserve_all(rows, [0] * len(rows))

    def enter(self, rows: list[int], locations: list[int]) -> None:
        self.target.copies.location.array[rows] = locations
        self.target.copies.seal_all(rows)
        self.target.enter(rows, locations)

    def give_up(self, row: int) -> None:
        self.target.copies.drop(row)


class Demoter:
    """Copies blocks from one tier to the next lower one. Thread-safe."""

    def __init__(
        self, state: StoreState, upper: LowerTier, lower: LowerTier, mover: BlockMover
    ) -> None:
        self._state = state
        self.upper = upper
        self.lower = lower
        self._mover = mover
        self._job = Demote(state, upper, lower)
        self._size = ChunkSizer(PIECE_BYTES)

    def demote(self, rows: Sequence[int], *, urgent: bool) -> None:
        """Copy the worthwhile blocks of `rows` and their paths to the lower tier. The originals
        stay.

        Blocks. `urgent`: a reclaim waits for it; otherwise it pauses for foreground reads.
        """
        for start in range(0, len(rows), _GATHER_MAX):
            with self._state.lock:
                gathered = self._gather(rows[start : start + _GATHER_MAX])
            for run in self._runs(gathered):
                if not self._copy_run(run, urgent=urgent):
                    return

    def _gather(self, rows: Iterable[int]) -> list[int]:
        """The rows with their ancestors and descendants in the upper tier, in path order."""
        assert self._state.lock.held()
        tree, copies = self._state.catalog.tree, self.upper.copies
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
        tree = self._state.catalog.tree
        return DemotionFacts(
            below=self.lower.copies.state.array[rows] != 0,
            hits=tree.hits.array[rows].astype(np.int64),
            continues=tree.parent.array[rows] != NONE,
            continued=tree.only_children(rows)[0] != NONE,
            closed=self._state.catalog.closed.mask(rows),
        )

    def _runs(self, rows: list[int]) -> Iterator[list[int]]:
        """Split rows into runs, each for one volume."""
        nbytes = self._state.catalog.nbytes
        run: list[int] = []
        total = 0
        for row in rows:
            run.append(row)
            total += record_bytes(nbytes[row])
            if total >= max(self.lower.volumes.contiguous_bytes, 1):
                yield run
                run, total = [], 0
        if run:
            yield run

    def _copy_run(self, rows: list[int], *, urgent: bool) -> bool:
        """Copy rows to the next volume. False: no volume takes them, or the store closes."""
        state, shares = self._state, self.lower.volumes.shares
        with state.lock:
            nbytes = sum(record_bytes(state.catalog.nbytes[row]) for row in rows)
            volume = shares.next()
            if volume is None:
                return False
            shares.take(volume, nbytes, state.clock.now())
        rests = () if urgent else (self.upper, self.lower)
        try:
            return not self._mover.copy_all(
                self._job, rows, lambda: [volume], size=self._size, rests=rests
            )
        finally:
            with state.lock:
                shares.done(volume, nbytes)


class DemoteAhead:
    """The background thread of one pair of tiers."""

    def __init__(self, state: StoreState, demoter: Demoter) -> None:
        self._state = state
        self._demoter = demoter
        self._done: set[int] = set()
        """Ids of the segments that were handled."""
        name = f"kvdepot-{demoter.upper.name}-demote-ahead"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not self._state.closing.wait(_LOOK_S):
            if self._demoter.lower.volumes.are_up:
                self.look()

    def look(self) -> None:
        """Copy ahead the blocks of the segments that will be reclaimed next."""
        upper = self._demoter.upper
        for entry in upper.volumes.entries:
            for segment, segment_id in self._next_to_go(entry.volume):
                self._done.add(segment_id)
                with self._state.lock:
                    rows = upper.live(entry.number, segment).tolist()
                self._demoter.demote(rows, urgent=False)
                if self._state.closing.is_set():
                    return

    def _next_to_go(self, volume: Volume) -> list[tuple[int, int]]:
        """Numbers and ids of the oldest full segments, if the volume will soon need room."""
        facts = volume.facts()
        if facts.spare_segments > facts.segments_max * (1 - _FULL_SHARE) or not facts.up:
            return []
        table, count = volume.segments(), max(1, int(facts.segments_max * _AHEAD_SHARE))
        oldest = zip(table.segments[table.sealed], table.ids[table.sealed], strict=True)
        chosen = [(int(segment), int(one)) for segment, one in itertools.islice(oldest, count)]
        return [one for one in chosen if one[1] not in self._done]
