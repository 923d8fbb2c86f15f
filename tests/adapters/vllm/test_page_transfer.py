"""Loads and saves of pages: damage in memory is no success, on a GPU neither; a daemon's restart
costs misses and nothing else."""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tests.support.page_locks import CudaStandIn
from tests.support.toy_engine import Toys
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import HostMover, KVTensors
from kvdepot.adapters.vllm import page_transfer
from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import BlockOrigin, GroupBlocks, GroupFacts, LoadJob, SaveJob
from kvdepot.adapters.vllm.page_transfer import (
    BlockTarget,
    FinishedLoad,
    Loader,
    PagedCache,
    Saver,
)
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import Sink
from kvdepot.core.layout import KVLayout
from kvdepot.depot import Depot
from kvdepot.testing.daemons import DaemonProcess

PAGES, PAGE_TOKENS = 6, 4
LAYOUT = KVLayout.opaque(PAGE_TOKENS * 2 * 64 * 4 * 2, PAGE_TOKENS)
FACTS = GroupFacts(GroupRule("full", 0, PAGE_TOKENS), LAYOUT, 1, (), WorkerShard(0, 1))


def cache_of(mover: HostMover, *layers: torch.Tensor) -> PagedCache:
    made = layers or [torch.rand(PAGES, PAGE_TOKENS, 2, 64) for _ in range(2)]
    tensors = KVTensors(made, "page token head dim", order="token head dim")
    return PagedCache(FACTS, tensors, mover, PAGE_TOKENS)


def loader_of(store: Any, cache: PagedCache, threads: int = 1) -> Loader:
    return Loader(store, [cache], defaultdict(float), threads)


def keys_of(store: Depot, model: str = "m", pages: int = PAGES) -> list[BlockKey]:
    return store.namespace(model=model, layout=LAYOUT).keys(range(pages * PAGE_TOKENS))


def blocks_of(keys: list[BlockKey]) -> GroupBlocks:
    return GroupBlocks(0, (tuple(keys),), tuple(range(len(keys))), 0)


def save(store: Depot, cache: PagedCache, keys: list[BlockKey]) -> int | None:
    """The first block that is not saved."""
    auditor = BlockAuditor(store, AuditConfig(), "test", logging.getLogger("tests"))
    saver = Saver(store, [cache], defaultdict(float), auditor)
    saver.save(SaveJob("r", BlockOrigin(), blocks_of(keys)), keys)
    saver.close()
    return next((block for _, block in saver.take_unsaved()), None)


def submit(loader: Loader, cache: PagedCache, name: str, keys: list[BlockKey], **job: Any) -> None:
    targets = [BlockTarget(key, cache, at, (at,)) for at, key in enumerate(keys)]
    loader.submit(LoadJob(name, BlockOrigin(), (blocks_of(keys),), **job), targets)


def load(
    store: Any, cache: PagedCache, keys: list[BlockKey], recompute_s: float = 0.0
) -> FinishedLoad:
    loader = loader_of(store, cache)
    submit(loader, cache, "r", keys, timeout_s=20.0, recompute_s=recompute_s)
    loader.close()
    (finished,) = loader.take()
    return finished


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_flipped_bit_is_recomputed(toys: Toys, on_gpu: bool) -> None:
    store = toys.store()
    mover = CudaStandIn(lambda: store.memory) if on_gpu else HostMover()
    cache, keys = cache_of(mover), keys_of(store)
    assert save(store, cache, keys) is None
    assert load(store, cache, keys).end.failed_block is None
    with store.lease(keys) as lease:
        view = lease.view(3)
        assert view is not None
        for part in store.memory:
            at = bytes(part).find(view)
            if at >= 0:
                part[at + 777] ^= 1
    finished = load(store, cache, keys)
    assert finished.end.failed_block == 3
    assert finished.failed_pages == frozenset(range(3, PAGES))
    assert finished.counts["missed_blocks:corrupt"] == 1
    mover.close()


def test_a_save_that_cannot_start_gives_its_slots_back(toys: Toys) -> None:
    """As after a daemon's restart, until its new memory is locked. Nothing is raised."""
    store = toys.store()
    with CudaStandIn(list) as mover:
        keys = keys_of(store)
        assert save(store, cache_of(mover), keys) == 0
        assert load(store, cache_of(mover), keys).end.failed_block == 0
        assert save(store, cache_of(HostMover()), keys) is None
        assert load(store, cache_of(mover), keys).end.failed_block == 0
        assert store.stats()["leased"] == 0


