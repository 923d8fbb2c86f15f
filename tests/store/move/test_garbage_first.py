"""Segments of removed blocks are reclaimed before segments of live ones."""

from pathlib import Path

import pytest
from tests.support.store_contract import prompt, put, small, space_of

from kvdepot.config.settings import load
from kvdepot.store.open import assemble

ORDERS = [
    "default",
    "s3fifo",
    *(pytest.param(order, marks=pytest.mark.slow) for order in ("lru", "fifo", "lfu")),
]


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_evicted_while_there_is_garbage(tmp_path: Path, order: str) -> None:
    tree = small(tmp_path / "kv")
    tree["ssd"] |= {"capacity": 4 << 20, "segment": 256 << 10, "eviction": order}
    with assemble(load(overrides=tree)) as store:
        space = space_of(store)
        keys = [prompt(space, seed, 8) for seed in range(5)]
        for some in keys:
            put(store, some)
        assert store.flush()
        for seed in range(100, 160):
            passing = prompt(space, seed, 8)
            put(store, passing)
            assert store.flush()
            assert store.remove(passing) == 8
        assert store.stats()["counters"]["reclaimed_segments"] > 0
        assert [len(store.match(some)) for some in keys] == [8] * 5
        assert store.stats()["tiers"]["ssd"]["blocks"] == 40
        assert store.admin.check().ok


@pytest.mark.parametrize("order", ORDERS)
def test_live_blocks_between_garbage_are_moved(tmp_path: Path, order: str) -> None:
    """Every segment has one block in four that stays."""
    tree = small(tmp_path / "kv")
    tree["ssd"] |= {"capacity": 4 << 20, "segment": 256 << 10, "eviction": order}
    with assemble(load(overrides=tree)) as store:
        space, kept = space_of(store), []
        for seed in range(16):
            stays, passing = prompt(space, seed, 2), prompt(space, 100 + seed, 6)
            put(store, [*stays, *passing])
            assert store.flush()
            assert store.remove(passing) == 6
            kept.append(stays)
        for seed in range(200, 230):
            passing = prompt(space, seed, 8)
            put(store, passing)
            assert store.flush()
            assert store.remove(passing) == 8
        assert [len(store.match(some)) for some in kept] == [2] * 16
        assert store.stats()["tiers"]["ssd"]["blocks"] == 32
        assert store.admin.check().ok
