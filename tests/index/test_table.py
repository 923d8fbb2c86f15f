"""Rows for keys: what they tell, and what the table takes.

What is found, after any additions and removals: tests/property/test_index.py.
"""

import struct

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_keys
from kvdepot.index.table import KeyTable


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
