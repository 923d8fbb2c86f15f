"""Rows whose session will not come back."""

import random

import numpy as np
from tests.support.catalogs import chain, in_memory, key

from kvdepot.index.catalog import Catalog
from kvdepot.index.closed import Closed


def test_many_at_once_and_one_by_one_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    catalog = Catalog()
    rows = [in_memory(catalog, one) for one in chain(200)]
    catalog.use(rows, hit=False)
    closed: set[int] = set()
    for _ in range(300):
        some = rng.sample(rows, rng.randrange(1, 20))
        match rng.randrange(3):
            case 0:
                catalog.closed.add(some)
                closed |= set(some)
            case 1:
                catalog.closed.discard(some)
                closed -= set(some)
            case _:
                catalog.use(some)
                closed -= set(some)
        expected = [row in closed for row in rows]
        assert [row in catalog.closed for row in rows] == expected
        assert catalog.closed.mask(np.array(rows)).tolist() == expected


def test_another_block_in_the_same_row_is_not_closed() -> None:
    catalog = Catalog()
    row = in_memory(catalog, key(1))
    catalog.use([row], hit=False)
    catalog.closed.add([row])
    catalog.leaves.leave(row)
    catalog.memory.drop(row)
    catalog.forget_if_gone(row)
    assert in_memory(catalog, key(2)) == row
    catalog.use([row], hit=False)
    assert row not in catalog.closed
    assert catalog.closed.mask(np.array([row])).tolist() == [False]


def test_the_ones_closed_first_are_forgotten() -> None:
    catalog = Catalog()
    rows = [in_memory(catalog, one) for one in chain(20)]
    catalog.use(rows, hit=False)
    closed = Closed(catalog.tree, rows_max=10)
    for row in rows:
        closed.add([row])
    found = closed.mask(np.array(rows)).tolist()
    assert found[-5:] == [True] * 5 and sum(found) <= 10
