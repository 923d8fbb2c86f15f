"""Protection of blocks while they are in use."""

from dataclasses import dataclass, field

import numpy as np

from kvdepot.core.keys import Keys
from kvdepot.core.requests import Array
from kvdepot.index.table import Rows
from kvdepot.store.state.state import StoreState


@dataclass(slots=True)
class BlockLease:
    """Blocks that stay in the tiers where they are until `release`."""

    state: StoreState
    rows: list[int] = field(default_factory=list)
    words: Keys = field(default_factory=lambda: np.empty((0, 4), np.uint64))
    """Their keys, if the lease was asked for by key."""

    def protect(self, rows: list[int]) -> None:
        """Protect more blocks."""
        with self.state.lock:
            self.state.lease(rows)
        self.rows += rows

    def places(self) -> tuple[Array, Array]:
        """Address of each block's record in memory, 0 if it is on a drive only; and the length of
        its payload.
        """
        state, rows = self.state, np.asarray(self.rows, np.int64)
        with state.lock:
            state.check_open()
            return addresses_of(state, rows), state.catalog.nbytes.array[rows]

    def release(self) -> None:
        """End the protection. A second call does nothing."""
        rows, self.rows = self.rows, []
        self.state.release(rows)


def addresses_of(state: StoreState, rows: Rows) -> Array:
    """Addresses of records in the fastest memory that has them; 0 for those that are in none."""
    assert state.lock.held()
    found = np.zeros(len(rows), np.int64)
    for memory in state.memory_tiers:
        found = np.where(found == 0, memory.addresses(rows), found)
    return found
