"""One of two drives is damaged, pulled, stalled, slow or failing: mirrored prompts do not miss."""

import errno
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.mirrors import LONG, forget_memory, mirrored, places
from tests.support.pulling import pull
from tests.support.waiting import eventually

from kvdepot.core.block import BlockKey
from kvdepot.core.config import EmulateConfig, load
from kvdepot.core.tier import drive_of
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall
from kvdepot.testing.store_contract import BLOCK_BYTES, TOKENS, prompt, put, space_of, tiers
from kvdepot.tiers.device.emulation import EmulatedFiles
from kvdepot.tiers.device.files import Files

pytestmark = pytest.mark.crash

PROMPTS = 12
SLOWER = 20.0
MODEL = EmulateConfig(read_bandwidth=20_000_000, write_bandwidth=200_000_000, seek=0.0)


@pytest.fixture(params=["ssd", pytest.param("hdd", marks=pytest.mark.slow)])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def opened(path: Path, tier: str, files: Files, drives: int = 2, **more: Any) -> Store:
    table: dict[str, Any] = {
        "path": [str(path / f"drive-{number}") for number in range(drives)],
        "capacity": f"{24 * drives}MiB",
        "segment": "1MiB",
        "retry_initial": "200ms",
        "retry_max": "1s",
        "read_timeout": "5s",
        "promote": False,
        "mirror": LONG * TOKENS,
        **more,
    }
    if tier == "hdd":
        table["run"] = 4 * BLOCK_BYTES
    dram = {"capacity": "4MiB", "prefault": False, "huge_pages": "never"}
    tree: dict[str, Any] = {"dram": dram, tier: table, "writeback": {"staging": "8MiB"}}
    return assemble(load(overrides=tree), files=files)


def filled(store: Store, tier: str) -> list[list[BlockKey]]:
    """Prompts on two drives each, and nowhere else."""
    space = space_of(store)
    prompts = [prompt(space, number, LONG) for number in range(PROMPTS)]
    for keys in prompts:
        assert all(put(store, keys))
    assert store.flush()
    assert eventually(lambda: mirrored(store, tier) == PROMPTS * LONG)
    for keys in prompts:
        forget_memory(store, keys)
    return prompts


