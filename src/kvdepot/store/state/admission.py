"""Admission to the fastest lower tier, by the wear of its drives and its thrashing.

Admits all blocks if no drive has a write budget, no tier is written selectively and there is only
one lower tier. Guarded by the store's lock.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.format.record import record_bytes
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.policy.placing.admission import (
    PROMISING,
    ReuseChance,
    ThrashDetector,
    kind_of,
    worth_wear,
)
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.events import Events
from kvdepot.store.state.lower_tier import LowerTier

_COUNT_MAX: Final = 255


class Admission:
    """Decides whether a block is queued for the fastest lower tier; learns from reads and
    evictions.
    """

    def __init__(self, catalog: Catalog, lower_tiers: Sequence[LowerTier], events: Events) -> None:
        self._catalog = catalog
        self._lower_tiers = lower_tiers
        self._events = events
        self._budgeted = any(lower.volumes.budget() is not None for lower in lower_tiers[:1])
        self._thrash = ThrashDetector() if len(lower_tiers) > 1 else None
        self._history: ReuseHistory | None = None
        self.learns = False
        """True if `made`, `asked` and `read` must be called."""

    def modes_changed(self) -> None:
        selective = any(lower.mode is WriteMode.SELECTIVE for lower in self._lower_tiers)
        self._wants_history = selective or self._budgeted
        self.learns = self._wants_history or self._thrash is not None

    @property
    def thrashing(self) -> bool:
        """True if promotions to the fastest lower tier only evict blocks that would be hit."""
        return self._thrash is not None and self._thrash.thrashing

    def made(self, row: int) -> bool:
        """Called when a block was put. Returns True if a further request for it is likely."""
        if self._thrash is not None:
            self._thrash.made(self._catalog.table.digest(row))
        history = self._learned()
        if history is None:
            return False
        history.made(row)
        return history.chance(row) >= PROMISING

    def asked(self, rows: list[int]) -> None:
        """Called when blocks of one prompt were requested."""
        history = self._learned()
        if history is not None:
            history.asked(rows)

    def read(self, rows: list[int]) -> None:
        """Called when blocks are read from drives."""
        if self._thrash is None:
            return
        ready, digest = self._lower_tiers[0].copies.ready, self._catalog.table.digest
        for row in rows:
            if ready(row):
                self._thrash.hit()
            else:
                self._thrash.missed(digest(row))

    def left(self, row: int, lower: LowerTier) -> None:
        """Called when a block was evicted from a tier."""
        if self._thrash is not None and lower is self._lower_tiers[0]:
            self._thrash.left(self._catalog.table.digest(row), lower.copies.count)

    def promotes(self, row: int, sample: int) -> bool:
        """True if a block that was read may be promoted. `sample` is a byte of the prompt's key."""
        if self._thrash is None or self._thrash.promotes(sample):
            return True
        self._events.count("held_below", self._lower_tiers[0].copies.absent(row))
        return False

    def sift(self, row: int, numbers: list[int]) -> list[int]:
        """Return the tiers of `numbers` that a block may be written to.

        A block that is not worth the wear of the fastest tier goes to the next one, if any.
        """
        history = self._history if self._budgeted else None
        if history is None or 0 not in numbers or not self._is_new(row):
            return numbers
        if worth_wear(history.chance(row), self._fill_after(row)):
            return numbers
        self._events.count("bypassed")
        below = range(1, len(self._lower_tiers))
        return [number for number in below if number == 1 or number in numbers]

    def _is_new(self, row: int) -> bool:
        first = self._lower_tiers[0]
        return first.copies.absent(row) and row not in first.queue.tickets

    def _learned(self) -> "ReuseHistory | None":
        """The history of blocks, if it is used."""
        if self._wants_history and self._history is None:
            capacity_bytes = self._lower_tiers[0].volumes.capacity_bytes
            self._history = ReuseHistory(self._catalog, capacity_bytes)
        return self._history if self._wants_history else None

    def _fill_after(self, row: int) -> float:
        """The share of the write budget left after the queue and this block are written."""
        first = self._lower_tiers[0]
        budget = first.volumes.budget()
        if budget is None or not budget.bucket_bytes:
            return 0.0
        record = record_bytes(self._catalog.nbytes[row])
        return (budget.left_bytes - first.queue.dirty_bytes - record) / budget.bucket_bytes


class ReuseHistory:
    """Counts turns and uses of each block, and estimates reuse from similar blocks."""

    def __init__(self, catalog: Catalog, capacity_bytes: int) -> None:
        self._catalog = catalog
        self._chance = ReuseChance(capacity_bytes)
        self._turns = catalog.table.column(np.uint8, 0)
        """Turns of the session when each block was put."""
        self._uses = catalog.table.column(np.uint8, 0)
        self._kind = catalog.table.column(np.uint8, 0)

    def chance(self, row: int) -> float:
        """The probability that a block is requested again while the tier would keep it."""
        return self._chance.chance(self._kind.view[row])

    def made(self, row: int) -> None:
        """Called when a block was put."""
        parent = self._catalog.tree.parent.view[row]
        turns = 0
        if parent != NONE:
            turns = self._turns.view[parent] + (self._uses.view[parent] > 0)
        self._turns.view[row], self._uses.view[row] = min(turns, _COUNT_MAX), 0
        self._classify(row, turns, 0)

    def asked(self, rows: Sequence[int]) -> None:
        """Called when blocks of one prompt, given head first, were requested again."""
        if not rows:
            return
        turns, uses = self._turns.view[rows[-1]] + 1, self._uses.view
        for row in rows:
            uses[row] = min(uses[row] + 1, _COUNT_MAX)
            self._classify(row, turns, uses[row])

    def _classify(self, row: int, turns: int, uses: int) -> None:
        kind = self._kind.view[row] = kind_of(turns, uses)
        nbytes = record_bytes(self._catalog.nbytes.view[row])
        self._chance.seen(self._catalog.table.digest(row), kind, nbytes)
