"""Rows for blocks: an open-addressing hash table from keys to rows, over numpy columns.

The hash is the first eight bytes of the digest, which are uniform. Children name their parent by
the same bytes, so that the table also finds parents. It takes about 70 bytes for each block.

Not thread-safe; the store's lock guards it.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import Keys

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NONE: Final = -1
_KEY: Final = struct.Struct("<QQQQ")
_FIRST_ROWS: Final = 1024
FEW: Final = 16
"""Below this many rows a loop is faster than numpy."""


class Column:
    """A growing array with a value for each row. Use `view` for single values: it is faster."""

    def __init__(self, dtype: npt.DTypeLike, fill: int, rows: int) -> None:
        self.fill = fill
        self.array: npt.NDArray[Any] = np.full(rows, fill, dtype=dtype)
        self.view: memoryview = self.array.data

    def resize(self, rows: int) -> None:
        grown = np.full(rows, self.fill, dtype=self.array.dtype)
        grown[: len(self.array)] = self.array
        self.array = grown
        self.view = grown.data

    def __getitem__(self, row: int) -> int:
        value: int = self.view[row]
        return value

    def __setitem__(self, row: int, value: int) -> None:
        self.view[row] = value


class KeyTable:
    """Keys to rows. A row number stays valid until `free`.

    The last row is never used, so that the values of NONE, -1, are the fill values of the columns.
    """

    def __init__(self) -> None:
        self.rows = _FIRST_ROWS
        self.live = 0
        self._columns: list[Column] = []
        self._fills: list[tuple[memoryview, int]] = []
        """View and fill value of each column."""
        self._words = np.zeros((self.rows, 4), dtype=np.uint64)
        self._flat = self._words.reshape(-1).data
        self._next_free = self.column(np.int32, NONE)
        self._free = NONE
        self._unused = 0
        self._mask = 0
        self._slots: memoryview = np.zeros(0, dtype=np.int32).data
        self._rehash()

    def column(self, dtype: npt.DTypeLike, fill: int) -> Column:
        """Add a column that grows with the table; freed rows return to `fill`."""
        column = Column(dtype, fill, self.rows)
        self._columns.append(column)
        self._fills.append((column.view, column.fill))
        return column

    def key(self, row: int) -> BlockKey:
        return BlockKey(_KEY.pack(*self._flat[4 * row : 4 * row + 4]))

    def words(self, rows: Rows) -> Keys:
        return self._words[rows]

    def tags(self) -> npt.NDArray[np.uint64]:
        """The namespace tag of every row, in use or not."""
        return self._words[:, 0]

    def link(self, row: int) -> int:
        """The key's link to its parent; 0 for the first block of a prompt."""
        return int(self._flat[4 * row + 1])

    def name(self, row: int) -> tuple[int, int]:
        """The (tag, link) in the keys of this row's children."""
        return self._flat[4 * row], self._flat[4 * row + 2]

    def digest(self, row: int) -> int:
        """The first half of the key's digest."""
        return int(self._flat[4 * row + 2])

    def digests(self, rows: Rows) -> npt.NDArray[np.uint64]:
        found: npt.NDArray[np.uint64] = self._words[rows, 2]
        return found

    def parent_name(self, row: int) -> tuple[int, int]:
        return self._flat[4 * row], self._flat[4 * row + 1]

    def find(self, key: BlockKey) -> int:
        """The key's row, or NONE."""
        words = _KEY.unpack(key)
        slots, flat, mask = self._slots, self._flat, self._mask
        slot = words[2] & mask
        while row := slots[slot]:
            base = 4 * (row - 1)
            if flat[base + 2] == words[2] and tuple(flat[base : base + 4]) == words:
                return int(row) - 1
            slot = (slot + 1) & mask
        return NONE

    def find_name(self, tag: int, link: int) -> int:
        """The row whose children have (tag, link) in their keys, or NONE."""
        slots, flat, mask = self._slots, self._flat, self._mask
        slot = link & mask
        while row := slots[slot]:
            base = 4 * (row - 1)
            if flat[base + 2] == link and flat[base] == tag:
                return int(row) - 1
            slot = (slot + 1) & mask
        return NONE

    def find_before(self, key: BlockKey) -> int:
        """The row that the key names as its parent, or NONE."""
        tag, link, *_ = _KEY.unpack(key)
        return self.find_name(tag, link) if link else NONE

    def find_many(self, words: Keys) -> Rows:
        """Rows of many keys at once, NONE where absent."""
        if len(words) < FEW:
            packed = words.tobytes()
            keys = [BlockKey(packed[at : at + 32]) for at in range(0, len(packed), 32)]
            return np.array([self.find(key) for key in keys], np.int64)
        rows = self._probe_digests(words[:, 2])
        found = self._words[rows]
        if found.tobytes() == words.tobytes():
            return rows
        differs = (found != words).any(axis=1)
        if not (differs & (rows != NONE)).any():
            return rows

        def same(found: Rows, at: Rows) -> Bools:
            equal: Bools = (self._words[found] == words[at]).all(axis=1)
            return equal

        return self._probe(words[:, 2], same)

    def find_names(self, tags: npt.NDArray[np.uint64], links: npt.NDArray[np.uint64]) -> Rows:
        def same(found: Rows, at: Rows) -> Bools:
            words = self._words[found]
            equal: Bools = (words[:, 2] == links[at]) & (words[:, 0] == tags[at])
            return equal

        return self._probe(links, same)

    def add(self, key: BlockKey) -> int:
        """Add a row for an unknown key."""
        if self._free != NONE:
            row = self._free
            self._free = self._next_free.view[row]
        else:
            if self._unused == self.rows - 1:
                self._grow(self.rows + self.rows // 2)
            row = self._unused
            self._unused += 1
        words = _KEY.unpack(key)
        base = 4 * row
        flat = self._flat
        flat[base], flat[base + 1], flat[base + 2], flat[base + 3] = words
        self.live += 1
        slots, mask = self._slots, self._mask
        slot = words[2] & mask
        while slots[slot]:
            slot = (slot + 1) & mask
        slots[slot] = row + 1
        return row

    def add_many(self, words: Keys) -> Rows:
        """Add rows for many distinct unknown keys."""
        count, freed = len(words), list[int]()
        while self._free != NONE and len(freed) < count:
            freed.append(self._free)
            self._free = self._next_free.view[self._free]
        first, self._unused = self._unused, self._unused + count - len(freed)
        if self._unused >= self.rows:
            self._grow(max(self._unused + 1, self.rows + self.rows // 2))
        rows = np.array([*freed, *range(first, self._unused)], np.int64)
        self._words[rows] = words
        self.live += count
        self._insert_many(rows)
        return rows

    def hide(self, row: int) -> None:
        """Remove the key from the hash table; the row stays in use."""
        slots, flat, mask = self._slots, self._flat, self._mask
        slot = flat[4 * row + 2] & mask
        while slots[slot] != row + 1:
            slot = (slot + 1) & mask
        hole = slot
        while True:
            slot = (slot + 1) & mask
            other = slots[slot]
            if not other:
                break
            home = flat[4 * (other - 1) + 2] & mask
            if (slot - home) & mask >= (slot - hole) & mask:
                slots[hole] = other
                hole = slot
        slots[hole] = 0

    def free(self, row: int) -> None:
        """Free a hidden row; its columns return to their fill values."""
        for view, fill in self._fills:
            view[row] = fill
        self._next_free.view[row] = self._free
        self._free = row
        self.live -= 1

    def memory_bytes(self) -> int:
        columns = sum(column.array.nbytes for column in self._columns)
        return columns + self._words.nbytes + self._slots.nbytes

    def _probe_digests(self, digests: npt.NDArray[np.uint64]) -> Rows:
        """The first row with each half digest, which is most likely the wanted one. Takes a third
        of the time of `_probe`.
        """
        table, known = np.asarray(self._slots), self._words[:, 2]
        slots = (digests & np.uint64(self._mask)).astype(np.int64)
        result = table[slots].astype(np.int64) - 1
        at = np.flatnonzero((known[result] != digests) & (result != NONE))
        slots, digests = slots[at], digests[at]
        while len(at):
            slots = (slots + 1) & self._mask
            found = table[slots].astype(np.int64) - 1
            result[at] = found
            left = (known[found] != digests) & (found != NONE)
            at, slots, digests = at[left], slots[left], digests[left]
        return result

    def _probe(self, hashes: npt.NDArray[np.uint64], same: Callable[[Rows, Rows], Bools]) -> Rows:
        """Find rows by linear probing, one step of all keys at a time."""
        table = np.asarray(self._slots)
        result = np.full(len(hashes), NONE, dtype=np.int64)
        at = np.arange(len(hashes), dtype=np.int64)
        slots = (hashes & np.uint64(self._mask)).astype(np.int64)
        while len(at):
            found = table[slots].astype(np.int64) - 1
            taken = found >= 0
            if not taken.all():
                at, slots, found = at[taken], slots[taken], found[taken]
            hit = same(found, at)
            result[at[hit]] = found[hit]
            if hit.all():
                break
            at, slots = at[~hit], (slots[~hit] + 1) & self._mask
        return result

    def _insert_many(self, rows: Rows) -> None:
        """Insert rows in rounds: the first of those with the same slot gets it, the others probe
        on.
        """
        table = np.asarray(self._slots)
        slots = (self._words[rows, 2] & np.uint64(self._mask)).astype(np.int64)
        while len(rows):
            empty = table[slots] == 0
            table[slots[empty][::-1]] = rows[empty][::-1] + 1
            placed = table[slots] == rows + 1
            rows, slots = rows[~placed], (slots[~placed] + 1) & self._mask

    def _grow(self, rows: int) -> None:
        rows = max(rows, _FIRST_ROWS)
        words = np.zeros((rows, 4), dtype=np.uint64)
        words[: self.rows] = self._words
        self._words = words
        self._flat = words.reshape(-1).data
        self.rows = rows
        for column in self._columns:
            column.resize(rows)
        self._fills = [(column.view, column.fill) for column in self._columns]
        self._rehash()

    def _rehash(self) -> None:
        size = 1 << (2 * self.rows - 1).bit_length()
        taken = np.asarray(self._slots)
        used = taken[taken > 0].astype(np.int64) - 1
        if size == len(taken):
            return
        self._slots = np.zeros(size, dtype=np.int32).data
        self._mask = size - 1
        self._insert_many(used)
