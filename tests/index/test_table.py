"""Rows for keys: found by key and by name, whatever the digests' low bits look like."""

import struct

import numpy as np
import pytest

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_words
from kvdepot.index.table import NONE, KeyTable

FIRST_MASK = 2047
"""Slots of a fresh table, less one: digests that agree in these bits want the same slot."""


def key(tag: int, link: int, high: int, low: int = 0) -> BlockKey:
    return BlockKey(struct.pack("<QQQQ", tag, link, high, low))


def crowd(count: int, slot: int) -> list[BlockKey]:
    """Keys that all want one slot, also after the table has grown a few times."""
    return [key(1, 0, (n + 1) << 40 | slot, n) for n in range(count)]


def test_a_key_comes_back_from_its_row_as_it_was() -> None:
    table = KeyTable()
    given = key(2**64 - 1, 2**63, 2**64 - 2, 7)
    row = table.add(given)
    assert table.key(row) == given
    assert table.keys(np.array([row, row])) == [given, given]
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


def test_names_of_another_namespace_are_not_found() -> None:
    table = KeyTable()
    table.add(key(5, 0, 111))
    assert table.find_name(6, 111) == NONE
    tags = np.array([6, 5], dtype=np.uint64)
    links = np.array([111, 112], dtype=np.uint64)
    assert table.find_names(tags, links).tolist() == [NONE, NONE]


def test_keys_that_differ_in_one_word_only_are_different_keys() -> None:
    table = KeyTable()
    words = [3, 4, 5, 6]
    rows = {tuple(words): table.add(key(*words))}
    for place in range(4):
        other = tuple(value + (index == place) for index, value in enumerate(words))
        assert table.find(key(*other)) == NONE
        rows[other] = table.add(key(*other))
    assert len(set(rows.values())) == 5
    for other, row in rows.items():
        assert table.find(key(*other)) == row


@pytest.mark.parametrize("slot", [0, 1, FIRST_MASK - 1, FIRST_MASK])
def test_a_crowd_around_one_slot_survives_removals_in_the_middle(slot: int) -> None:
    table = KeyTable()
    keys = crowd(40, slot) + crowd(40, (slot + 3) & FIRST_MASK)[20:]
    rows = [table.add(one) for one in keys]
    for gone in range(0, len(keys), 3):
        table.hide(rows[gone])
        table.free(rows[gone])
        for index, one in enumerate(keys):
            hidden = index <= gone and index % 3 == 0
            assert table.find(one) == (NONE if hidden else rows[index])


def test_growth_moves_no_row_and_loses_no_key() -> None:
    table = KeyTable()
    numbers = table.column(np.int64, -5)
    keys = crowd(30, FIRST_MASK) + [key(2, 0, n * 0x9E3779B97F4A7C15 % 2**64) for n in range(3000)]
    rows = []
    for number, one in enumerate(keys):
        rows.append(table.add(one))
        numbers[rows[-1]] = number
    assert len(set(rows)) == len(keys) == table.live
    assert [table.find(one) for one in keys] == rows
    assert [numbers[row] for row in rows] == list(range(len(keys)))
    assert table.find_many(as_words(keys)).tolist() == rows


def test_a_freed_row_is_used_again_and_starts_with_the_fill_values() -> None:
    table = KeyTable()
    column = table.column(np.int32, -7)
    row = table.add(key(1, 0, 1))
    column[row] = 99
    table.hide(row)
    table.free(row)
    again = table.add(key(1, 0, 2))
    assert again == row
    assert column[again] == -7
    assert table.live == 1


def test_a_hidden_row_is_not_given_away_before_it_is_free() -> None:
    table = KeyTable()
    row = table.add(key(1, 0, 1))
    table.hide(row)
    assert table.find(key(1, 0, 1)) == NONE
    assert table.add(key(1, 0, 1)) != row
    assert table.live == 2


def test_many_at_once_equals_one_by_one() -> None:
    one_by_one, at_once = KeyTable(), KeyTable()
    keys = [key(n % 3, n, (n + 1) << 40 | n % 500, n) for n in range(2500)]
    first = [one_by_one.add(one) for one in keys]
    rows = at_once.add_many(as_words(keys)).tolist()
    assert rows == first
    assert [at_once.find(one) for one in keys] == rows
    assert at_once.find_many(as_words(keys[::-1])).tolist() == rows[::-1]
    tags, links = as_words(keys)[:, 0], as_words(keys)[:, 2]
    assert at_once.find_names(tags, links).tolist() == rows


def test_no_keys_are_found_at_no_rows() -> None:
    table = KeyTable()
    assert table.find_many(np.zeros((0, 4), dtype=np.uint64)).tolist() == []
    assert table.add_many(np.zeros((0, 4), dtype=np.uint64)).tolist() == []
    assert table.live == 0


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
