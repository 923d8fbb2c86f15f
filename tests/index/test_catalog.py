"""Every block's state in one place: transitions, leases, removal, recovery."""

from itertools import islice

import numpy as np
import pytest
from tests.support.catalogs import chain, in_memory, key, resident

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_words
from kvdepot.errors import StateError
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.table import FEW, NONE


def on_disk(catalog: Catalog, one: BlockKey) -> int:
    row = catalog.ensure(one, 100)
    catalog.files[0].reserve(row, 9)
    catalog.files[0].seal(row)
    return row


class TestCopies:
    def test_many_copies_at_once(self) -> None:
        catalog = Catalog()
        rows = [catalog.ensure(key(number), 100) for number in range(20)]
        copies = catalog.memory
        copies.reserve_all(rows, list(range(20)))
        assert not any(map(copies.ready, rows)) and not any(map(copies.absent, rows))
        copies.seal_all(rows)
        assert all(map(copies.ready, rows)) and copies.count == 20
        assert catalog.fastest(rows) == ["dram"] * 20
        assert copies.drop_all(rows[5:]) == list(range(5, 20))
        assert all(map(copies.absent, rows[5:])) and copies.count == 5
        assert len(resident(catalog, [key(number) for number in range(20)])) == 5

    @pytest.mark.parametrize("step", ["reserve_all", "seal_all", "drop_all"])
    def test_many_copies_of_which_one_is_not_ready_for_it(self, step: str) -> None:
        catalog = Catalog()
        rows = [catalog.ensure(key(number), 100) for number in range(3)]
        copies = catalog.memory
        if step == "reserve_all":
            copies.reserve(rows[1], 0)
            with pytest.raises(StateError):
                copies.reserve_all(rows, [1, 2, 3])
            assert copies.absent(rows[0]) and copies.absent(rows[2])
        elif step == "seal_all":
            copies.reserve_all(rows[:2], [1, 2])
            with pytest.raises(StateError):
                copies.seal_all(rows)
            assert copies.count == 0
        else:
            copies.reserve_all(rows, [1, 2, 3])
            copies.seal_all(rows[:2])
            with pytest.raises(StateError):
                copies.drop_all(rows)
            assert copies.count == 2

    def test_an_abandoned_copy_never_counts(self) -> None:
        catalog = Catalog()
        row = catalog.ensure(key(1), 100)
        catalog.files[0].reserve(row, 5)
        assert catalog.files[0].drop(row) == 5
        assert catalog.files[0].count == 0

    def test_every_other_step_is_a_bug_that_raises_and_changes_nothing(self) -> None:
        def absent(copies: Copies, row: int) -> None:
            pass

        def filling(copies: Copies, row: int) -> None:
            copies.reserve(row, 1)

        def ready(copies: Copies, row: int) -> None:
            copies.reserve(row, 1)
            copies.seal(row)

        for prepare, verbs in (
            (absent, ("seal", "drop", "move")),
            (filling, ("reserve", "move")),
            (ready, ("reserve", "seal")),
        ):
            for verb in verbs:
                catalog = Catalog()
                row = catalog.ensure(key(1), 100)
                prepare(catalog.memory, row)
                before = (catalog.memory.state[row], catalog.memory.count)
                steps = {
                    "seal": lambda c=catalog, r=row: c.memory.seal(r),
                    "drop": lambda c=catalog, r=row: c.memory.drop(r),
                    "move": lambda c=catalog, r=row: c.memory.move(r, 2),
                    "reserve": lambda c=catalog, r=row: c.memory.reserve(r, 2),
                }
                with pytest.raises(StateError):
                    steps[verb]()
                assert (catalog.memory.state[row], catalog.memory.count) == before


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, 3 * FEW])
class TestPrefix:
    @pytest.mark.parametrize("gap", ["missing", "filling"])
    def test_the_resident_run_ends_at_the_first_block_that_is_not_ready(
        self, count: int, gap: str
    ) -> None:
        catalog = Catalog()
        keys = chain(count)
        rows = [
            (in_memory if n % 2 else on_disk)(catalog, one) if n != count - 1 else NONE
            for n, one in enumerate(keys)
        ]
        if gap == "filling":
            catalog.memory.reserve(catalog.ensure(keys[-1], 100), 3)
        assert resident(catalog, keys) == rows[:-1]
        assert resident(catalog, keys[-1:] + keys[:-1]) == []

    def test_recovered_blocks_are_ready_on_disk_and_younger_ones_are_warmer(
        self, count: int
    ) -> None:
        catalog = Catalog()
        keys = chain(count)
        at = np.arange(count, dtype=np.int64)
        rows = catalog.recover(as_words(keys), np.full(count, 512, dtype=np.int64), at + 50)
        assert catalog.rows(keys) == rows.tolist()
        assert resident(catalog, keys) == rows.tolist()
        assert catalog.files[0].count == count
        assert [catalog.files[0].location[row] for row in rows.tolist()] == list(
            range(50, 50 + count)
        )
        assert {catalog.nbytes[row] for row in rows.tolist()} == {512}
        stamps = [catalog.tree.stamp[row] for row in rows.tolist()]
        assert stamps == sorted(set(stamps))
        later = catalog.ensure(key(5000), 1)
        catalog.use([later])
        assert catalog.tree.stamp[later] > stamps[-1]


