"""Rows in the order of prompts."""

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog
from kvdepot.index.paths import path_order


def key(own: int, parent: int | None = None) -> BlockKey:
    """Tag, link to the parent's digest, own digest."""
    link = (parent or 0).to_bytes(8, "little")
    return BlockKey(bytes(8) + link + own.to_bytes(8, "little") + bytes(8))


def test_every_block_is_right_behind_the_one_it_continues() -> None:
    catalog = Catalog()
    arrived = [(1, None), (10, None), (2, 1), (11, 10), (3, 2), (12, 11), (13, 11)]
    rows = {own: catalog.ensure(key(own, parent), 100) for own, parent in arrived}
    names = {row: own for own, row in rows.items()}
    ordered = path_order(catalog.tree, [rows[own] for own, _ in arrived])
    assert [names[row] for row in ordered] == [1, 2, 3, 10, 11, 12, 13]


def test_parts_of_prompts_keep_the_order_they_are_given_in() -> None:
    catalog = Catalog()
    rows = {
        own: catalog.ensure(key(own, parent), 100) for own, parent in [(1, None), (2, 1), (3, 2)]
    }
    assert path_order(catalog.tree, [rows[3], rows[1]]) == [rows[3], rows[1]]
    assert path_order(catalog.tree, [rows[3], rows[2]]) == [rows[2], rows[3]]


def test_made_up_keys_that_go_in_circles_come_out_once() -> None:
    catalog = Catalog()
    rows = [catalog.ensure(key(1, 2), 100), catalog.ensure(key(2, 1), 100)]
    assert sorted(path_order(catalog.tree, rows)) == sorted(rows)
