"""The laws of a store, for one with a slower memory below the first."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.cxl_world import settle
from tests.support.store_contract import (
    InPlaceContract,
    OpenDepot,
    StoreContract,
    prompt,
    put,
    small,
    space_of,
    touch,
)

from kvdepot.depot import Depot
from kvdepot.store.open import open_store
from kvdepot.store.store import Store


@pytest.fixture
def depot(tmp_path: Path) -> OpenDepot:
    device = tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(2 << 20)
    cxl = {"capacity": 1 << 20, "path": device}

    def opened(**settings: Any) -> Store:
        return open_store(**{**small(tmp_path / "kv"), "cxl": cxl, **settings})

    return opened


class TestTwoMemories(StoreContract):
    """Through kvdepot.open."""

    def test_touching_keeps_a_prompt_longer(self, store: Depot) -> None:
        """In either memory: some of the first is kept free."""
        assert isinstance(store, Store)
        space = space_of(store)
        first, second = prompt(space, 1, 10), prompt(space, 2, 10)
        put(store, first)
        put(store, second)
        assert store.flush()
        assert touch(store, first) == 10
        for number in range(25):
            assert put(store, prompt(space, 1000 + number, 1))
            settle(store)
        steps = {"dram": 2, "cxl": 1, "ssd": 0}
        near, far = (
            sum(steps[tier] for tier in store.match(keys).tiers) for keys in (first, second)
        )
        assert near > far > 0


class TestTwoMemoriesInPlace(InPlaceContract):
    """The same, in place."""
