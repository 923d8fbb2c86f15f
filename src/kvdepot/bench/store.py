"""`bench store`: put, get and lookups of a store, compared with the raw device and memcpy."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.bench.prompts import (
    BLOCK_TOKENS,
    WAIT_S,
    FlushedStore,
    StoreUnderTest,
    check_tier,
    fill_index,
    prompts_for,
)
from kvdepot.bench.raw import MIB, best_copies, filled, memory_copies, pieces, raw_file
from kvdepot.bench.rounds import (
    BenchPart,
    BenchPlan,
    Figure,
    Latency,
    Result,
    compare,
    percentile,
)
from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import Lease
from kvdepot.depot import Depot
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

MEMORY: Final = 0.85
"""The promised speed of memory for blocks of a MiB, relative to memcpy in one thread."""
FASTEST_COPY: Final = 0.80
"""The same for `get_many` and blocks of 4 MiB, relative to streaming copies on all cores."""
MATCH_LEASE_US: Final = 1000.0
"""The promise for matching and leasing a hit of 512 blocks."""
KEYS_US: Final = 10_000.0
"""The promise for computing the keys of 131,072 tokens."""
DEGRADATION: Final = 0.90
"""The promised lookup speed with 10^6 blocks in the index, relative to 10^3 blocks."""
MEMORY_BLOCKS: Final = (1 * MIB, 4 * MIB, 32 * MIB)
INDEXES: Final = (10**3, 10**5, 10**6)
QUICK_INDEXES: Final = (10**3, 10**5)
BLOCKS_MIN: Final = 32
"""Blocks of a set, so that some of them fit in memory and most do not."""
HIT_BLOCKS: Final = 512
_SET_BYTES_MAX: Final = 512 * MIB
_MEMORY_BATCH_BYTES: Final = 64 * MIB
_DISK_BATCH_BYTES: Final = 128 * MIB
_DISK_SETS: Final = 3
"""Capacity of the disk tier, in sets of blocks."""
_PAYLOAD_BYTES: Final = 4096
_ROUND_CALLS: Final = 20
_PATIENCE_S: Final = 30.0


def disk_bar(op: str, block_bytes: int) -> float | None:
    """The least speed relative to the raw device, measured with registered huge pages."""
    if op == "get":
        return 0.80 if block_bytes >= 4 * MIB else 0.75 if block_bytes >= 128 << 10 else None
    least = {"deliver": 0.90, "put": 0.85}.get(op)
    return least if block_bytes >= 4 * MIB else None


def parts(plan: BenchPlan, directory: Path) -> Iterator[BenchPart]:
    memory_bytes = min(plan.total_bytes, _SET_BYTES_MAX)
    for size in MEMORY_BLOCKS:
        if size <= memory_bytes // 4:
            run = partial(measure_memory, size, memory_bytes, plan.rounds)
            yield BenchPart(f"dram, {size >> 20} MiB blocks", run)
    if memory_bytes >= 8 * MIB:
        yield BenchPart("cxl, 1 MiB blocks", partial(measure_cxl, MIB, memory_bytes, plan.rounds))
    for size in plan.blocks_bytes:
        run = partial(measure_disk, directory, size, plan.total_bytes, plan.rounds)
        yield BenchPart(f"ssd, {size >> 10} KiB blocks", run)
    yield BenchPart("keys", measure_keys)
    indexes = QUICK_INDEXES if plan.quick else INDEXES
    yield BenchPart("lookups", partial(measure_lookups, indexes, plan.rounds))


class MemoryStore(StoreUnderTest):
    """A full memory tier: a new set pushes the old one out."""

    tier = "dram"
    """Where all blocks must come from."""

    def put_many(self) -> float:
        return self._put(lambda keys: self.store.put_many(keys, self.prompts.sources))

    def put_each(self) -> float:
        put, sources = self.store.put_many, self.prompts.sources
        return self._put(
            lambda keys: [put([k], [s])[0] for k, s in zip(keys, sources, strict=True)]
        )

    def get_many(self) -> float:
        return self._get(lambda keys: self.store.get_many(keys, self.targets))

    def get_each(self) -> float:
        get, targets = self.store.get_many, self.targets
        return self._get(
            lambda keys: [get([k], [t])[0] for k, t in zip(keys, targets, strict=True)]
        )

    def _put(self, put: Callable[[list[BlockKey]], Iterable[object]]) -> float:
        fresh = self.prompts.fresh(self.count)
        started = time.perf_counter()
        stored = [put(keys) for keys in fresh]
        taken = time.perf_counter() - started
        if not all(map(all, stored)):
            raise StateError("a put was refused although there is room")
        self.current = fresh
        return taken

    def _get(self, get: Callable[[list[BlockKey]], Iterable[GetResult]]) -> float:
        started = time.perf_counter()
        got = [get(keys) for keys in self.current]
        taken = time.perf_counter() - started
        check_tier([answer for answers in got for answer in answers], self.tier)
        return taken


def measure_memory(block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """Batches and single calls against a plain copy; batches also against the fastest copy."""
    rows: list[Result] = []
    batch_bytes = max(block_bytes, min(_MEMORY_BATCH_BYTES, set_bytes // 4))
    with open_store(dram=int(1.1 * set_bytes) + 2 * batch_bytes) as store:
        store.inspect().wait_for_prefault()
        subject = MemoryStore.of(store, block_bytes, batch_bytes, set_bytes)
        subject.put_many()
        subject.put_many()
        stored = pieces(filled(subject.set_bytes, seed=2), block_bytes)
        batch = pieces(filled(len(subject.targets) * block_bytes, seed=3), block_bytes)
        puts = {"put_many": subject.put_many, "put": subject.put_each}
        gets = {"get_many": subject.get_many, "get": subject.get_each}
        speeds = compare(memory_copies(batch, stored), puts, rounds)
        speeds |= compare(memory_copies(stored, batch), gets, rounds)
        best = compare(best_copies(batch, stored), {"put_many": subject.put_many}, rounds)
        best |= compare(best_copies(stored, batch), {"get_many": subject.get_many}, rounds)
        for op, speed in speeds.items():
            bar = MEMORY if block_bytes >= MIB else None
            rows.append(speed.row("dram", op, block_bytes, subject.set_bytes, bar))
        for op, speed in best.items():
            judged = op == "get_many" and block_bytes >= 4 * MIB
            name, bar = f"{op}, fastest copy", FASTEST_COPY if judged else None
            rows.append(speed.row("dram", name, block_bytes, subject.set_bytes, bar))
    return rows


def measure_cxl(block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """Reads from the slower memory against reads of as many bytes from the faster one.

    Both are ordinary memory, so that the ratio shows the cost of the store itself.
    """
    batch_bytes = max(block_bytes, min(_MEMORY_BATCH_BYTES, set_bytes // 4))
    memory = {"capacity": int(1.75 * set_bytes), "eviction": "lru"}
    with ExitStack() as scope:
        store = scope.enter_context(open_store(dram=memory, cxl=4 * set_bytes))
        store.inspect().wait_for_prefault()
        prompts = prompts_for(store, block_bytes, batch_bytes)
        count = max(1, set_bytes // (prompts.blocks * block_bytes))
        made: list[list[BlockKey]] = []
        deadline = time.monotonic() + _PATIENCE_S
        while not made or any(
            store.match(keys).tiers != ("cxl",) * len(keys) for keys in made[:count]
        ):
            if time.monotonic() > deadline:
                raise StateError("blocks are not moved to the slower memory")
            made += prompts.fresh(1)
            if not all(store.put_many(made[-1], prompts.sources)):
                raise StateError("a put was refused although there is room")
        for keys in made:
            scope.enter_context(store.lease(keys))  # leased blocks do not change places
        below, above = made[:count], made[-count:]
        targets = pieces(filled(len(above[0]) * block_bytes, seed=1), block_bytes)
        fast = MemoryStore(store, prompts, count, targets, above)
        slow = MemoryStore(store, prompts, count, targets, below)
        slow.tier = "cxl"
        speeds = compare({"get_many from dram": fast.get_many}, {"get_many": slow.get_many}, rounds)
        speeds |= compare({"get from dram": fast.get_each}, {"get": slow.get_each}, rounds)
    return [
        speed.row("cxl", f"{op} (stand-in memory)", block_bytes, slow.set_bytes)
        for op, speed in speeds.items()
    ]


class DiskStore(FlushedStore):
    def get_set(self) -> float:
        """Read the last set. Its prompts come in turn, so memory never has the next one."""
        got: list[Any] = []
        started = time.perf_counter()
        for keys in self.current:
            got += self.store.get_many(keys, self.targets, timeout_s=WAIT_S)
        taken = time.perf_counter() - started
        check_tier(got, "ssd")
        return taken

    def deliver_set(self) -> float:
        """Read and verify the last set in place, without a copy."""
        got: list[Any] = []
        started = time.perf_counter()
        for keys in self.current:
            with self.store.lease(keys) as lease:
                got += lease.deliver(lambda _: None, timeout_s=WAIT_S)
        taken = time.perf_counter() - started
        check_tier(got, "ssd")
        return taken


@contextmanager
def disk_store(directory: Path, block_bytes: int, set_bytes: int) -> Iterator[DiskStore]:
    """A new store for sets of `set_bytes`, a quarter of which fits in its memory."""
    set_bytes = max(set_bytes, BLOCKS_MIN * block_bytes)
    batch_bytes = min(_DISK_BATCH_BYTES, set_bytes // 8)
    capacity_bytes = _DISK_SETS * set_bytes
    segment_bytes = max(MIB, min(256 * MIB, capacity_bytes // 8)) // MIB * MIB
    ssd: dict[str, Any] = {"path": directory, "capacity": capacity_bytes, "segment": segment_bytes}
    # With LRU a set that is read in turn is never in memory.
    dram = {"capacity": max(set_bytes // 4, MIB), "eviction": "lru"}
    try:
        with open_store(dram=dram, ssd=ssd) as store:
            store.inspect().wait_for_prefault()
            yield DiskStore.of(store, block_bytes, batch_bytes, set_bytes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure_disk(directory: Path, block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """First writes, writes over old segments, and reads, each against the raw device."""
    with ExitStack() as scope:
        subject = scope.enter_context(disk_store(directory / "store", block_bytes, set_bytes))
        blocks = subject.set_bytes // block_bytes
        raw = scope.enter_context(raw_file(directory, block_bytes, blocks))
        first = {"first put": subject.put_set}
        speeds = compare(raw.first_writes(), first, min(rounds, _DISK_SETS - 1))
        subject.put_set()
        speeds |= compare(raw.writes(), {"put": subject.put_set}, rounds)
        gets = {"get": subject.get_set, "deliver": subject.deliver_set}
        speeds |= compare(raw.reads(), gets, rounds)
        subject.verify()
    bars = {op: disk_bar(op, block_bytes) for op in ("put", "get", "deliver")}
    return [
        speed.row("ssd", op, block_bytes, subject.set_bytes, bars.get(op))
        for op, speed in speeds.items()
    ]


@contextmanager
def hit_among(index_blocks: int) -> Iterator[tuple[Store, list[BlockKey]]]:
    """A store whose index has this many blocks, and the keys of a prompt that it has."""
    with open_store(dram=32 * MIB) as store:
        prompts = prompts_for(store, _PAYLOAD_BYTES, HIT_BLOCKS * _PAYLOAD_BYTES)
        fill_index(store, prompts.space, index_blocks - HIT_BLOCKS)
        (keys,) = prompts.fresh(1)
        if not all(store.put_many(keys, prompts.sources)):
            raise StateError("a put was refused although there is room")
        yield store, keys


def match_and_lease(store: Depot, keys: list[BlockKey]) -> Lease:
    """The calls of an engine before it loads a prefix."""
    found = store.match(keys)
    lease = store.lease(keys)
    if len(found) != len(keys) or len(lease) != len(keys):
        raise StateError("a prompt that was put is not matched")
    return lease


def measure_lookups(indexes: Sequence[int], rounds: int) -> list[Result]:
    """Each size in turn, many times; the speed of the last one against the first one."""
    with ExitStack() as scope:
        hits = {count: scope.enter_context(hit_among(count)) for count in indexes}
        leased: dict[int, list[list[float]]] = {count: [] for count in indexes}
        matched: dict[int, list[float]] = {count: [] for count in indexes}
        for number in range(rounds + 1):
            for count, (store, keys) in hits.items():
                match = _times(partial(store.match, keys), 1 if number else 3)
                batch = _times(partial(match_and_lease, store, keys), _ROUND_CALLS)
                if number:  # the first round is to warm up
                    matched[count] += match
                    leased[count].append(batch)
    results: list[Result] = []
    for count in indexes:
        results.append(_latency(f"match {HIT_BLOCKS} blocks", count, matched[count]))
        calls = [call for batch in leased[count] for call in batch]
        op = f"match+lease {HIT_BLOCKS} blocks"
        results.append(_latency(op, count, calls, MATCH_LEASE_US))
    few, many = leased[indexes[0]], leased[indexes[-1]]
    ratios = [percentile(a, 0.5) / percentile(b, 0.5) for a, b in zip(few, many, strict=True)]
    what, middle = f"match+lease speed, {indexes[-1]} blocks of few", percentile(ratios, 0.5)
    low, high = min(ratios), max(ratios)
    return [*results, Figure(what, middle, "×", low, high, DEGRADATION, bar_is_least=True)]


def measure_keys() -> list[Result]:
    with open_store(dram=32 * MIB) as store:
        space = prompts_for(store, _PAYLOAD_BYTES, _PAYLOAD_BYTES).space
        tokens = np.random.default_rng(2).integers(
            0, 1 << 17, HIT_BLOCKS * BLOCK_TOKENS, dtype=np.uint32
        )
        taken = _times(lambda: space.keys(tokens), _ROUND_CALLS)
    return [_latency(f"keys of {len(tokens)} tokens", 0, taken, KEYS_US)]


def _times(call: Callable[[], object], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        answer = call()
        taken.append(time.perf_counter() - started)
        if isinstance(answer, Lease):
            answer.release()
    return taken


def _latency(
    op: str, index_blocks: int, taken: Sequence[float], bar_us: float | None = None
) -> Latency:
    p50, p99 = (percentile(taken, share) * 1e6 for share in (0.5, 0.99))
    return Latency(op, index_blocks, p50, p99, len(taken), bar_us)
