"""`bench store`, memory: put and get through a store that has no disk, beside memcpy."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kvdepot.bench.bars import fastest_copy_bar, memory_bar
from kvdepot.bench.disk import grow_index
from kvdepot.bench.prompts import StoreUnderTest
from kvdepot.bench.raw import MIB, Bytes, best_copies, filled, memory_copies, pieces
from kvdepot.bench.rounds import Result, compare, fastest_way
from kvdepot.core.block import BlockKey
from kvdepot.errors import StateError
from kvdepot.store.open import open_store

BATCH_BYTES: Final = 64 * MIB
_SLACK: Final = 1.1
"""Memory tier, in sets: a new set pushes the old one out."""


class MemoryStore(StoreUnderTest):
    """Full: a new set pushes the old one out."""

    def put_many(self) -> float:
        return self._put(lambda keys: self.store.put_many(keys, self.prompts.sources))

    def put_each(self) -> float:
        put, sources = self.store.put, self.prompts.sources
        return self._put(lambda keys: [put(k, s) for k, s in zip(keys, sources, strict=True)])

    def get_many(self) -> float:
        return self._get(lambda keys: self.store.get_many(keys, self.targets))

    def get_each(self) -> float:
        get, targets = self.store.get, self.targets
        return self._get(lambda keys: [get(k, t) for k, t in zip(keys, targets, strict=True)])

    def _put(self, put: Callable[[list[BlockKey]], Iterable[object]]) -> float:
        fresh = self.prompts.fresh(self.count)
        started = time.perf_counter()
        stored = [put(keys) for keys in fresh]
        taken = time.perf_counter() - started
        if not all(map(all, stored)):
            raise StateError("a put was refused although there is room")
        self.current = fresh
        return taken

    def _get(self, get: Callable[[list[BlockKey]], Iterable[object]]) -> float:
        started = time.perf_counter()
        got = [get(keys) for keys in self.current]
        taken = time.perf_counter() - started
        if not all(map(all, got)):
            raise StateError("a block that was put is not in memory")
        return taken


@contextmanager
def memory_store(block_bytes: int, set_bytes: int) -> Iterator[MemoryStore]:
    """A store in memory that holds one set of blocks and little more, pages touched."""
    batch_bytes = max(block_bytes, min(BATCH_BYTES, set_bytes // 4))
    with open_store(dram=int(_SLACK * set_bytes) + 2 * batch_bytes) as store:
        store.inspect().wait_for_prefault()
        subject = MemoryStore.of(store, block_bytes, batch_bytes, set_bytes)
        subject.put_many()
        subject.put_many()
        yield subject


def copy_places(subject: MemoryStore) -> tuple[list[Bytes], list[Bytes]]:
    """Memories as large as the store's and as a batch, for plain copies between them."""
    size = subject.prompts.space.block_bytes
    stored = pieces(filled(subject.set_bytes, seed=2), size)
    return stored, pieces(filled(len(subject.targets) * size, seed=3), size)


def measure_memory(block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """Batches and single calls beside a plain copy, batches beside the fastest copy there is."""
    rows: list[Result] = []
    with memory_store(block_bytes, set_bytes) as subject:
        stored, batch = copy_places(subject)
        puts = {"put_many": subject.put_many, "put": subject.put_each}
        gets = {"get_many": subject.get_many, "get": subject.get_each}
        speeds = compare(memory_copies(batch, stored), puts, rounds)
        speeds |= compare(memory_copies(stored, batch), gets, rounds)
        best = compare(best_copies(batch, stored), {"put_many": subject.put_many}, rounds)
        best |= compare(best_copies(stored, batch), {"get_many": subject.get_many}, rounds)
        for op, speed in speeds.items():
            bar = memory_bar(block_bytes)
            rows.append(speed.row("dram", op, block_bytes, subject.set_bytes, bar))
        for op, speed in best.items():
            name, bar = f"{op}, fastest copy", fastest_copy_bar(op, block_bytes)
            rows.append(speed.row("dram", name, block_bytes, subject.set_bytes, bar))
    return rows


def degrade_memory(
    block_bytes: int, set_bytes: int, rounds: int, indexes: tuple[int, int]
) -> list[Result]:
    """Put and get before and after the index of one and the same store has grown."""
    with memory_store(block_bytes, set_bytes) as subject:
        stored, batch = copy_places(subject)
        puts, gets = memory_copies(batch, stored), memory_copies(stored, batch)
        pairs = (
            (fastest_way(puts), {"put_many": subject.put_many}),
            (fastest_way(gets), {"get_many": subject.get_many}),
        )
        return grow_index("dram", subject, pairs, rounds, indexes)
