"""A small store with two memories, for tests."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.store_contract import prompt, put, space_of

from kvdepot.core.block import BlockKey
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

MIB = 1 << 20


def settings(**cxl: Any) -> dict[str, Any]:
    """Two memories and no disk: 51 blocks of the contract's size above, some hundred below."""
    return {
        "dram": {"capacity": 2 * MIB, "prefault": False, "huge_pages": "never", "eviction": "lru"},
        "cxl": {"capacity": 4 * MIB, **cxl},
        "writeback": {"staging": 2 * MIB},
    }


def disk(path: Path) -> dict[str, Any]:
    return {"path": str(path), "capacity": 32 * MIB, "segment": MIB}


def settle(store: Store, within_s: float = 60.0) -> None:
    """Wait until the porter has nothing to do."""
    state, deadline = store.inspect().state, time.monotonic() + within_s
    while time.monotonic() < deadline:
        with state.lock:
            upper = state.memory_tiers[0]
            if (
                not upper.short
                and not upper.hits
                and state.catalog.leased == store.inspect().state.leased
            ):
                return
        time.sleep(0.001)
    raise AssertionError("the porter does not come to an end")


def places(store: Store, keys: Sequence[BlockKey]) -> list[list[str]]:
    """The tiers that have each block."""
    catalog = store.inspect().catalog
    with store.inspect().state.lock:
        return [
            [copies.tier for copies in catalog.tiers if copies.ready(row)]
            for row in catalog.rows(list(keys))
        ]


def damage(store: Store, key: BlockKey, *, at: int = 4096 + 100, tier: int = 1) -> None:
    """Flip a bit of a block's record in one memory."""
    pool = store.inspect().memory(tier)
    with store.inspect().state.lock:
        image = pool.image(store.inspect().catalog.table.find(key))
        image[at] ^= 1


def opened(folder: Path, **cxl: Any) -> Store:
    """With a disk."""
    return open_store(**settings(**cxl), ssd=disk(folder))


def fill(store: Store, prompts: int, first: int = 100) -> list[list[BlockKey]]:
    """Prompts of ten blocks, no faster than the porter can follow."""
    space = space_of(store)
    everything = [prompt(space, first + number, 10) for number in range(prompts)]
    for keys in everything:
        for key in keys:
            assert put(store, [key])
            settle(store)
        store.flush()
    settle(store)
    return everything
