"""Writes blocks of a tier again, so that they are younger than any removal that is known elsewhere.

A drive that was away since the store was opened may know that a block was removed. When it is back
that covers all records of the block from before, also one that was found on another drive meanwhile
and relied on.
"""

from kvdepot.core.volume import Purpose
from kvdepot.index.table import NONE
from kvdepot.store.move.mover import PIECE_BYTES, BlockMover, CopyJob
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState


class Renew(CopyJob):
    purpose = Purpose.MOVE
    from_memory = False
    renews = True

    def __init__(self, state: StoreState, lower: LowerTier, rows: list[int]) -> None:
        super().__init__(lower)
        self._state = state
        self.places = {row: lower.copies.location[row] for row in rows}
        """Where those are that have yet to be written again."""

    def is_wanted(self, row: int) -> bool:
        place = self.target.place(row)
        return place != NONE and place == self.places.get(row)

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self.target, self.places[row]

    def enter(self, row: int, location: int) -> None:
        self.target.relocate(row, self.places.pop(row), location)


def renew(state: StoreState, lower: LowerTier, rows: list[int], mover: BlockMover) -> bool:
    """False: some lie where they did: they could not be read or written."""
    with state.lock:
        job = Renew(state, lower, rows)
    able = [number for number, facts in lower.volumes.all_facts() if facts.up and facts.may_write]
    mover.copy_all(job, rows, lambda: able, size=ChunkSizer(PIECE_BYTES))
    with state.lock:
        return not any(map(job.is_wanted, job.places))
