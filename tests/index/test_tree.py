"""Who continues whom: whatever the order of arrival and departure."""

import itertools
import random
import struct
from collections.abc import Iterable

import numpy as np
import pytest

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_words
from kvdepot.index.table import FEW, NONE, KeyTable
from kvdepot.index.tree import HITS_MAX, PrefixTree

PARENTS: dict[int, int | None] = {1: None, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: None, 8: 7}
"""A small forest: numbers of blocks and of their parents."""


def key(number: int) -> BlockKey:
    parent = PARENTS[number]
    link = parent << 33 if parent is not None else 0
    return BlockKey(struct.pack("<QQQQ", 9, link, number << 33, 0))


class Forest:
    """A table and a tree, with blocks named by their numbers."""

    def __init__(self) -> None:
        self.table = KeyTable()
        self.tree = PrefixTree(self.table)
        self.rows: dict[int, int] = {}

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.rows[number] = self.table.add(key(number))
            self.tree.attach(self.rows[number])

    def recover(self, numbers: list[int]) -> None:
        rows = self.table.add_many(as_words([key(number) for number in numbers]))
        self.rows.update(zip(numbers, rows.tolist(), strict=True))
        self.tree.attach_many(rows)

    def remove(self, number: int) -> None:
        row = self.rows.pop(number)
        self.tree.detach(row)
        self.table.hide(row)
        self.table.free(row)

    def check(self) -> None:
        """Links are exactly those of PARENTS among the blocks that are there."""
        numbers = {row: number for number, row in self.rows.items()}
        for number, row in self.rows.items():
            parent = PARENTS[number]
            there = parent in self.rows if parent is not None else False
            expected = self.rows[parent] if there and parent is not None else NONE
            assert self.tree.parent[row] == expected
            children = [numbers[child] for child in self.tree.children(row)]
            assert sorted(children) == [n for n in sorted(self.rows) if PARENTS[n] == number]
            below = [numbers[child] for child in self.tree.descendants(row)]
            assert sorted(below) == sorted(n for n in self.rows if self.is_below(n, number))
            for parent_number, child_number in itertools.product(below, below):
                if PARENTS[child_number] == parent_number:
                    assert below.index(parent_number) < below.index(child_number)

    def is_below(self, number: int, top: int) -> bool:
        parent = PARENTS[number]
        while parent is not None and parent in self.rows:
            if parent == top:
                return True
            parent = PARENTS[parent]
        return False


def test_links_follow_random_arrivals_and_departures(seed: int) -> None:
    rng = random.Random(seed)
    forest = Forest()
    for _ in range(600):
        number = rng.choice(list(PARENTS))
        if number in forest.rows:
            forest.remove(number)
        else:
            forest.add([number])
        forest.check()
    for number in list(forest.rows):
        forest.remove(number)
    assert not forest.tree._orphans, "nobody waits for a parent any more"


@pytest.mark.parametrize("batch", [[1, 2, 3, 4, 5, 6, 7, 8], [8, 6, 5, 4, 3, 2, 1, 7], [4, 5, 6]])
def test_recovered_rows_are_linked_as_if_they_had_come_one_by_one(batch: list[int]) -> None:
    forest = Forest()
    forest.recover(batch)
    forest.check()
    for number in [n for n in PARENTS if n not in batch]:
        forest.add([number])
        forest.check()
    for number in list(PARENTS):
        forest.remove(number)
        forest.check()


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, FEW + 1, 3 * FEW])
def test_stamps_of_short_and_long_prompts_follow_one_rule(count: int) -> None:
    table = KeyTable()
    tree = PrefixTree(table)
    rows = [table.add(BlockKey(struct.pack("<QQQQ", 1, 0, n + 1, 0))) for n in range(count)]
    tree.use([rows[0]])
    tree.use(rows)
    assert tree.now == count + 1
    assert [tree.stamp[row] for row in rows] == [count + 1 - age for age in range(count)]
    assert [tree.hits[row] for row in rows] == [2] + [1] * (count - 1)
    tree.use(rows, hit=False)
    assert [tree.hits[row] for row in rows] == [2] + [1] * (count - 1)


@pytest.mark.parametrize("count", [1, FEW])
def test_hits_stop_at_their_maximum_instead_of_wrapping(count: int) -> None:
    table = KeyTable()
    tree = PrefixTree(table)
    rows = [table.add(BlockKey(struct.pack("<QQQQ", 1, 0, n + 1, 0))) for n in range(count)]
    for _ in range(HITS_MAX + 3):
        tree.use(rows)
    assert {tree.hits[row] for row in rows} == {HITS_MAX}


def test_recovery_of_nothing_is_nothing() -> None:
    forest = Forest()
    forest.tree.attach_many(np.zeros(0, dtype=np.int64))
    forest.add([1, 2])
    forest.check()
