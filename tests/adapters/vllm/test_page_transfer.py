"""Loads and saves of pages: damage in memory is no success, on a GPU neither; a daemon's restart
costs misses and nothing else."""

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tests.support.page_locks import CudaStandIn
from tests.support.toy_engine import OpenStore
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import HostMover, KVTensors
from kvdepot.adapters.vllm import page_transfer
from kvdepot.adapters.vllm.messages import LoadJob, SaveJob
from kvdepot.adapters.vllm.metrics import ConnectorCounts
from kvdepot.adapters.vllm.page_transfer import FinishedLoad, Loader, PagedCache, Saver
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import Depot, Sink
from kvdepot.core.layout import KVLayout
from kvdepot.testing.daemons import DaemonProcess

PAGES, PAGE_TOKENS = 6, 4
LAYOUT = KVLayout.opaque(PAGE_TOKENS * 2 * 64 * 4 * 2, PAGE_TOKENS)


def cache_of(mover: HostMover) -> PagedCache:
    layers = [torch.rand(PAGES, PAGE_TOKENS, 2, 64) for _ in range(2)]
    tensors = KVTensors(layers, "page token head dim", order="token head dim")
    return PagedCache(tensors, mover, 1, LAYOUT)


def keys_of(store: Depot) -> list[BlockKey]:
    return store.namespace(model="m", layout=LAYOUT).keys(range(PAGES * PAGE_TOKENS))


def save(store: Depot, cache: PagedCache, keys: list[BlockKey]) -> int | None:
    auditor = BlockAuditor(store, AuditConfig(), "test", logging.getLogger("tests"))
    saver = Saver(store, [cache], ConnectorCounts(), auditor)
    saver.save(SaveJob("r", "", (tuple(keys),), tuple(range(len(keys))), 0), keys)
    saver.close()
    return next((block for _, block in saver.take_unsaved()), None)


def load(
    store: Any, cache: PagedCache, keys: list[BlockKey], recompute_s: float = 0.0
) -> FinishedLoad:
    loader = Loader(store, [cache], ConnectorCounts(), 1)
    pages = tuple(range(len(keys)))
    job = LoadJob("r", "", (tuple(keys),), pages, 0, timeout_s=20.0, recompute_s=recompute_s)
    loader.submit(job, keys)
    loader.close()
    (finished,) = loader.take()
    return finished


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_flipped_bit_is_recomputed(open_store: OpenStore, on_gpu: bool) -> None:
    with open_store() as store:
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
        mover.close()


def test_a_save_that_cannot_start_gives_its_slots_back(open_store: OpenStore) -> None:
    """As after a daemon's restart, until its new memory is locked. Nothing is raised."""
    with open_store() as store, CudaStandIn(list) as mover:
        keys = keys_of(store)
        assert save(store, cache_of(mover), keys) == 0
        assert load(store, cache_of(mover), keys).end.failed_block == 0
        assert save(store, cache_of(HostMover()), keys) is None
        assert load(store, cache_of(mover), keys).end.failed_block == 0
        assert store.stats()["leased"] == 0


def resident_share(tensor: torch.Tensor) -> float:
    """Of the whole memory pages of a tensor, as the kernel says."""
    size = os.sysconf("SC_PAGE_SIZE")
    start = -(-tensor.data_ptr() // size) * size
    count = (tensor.data_ptr() + tensor.nbytes - start) // size
    there = (ctypes.c_ubyte * count)()
    length = ctypes.c_size_t(count * size)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), length, there) == 0
    return sum(byte & 1 for byte in there) / count


def test_the_first_load_finds_its_pages_touched(open_store: OpenStore) -> None:
    with open_store() as store:
        memory = mmap.mmap(-1, 16 << 20)  # untouched
        layer = torch.frombuffer(memory, dtype=torch.float32).view(-1, PAGE_TOKENS, 2, 64)
        assert resident_share(layer) < 0.1
        tensors = KVTensors([layer], "page token head dim", order="token head dim")
        cache = PagedCache(tensors, HostMover(), 1, LAYOUT)
        Loader(store, [cache], ConnectorCounts(), 1).close()
        assert resident_share(layer) == 1.0
        assert not layer.any()


class LateStore:
    """A store whose leases say of all but the first blocks that they are late, once."""

    def __init__(self, store: Depot, in_time: int) -> None:
        self._store = store
        self._in_time = in_time
        self.asked: list[tuple[int, float]] = []
        """First block and time of each delivery."""

    @contextmanager
    def lease(self, keys: list[BlockKey]) -> Iterator["LateStore"]:
        with self._store.lease(keys) as self._lease:
            yield self

    def deliver(
        self, sink: Sink, *, timeout_s: float, start: int = 0, beside: bool
    ) -> list[GetResult]:
        self.asked.append((start, timeout_s))
        if len(self.asked) > 1:
            return self._lease.deliver(sink, start=start, beside=beside, timeout_s=20.0)
        came = self._lease.deliver(sink, stop=self._in_time, beside=beside, timeout_s=20.0)
        return [*came, *[GetResult(None, "late")] * (PAGES - self._in_time)]


