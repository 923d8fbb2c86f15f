"""Blocks that will be wanted soon are in memory when they are."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.cold_prompt import SLOW, left_on_the_hard_drive
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import settings

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.requests import BLOCK_DTYPE, Array
from kvdepot.errors import ConfigError
from kvdepot.format.record import record_bytes
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.store import Store
from kvdepot.testing.emulation import open_emulated

BLOCKS = 10


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    return left_on_the_hard_drive(tmp_path, BLOCKS)


@pytest.fixture
def store(tmp_path: Path, keys: list[BlockKey]) -> Iterator[Store]:
    with open_emulated({"hdd": SLOW}, **settings(tmp_path)) as opened:
        space_of(opened)
        yield opened


def test_what_was_hinted_at_comes_from_memory(store: Store, keys: list[BlockKey]) -> None:
    hint = store.prefetch(keys, 20.0)
    assert hint.wait(60.0)
    assert hint.brought == BLOCKS
    assert store.match(keys).tiers == ("dram",) * BLOCKS
    counters = store.stats()["counters"]
    assert (counters["hinted"], counters["get_hdd"]) == (BLOCKS, 0), "it is no use"
    assert tiers(store, keys) == ["dram"] * BLOCKS


def test_it_does_not_wait_and_can_be_called_off(store: Store, keys: list[BlockKey]) -> None:
    started = time.monotonic()
    store.prefetch(keys, 20.0).cancel()
    assert time.monotonic() - started < 10.0
    assert None not in tiers(store, keys)


def test_what_is_there_or_unknown_needs_nothing(store: Store, keys: list[BlockKey]) -> None:
    assert None not in tiers(store, keys)
    assert store.prefetch(keys, 20.0).wait(0.0)
    assert store.prefetch(prompt(space_of(store), 2, 3), 20.0).wait(0.0)


def test_it_takes_no_more_than_a_part_of_memory(tmp_path: Path, keys: list[BlockKey]) -> None:
    """Half a megabyte has room for three hinted blocks, not for ten."""
    small = settings(tmp_path, dram={"capacity": "512KiB"})
    with kvdepot.open(**small) as store:
        space_of(store)
        hint = store.prefetch(keys, 20.0)
        assert hint.wait(60.0)
        assert hint.brought == 3


def test_a_deadline_that_has_passed_is_the_end_of_it(store: Store, keys: list[BlockKey]) -> None:
    hint = store.prefetch(keys, 0.0)
    assert hint.wait(60.0)
    assert hint.brought == 0


@pytest.mark.slow
def test_closing_calls_it_off(tmp_path: Path, keys: list[BlockKey]) -> None:
    crawling = replace(SLOW, read_bandwidth=200_000)
    store = open_emulated({"hdd": crawling}, **settings(tmp_path))
    space_of(store)
    store.prefetch(keys, 20.0)
    assert store.close()


def test_a_block_without_room_in_memory_is_not_read(tmp_path: Path, keys: list[BlockKey]) -> None:
    """Everything in memory is leased, so nothing can leave it."""
    with kvdepot.open(**settings(tmp_path, dram={"capacity": "512KiB"})) as store:
        others = prompt(space_of(store), 2, 30)
        with store.lease(fill_memory(store, others)):
            hint = store.prefetch(keys, 300.0)
            assert hint.wait(60.0), "it does not wait for room"
            assert (hint.wanted, hint.brought) == (3, 0)
        assert store.stats()["counters"]["hinted"] == 0
        assert store.match(keys).tiers == ("hdd",) * BLOCKS


def fill_memory(store: Store, keys: list[BlockKey]) -> list[BlockKey]:
    """Put as many blocks as memory holds."""
    while store.stats()["counters"]["evicted_dram"] == 0:
        count = store.stats()["tiers"]["dram"]["blocks"]
        put(store, keys[count : count + 1])
        assert store.flush()
    here = [key for key in keys if store.match([key]).tiers == ("dram",)]
    assert len(here) > 3
    return here


def test_rows_that_vanish_are_not_brought(store: Store, keys: list[BlockKey]) -> None:
    """Removed after they were looked up."""
    size = space_of(store).block_bytes
    wants = wanted(as_words(keys), size)
    store.remove(keys[5:])
    hint = store.inspect().prefetcher.start(wants, 20.0)
    assert hint.wait(60.0)
    assert (hint.wanted, hint.brought) == (10, 5)


def test_a_hint_brings_what_is_not_promoted_otherwise(tmp_path: Path, keys: list[BlockKey]) -> None:
    with kvdepot.open(**settings(tmp_path, hdd={"promote": False})) as store:
        space_of(store)
        assert tiers(store, keys) == tiers(store, keys) == ["hdd"] * BLOCKS
        assert store.prefetch(keys, 20.0).wait(60.0)
        assert tiers(store, keys) == ["dram"] * BLOCKS


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan")])
def test_a_deadline_in_the_past_is_refused(
    store: Store, keys: list[BlockKey], deadline_s: float
) -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        store.prefetch(keys, deadline_s)


def test_many_hints_from_many_threads(store: Store, keys: list[BlockKey]) -> None:
    """Taken, called off and measured at the same time as they are served."""
    found: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            hint = store.prefetch(keys[: 1 + (number + turn) % BLOCKS], 20.0)
            if turn % 3:
                hint.cancel()
            found.append(hint.brought)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and min(found) >= 0
    assert None not in tiers(store, keys)


def wanted(keys: Keys, nbytes: int) -> Array:
    blocks = np.zeros(len(keys), BLOCK_DTYPE)
    blocks["key"] = keys
    blocks["payload_bytes"] = blocks["chunk_bytes"] = blocks["stop"] = nbytes
    return blocks


def some_wants(count: int) -> Array:
    return wanted(as_words([BlockKey(bytes([n]) * 32) for n in range(count)]), 4096)


def test_a_step_takes_no_more_than_a_share_from_each_drive() -> None:
    wants = some_wants(6)
    record = record_bytes(4096)
    hint = Hint(wants, 1.0)
    blocks, volumes = hint.take(np.array([7, 7, 7, 8]), 100 * record, 2 * record)
    assert np.array_equal(blocks, wants[[0, 1, 3]]) and volumes.tolist() == [7, 7, 8]
    left = wants[[2, 4, 5]]
    assert np.array_equal(hint.first(9), left), "what was left out comes next, in order"
    assert hint.nbytes == 3 * record


def test_a_step_takes_one_block_even_where_that_is_too_much() -> None:
    wants = some_wants(3)
    hint = Hint(wants, 1.0)
    blocks, _ = hint.take(np.array([7] * 3), 1, 1)
    assert np.array_equal(blocks, wants[:1])
    assert np.array_equal(hint.first(9), wants[1:])
