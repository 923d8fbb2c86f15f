"""Blocks of another meaning in a depot: each under the name of the one before it.

Their bytes and checksums are good. An engine that loads them has K and V of other tokens, at other
positions.
"""

from collections.abc import Sequence

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store


def keys_in(store: Store) -> list[BlockKey]:
    """Of all blocks, in the order in which they came."""
    catalog, lock = store.inspect().catalog, store.inspect().state.lock
    with lock:
        return [catalog.table.key(row) for row in catalog.live_rows().tolist()]


def misplace(store: Store, keys: Sequence[BlockKey]) -> int:
    """Give each of these blocks, all of one size, the bytes of the next. Returns how many."""
    catalog, lock = store.inspect().catalog, store.inspect().state.lock
    with lock:
        (size,) = {catalog.nbytes[row] for row in catalog.rows(keys)}
    for space in store.described_namespaces():  # as of one that was just opened
        store.register(space)
    kept = [np.empty(size, np.uint8) for _ in keys]
    assert all(store.get_many(keys, kept))
    for key in keys:
        store.remove(key)
    assert all(store.put_many(keys, [*kept[1:], kept[0]]))
    return len(keys)