def resident_share(tensor: torch.Tensor) -> float:
    """The share of a tensor's memory pages that the kernel has allocated."""
    size = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // size) * size
    count = (tensor.data_ptr() + tensor.nbytes - start) // size
    there = (ctypes.c_ubyte * count)()
    length = ctypes.c_size_t(count * size)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), length, there) == 0
    return sum(byte & 1 for byte in there) / count


def test_the_first_load_finds_its_pages_touched(toys: Toys) -> None:
    memory = mmap.mmap(-1, 16 << 20)  # untouched
    layer = torch.frombuffer(memory, dtype=torch.float32).view(-1, PAGE_TOKENS, 2, 64)
    assert resident_share(layer) < 0.1
    loader_of(toys.store(), cache_of(HostMover(), layer)).close()
    assert resident_share(layer) == 1.0
    assert not layer.any()


class LateStore:
    """A store whose leases report all but the first blocks as late, once."""

    def __init__(self, store: Depot, in_time: int) -> None:
        self._store = store
        self._in_time = in_time
        self.first_blocks: list[int] = []
        """Of each delivery."""

    @contextmanager
    def lease(self, keys: list[BlockKey]) -> Iterator["LateStore"]:
        with self._store.lease(keys) as self._lease:
            yield self

    def deliver(
        self, sink: Sink, *, timeout_s: float, start: int = 0, verify_concurrently: bool
    ) -> list[GetResult]:
        self.first_blocks.append(start)
        if len(self.first_blocks) > 1:
            return self._lease.deliver(
                sink, start=start, verify_concurrently=verify_concurrently, timeout_s=20.0
            )
        came = self._lease.deliver(
            sink, stop=self._in_time, verify_concurrently=verify_concurrently, timeout_s=20.0
        )
        return [*came, *[GetResult(None, "late")] * (PAGES - self._in_time)]


def test_a_load_that_is_nearly_there_is_finished(toys: Toys) -> None:
    store = toys.store()
    source, target, keys = cache_of(HostMover()), cache_of(HostMover()), keys_of(store)
    assert save(store, source, keys) is None
    late = LateStore(store, PAGES - 1)
    end = load(late, target, keys, recompute_s=3600.0).end
    assert (end.failed_block, end.late_blocks) == (None, 0)
    assert late.first_blocks == [0, PAGES - 1]
    assert [time.blocks for time in end.times] == [PAGES - 1], "not learnt as the tier's"
    own, other = (each.tensors.pages(range(PAGES)).tensors for each in (source, target))
    assert all(map(torch.equal, own, other))


@pytest.mark.parametrize(("in_time", "recompute_s"), [(PAGES - 1, 0.0), (0, 3600.0)])
def test_a_late_load_is_given_up(toys: Toys, in_time: int, recompute_s: float) -> None:
    store = toys.store()
    cache, keys = cache_of(HostMover()), keys_of(store)
    assert save(store, cache, keys) is None
    late = LateStore(store, in_time)
    end = load(late, cache, keys, recompute_s=recompute_s).end
    assert (end.failed_block, end.late_blocks) == (in_time, PAGES - in_time)
    assert late.first_blocks == [0]


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("kvdepot-arena")


@pytest.mark.parametrize("turns", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_daemons_restart_costs_misses_and_nothing_else(tmp_path: Path, turns: int) -> None:
    settings = {
        "dram": {"capacity": "8MiB", "huge_pages": "never", "prefault": False},
        "ssd": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "segment": "1MiB"},
    }
    with (
        DaemonProcess(tmp_path, settings) as daemon,
        kvdepot.open(daemon.address) as store,
        CudaStandIn(lambda: store.memory) as mover,
    ):
        cache, keys = cache_of(mover), keys_of(store)
        assert save(store, cache, keys) is None
        assert store.flush()
        locked, arenas = sum(mover.driver.locked.values()), mapped_arenas()
        assert locked and arenas
        for turn in range(turns):
            daemon.kill()
            assert load(store, cache, keys).end.failed_block == 0
            assert save(store, cache, keys) == 0
            daemon.start()
            fresh = keys_of(store, f"m{turn}", 1)
            deadline = time.monotonic() + 30.0
            while load(store, cache, keys).end.failed_block is not None:
                save(store, cache, fresh)
                assert time.monotonic() < deadline, "no hits again"
            assert save(store, cache, fresh) is None
            assert load(store, cache, fresh).end.failed_block is None
            assert sum(mover.driver.locked.values()) == locked
            until(lambda: mapped_arenas() == arenas)  # the last view of the old one may go later
        assert mover.driver.most_locked == locked
        assert store.stats()["leased"] == 0


