"""What somebody else is reading is not read again."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.cold_prompt import SLOW, left_on_the_hard_drive
from tests.support.store_contract import space_of, tiers
from tests.support.stores import settings

from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store
from kvdepot.testing.emulation import open_emulated

BLOCKS = 12


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    return left_on_the_hard_drive(tmp_path, BLOCKS)


@pytest.fixture
def store(tmp_path: Path, keys: list[BlockKey]) -> Iterator[Store]:
    with open_emulated({"hdd": SLOW}, **settings(tmp_path)) as opened:
        space_of(opened)
        yield opened


def test_four_who_return_together_read_a_prompt_once(store: Store, keys: list[BlockKey]) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: tiers(store, keys), range(4)))
    flat = [tier for some in found for tier in some]
    assert set(flat) == {"hdd", "dram"}, "everybody got everything"
    assert flat.count("hdd") == BLOCKS


def test_a_block_that_is_asked_for_twice_in_one_call_is_read_once(
    store: Store, keys: list[BlockKey]
) -> None:
    found = tiers(store, [keys[0], keys[1], keys[0]])
    assert found.count("hdd") == 2
    assert found.count("dram") == 1


def test_a_hint_that_is_under_way_is_not_read_again(store: Store, keys: list[BlockKey]) -> None:
    hint = store.prefetch(keys, 20.0)
    found = tiers(store, keys)
    assert hint.wait(60.0)
    assert None not in found
    assert found.count("hdd") + hint.brought == BLOCKS
