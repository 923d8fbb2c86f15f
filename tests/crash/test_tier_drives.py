"""One drive of several is pulled, filled, slowed or failing under load: the others go on."""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvdepot.core.block import BlockKey
from kvdepot.core.config import EmulateConfig, load
from kvdepot.store.opening import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles
from kvdepot.testing.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from kvdepot.tiers.emulation import EmulatedFiles
from kvdepot.tiers.files import Files
from kvdepot.tiers.ssd import drive_of

pytestmark = pytest.mark.crash

DRIVES = 3
SLOWER = 20.0
MODEL = EmulateConfig(read_bandwidth=20_000_000, write_bandwidth=200_000_000, seek=0.0)
"""So slow that the machine's own disk does not count."""


def opened(path: Path, tier: str, files: Files) -> Store:
    table = {
        "path": [str(path / f"drive-{number}") for number in range(DRIVES)],
        "capacity": "48MiB",
        "segment": "1MiB",
        "retry_initial": "200ms",
        "retry_max": "1s",
        "read_timeout": "5s",
        "promote": False,
    }
    dram = {"capacity": "4MiB", "prefault": False, "huge_pages": "never"}
    tree: dict[str, Any] = {"dram": dram, tier: table, "writeback": {"staging": "8MiB"}}
    if tier == "hdd":
        table["run"] = 8 * BLOCK_BYTES
    return assemble(load(overrides=tree), files=files)


@dataclass
class Load:
    """Readers of one drive's blocks each, counting what they get."""

    store: Store
    by_drive: dict[int, list[BlockKey]]
    counts: dict[int, int] = field(default_factory=dict)
    misses: dict[int, int] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)

    def run(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._read, args=(drive,), name=f"reader of {drive}")
            for drive in self.by_drive
        ]
        for thread in threads:
            thread.start()
        return threads

    def _read(self, drive: int) -> None:
        keys = self.by_drive[drive]
        try:
            while not self.stop.is_set():
                got = tiers(self.store, keys[:8])  # checks every byte
                self.counts[drive] = self.counts.get(drive, 0) + sum(one is not None for one in got)
                self.misses[drive] = self.misses.get(drive, 0) + got.count(None)
                if None in got:
                    time.sleep(0.01)  # as who computes it instead
        except BaseException as error:
            self.failures.append(error)
            raise

    def speed(self, drives: list[int], seconds: float) -> float:
        """Blocks a second from these drives."""
        before = sum(self.counts.get(drive, 0) for drive in drives)
        started = time.monotonic()
        time.sleep(seconds)
        after = sum(self.counts.get(drive, 0) for drive in drives)
        return (after - before) / (time.monotonic() - started)


def spread(store: Store) -> dict[int, list[BlockKey]]:
    """Blocks on every drive, nowhere else."""
    space = space_of(store)
    level = store._stock.levels[0]
    keys: list[BlockKey] = []
    for number in range(60):
        some = prompt(space, number, 4)
        assert all(put(store, some))
        keys += some
        assert store.flush()
    found: dict[int, list[BlockKey]] = {drive: [] for drive in range(DRIVES)}
    with store._stock.changed:
        for key, row in zip(keys, store._stock.catalog.rows(keys), strict=True):
            if store._stock.catalog.memory.ready(row):
                store._stock.pools[0].drop(row)
            found[drive_of(level.copies.location[row])].append(key)
    assert all(len(some) >= 8 for some in found.values())
    return found