class TestRemoval:
    def test_removing_twice_is_removing_once(self) -> None:
        catalog = Catalog()
        row = in_memory(catalog, key(1))
        assert catalog.mark_deleted(row)
        assert catalog.mark_deleted(row)
        assert catalog.table.find(key(1)) == NONE


def test_a_drive_that_comes_back_does_not_let_heads_go_before_tails() -> None:
    """The child waited in memory as an orphan; its parent is recovered, then promoted."""
    catalog = Catalog()
    child = in_memory(catalog, key(2, 1))
    (parent,) = catalog.recover(
        as_words([key(1)]), np.array([100], dtype=np.int64), np.array([0], dtype=np.int64)
    ).tolist()
    catalog.memory.reserve(parent, 1)
    catalog.memory.seal(parent)
    catalog.leaves.enter(parent, 4096)
    catalog.use([child])
    assert catalog.leaves.coldest(4096) == child


@pytest.mark.parametrize("there", [[1, 2], [4, 5, 6], [1, 3, 8], [2, 6], [7]])
def test_blocks_recovered_beside_others_are_linked_to_them(there: list[int]) -> None:
    """A drive that comes back brings blocks whose relatives are in memory."""
    parents: dict[int, int | None] = {1: None, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: None, 8: 7}
    catalog = Catalog()
    rows = {n: in_memory(catalog, key(n, parents[n])) for n in there}
    back = [n for n in parents if n not in there]
    count = len(back)
    found = catalog.recover(
        as_words([key(n, parents[n]) for n in back]),
        np.full(count, 100, dtype=np.int64),
        np.arange(count, dtype=np.int64),
    )
    rows.update(zip(back, found.tolist(), strict=True))
    for number, parent in parents.items():
        assert catalog.tree.parent[rows[number]] == (NONE if parent is None else rows[parent])
        children = sorted(rows[n] for n in parents if parents[n] == number)
        assert sorted(catalog.tree.children(rows[number])) == children
    for number in list(parents):
        catalog.mark_deleted(rows.pop(number))
        for child in [n for n in rows if parents[n] == number]:
            assert catalog.tree.parent[rows[child]] == NONE
    assert not catalog.tree._orphans


@pytest.mark.parametrize("links", [[(1, 1)], [(1, 2), (2, 1)], [(1, 3), (2, 1), (3, 2)]])
def test_keys_that_name_each_other_as_parents_do_not_hang_the_store(
    links: list[tuple[int, int]],
) -> None:
    """No prompt has such keys, but a caller can make them up: any 32 bytes are a key."""
    catalog = Catalog()
    rows = [in_memory(catalog, key(own, parent)) for own, parent in links]
    for row in rows:
        assert len(list(islice(catalog.tree.descendants(row), 10))) < len(rows)
    victims = []
    while (row := catalog.leaves.coldest(4096)) != NONE:
        catalog.leaves.leave(row)
        catalog.memory.drop(row)
        catalog.forget_if_gone(row)
        victims.append(row)
    assert sorted(victims) == sorted(rows), "every block can be evicted"
