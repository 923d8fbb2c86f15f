"""Blocks that will be wanted soon are in memory when they are."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.test_chain import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import prompt, put, space_of, tiers

SLOW = {"read_bandwidth": "2MB", "write_bandwidth": "100MB", "seek": "5ms"}
BLOCKS = 10


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    """A prompt that lies on the hard drive only."""
    with kvdepot.open(**settings(tmp_path, hdd={"write_mode": "pass-through"})) as store:
        found = prompt(space_of(store), 1, BLOCKS)
        assert all(put(store, found))
    return found


@pytest.fixture
def store(tmp_path: Path, keys: list[BlockKey]) -> Iterator[Store]:
    with kvdepot.open(**settings(tmp_path, hdd={"emulate": SLOW})) as opened:
        space_of(opened)
        yield opened


def test_what_was_hinted_at_comes_from_memory(store: Store, keys: list[BlockKey]) -> None:
    hint = store.hint(keys, 20.0)
    assert hint.wait(20.0)
    assert hint.brought == BLOCKS
    assert store.match(keys).tiers == ("dram",) * BLOCKS
    counters = store.stats()["counters"]
    assert (counters["hinted"], counters["get_hdd"]) == (BLOCKS, 0), "it is no use"
    assert tiers(store, keys) == ["dram"] * BLOCKS


def test_it_does_not_wait_and_can_be_called_off(store: Store, keys: list[BlockKey]) -> None:
    started = time.monotonic()
    store.hint(keys, 20.0).cancel()
    assert time.monotonic() - started < 0.1
    assert None not in tiers(store, keys)


def test_what_is_there_or_unknown_needs_nothing(store: Store, keys: list[BlockKey]) -> None:
    assert None not in tiers(store, keys)
    assert store.hint(keys, 20.0).wait(0.0)
    assert store.hint(prompt(space_of(store), 2, 3), 20.0).wait(0.0)


def test_it_takes_no_more_than_a_part_of_memory(tmp_path: Path, keys: list[BlockKey]) -> None:
    """Half a megabyte has room for three hinted blocks, not for ten."""
    small = settings(tmp_path, dram={"capacity": "512KiB"})
    with kvdepot.open(**small) as store:
        space_of(store)
        hint = store.hint(keys, 20.0)
        assert hint.wait(20.0)
        assert hint.brought == 3


def test_a_deadline_that_has_passed_is_the_end_of_it(store: Store, keys: list[BlockKey]) -> None:
    hint = store.hint(keys, 0.0)
    assert hint.wait(5.0)
    assert hint.brought == 0


def test_closing_calls_it_off(tmp_path: Path, keys: list[BlockKey]) -> None:
    crawling = {**SLOW, "read_bandwidth": "200kB"}
    store = kvdepot.open(**settings(tmp_path, hdd={"emulate": crawling}))
    space_of(store)
    store.hint(keys, 20.0)
    assert store.close()
