"""`bench store`, memory: put and get through a store that has no disk, beside memcpy."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvdepot.bench.bars import fastest_copy_bar, memory_bar
from kvdepot.bench.disk import changed_row
from kvdepot.bench.prompts import Prompts, fill_index, prompts_for
from kvdepot.bench.raw import MIB, Bytes, best_copies, filled, memory_copies, pieces
from kvdepot.bench.rounds import Result, Timings, compare, fastest_way
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

BATCH_BYTES: Final = 64 * MIB
_SLACK: Final = 1.1
"""Memory tier, in sets: a new set pushes the old one out."""


@dataclass(slots=True)
class MemoryStore:
    """A store under test, full. Works move the same bytes: `set_bytes`, in prompts."""

    store: Depot
    prompts: Prompts
    count: int
    targets: list[Bytes]
    current: list[list[BlockKey]] = field(default_factory=list)

    @property
    def set_bytes(self) -> int:
        return self.count * self.prompts.blocks * self.prompts.space.block_bytes

    def put_many(self) -> float:
        fresh = self.prompts.fresh(self.count)
        started = time.perf_counter()
        stored = [self.store.put_many(keys, self.prompts.sources) for keys in fresh]
        taken = time.perf_counter() - started
        if not all(all(answers) for answers in stored):
            raise StateError("a put was refused although there is room")
        self.current = fresh
        return taken

    def put_each(self) -> float:
        fresh = self.prompts.fresh(self.count)
        put, sources = self.store.put, self.prompts.sources
        started = time.perf_counter()
        stored = [put(k, s) for keys in fresh for k, s in zip(keys, sources, strict=True)]
        taken = time.perf_counter() - started
        if not all(stored):
            raise StateError("a put was refused although there is room")
        self.current = fresh
        return taken

    def get_many(self) -> float:
        started = time.perf_counter()
        got = [self.store.get_many(keys, self.targets) for keys in self.current]
        taken = time.perf_counter() - started
        if not all(all(answers) for answers in got):
            raise StateError("a block that was put is not in memory")
        return taken

    def get_each(self) -> float:
        get, targets = self.store.get, self.targets
        started = time.perf_counter()
        got = [get(k, t) for keys in self.current for k, t in zip(keys, targets, strict=True)]
        taken = time.perf_counter() - started
        if not all(got):
            raise StateError("a block that was put is not in memory")
        return taken


@contextmanager
def memory_store(block_bytes: int, set_bytes: int, index_blocks: int = 0) -> Iterator[MemoryStore]:
    """A store in memory that holds one set of blocks and little more, pages touched."""
    batch_bytes = max(block_bytes, min(BATCH_BYTES, set_bytes // 4))
    count = max(1, set_bytes // batch_bytes)
    with open_store(dram=int(_SLACK * set_bytes) + 2 * batch_bytes) as store:
        store.inspect().wait_for_prefault()
        prompts = prompts_for(store, block_bytes, batch_bytes)
        targets = pieces(filled(prompts.blocks * block_bytes, seed=1), block_bytes)
        subject = MemoryStore(store, prompts, count, targets)
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
    small, large = indexes
    with memory_store(block_bytes, set_bytes) as subject:
        stored, batch = copy_places(subject)
        put_limit = fastest_way(memory_copies(batch, stored))
        get_limit = fastest_way(memory_copies(stored, batch))
        speeds: list[dict[str, Timings]] = []
        for more in (small, large - small):
            assert isinstance(subject.store, Store)
            fill_index(subject.store, subject.prompts.space, more, seed=more)
            puts = compare(put_limit, {"put_many": subject.put_many}, rounds)
            speeds.append(puts | compare(get_limit, {"get_many": subject.get_many}, rounds))
    before, after = speeds
    return [
        changed_row(
            "dram", f"{op}, {large} blocks", block_bytes, subject.set_bytes, before[op], after[op]
        )
        for op in before
    ]
