"""Which blocks enter the fastest file tier: as its drives' wear and its thrashing allow.

Does next to nothing where drives have no budget, no tier is written selectively and there is one
tier of files only. Guarded by the stock's lock.
"""

from kvdepot.codec.record import record_bytes
from kvdepot.index.catalog import Catalog
from kvdepot.policy.placing.admission import PROMISING, ThrashDetector, worth_wear
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.counters import Counters
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.reuse_history import History


class Admission:
    """Asked before a block is queued for the fastest file tier; told of what is read and leaves."""

    def __init__(self, catalog: Catalog, levels: tuple[Level, ...], counters: Counters) -> None:
        self._catalog = catalog
        self._levels = levels
        self._counters = counters
        self._budgeted = any(
            drive.wear.has_budget for level in levels[:1] for drive in level.tier.drives
        )
        self._thrash = ThrashDetector() if len(levels) > 1 else None
        self._history: History | None = None

    @property
    def thrashing(self) -> bool:
        """Whether what is promoted to the fastest file tier only pushes out what would be hit."""
        return self._thrash is not None and self._thrash.thrashing

    def made(self, row: int) -> bool:
        """A block was put. True: it promises to be asked for again."""
        if self._thrash is not None:
            self._thrash.made(self._catalog.table.digest(row))
        history = self._learned()
        if history is None:
            return False
        history.made(row)
        return history.chance(row) >= PROMISING

    def asked(self, rows: list[int]) -> None:
        """Blocks of one prompt were asked for."""
        history = self._learned()
        if history is not None:
            history.asked(rows)

    def read(self, rows: list[int]) -> None:
        """Blocks are read from drives, since memory does not have them."""
        if self._thrash is None:
            return
        ready, digest = self._levels[0].copies.ready, self._catalog.table.digest
        for row in rows:
            if ready(row):
                self._thrash.hit()
            else:
                self._thrash.missed(digest(row))

    def left(self, row: int, level: Level) -> None:
        """A block made room on a tier."""
        if self._thrash is not None and level is self._levels[0]:
            self._thrash.left(self._catalog.table.digest(row), level.copies.count)

    def promotes(self, row: int, sample: int) -> bool:
        """Whether a block that was read may be promoted. `sample`: a byte of its prompt's own."""
        if self._thrash is None or self._thrash.promotes(sample):
            return True
        self._counters.held_below += self._levels[0].copies.absent(row)
        return False

    def sift(self, row: int, numbers: list[int]) -> list[int]:
        """Of the file tiers that a block should be written to, those that it may be.

        Where it is not worth the wear of the fastest, it goes to the next one, if there is one.
        """
        history = self._history if self._budgeted else None
        if history is None or 0 not in numbers or not self._is_new(row):
            return numbers
        if worth_wear(history.chance(row), self._level_after(row)):
            return numbers
        self._counters.bypassed += 1
        below = range(1, len(self._levels))
        return [number for number in below if number == 1 or number in numbers]

    def _is_new(self, row: int) -> bool:
        first = self._levels[0]
        return first.copies.absent(row) and row not in first.tickets

    def _learned(self) -> History | None:
        """What is known of blocks, where anybody wants to know."""
        levels = self._levels
        if not self._budgeted and all(level.mode is not WriteMode.SELECTIVE for level in levels):
            return None
        if self._history is None:
            self._history = History(self._catalog, levels[0].tier.usage().capacity_bytes)
        return self._history

    def _level_after(self, row: int) -> float:
        """How full the buckets of the drives that work are, when what waits has been written."""
        first = self._levels[0]
        drives = [drive for drive in first.tier.drives if drive.breaker.closed]
        wears = [drive.wear for drive in drives if not drive.draining]
        bucket_bytes = sum(wear.bucket_bytes for wear in wears)
        level_bytes = sum(wear.level_bytes for wear in wears) - first.dirty_bytes
        left_bytes = level_bytes - record_bytes(self._catalog.nbytes[row])
        return left_bytes / bucket_bytes if bucket_bytes else 0.0
