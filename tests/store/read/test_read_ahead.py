"""Who reads a prompt block by block from a hard drive finds the next ones in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cold_prompt import left_on_the_hard_drive
from tests.support.store_contract import put, space_of, tiers
from tests.support.stores import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store

BLOCKS = 12


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    return left_on_the_hard_drive(tmp_path, BLOCKS)


@pytest.fixture
def store(tmp_path: Path, keys: list[BlockKey]) -> Iterator[Store]:
    with kvdepot.open(**settings(tmp_path)) as opened:
        space_of(opened)
        yield opened


def brought(store: Store) -> int:
    """Blocks that came without being asked for, once the thread is through."""
    thread = store.inspect().prefetcher._thread
    if thread is not None:
        thread.join(10.0)
    return int(store.stats()["counters"]["hinted"])


def test_the_second_block_in_a_row_brings_those_that_follow(
    store: Store, keys: list[BlockKey]
) -> None:
    assert tiers(store, keys[:1]) == ["hdd"]
    assert brought(store) == 0, "one block is no reading in a row"
    assert tiers(store, keys[1:2]) == ["hdd"]
    assert brought(store) > 0
    found = []
    for key in keys[2:]:
        brought(store)
        found += tiers(store, [key])
    assert found[0] == "dram"
    assert found.count("hdd") <= 1, found


def test_a_whole_prompt_brings_nothing_else(store: Store, keys: list[BlockKey]) -> None:
    assert set(tiers(store, keys[:6])) == {"hdd"}
    assert brought(store) == 0


def test_reading_elsewhere_brings_nothing(store: Store, keys: list[BlockKey]) -> None:
    for at in (0, 4, 2, 8):
        tiers(store, keys[at : at + 1])
    assert brought(store) == 0


def test_where_a_prompt_forks_it_does_not_guess(store: Store, keys: list[BlockKey]) -> None:
    space = space_of(store)
    tokens = [1, *range(1, space.layout.block_tokens * 4)]
    fork = space.keys([*tokens[: space.layout.block_tokens * 2], *range(10**6, 10**6 + 64)])
    assert fork[:2] == keys[:2]
    assert all(put(store, fork[2:3]))
    tiers(store, keys[:1])
    tiers(store, keys[1:2])
    assert brought(store) == 0