@pytest.fixture(params=["ssd", "hdd"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def emulated(tmp_path: Path, tier: str) -> Iterator[tuple[Store, EmulatedFiles]]:
    files = EmulatedFiles(MODEL)
    with opened(tmp_path, tier, files) as store:
        yield store, files


def eventually(fact: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.02)
    return fact()


def is_up(store: Store, drive: int) -> bool:
    return store._stock.levels[0].tier.drives[drive].breaker.closed


@pytest.mark.slow
def test_a_slow_drive_is_left_alone_and_taken_back(
    emulated: tuple[Store, EmulatedFiles], tmp_path: Path
) -> None:
    store, files = emulated
    load = Load(store, spread(store))
    threads = load.run()
    time.sleep(1.0)
    others = [0, 2]
    before = load.speed(others, 1.5)
    files.slow_down(str(tmp_path / "drive-1"), SLOWER)
    assert eventually(lambda: not is_up(store, 1)), "it is taken out"
    during = load.speed(others, 1.5)
    assert len(store.match(load.by_drive[1][:1])) == 0, "its blocks are misses"
    files.slow_down(str(tmp_path / "drive-1"), 1.0)
    misses = load.misses.get(1, 0)
    assert eventually(lambda: is_up(store, 1)), "it comes back by itself"
    counted = load.counts[1]
    assert eventually(lambda: load.counts[1] > counted)
    load.stop.set()
    for thread in threads:
        thread.join()
    assert not load.failures
    assert misses > 0
    assert during >= 0.9 * before, f"{during:.0f} of {before:.0f} blocks a second"
    assert store.check().ok


def test_a_drive_with_errors_is_left_alone_and_taken_back(tmp_path: Path, tier: str) -> None:
    files = FaultyFiles()
    with opened(tmp_path, tier, files) as store:
        load = Load(store, spread(store))
        fault = Fault(
            Call.RUN_READ,
            Fail(errno.EIO),
            where=lambda operation: "drive-1" in operation.path,
            times=None,
        )
        threads = load.run()
        assert eventually(lambda: len(load.counts) == DRIVES)
        files.add(fault)
        assert eventually(lambda: not is_up(store, 1))
        counted = dict(load.counts)
        assert eventually(lambda: all(load.counts[n] > counted[n] + 50 for n in (0, 2)))
        files.clear()
        assert eventually(lambda: is_up(store, 1))
        load.stop.set()
        for thread in threads:
            thread.join()
        assert not load.failures
        assert store.check().ok


def test_a_drive_that_is_pulled_leaves_the_others_and_starts_anew(
    tmp_path: Path, tier: str
) -> None:
    files = EmulatedFiles(MODEL)
    with opened(tmp_path, tier, files) as store:
        load = Load(store, spread(store))
        threads = load.run()
        assert eventually(lambda: len(load.counts) == DRIVES)
        shutil.rmtree(tmp_path / "drive-1")
        space = space_of(store)
        numbers = count(1000)

        def came_back() -> bool:
            """It does with the first writes after its pause."""
            assert all(put(store, prompt(space, next(numbers), 4)))
            return (tmp_path / "drive-1" / "superblock").exists()

        assert eventually(came_back)
        load.stop.set()
        for thread in threads:
            thread.join()
        assert not load.failures
        assert eventually(lambda: is_up(store, 1))
        assert store.check().ok


def test_a_drive_that_is_full_takes_no_more_and_the_others_do(tmp_path: Path, tier: str) -> None:
    files = FaultyFiles()
    with opened(tmp_path, tier, files) as store:
        load = Load(store, spread(store))
        threads = load.run()
        full = Fault(
            Call.RUN_WRITE,
            Fail(errno.ENOSPC),
            where=lambda operation: "drive-1" in operation.path,
            times=None,
        )
        files.add(full)
        space = space_of(store)
        for number in range(1000, 1040):
            assert all(put(store, prompt(space, number, 4)))
        flushed = store.flush()
        assert flushed.waiting == 0
        load.stop.set()
        for thread in threads:
            thread.join()
        assert not load.failures
        files.clear()
        assert eventually(lambda: is_up(store, 1) or self_heals(store, space))
        assert store.check().ok


def self_heals(store: Store, space: Any) -> bool:
    """A drive that failed to write is tried again when there is something to write."""
    put(store, prompt(space, int(time.monotonic() * 1000) % 10**6 + 10**6, 2))
    return is_up(store, 1)