class GatedStore:
    """A store whose deliveries wait until they are let go, one by one. With `take_s` each takes
    that long on a clock of its own."""

    def __init__(self, take_s: float = 0.0) -> None:
        self.begun: list[str] = []
        self.given_s: list[float] = []
        self.gates: dict[str, threading.Event] = {}
        self.now_s = 0.0
        self._take_s = take_s

    def monotonic(self) -> float:
        return self.now_s

    @contextmanager
    def lease(self, keys: list[BlockKey]) -> Iterator["GatedStore"]:
        self._key = keys[0]
        yield self

    def deliver(
        self, sink: object, *, start: int, verify_concurrently: bool, timeout_s: float
    ) -> list[GetResult]:
        name = self._key[:1].decode()
        self.begun.append(name)
        self.given_s.append(timeout_s)
        assert self.gates[name].wait(20.0)
        self.now_s += self._take_s
        return [GetResult(None, "late")]


class GatedLoads:
    """A loader, and loads that are named by letters."""

    def __init__(self, threads: int = 4, take_s: float = 0.0) -> None:
        self.store = GatedStore(take_s)
        self.cache = cache_of(HostMover())
        self.loader = loader_of(self.store, self.cache, threads)

    def submit(self, names: str, *, next_queued: bool = True, timeout_s: float = 60.0) -> None:
        for name in names:
            key = BlockKey(name.encode() * 32)
            self.store.gates[name] = threading.Event()
            job: dict[str, Any] = {"timeout_s": timeout_s, "next_queued": next_queued}
            submit(self.loader, self.cache, name, [key], **job)

    def let_go(self, names: str) -> None:
        for name in names:
            self.store.gates[name].set()

    def begun(self, names: str) -> bool:
        """Whether these have begun, in this order, and no other; waits for them."""
        until(lambda: len(self.store.begun) >= len(names))
        time.sleep(0.05)
        return self.store.begun == list(names)

    def ended(self) -> list[FinishedLoad]:
        """The next loads that have ended; waits for one."""
        ended: list[FinishedLoad] = []

        def has_one() -> bool:
            ended.extend(self.loader.take())
            return bool(ended)

        until(has_one)
        return ended


def test_the_time_of_a_load_runs_while_it_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = GatedLoads(threads=1, take_s=3.0)
    monkeypatch.setattr(page_transfer, "time", loads.store)
    loads.submit("abc", next_queued=False, timeout_s=5.0)
    loads.let_go("abc")
    loads.loader.close()
    assert loads.store.given_s == [5.0, 2.0, 0.0]
    assert [one.end.late_blocks for one in loads.loader.take()] == [1, 1, 1]


def test_loads_from_drives_begin_in_turn_and_memory_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_transfer, "_DRIVE_LOAD_BYTES", LAYOUT.block_bytes)
    loads = GatedLoads()
    loads.submit("abc")
    assert loads.begun("a")
    loads.submit("m", next_queued=False)
    assert loads.begun("am")
    loads.let_go("m")
    assert [load.job.request_id for load in loads.ended()] == ["m"]
    for name, begun in zip("abc", ("amb", "ambc", "ambc"), strict=True):
        loads.let_go(name)
        assert loads.begun(begun)
    loads.loader.close()
    assert sorted(load.job.request_id for load in loads.ended()) == ["a", "b", "c"]


def test_small_loads_from_drives_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfer, "_DRIVE_LOAD_BYTES", 2 * LAYOUT.block_bytes)
    loads = GatedLoads()
    loads.submit("abc")
    until(lambda: sorted(loads.store.begun) == ["a", "b"])
    loads.let_go("abc")
    loads.loader.close()


def test_a_load_whose_turn_does_not_come_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_transfer, "_DRIVE_LOAD_BYTES", 1)
    loads = GatedLoads()
    loads.submit("a")
    loads.submit("b", timeout_s=0.1)
    (late,) = loads.ended()
    assert (late.job.request_id, late.end.failed_block, late.end.late_blocks) == ("b", 0, 1)
    assert late.failed_pages == frozenset({0})
    loads.let_go("a")
    assert [load.job.request_id for load in loads.ended()] == ["a"]
    assert loads.begun("a"), "nothing is read for one that is given up"
    loads.loader.close()
