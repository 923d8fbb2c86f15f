"""Gives each block of a store the payload of the next block.

The checksums are right. An engine that loads such blocks gets K and V of other tokens, at other
positions: an audit must notice.
"""

from collections.abc import Sequence

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store


def keys_in(store: Store) -> list[BlockKey]:
    """Returns the keys of all blocks, in the order in which they were put."""
    catalog, lock = store.inspect().catalog, store.inspect().state.lock
    with lock:
        return [catalog.table.key(row) for row in catalog.live_rows().tolist()]


def swap_payloads(store: Store, keys: Sequence[BlockKey]) -> int:
    """Give each of these blocks, all of one size, the payload of the next. Returns how many."""
    catalog, lock = store.inspect().catalog, store.inspect().state.lock
    with lock:
        (size,) = {catalog.nbytes[row] for row in catalog.rows(keys)}
    for space in store.routing.namespaces():  # as of one that was just opened
        store.namespace(space)
    kept = [np.empty(size, np.uint8) for _ in keys]
    assert all(store.get_many(keys, kept))
    for key in keys:
        store.remove(key)
    assert all(store.put_many(keys, [*kept[1:], kept[0]]))
    return len(keys)
