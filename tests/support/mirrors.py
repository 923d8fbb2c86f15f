"""Second copies of a store with two drives: how many, where, and without memory in the way."""

from kvdepot.core.block import BlockKey
from kvdepot.core.tier import drive_of
from kvdepot.store.store import Store

LONG = 8
"""Blocks of a prompt that is mirrored."""


def mirrored(store: Store, tier: str) -> int:
    count: int = store.stats()["tiers"][tier]["mirrored"]
    return count


def places(store: Store, keys: list[BlockKey]) -> list[list[int]]:
    """The drives of each block."""
    level = store.inspect().lower()
    with store.inspect().state.lock:
        rows = store.inspect().catalog.rows(keys)
        return [sorted(map(drive_of, level.places(row))) for row in rows]


def forget_memory(store: Store, keys: list[BlockKey]) -> None:
    state = store.inspect().state
    with state.lock:
        for row in state.catalog.rows(keys):
            if state.catalog.memory.ready(row):
                state.memory_tiers[0].drop(row)
