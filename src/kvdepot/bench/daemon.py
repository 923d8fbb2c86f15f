"""`bench daemon`: the store of a daemon, compared with a store in this process; lookups."""

import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final, cast

from kvdepot.bench.prompts import StoreUnderTest, prompts_for
from kvdepot.bench.raw import MIB, filled, pieces
from kvdepot.bench.rounds import (
    BenchPart,
    BenchPlan,
    Figure,
    Latency,
    Result,
    compare,
    percentile,
)
from kvdepot.bench.store import HIT_BLOCKS, DiskStore, MemoryStore
from kvdepot.core.block import BlockKey
from kvdepot.daemon.client.open import open_remote
from kvdepot.depot import Depot
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

DAEMON_MATCH_P99_US: Final = 1000.0
"""The promise for a match of 512 blocks through the daemon while four clients are busy."""
BLOCKS_BYTES: Final = (MIB, 4 * MIB, 32 * MIB)
CLIENTS: Final = 4
_SET_BYTES: Final = 512 * MIB
_DISK_SET_BYTES: Final = 1024 * MIB
_MATCH_ROUNDS: Final = 5
_MATCH_CALLS: Final = 400
_PAUSE_S: Final = 0.05
_PAYLOAD_BYTES: Final = 4096
_START_S: Final = 60.0
_BATCH_BYTES: Final = 32 * MIB
_EMBEDDED: Final = "the same store in this process"


def daemon_bar(op: str, block_bytes: int) -> float | None:
    """The least speed of a batch, relative to a store in the same process."""
    return 0.90 if op == "get_many" and block_bytes >= MIB else None


