"""Every known block: the tiers that hold it, its state in each, and its leases.

All changes of a block's state are made here, through the transitions of core.block. No I/O. Not
thread-safe; the store's lock guards it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.core.block import ALLOWED, BlockKey, CopyState, check_transition
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.requests import Array
from kvdepot.errors import StateError
from kvdepot.index.closed import Closed
from kvdepot.index.leaves import LeafOrder
from kvdepot.index.order import Order
from kvdepot.index.table import FEW, NONE, Bools, Column, KeyTable, Rows
from kvdepot.index.tree import PrefixTree

_ABSENT, _FILLING, _READY = map(int, (CopyState.ABSENT, CopyState.FILLING, CopyState.READY))
_ONE: Final = np.int32(1)
"""Has the type of the column: with a plain 1 `ufunc.at` takes thirty times as long."""


class Copies:
    """The copies of blocks in one tier: their state and their place."""

    def __init__(self, table: KeyTable, tier: str, residency: Column, bit: int) -> None:
        self.tier = tier
        self.state = table.column(np.uint8, _ABSENT)
        self.location = table.column(np.int64, NONE)
        self.owed = table.column(np.uint8, 0)
        """1: the block could not be written here, and shall be when the tier works again."""
        self.left_owed = 0
        """Number of blocks that have left all tiers and were owed to this one."""
        self.count = 0
        self.bit = bit
        """The bit of this tier in a row's residency, set while the copy is ready."""
        self.residency = residency

    def ready(self, row: int) -> bool:
        return bool(self.state.view[row] == _READY)

    def absent(self, row: int) -> bool:
        return bool(self.state.view[row] == _ABSENT)

    def reserve(self, row: int, location: int) -> None:
        """ABSENT to FILLING: the bytes are being written to `location`."""
        self._go(row, CopyState.FILLING)
        self.location.view[row] = location

    def seal(self, row: int) -> None:
        """FILLING to READY: the bytes are complete and lookups find the block."""
        self._go(row, CopyState.READY)
        self.residency.view[row] |= self.bit
        self.count += 1

    def reserve_all(self, rows: list[int], locations: list[int]) -> None:
        """`reserve` for distinct rows."""
        at = self._go_all(rows, _ABSENT, CopyState.FILLING)
        self.location.array[at] = locations

    def seal_all(self, rows: list[int]) -> None:
        """`seal` for distinct rows."""
        at = self._go_all(rows, _FILLING, CopyState.READY)
        self.residency.array[at] |= self.bit
        self.count += len(rows)

    def drop_all(self, rows: list[int]) -> list[int]:
        """`drop` for distinct rows that are READY."""
        at = self._go_all(rows, _READY, CopyState.ABSENT)
        self.residency.array[at] &= ~self.bit & 0xFF
        self.count -= len(rows)
        locations: list[int] = self.location.array[at].tolist()
        self.location.array[at] = NONE
        return locations

    def seal_many(self, rows: Rows, locations: Rows) -> None:
        """ABSENT to READY for distinct rows whose bytes are at `locations` already."""
        self.location.array[rows] = locations
        self.state.array[rows] = _READY
        self.residency.array[rows] |= self.bit
        self.count += len(rows)

    def drop(self, row: int) -> int:
        """READY or FILLING to ABSENT. Returns the freed location."""
        if self.state.view[row] == _READY:
            self.count -= 1
            self.residency.view[row] &= ~self.bit
        self._go(row, CopyState.ABSENT)
        locations = self.location.view
        location: int = locations[row]
        locations[row] = NONE
        return location

    def move(self, row: int, location: int) -> None:
        if self.state[row] != _READY:
            raise StateError("only a ready copy can move")
        self.location[row] = location

    def _go_all(self, rows: list[int], old: int, new: CopyState) -> Rows:
        at: Rows = np.array(rows, dtype=np.int64)
        states = self.state.array
        if (states[at] != old).any():
            raise StateError(f"not all of {len(rows)} copies can become {new.name}")
        states[at] = new
        return at

    def _go(self, row: int, new: CopyState) -> None:
        states = self.state.view
        if (states[row], new) not in ALLOWED:
            check_transition(states[row], new)
        states[row] = new


