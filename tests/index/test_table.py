"""Rows for keys: what they tell, and what the table takes.

What is found, after any additions and removals: tests/property/test_index.py.
"""

import struct

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_keys, as_words
from kvdepot.index.table import NONE, KeyTable


def key(tag: int, link: int, high: int, low: int = 0) -> BlockKey:
    return BlockKey(struct.pack("<QQQQ", tag, link, high, low))


def test_a_key_comes_back_from_its_row_as_it_was() -> None:
    table = KeyTable()
    given = key(2**64 - 1, 2**63, 2**64 - 2, 7)
    row = table.add(given)
    assert table.key(row) == given
    assert as_keys(table.words(np.array([row, row]))) == [given, given]
    assert table.words(np.array([row])).tolist() == [[2**64 - 1, 2**63, 2**64 - 2, 7]]
    assert int(table.tags()[row]) == 2**64 - 1


def test_a_row_tells_its_own_name_and_its_parents() -> None:
    table = KeyTable()
    parent = table.add(key(5, 0, 111, 1))
    child = table.add(key(5, 111, 222, 2))
    assert table.link(parent) == 0
    assert table.link(child) == 111
    assert table.name(parent) == table.parent_name(child) == (5, 111)
    assert table.find_name(*table.parent_name(child)) == parent
    assert table.find_name(5, 222) == child


def test_the_table_itself_takes_at_most_70_bytes_a_block_after_a_bulk_load() -> None:
    """32 for the key, 4 for the free list, 8 to 16 for slots: 2 to 4 of 4 bytes a row."""
    table = KeyTable()
    count = 100_000
    words = np.zeros((count, 4), dtype=np.uint64)
    words[:, 2] = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    table.add_many(words)
    assert 44 * count <= table.memory_bytes() <= 70 * count


def test_keys_that_share_half_a_digest_are_told_apart() -> None:
    """The quick way looks at that half only; what it takes for another must not be answered."""
    table = KeyTable()
    keys = [key(1, 0, 77, 1), key(1, 0, 77, 2), key(2, 0, 77, 1), key(1, 5, 77, 1)]
    rows = [table.add(one) for one in keys]
    others = [key(1, 0, 78, n) for n in range(20)]
    rows += [table.add(one) for one in others]
    assert table.find_many(as_words([*keys, *others])).tolist() == rows
    absent = [key(1, 0, 77, 3), key(3, 0, 78, 0), key(1, 0, 79, 0)]
    assert table.find_many(as_words([*absent, keys[2]])).tolist() == [NONE] * 3 + [rows[2]]