def parts(plan: BenchPlan, directory: Path) -> Iterator[BenchPart]:
    share = 8 if plan.quick else 1
    for size in plan.blocks_bytes:
        set_bytes = max(_SET_BYTES // share, 4 * size)
        run = partial(measure_memory, directory, size, set_bytes, plan.rounds)
        yield BenchPart(f"dram, {size >> 20} MiB blocks", run)
    for size in plan.blocks_bytes:
        set_bytes = max(_DISK_SET_BYTES // share, 32 * size)
        run = partial(measure_disk, directory, size, set_bytes, plan.rounds)
        yield BenchPart(f"ssd, {size >> 20} MiB blocks", run)
    calls = _MATCH_CALLS // share
    yield BenchPart("lookups", partial(measure_lookups, directory, calls))


@contextmanager
def daemon_store(directory: Path, settings: Mapping[str, Any]) -> Iterator[tuple[Depot, str]]:
    """The store of a daemon in a process of its own, and its address."""
    directory.mkdir(exist_ok=True)
    short = Path(tempfile.mkdtemp(prefix="kvdepot-"))  # a socket's path has 107 bytes at most
    address = short / "s"
    command = [sys.executable, "-m", "kvdepot", "serve", "--json", "--socket", str(address)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise StateError("the daemon does not start; try kvdepot serve by hand")
        with open_remote(f"unix:{address}", call_timeout=60.0) as store:
            while not store.stats()["daemon"]["is_prefaulted"]:
                time.sleep(_PAUSE_S)
            yield store, f"unix:{address}"
    finally:
        process.terminate()
        process.communicate()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(short, ignore_errors=True)


def both(directory: Path, settings: Mapping[str, Any], scope: ExitStack) -> tuple[Store, Depot]:
    """A store here and one of a daemon, with the same settings and with touched memory."""
    there = dict(settings)
    here = dict(settings)
    if "ssd.capacity" in settings:
        scope.callback(shutil.rmtree, directory / "here", ignore_errors=True)
        here["ssd.path"], there["ssd.path"] = directory / "here", directory / "there"
        scope.callback(shutil.rmtree, directory / "there", ignore_errors=True)
    embedded = scope.enter_context(open_store(**here))
    embedded.inspect().wait_for_prefault()
    remote, _ = scope.enter_context(daemon_store(directory / "daemon", there))
    return embedded, remote


def measure_memory(directory: Path, block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    batch_bytes = max(block_bytes, set_bytes // 4)
    with ExitStack() as scope:
        settings = {"dram.capacity": int(1.25 * set_bytes) + 2 * batch_bytes}
        stores = both(directory, settings, scope)
        subjects = [MemoryStore.of(store, block_bytes, batch_bytes, set_bytes) for store in stores]
        for subject in subjects:
            subject.put_many()
            subject.put_many()
        names = {"put_many": "put_many", "get_many": "get_many", "get_each": "get"}
        return compared("dram", subjects, names, rounds)


def measure_disk(directory: Path, block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """Batches from disk, through memory with room for a quarter of them."""
    batch_bytes = min(128 * MIB, set_bytes // 8)
    with ExitStack() as scope:
        segment_bytes = max(MIB, min(256 * MIB, 3 * set_bytes // 8)) // MIB * MIB
        settings = {
            "dram.capacity": max(set_bytes // 4, MIB),
            "dram.eviction": "lru",
            "ssd.capacity": 3 * set_bytes,
            "ssd.segment": segment_bytes,
        }
        stores = both(directory, settings, scope)
        subjects = [DiskStore.of(store, block_bytes, batch_bytes, set_bytes) for store in stores]
        for subject in subjects:
            subject.put_set()
        names = {"put_set": "put_many", "get_set": "get_many"}
        rows = compared("ssd", subjects, names, rounds)
        for subject in subjects:
            subject.verify()
    return rows


def compared(
    tier: str, subjects: Sequence[StoreUnderTest], names: Mapping[str, str], rounds: int
) -> list[Result]:
    """The daemon's store, which is the last subject, against the first one: a row for each method
    in `names`, by the name there."""
    rows: list[Result] = []
    block_bytes = subjects[0].prompts.space.block_bytes
    for method, op in names.items():
        works = [cast(Callable[[], float], getattr(subject, method)) for subject in subjects]
        speed = compare({_EMBEDDED: works[0]}, {op: works[-1]}, rounds)[op]
        bar = daemon_bar(op, block_bytes)
        rows.append(speed.row(tier, op, block_bytes, subjects[0].set_bytes, bar))
    return rows


def measure_lookups(directory: Path, calls: int) -> list[Result]:
    """Round trips of a match of 512 blocks, alone and with four busy clients."""
    results: list[Result] = []
    with ExitStack() as scope:
        settings = {"dram.capacity": 1024 * MIB}
        store, address = scope.enter_context(daemon_store(directory / "daemon", settings))
        keys = resident(store)
        scope.enter_context(store.lease(keys))
        results += _latencies("alone", round_trips(store, keys, calls * _MATCH_ROUNDS), None)
        for what, work in (("match", _match), ("get and put", _move)):
            rounds = []
            for _ in range(_MATCH_ROUNDS):
                with busy_clients(address, CLIENTS, work):
                    rounds.append(round_trips(store, keys, calls))
            label = f"with {CLIENTS} clients that {what}"
            results += _latencies(label, [taken for batch in rounds for taken in batch], rounds)
    return results


def _latencies(
    label: str, taken: Sequence[float], rounds: Sequence[Sequence[float]] | None
) -> list[Result]:
    p50, p99 = (percentile(taken, share) * 1e6 for share in (0.5, 0.99))
    results: list[Result] = [Latency(f"match 512 blocks, {label}", 512, p50, p99, len(taken))]
    if rounds is not None:
        worst = [percentile(batch, 0.99) * 1e6 for batch in rounds]
        what = f"match 512 blocks, p99, {label}"
        results.append(Figure(what, p99, "us", min(worst), max(worst), DAEMON_MATCH_P99_US))
    return results


def round_trips(store: Depot, keys: list[BlockKey], calls: int) -> list[float]:
    """The time of each match of resident blocks."""
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        found = len(store.match(keys))
        taken.append(time.perf_counter() - started)
        if found != len(keys):
            raise StateError("a prompt that was put is not matched")
    return taken


def resident(store: Depot, seed: int = 0) -> list[BlockKey]:
    """The keys of a new prompt of 512 blocks; each seed gives another prompt."""
    prompts = prompts_for(store, _PAYLOAD_BYTES, HIT_BLOCKS * _PAYLOAD_BYTES)
    prompts.reseed(seed)
    (keys,) = prompts.fresh(1)
    if not all(store.put_many(keys, prompts.sources, timeout_s=_START_S)):
        raise StateError("a put was refused although there is room")
    return keys


@contextmanager
def busy_clients(address: str, count: int, work: Callable[..., None]) -> Iterator[None]:
    """`count` processes that repeat `work` until the scope ends. All have begun when it begins."""
    fresh = multiprocessing.get_context("spawn")
    ended = fresh.Event()
    begun = [fresh.Event() for _ in range(count)]
    clients = [
        fresh.Process(target=work, args=(address, number, ready, ended), daemon=True)
        for number, ready in enumerate(begun)
    ]
    for client in clients:
        client.start()
    try:
        if not all(ready.wait(_START_S) for ready in begun):
            raise StateError("a client does not start")
        yield
    finally:
        ended.set()
        for client in clients:
            client.join(_START_S)


def _match(address: str, number: int, ready: Event, ended: Event) -> None:
    with open_remote(address) as store:
        keys = resident(store, number + 1)
        while not ended.is_set():
            round_trips(store, keys, 20)
            ready.set()


def _move(address: str, number: int, ready: Event, ended: Event) -> None:
    """Put new prompts and read them, as engines do, without computing."""
    with open_remote(address) as store:
        prompts = prompts_for(store, MIB, _BATCH_BYTES)
        prompts.reseed(number + 1)
        targets = pieces(filled(_BATCH_BYTES, seed=number), MIB)
        while not ended.is_set():
            (keys,) = prompts.fresh(1)
            store.put_many(keys, prompts.sources)
            store.get_many(keys, targets)
            ready.set()