def test_a_load_that_is_nearly_there_is_finished(open_store: OpenStore) -> None:
    with open_store() as store:
        source, target = cache_of(HostMover()), cache_of(HostMover())
        keys = keys_of(store)
        assert save(store, source, keys) is None
        late = LateStore(store, PAGES - 1)
        end = load(late, target, keys, recompute_s=3600.0).end
        assert end.failed_block is None
        assert not end.late_blocks
        assert [first for first, _ in late.asked] == [0, PAGES - 1]
        assert [time.blocks for time in end.times] == [PAGES - 1], "not learnt as the tier's"
        pages = range(PAGES)
        mine, other = (each.tensors.pages(pages).tensors for each in (source, target))
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize(("in_time", "recompute_s"), [(PAGES - 1, 0.0), (0, 3600.0)])
def test_one_that_is_not_is_given_up(
    open_store: OpenStore, in_time: int, recompute_s: float
) -> None:
    with open_store() as store:
        cache, keys = cache_of(HostMover()), keys_of(store)
        assert save(store, cache, keys) is None
        late = LateStore(store, in_time)
        end = load(late, cache, keys, recompute_s=recompute_s).end
        assert (end.failed_block, end.late_blocks) == (in_time, PAGES - in_time)
        assert len(late.asked) == 1


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
            fresh = store.namespace(model=f"m{turn}", layout=LAYOUT).keys(range(PAGE_TOKENS))
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


class OneByOne:
    """A store whose deliveries take what `take_s` says of the clock; tells what they were given."""

    def __init__(self, take_s: float) -> None:
        self.now_s = 0.0
        self.given_s: list[float] = []
        self._take_s = take_s
        self.queued = threading.Event()

    def monotonic(self) -> float:
        return self.now_s

    def lease(self, keys: list[BlockKey]) -> "OneByOne":
        self.queued.wait()
        return self

    def __enter__(self) -> "OneByOne":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def deliver(
        self, sink: object, *, start: int, beside: bool, timeout_s: float
    ) -> list[GetResult]:
        self.given_s.append(timeout_s)
        self.now_s += self._take_s
        return [GetResult(None, "late")]


def test_the_time_of_a_load_runs_while_it_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = OneByOne(take_s=3.0)
    monkeypatch.setattr(page_transfer, "time", store)
    loader = Loader(store, [cache_of(HostMover())], ConnectorCounts(), 1)  # type: ignore[arg-type]
    keys = [BlockKey(bytes(32))]
    for name in "abc":
        loader.submit(LoadJob(name, "", (tuple(keys),), (0,), 0, timeout_s=5.0), keys)
    store.queued.set()
    loader.close()
    assert store.given_s == [5.0, 2.0, 0.0]
    assert [one.end.late_blocks for one in loader.take()] == [1, 1, 1]


class GatedStore:
    """A store whose deliveries wait until they are let go, one by one; tells which have begun."""

    def __init__(self) -> None:
        self.begun: list[BlockKey] = []
        self.gates: dict[BlockKey, threading.Event] = {}

    @contextmanager
    def lease(self, keys: list[BlockKey]) -> Iterator["GatedLease"]:
        yield GatedLease(self, keys[0], len(keys))


class GatedLease:
    def __init__(self, store: GatedStore, key: BlockKey, count: int) -> None:
        self._store, self._key, self._count = store, key, count

    def deliver(
        self, sink: object, *, start: int, beside: bool, timeout_s: float
    ) -> list[GetResult]:
        self._store.begun.append(self._key)
        assert self._store.gates[self._key].wait(20.0)
        return [GetResult(None, "absent")] * self._count


class GatedLoads:
    """A loader, and loads that are named by letters."""

    def __init__(self) -> None:
        self.store = GatedStore()
        cache = cache_of(HostMover())
        self.loader = Loader(self.store, [cache], ConnectorCounts(), 4)  # type: ignore[arg-type]

    def submit(self, name: str, *, next_queued: bool = True, timeout_s: float = 60.0) -> None:
        key = BlockKey(name.encode() * 32)
        self.store.gates[key] = threading.Event()
        job = LoadJob(name, "", ((key,),), (0,), 0, timeout_s=timeout_s, next_queued=next_queued)
        self.loader.submit(job, [key])

    def end(self, name: str) -> None:
        self.store.gates[BlockKey(name.encode() * 32)].set()

    def begun(self, names: str) -> bool:
        """Whether these have begun, in this order, and no other; waits for them."""
        until(lambda: len(self.store.begun) >= len(names))
        time.sleep(0.05)
        return [key[:1].decode() for key in self.store.begun] == list(names)

    def over(self) -> list[str]:
        """The next loads that are over; waits for one."""
        return [one.job.request_id for one in self.finished()]

    def finished(self) -> list[FinishedLoad]:
        found: list[FinishedLoad] = []

        def one_is_over() -> bool:
            found.extend(self.loader.take())
            return bool(found)

        until(one_is_over)
        return found


def test_loads_from_drives_come_in_turn_and_memory_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_transfer, "_TURN_BYTES", LAYOUT.block_bytes)
    loads = GatedLoads()
    for name in "abc":
        loads.submit(name)
    assert loads.begun("a")
    loads.submit("m", next_queued=False)
    assert loads.begun("am")
    loads.end("m")
    assert loads.over() == ["m"]
    loads.end("a")
    assert loads.begun("amb")
    loads.end("b")
    assert loads.begun("ambc")
    loads.end("c")
    loads.loader.close()
    assert sorted(loads.over()) == ["a", "b", "c"]


def test_small_loads_from_drives_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfer, "_TURN_BYTES", 2 * LAYOUT.block_bytes)
    loads = GatedLoads()
    for name in "abc":
        loads.submit(name)
    assert loads.begun("ab")
    for name in "abc":
        loads.end(name)
    loads.loader.close()


def test_a_load_whose_turn_does_not_come_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_transfer, "_TURN_BYTES", 1)
    loads = GatedLoads()
    loads.submit("a")
    loads.submit("b", timeout_s=0.1)
    (over,) = loads.finished()
    assert over.job.request_id == "b"
    assert (over.end.failed_block, over.end.late_blocks) == (0, 1)
    assert over.failed_pages == frozenset({0})
    loads.end("a")
    assert loads.over() == ["a"]
    assert loads.begun("a"), "nothing is read for one that is given up"
    loads.loader.close()
