"""Threads that do random things to one small store, and what must hold afterwards.

Memory and disk are far smaller than what is put, so eviction, promotion and reclaim go on all the
time. A block's payload follows from its key, so a wrong byte is seen by its reader.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.failures import HangError, check_data
from tests.support.store_contract import touch
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.testing.images import payload_for

TOKENS = 16
SIZES = (16384, 49152)
DRAM = 4 << 20
DISK = 24 << 20
PROMPTS = 60
BLOCKS = 30
BUSY = ("evicted_dram", "reclaimed_segments", "promoted", "removed")
"""Counters that must not be zero after a calls."""


def settings(path: Path, below: str = "", *, cxl: bool = False) -> dict[str, Any]:
    """Two drives, hard drives that get their blocks as `below` says, and a slower memory: a file,
    so that a wrong place in it would be seen.
    """
    tree: dict[str, Any] = {
        "dram": {"capacity": DRAM, "prefault": False, "huge_pages": "never"},
        "ssd": {"path": [path / "a", path / "b"], "capacity": DISK, "segment": "1MiB"},
        "writeback": {"staging": "2MiB", "put_timeout": "20ms"},
    }
    if below:
        paths = [path / "c", path / "d"]
        tree["hdd"] = {"path": paths, "capacity": DISK, "segment": "1MiB", "write_mode": below}
        tree["hdd"]["run"] = "256KiB"
        tree["ssd"].update(capacity=DISK // 3)
    if cxl:
        device = path / "device"
        with device.open("ab") as file:
            file.truncate(2 * DRAM)
        tree["cxl"] = {"capacity": 2 * DRAM, "path": device}
    return tree


class RandomCalls:
    """Threads that do random things to one store until told to stop."""

    reasons: tuple[str, ...] = ("absent", "busy")
    """Of misses."""

    def __init__(self, store: kvdepot.Store, seed: int) -> None:
        self.store = store
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.accepted = 0
        self.removed: set[kvdepot.BlockKey] = set()
        """Blocks that only one thread puts and removes, and that it removed last."""
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self.spaces: list[NamespaceHandle] = [
            store.namespace(model=f"m{size}", layout=kvdepot.KVLayout.opaque(size, TOKENS, 2))
            for size in SIZES
        ]
        self.prompts = [
            (space, space.keys([number, *range(1, TOKENS * BLOCKS)]))
            for space in self.spaces
            for number in range(PROMPTS)
        ]

    def run(self, threads: int, seconds: float, busy: Sequence[str] = ()) -> None:
        """For so long, and on a slow machine until all that the test is for has happened."""
        workers = [
            threading.Thread(target=self._work, args=(number,), name=f"worker-{number}")
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        self._enough.wait(seconds)
        happened = eventually(lambda: bool(self.errors) or not self.missing(busy))
        self._enough.set()
        for worker in workers:
            worker.join(60.0)
        if any(worker.is_alive() for worker in workers):
            raise HangError("a thread does not end")
        if self.errors:
            raise self.errors[0]
        assert happened, f"{self.missing(busy)}: the test does not do what it is for"

    def missing(self, busy: Sequence[str]) -> list[str]:
        """What no thread managed to do yet, and which counters of the store are zero."""
        counters = self.store.stats()["counters"]
        with self._lock:
            verbs = [verb for verb in ("put", "get", "lease", "remove") if not self.done[verb]]
        return verbs + [name for name in busy if not counters[name]]

    def _work(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        verbs = ["put"] * 6 + ["get"] * 8 + ["lease"] * 4 + ["touch", "match", "remove", "layer"]
        own = self.spaces[0].keys([10_000 + number, *range(1, TOKENS * BLOCKS)])
        try:
            while not self._enough.is_set():
                self._come_and_go(rng, own)
                verb = rng.choice(verbs)
                # Most of the traffic goes to few prompts, as in life.
                which = min(rng.randrange(len(self.prompts)), rng.randrange(len(self.prompts)))
                space, keys = self.prompts[which]
                count = getattr(self, f"_{verb}")(rng, space, keys)
                with self._lock:
                    self.done[verb] += count
        except BaseException as error:
            self.errors.append(error)

    def _come_and_go(self, rng: random.Random, own: list[kvdepot.BlockKey]) -> None:
        """Put or remove blocks that nobody else touches, and remember which are removed."""
        start = rng.randrange(BLOCKS)
        some = own[start : start + rng.randrange(1, 6)]
        if rng.random() < 0.5:
            self.store.remove(some)
            check_removed(self.store, some)
            self.removed.update(some)
            return
        answers = self.store.put_many(some, [payload_for(key, SIZES[0]) for key in some])
        there = [key for key, answer in zip(some, answers, strict=True) if answer]
        self.removed.difference_update(there)
        with self._lock:
            self.accepted += len(there)

    def _put(self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]) -> int:
        some = keys[: rng.randrange(1, BLOCKS + 1)]
        answers = self.store.put_many(some, [payload_for(key, space.block_bytes) for key in some])
        with self._lock:
            self.accepted += sum(map(bool, answers))
        return sum(map(bool, answers))

    def _get(self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]) -> int:
        some = keys[: len(self.store.match(keys))] or keys[:2]
        targets = [bytearray(space.block_bytes) for _ in some]
        answers = self.store.get_many(some, targets)
        for key, target, answer in zip(some, targets, answers, strict=True):
            right = not answer or target == payload_for(key, space.block_bytes)
            check_data(right, f"wrong bytes for {key.hex()} from {answer.tier}")
            if not answer and answer.reason not in self.reasons:
                raise AssertionError(f"{key.hex()}: {answer.reason} on a disk that works")
        return sum(map(bool, answers))

    def _layer(
        self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]
    ) -> int:
        key, half = rng.choice(keys), space.block_bytes // 2
        layer, target = rng.randrange(2), bytearray(half)
        if not self.store.get_many([key], [target], layers=range(layer, layer + 1))[0]:
            return 0
        wanted = payload_for(key, 2 * half)[layer * half : (layer + 1) * half]
        check_data(target == wanted, f"wrong bytes in layer {layer} of {key.hex()}")
        return 1

    def _lease(
        self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]
    ) -> int:
        """What is leased can be read until the lease ends, unless somebody removes it."""
        with self.store.lease(keys) as lease:
            for index, key in enumerate(lease):
                view = lease.view(index)
                if view is not None:
                    with view:
                        right = view == payload_for(key, space.block_bytes)
                        check_data(right, f"wrong bytes in view of {key.hex()}")
            self._put(rng, *rng.choice(self.prompts))
            return len(lease)

    def _touch(
        self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]
    ) -> int:
        return touch(self.store, keys)

    def _match(
        self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]
    ) -> int:
        match = self.store.match(keys)
        assert set(match.tiers) <= {"dram", "cxl", "ssd", "hdd"}
        return len(match)

    def _remove(
        self, rng: random.Random, space: NamespaceHandle, keys: list[kvdepot.BlockKey]
    ) -> int:
        return self.store.remove(keys[rng.randrange(BLOCKS) :][:3])


def check_removed(store: kvdepot.Store, keys: Iterable[kvdepot.BlockKey]) -> None:
    back = [key.hex() for key in keys if len(store.match([key]))]
    check_data(not back, f"removed blocks came back: {back}")


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/segment-*"))


def held_bytes(store: kvdepot.Store) -> int:
    tiers = store.stats()["tiers"].values()
    return sum(tier.get("held_bytes", 0) for tier in tiers)


def check_after(store: kvdepot.Store, calls: RandomCalls, folder: Path) -> None:
    """Nothing is held, the books are right, memory and disk are within their limits."""
    assert store.flush()
    assert eventually(lambda: not store.stats()["staging_bytes"]), "staging memory is left"
    stats = store.stats()
    counters = stats["counters"]
    assert (stats["leased"], stats["dirty_bytes"], stats["staging_bytes"]) == (0, 0, 0)
    report = store.admin.check()
    assert report.findings == []
    assert counters["quarantined"] == counters["write_failed"] == counters["read_failed"] == 0
    assert counters["put_stored"] + counters["put_present"] == calls.accepted
    tiers = stats["tiers"]
    assert tiers["dram"]["used_bytes"] <= DRAM
    assert "cxl" not in tiers or tiers["cxl"]["used_bytes"] <= 2 * DRAM
    assert tiers["ssd"]["used_bytes"] <= tiers["ssd"]["held_bytes"] <= DISK
    assert eventually(lambda: files_bytes(folder) == held_bytes(store)), "accounting"
    assert stats["index_bytes"] < 1 << 20
    counts = [tier["blocks"] for tier in tiers.values()]
    assert max(counts) <= stats["blocks"] <= sum(counts)


def check_reopened(store: kvdepot.Store, calls: RandomCalls) -> None:
    """What was removed is not back, and every byte that is there is right."""
    again = RandomCalls(store, calls.seed)
    assert store.admin.check()
    check_removed(store, calls.removed)
    for space, keys in again.prompts:
        targets = [bytearray(space.block_bytes) for _ in keys]
        for key, target, got in zip(keys, targets, store.get_many(keys, targets), strict=True):
            right = not got or target == payload_for(key, space.block_bytes)
            check_data(right, f"wrong bytes for {key.hex()}")
    assert store.stats()["counters"]["quarantined"] == 0
