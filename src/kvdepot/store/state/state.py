"""What the parts of a store share: the catalog, the memories, the file tiers, one lock.

`changed` is that lock; it is notified whenever room, work or an outcome appears that somebody may
wait for. It is held for bookkeeping only, never across I/O or copies.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.config import Config
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import as_words
from kvdepot.policy.placing.memory_levels import ReturnTimes
from kvdepot.policy.placing.write_mode import WriteMode, promotes, targets
from kvdepot.store.counters import Counters
from kvdepot.store.state.admission import Admission
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.memory_tier import Pool
from kvdepot.store.trace_recorder import Recorder
from kvdepot.tiers.memory.arena import Arena

TEMPORARY: Final = -2
"""Owner of a slot that belongs to a transfer, not to a block."""


@dataclass(slots=True)
class Stock:
    """Shared state of one store."""

    config: Config
    clock: Clock
    catalog: Catalog
    arena: Arena
    staging: Arena
    levels: tuple[Level, ...]
    """The file tiers, fastest first."""
    cxl_arena: Arena | None = None
    """Of the slower memory, if there is one."""
    return_times: ReturnTimes = field(default_factory=ReturnTimes)
    """What tells when blocks are expected; it learns where there is such a memory."""
    pools: tuple[Pool, ...] = field(init=False)
    """The memory tiers, fastest first; `arena` is that of the first."""
    counters: Counters = field(default_factory=Counters)
    admission: Admission = field(init=False)
    changed: threading.Condition = field(init=False)
    work: threading.Condition = field(init=False)
    """The same lock; notified when there is something to write, or the store closes."""
    tickets: int = 0
    closing: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set with `closing`, for threads that nobody else wakes."""
    recorder: Recorder | None = None
    """Told of every lookup while somebody wants to know."""

    def __post_init__(self) -> None:
        lock = threading.Lock()
        self.changed, self.work = threading.Condition(lock), threading.Condition(lock)
        arenas = (self.arena, self.cxl_arena)
        books = zip(self.catalog.memories, self.catalog.orders, strict=True)
        self.pools = tuple(
            Pool(arena, self.catalog, copies, leaves)
            for arena, (copies, leaves) in zip(arenas, books, strict=False)
            if arena is not None
        )
        self.admission = Admission(self.catalog, self.levels, self.counters)

    @property
    def arenas(self) -> list[Arena]:
        """All memory that views of blocks lie in."""
        return [*(pool.arena for pool in self.pools), self.staging]

    @property
    def dirty_bytes(self) -> int:
        """What waits to be written down."""
        return sum(level.dirty_bytes for level in self.levels)

    @property
    def writers(self) -> int:
        """Threads that write blocks down; without any, blocks stay in memory."""
        return sum(level.writers for level in self.levels)

    def drop_unreadable(self, row: int) -> None:
        """Drop copies on drives that are down, so that the block can be kept in memory anew."""
        for level in self.levels:
            if level.copies.ready(row) and not level.usable(row):
                level.drop(row)

    def record(self, path: Path) -> None:
        """Write lookups down from now on, or ConfigError."""
        if self.recorder is not None:
            raise ConfigError("record", f"{self.recorder.path} is being written already")
        self.recorder = Recorder(path, self.config.block_tokens, self.clock)

    def stop_recording(self) -> int:
        """Write no more. Returns how many lookups were."""
        recorder, self.recorder = self.recorder, None
        return recorder.close() if recorder is not None else 0

    def looked_up(self, keys: Sequence[BlockKey]) -> None:
        """A prompt was looked up."""
        if self.recorder is not None:
            self.recorder.saw(as_words(keys))

    def drop_all(self, row: int) -> None:
        """Drop a block nobody uses from every tier."""
        for pool in self.pools:
            if pool.copies.ready(row):
                pool.drop(row)
        for level in self.levels:
            if level.copies.ready(row):
                level.drop(row)
        self.catalog.forget_if_gone(row)

    def unlease(self, rows: list[int]) -> None:
        """End the use of rows, and let go of those that were removed meanwhile."""
        for row in self.catalog.unlease(rows):
            if self.catalog.nbytes.view[row]:
                self.drop_all(row)
        self.changed.notify_all()

    def pool_of(self, row: int) -> Pool | None:
        """The fastest memory that has a block."""
        return next((pool for pool in self.pools if pool.copies.ready(row)), None)

    def source(self, row: int) -> Level | None:
        """The file tier to read a block from: the fastest whose drive works, else the fastest."""
        found = [level for level in self.levels if level.copies.ready(row)]
        return next((level for level in found if level.usable(row)), found[0] if found else None)

    def write_down(self, row: int) -> None:
        """A new block in memory waits to be written to the file tiers that want it."""
        promising = self.admission.made(row)
        self._write_to(row, targets(self._modes(), touched=promising))

    def write_touched(self, rows: list[int]) -> None:
        """Blocks were asked for again: those in memory may be worth writing now."""
        modes = self._modes()
        self.admission.asked(rows)
        if WriteMode.SELECTIVE not in modes:
            return
        for row in rows:
            if self.catalog.memory.ready(row) and self.catalog.is_live(row):
                self._write_to(row, targets(modes, touched=True))
        self.work.notify_all()

    def promote(self, row: int, source: Level, sample: int) -> None:
        """A block read from `source` is in memory now: it goes to the file tiers above it too.

        Not while much waits to be written: a put must not wait for it. `sample` is a byte of the
        prompt's own: while a tier thrashes, only some prompts enter it.
        """
        if 2 * self.dirty_bytes > self.dirty_limit_bytes or not self.catalog.is_live(row):
            return
        above = promotes(self._modes(), self.levels.index(source))
        if above and self.admission.promotes(row, sample):
            self._write_to(row, above)
            self.work.notify_all()

    def _write_to(self, row: int, numbers: list[int]) -> None:
        """A block in memory waits to be written to those of the file tiers that it may enter."""
        for number in self.admission.sift(row, numbers):
            self.mark_dirty(row, self.levels[number])

    @property
    def dirty_limit_bytes(self) -> int:
        """How much of memory may wait to be written."""
        return max(1, int(self.config.dram.capacity * self.config.writeback.dirty_limit))

    def _modes(self) -> list[WriteMode]:
        return [level.mode for level in self.levels]

    def mark_dirty(self, row: int, level: Level) -> None:
        """A block in memory waits to be written to one file tier."""
        if level.writers and level.copies.absent(row) and row not in level.tickets:
            self.tickets += 1
            level.mark_dirty(row, self.tickets, self.clock.now())

    def is_waiting(self, row: int) -> bool:
        """Whether a block waits to be written anywhere."""
        return any(row in level.tickets for level in self.levels)

    def mark_clean(self, row: int, level: Level) -> None:
        """The block no longer waits for this tier."""
        level.mark_clean(row)
        catalog = self.catalog
        if catalog.is_doomed(row) and not catalog.leases(row) and not self.is_waiting(row):
            self.drop_all(row)