class Catalog:
    """All blocks of a store. Tiers are named fastest first: memories, then files.

    `order` is the eviction order of the first memory, `below` that of a second one.
    """

    def __init__(
        self,
        files: Sequence[str] = ("ssd",),
        memories: Sequence[str] = ("dram",),
        order: Order | None = None,
        below: Order | None = None,
    ) -> None:
        self.table = KeyTable()
        self.tree = PrefixTree(self.table)
        self.nbytes = self.table.column(np.uint32, 0)
        self._leases = self.table.column(np.int32, 0)
        self._doomed = self.table.column(np.uint8, 0)
        self.residency = self.table.column(np.uint8, 0)
        """The tiers where a block is ready, a bit each: the lowest is the fastest."""
        self.unwritten = self.table.column(np.uint8, 0)
        """Why a block is not on a drive, as an index into core.depot.DURABILITY; 0 if it was
        written."""
        self.left_unwritten: Counter[int] = Counter()
        """Number of evicted blocks that were on no drive, by that reason, since the start."""
        self.tiers = tuple(
            Copies(self.table, name, self.residency, 1 << number)
            for number, name in enumerate((*memories, *files))
        )
        self._memory_bits = (1 << len(memories)) - 1
        names = [copies.tier for copies in self.tiers]
        fastest = ((bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(names)))
        self._by_bits = ["", *(names[number] for number in fastest)]
        orders = [order, below][: len(memories)]
        self.orders = tuple(LeafOrder(self.table, self.tree, one) for one in orders)
        """The eviction order of each memory tier."""
        self.memory, self.leaves = self.tiers[0], self.orders[0]
        self.closed = Closed(self.tree)
        self.leased = 0

    @property
    def memories(self) -> tuple[Copies, ...]:
        return self.tiers[: len(self.orders)]

    @property
    def files(self) -> tuple[Copies, ...]:
        return self.tiers[len(self.orders) :]

    def rows(self, keys: Sequence[BlockKey]) -> list[int]:
        """The keys' rows, NONE for unknown keys."""
        if len(keys) < FEW:
            return [self.table.find(key) for key in keys]
        found: list[int] = self.table.find_many(as_words(keys)).tolist()
        return found

    def is_absent(self, row: int) -> bool:
        """True if no tier has a copy or is being filled with one."""
        return not self.residency.view[row] and all(copies.absent(row) for copies in self.tiers)

    def ensure(self, key: BlockKey, nbytes: int) -> int:
        """The key's row; adds one if there is none."""
        row = self.table.find(key)
        return self.add(key, nbytes) if row == NONE else row

    def add(self, key: BlockKey, nbytes: int) -> int:
        """Add a row for an unknown key."""
        row = self.table.add(key)
        self.nbytes.view[row] = nbytes
        self._link(row)
        return row

    def add_all(self, words: Keys, nbytes: int) -> list[int]:
        """Add rows for distinct unknown keys of blocks of one size; each prompt head first."""
        if len(words) < FEW:
            packed = words.tobytes()
            keys = [BlockKey(packed[at : at + 32]) for at in range(0, len(packed), 32)]
            rows = [self.table.add(key) for key in keys]
        else:
            rows = self.table.add_many(words).tolist()
        self.nbytes.array[rows] = nbytes
        for row in self.tree.attach_all(rows, words):
            for leaves in self.orders:
                leaves.adopt(row)
        return rows

    def recover(
        self, words: Keys, nbytes: Rows, locations: Rows, copies: Copies | None = None
    ) -> Rows:
        """Add distinct unknown blocks found in a file tier (default: the fastest), oldest first."""
        alone = not self.table.live
        rows = self.table.add_many(words)
        self.nbytes.array[rows] = nbytes
        (copies or self.files[0]).seal_many(rows, locations)
        if alone:
            self.tree.attach_many(rows)
        else:
            for row in rows.tolist():
                self._link(row)
        base = self.tree.now
        self.tree.now += len(rows)
        self.tree.stamp.array[rows] = np.arange(base + 1, self.tree.now + 1)
        return rows

    def in_memory(self, row: int) -> bool:
        """True if a memory tier has the block."""
        return bool(self.residency.view[row] & self._memory_bits)

    def fastest(self, rows: Sequence[int]) -> list[str]:
        """For each resident row the fastest tier that has it."""
        residency = self.residency.view
        return [self._by_bits[residency[row]] for row in rows]

    def use(self, rows: Sequence[int], *, hit: bool = True) -> None:
        """Record the use of blocks of one prompt, head first. `hit`: a lookup, not a put."""
        self.tree.use(rows, hit=hit)
        for leaves in self.orders:
            leaves.used(rows, hit=hit)

    def lease(self, rows: Sequence[int]) -> None:
        """Protect rows from eviction until `unlease`."""
        if len(rows) < FEW:
            for row in rows:
                self._leases.view[row] += 1
        else:
            np.add.at(self._leases.array, np.array(rows), _ONE)
        for leaves in self.orders:
            leaves.hold_all(rows)
        self.leased += len(rows)

    def unlease(self, rows: Sequence[int]) -> list[int]:
        """Undo one `lease`. Returns rows without leases that are deleted or in no tier."""
        if len(rows) < FEW:
            for row in rows:
                self._leases.view[row] -= 1
        else:
            np.subtract.at(self._leases.array, np.array(rows), _ONE)
        for leaves in self.orders:
            leaves.release_all(rows)
        self.leased -= len(rows)
        doomed, leases, residency = self._doomed.view, self._leases.view, self.residency.view
        return [row for row in rows if (doomed[row] or not residency[row]) and not leases[row]]

    def enter_memory(self, rows: list[int], groups: Sequence[int]) -> None:
        """Make filled slots of the fastest memory visible as blocks: distinct rows, those of one
        prompt head first, and the size class of each.
        """
        self.memory.seal_all(rows)
        self.leaves.enter_all(rows, groups)

    def leased_rows(self, rows: Rows) -> Bools:
        leased: Bools = self._leases.array[rows] > 0
        return leased

    def all_leased(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self._leases.array > 0).tolist()
        return rows

    def leases(self, row: int) -> int:
        return self._leases[row]

    def mark_deleted(self, row: int) -> bool:
        """Hide a block from lookups. Returns True if it is not leased: its
        copies can be dropped.
        """
        if not self._doomed[row]:
            self._doomed[row] = 1
            self._unlink(row)
        return not self._leases[row]

    def is_live(self, row: int) -> bool:
        """True if lookups find the row."""
        return bool(self.nbytes[row]) and not self._doomed[row]

    def live_rows(self) -> Rows:
        """The rows that lookups find."""
        rows: Rows = np.flatnonzero((self.residency.array != 0) & (self._doomed.array == 0))
        return rows

    def visible(self) -> Array:
        """The residency of every row as lookups see it: 0 for rows that were deleted."""
        found: Array = np.where(self._doomed.array == 0, self.residency.array, 0)
        return found

    def deleted(self, rows: Sequence[int]) -> list[int]:
        """Those of the rows that were deleted."""
        doomed = self._doomed.view
        return [row for row in rows if doomed[row]]

    def forget_if_gone(self, row: int) -> None:
        """Free the row if no tier has or awaits a copy and it is not leased."""
        if self.residency.view[row] or self._leases.view[row] or self.leaves.held(row):
            return
        if self.is_absent(row):
            if not self._doomed[row]:
                self._unlink(row)
                if self.unwritten.view[row]:
                    self.left_unwritten[self.unwritten.view[row]] += 1
                for copies in self.files:
                    copies.left_owed += copies.owed.view[row]
            self.table.free(row)

    def _link(self, row: int) -> None:
        if self.tree.attach(row):
            for leaves in self.orders:
                leaves.adopt(row)

    def _unlink(self, row: int) -> None:
        for leaves in self.orders:
            leaves.detach(row)
        self.tree.detach(row)
        self.table.hide(row)