@dataclass
class Readers:
    """Threads that read prompts over and over; none may miss."""

    store: Store
    prompts: list[list[BlockKey]]
    reads: int = 0
    missed: list[BlockKey] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Readers":
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(3)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures
        assert not self.missed, f"{len(self.missed)} of {self.reads * LONG} blocks"

    def _read(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self.stop.is_set():
                keys = rng.choice(self.prompts)
                got = tiers(self.store, keys)  # checks every byte
                self.missed += [key for key, one in zip(keys, got, strict=True) if one is None]
                self.reads += 1
        except BaseException as error:
            self.failures.append(error)
            raise

    def go_on(self, reads: int = 20) -> bool:
        before = self.reads
        return eventually(lambda: self.reads >= before + reads)


def is_up(store: Store, drive: int) -> bool:
    return store.inspect().log_tier().drives[drive].breaker.closed


def on_drive_1(operation: Any) -> bool:
    return "drive-1" in operation.path


def flip_bits(path: Path, store: Store, keys: list[BlockKey], drive: int) -> None:
    """Damage the payload of each block's copy on one drive."""
    level, segment_bytes = store.inspect().lower(), 1 << 20
    for row in store.inspect().catalog.rows(keys):
        (place,) = [place for place in level.places(row) if drive_of(place) == drive]
        slot, page = place >> 32 & 0xFFFFFF, place & 0xFFFFFFFF
        file = path / f"drive-{drive}" / f"segment-{slot:06}.kvs"
        assert file.stat().st_size == segment_bytes
        with file.open("r+b") as opened_file:
            opened_file.seek(4096 * page + 4096 + 100)
            (byte,) = opened_file.read(1)
            opened_file.seek(-1, 1)
            opened_file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("drive", [0, 1])
def test_bits_that_flip_on_one_drive_are_read_from_the_other(
    tmp_path: Path, tier: str, drive: int
) -> None:
    with opened(tmp_path, tier, FaultyFiles()) as store:
        keys = filled(store, tier)[3]
        flip_bits(tmp_path, store, keys, drive)
        assert not store.check().ok, "a check reads both copies"
        for _ in range(4):  # whichever copy a read prefers
            assert tiers(store, keys) == [tier] * LONG
            other = store.inspect().log_tier().drives[1 - drive].breaker
            other.failed("not now", at_once=True)
            tiers(store, keys)
            other.succeeded()
        counters = store.stats()["counters"]
        assert counters["quarantined"] == LONG
        assert eventually(lambda: mirrored(store, tier) == PROMPTS * LONG), "mirrored anew"
        assert places(store, keys) == [[0, 1]] * LONG
        assert store.check().ok


def test_a_drive_with_errors_costs_no_miss_and_comes_back(tmp_path: Path, tier: str) -> None:
    files = FaultyFiles()
    with opened(tmp_path, tier, files) as store:
        with Readers(store, filled(store, tier)) as readers:
            assert readers.go_on()
            files.add(Fault(Call.RUN_READ, Fail(errno.EIO), where=on_drive_1, times=None))
            assert eventually(lambda: not is_up(store, 1))
            assert readers.go_on(100)
            files.clear()
            assert eventually(lambda: is_up(store, 1)), "it is tried again"
            assert readers.go_on()
        assert store.stats()["counters"]["get_mirror"] > 0
        assert eventually(lambda: mirrored(store, tier) == PROMPTS * LONG)
        assert store.check().ok


def test_a_drive_that_stalls_costs_time_and_no_miss(tmp_path: Path, tier: str) -> None:
    files = FaultyFiles()
    stall = Stall()
    with opened(tmp_path, tier, files, read_timeout="8s") as store:
        prompts = filled(store, tier)
        files.add(Fault(Call.RUN_READ, stall, where=on_drive_1, times=None))
        targets = [bytearray(BLOCK_BYTES) for _ in prompts[0]]
        assert all(store.get_many(prompts[0], targets)), "within the time of a read"
        assert not is_up(store, 1), "it is left alone from now on"
        with Readers(store, prompts) as readers:
            assert readers.go_on(50)
        files.clear()
        stall.release()
        assert eventually(lambda: all(tiers(store, prompts[0])) and is_up(store, 1))
        assert store.check().ok


def test_a_drive_that_is_pulled_costs_no_miss_and_is_filled_again(
    tmp_path: Path, tier: str
) -> None:
    with opened(tmp_path, tier, FaultyFiles()) as store:
        prompts = filled(store, tier)
        with Readers(store, prompts) as readers:
            assert readers.go_on()
            pull(tmp_path / "drive-1")
            space, level = space_of(store), store.inspect().lower()
            for number in range(100, 104):
                assert all(put(store, prompt(space, number, LONG)))
            store.flush()
            assert eventually(lambda: (tmp_path / "drive-1" / "superblock").exists())
            assert readers.go_on()
        expected = (PROMPTS + 4) * LONG
        assert eventually(lambda: mirrored(store, tier) == expected), level.second_copies
        assert store.check().ok
    pull(tmp_path / "drive-0")
    with opened(tmp_path, tier, FaultyFiles()) as store:
        space_of(store)
        for keys in prompts:
            assert tiers(store, keys) == [tier] * LONG


@pytest.mark.slow
def test_a_slow_drive_costs_no_miss_and_comes_back(tmp_path: Path, tier: str) -> None:
    files = EmulatedFiles(MODEL)
    with opened(tmp_path, tier, files, drives=3) as store:
        with Readers(store, filled(store, tier)) as readers:
            assert readers.go_on(60)
            files.slow_down(str(tmp_path / "drive-1"), SLOWER)
            assert readers.go_on(60)
            files.slow_down(str(tmp_path / "drive-1"), 1.0)
            assert eventually(lambda: is_up(store, 1))
            assert readers.go_on()
        assert store.check().ok
