"""Access to a store's internals for tests and benchmarks."""

import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.volume import volume_of
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.engine import Engine
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.memory_tier import ArenaTier
from kvdepot.store.volume_set import VolumeSet
from kvdepot.volumes.log.volume import LogVolume


class StoreInspector:
    """Made by `Store.inspect`. Its calls take the store's lock themselves."""

    def __init__(self, engine: Engine, drives: VolumeMaintenance) -> None:
        self.engine = engine
        self.state = engine.state
        self.slots = engine.putter.slots
        self.reader = engine.reader
        self.prefetcher = engine.prefetcher
        self.drives = drives

    @property
    def catalog(self) -> Catalog:
        return self.state.catalog

    def lower(self, number: int = 0) -> LowerTier:
        """A tier below memory, counted from the fastest."""
        return self.state.lower_tiers[number]

    @property
    def volumes(self) -> VolumeSet:
        return self.state.volumes

    def log_volume(self, number: int = 0) -> LogVolume:
        """A log volume with its internals."""
        return cast(LogVolume, self.volumes.entries[number].volume)

    def memory(self, number: int = 0) -> ArenaTier:
        """A memory tier, counted from the fastest."""
        return self.state.memory_tiers[number]

    def rows(self, keys: Sequence[BlockKey]) -> list[int]:
        with self.state.lock:
            return self.state.catalog.rows(keys)

    def locations(self, keys: Sequence[BlockKey], number: int = 0) -> list[int]:
        """Locations of blocks in a lower tier; NONE for absent ones."""
        copies = self.lower(number).copies
        with self.state.lock:
            rows = self.state.catalog.rows(keys)
            return [
                copies.location[row] if row != NONE and copies.ready(row) else NONE for row in rows
            ]

    def volumes_of(self, keys: Sequence[BlockKey], number: int = 0) -> list[int]:
        """The volume of each block in a lower tier; -1 if the tier does not have it."""
        return [volume_of(location) for location in self.locations(keys, number)]

    def drop_from_memory(self, keys: Sequence[BlockKey] | None = None) -> None:
        """Evict blocks (default: all) from the fastest memory tier. They must
        be written already.
        """
        memory = self.memory()
        with self.state.lock:
            if keys is None:
                rows = np.flatnonzero(memory.copies.state.array).tolist()
            else:
                rows = self.state.catalog.rows(keys)
            for row in rows:
                if row != NONE and memory.copies.ready(row):
                    memory.drop(row)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until a condition is true. False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def wait_for_prefault(self, timeout_s: float = 60.0) -> bool:
        """Wait until prefaulting has ended. False after `timeout_s`."""
        return all(arena.memory.prefaulted(timeout_s) for arena in self.state.all_arenas)
