"""Drives of speeds 1 and 3 in one tier: what is written, and so what is read, lies on them 1 to 3.

Counted, not timed: benchmarks/drive_spread.py has the times.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.stores import PROFILE
from tests.support.waiting import eventually

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.volume import volume_of
from kvdepot.io.files import Files
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, EmulatedFiles

FASTER = 3.0
MODEL = DriveModel(read_bandwidth=100_000_000, write_bandwidth=300_000_000)
"""So slow that what it takes is mostly the model's time."""


def opened(path: Path, tier: str, files: Files | None = None, **more: Any) -> Store:
    table: dict[str, Any] = {
        "path": [str(path / "slow"), str(path / "fast")],
        "capacity": "64MiB",
        "segment": "2MiB",
        "promote": False,
        **more,
    }
    if tier == "hdd":
        table["run"] = 2 * BLOCK_BYTES
    dram = {"capacity": "16MiB", "prefault": False, "huge_pages": "never"}
    tree = {"dram": dram, tier: table, "writeback": {"staging": "8MiB"}}
    return assemble(load(overrides=tree), files=files)


def tell(store: Store, *speeds: float, first: int = 0) -> None:
    """Let the store know how fast its drives are."""
    for number, speed in enumerate(speeds, start=first):
        meter = store.inspect().log_volume(number).reader.meter
        meter.profile = replace(PROFILE, read_bytes_per_s=int(speed))


def blocks_on(store: Store, keys: list[BlockKey]) -> list[int]:
    """How many of the blocks lie on each drive."""
    found = [0, 0]
    with store.inspect().state.lock:
        for row in store.inspect().catalog.rows(keys):
            found[volume_of(store.inspect().lower().copies.location[row])] += 1
    return found


def written(store: Store) -> bool:
    return eventually(lambda: not store.stats()["dirty_bytes"])


def put_prompts(store: Store, count: int, done: Callable[[Store], bool]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for number in range(count):
        some = prompt(space_of(store), number, 8)
        assert all(put(store, some))
        assert done(store)
        keys += some
    return keys


def test_hard_drives_get_runs_as_they_are_fast(tmp_path: Path) -> None:
    with opened(tmp_path, "hdd") as store:
        tell(store, 1e8, FASTER * 1e8)
        slow, fast = blocks_on(store, put_prompts(store, 16, lambda one: bool(one.flush())))
        assert slow + fast == 128
        assert 2.5 <= fast / slow <= 3.5


def test_a_large_prompt_lies_on_them_as_they_are_fast(tmp_path: Path) -> None:
    with opened(tmp_path, "hdd") as store:
        tell(store, 1e8, FASTER * 1e8)
        keys = prompt(space_of(store), 1, 160)
        assert all(put(store, keys))
        assert store.flush()
        slow, fast = blocks_on(store, keys)
        assert 2.5 <= fast / slow <= 3.5
        assert tiers(store, keys) != [None] * 160


def test_ssds_of_different_speed_too_while_little_waits(tmp_path: Path) -> None:
    with opened(tmp_path, "ssd") as store:
        tell(store, 1e8, FASTER * 1e8)
        slow, fast = blocks_on(store, put_prompts(store, 40, written))
        assert slow + fast == 320
        assert 2.0 <= fast / slow <= 4.5


def test_drives_that_are_alike_get_the_same(tmp_path: Path) -> None:
    with opened(tmp_path, "hdd") as store:
        first, second = blocks_on(store, put_prompts(store, 16, lambda one: bool(one.flush())))
        assert first + second == 128
        assert abs(first - second) <= 4, "a run or two"


def test_what_comes_down_from_ssds_is_spread_in_the_same_way(tmp_path: Path) -> None:
    ssd = {"path": str(tmp_path / "ssd"), "capacity": "64MiB", "segment": "2MiB"}
    hdd = {
        "path": [str(tmp_path / "slow"), str(tmp_path / "fast")],
        "capacity": "64MiB",
        "segment": "4MiB",
        "run": 2 * BLOCK_BYTES,
    }
    dram = {"capacity": "16MiB", "prefault": False, "huge_pages": "never"}
    tree = {"dram": dram, "ssd": ssd, "hdd": hdd, "writeback": {"staging": "8MiB"}}
    with assemble(load(overrides=tree)) as store:
        upper, lower = store.inspect().state.lower_tiers
        tell(store, 1e8, FASTER * 1e8, first=1)
        keys = prompt(space_of(store), 1, 160)
        assert all(put(store, keys))
        assert store.flush()
        with store.inspect().state.lock:
            rows = store.inspect().catalog.rows(keys)
            assert all(upper.copies.ready(row) for row in rows)
        store.inspect().drives.demoters[upper].demote(rows, urgent=True)
        with store.inspect().state.lock:
            places = [volume_of(lower.copies.location[row]) for row in rows]
        assert 2.5 <= places.count(2) / places.count(1) <= 3.5
        assert store.admin.check().ok


@pytest.mark.slow
def test_measured_and_then_spread(tmp_path: Path) -> None:
    """Nobody tells the store anything: one drive is made slower, and the store finds out."""
    files = EmulatedFiles(lambda _: MODEL)
    files.slow_down(str(tmp_path / "slow"), FASTER)
    with opened(tmp_path, "hdd", files, profile="always") as store:
        meters = [store.inspect().log_volume(number).reader.meter for number in range(2)]
        assert eventually(lambda: all(meter.profile for meter in meters))
        speeds = [meter.profile.read_bytes_per_s for meter in meters if meter.profile]
        faster = speeds[1] / speeds[0]
        assert faster > 1.2, "a busy machine may slow down either of them"
        keys = prompt(space_of(store), 1, 160)
        assert all(put(store, keys))
        assert store.flush()
        slow, fast = blocks_on(store, keys)
        assert 0.6 * faster <= fast / slow <= 1.5 * faster
        assert store.stats()["tiers"]["hdd"]["drives"][0]["emulated"]
