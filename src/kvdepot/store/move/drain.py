"""Moves all blocks off a volume that is to be removed, while the store is in use."""

import itertools

from kvdepot.core.units import format_count
from kvdepot.errors import ConfigError
from kvdepot.index.table import NONE
from kvdepot.store.move.mover import PIECE_BYTES, BlockMover, CopyJob
from kvdepot.store.move.reclaim import make_durable
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState
from kvdepot.store.volume_entry import VolumeEntry

_WAIT_S = 0.1


class MoveAway(CopyJob):
    from_memory = False

    def __init__(self, state: StoreState, lower: LowerTier, volume: int) -> None:
        super().__init__(lower)
        self._state = state
        self._volume = volume
        self.moved = 0
        self.bound: list[int] = []
        """Pinned blocks that could not be read or written, and were not moved."""

    def is_wanted(self, row: int) -> bool:
        return self.target.place_on(row, self._volume) != NONE

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        return self.target, self.target.place_on(row, self._volume)

    def enter(self, rows: list[int], locations: list[int]) -> None:
        for row, location in zip(rows, locations, strict=True):
            self.target.relocate(row, self.target.place_on(row, self._volume), location)
        self.moved += len(rows)

    def give_up(self, row: int) -> None:
        if self.target.is_bound(row):
            self.bound.append(row)
            return
        if self.is_wanted(row):
            self.target.drop(row)
            self._state.events.count(f"evicted_{self.target.name}")
            self._state.events.count(f"drained_{self.target.name}")


def drain(state: StoreState, lower: LowerTier, number: int, mover: BlockMover) -> int:
    """Move all blocks of a volume to the others of its tier; drop those that cannot be moved.

    Returns the number of moved blocks. Blocks until the volume is empty, or the store closes. The
    volume accepts no new blocks afterwards. ConfigError: pinned blocks could not be moved, and the
    volume is used as before.
    """
    entry = state.volumes.entries[number]
    volume = entry.volume
    entry.draining = True
    volume.set_limits(None, may_write=False)
    with state.lock:  # wait for appends that have begun
        state.lock.written.wait_for(
            lambda: (
                state.closing.is_set() or not (lower.appending[number] or volume.facts().writes)
            ),
            lower.config.write_timeout,
        )
    job, size, turn = MoveAway(state, lower, number), ChunkSizer(PIECE_BYTES), itertools.count()

    def move(rows: list[int]) -> None:
        while rows and not state.closing.is_set():
            rows = mover.copy_all(job, rows, lambda: _others(lower, number, next(turn)), size=size)
            if rows:  # no staging memory, or no volume has room: drop these blocks
                with state.lock:
                    state.lock.room.wait(_WAIT_S)

    segments = volume.segments().segments.tolist()
    for segment in segments:
        with state.lock:
            rows = lower.live(number, segment).tolist()
        move(rows)
    deadline_s = state.clock.now() + lower.config.write_timeout
    while job.bound and not state.closing.wait(_WAIT_S):
        if state.clock.now() > deadline_s:
            end_drain(entry)
            make_durable(state)
            raise ConfigError(
                f"{lower.name}.path",
                f"{format_count(len(job.bound), 'pinned block')} could not be moved",
                hint="see kvdepot tiers list; kvdepot session unpin ends pins",
            )
        rows, job.bound = job.bound, []
        move(rows)
    with state.lock:
        for segment in segments if not state.closing.is_set() else ():
            lower.forget_segment(number, segment)
    make_durable(state)
    return job.moved


def end_drain(entry: VolumeEntry) -> None:
    """Undo a drain: allow writes to the volume again."""
    entry.draining = False
    entry.volume.set_limits(None, may_write=True)


def _others(lower: LowerTier, volume: int, turn: int) -> list[int]:
    """The other writable volumes, rotated by `turn`."""
    facts = lower.volumes.all_facts()
    able = [number for number, one in facts if number != volume and one.up and one.may_write]
    start = turn % max(1, len(able))
    return able[start:] + able[:start]
