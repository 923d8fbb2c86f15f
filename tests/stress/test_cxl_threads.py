"""Many threads on a small store with two memories; see test_threads."""

from pathlib import Path

import pytest
from tests.support.random_calls import BUSY, DRAM, RandomCalls, check_after, check_removed, settings

import kvdepot


def stress(folder: Path, seed: int, threads: int, seconds: float, below: str = "") -> None:
    """Memory that is a file, so that a wrong place in it would be seen."""
    device = folder / "device"
    with device.open("wb") as file:
        file.truncate(2 * DRAM)
    tree = settings(folder, below)
    tree["cxl"] = {"capacity": 2 * DRAM, "path": device, "prefault": False}
    with kvdepot.open(**tree) as store:
        calls = RandomCalls(store, seed)
        calls.run(threads, seconds, [*BUSY, "get_cxl", "demoted", "evicted_cxl"])
        check_after(store, calls, folder)
        assert store.stats()["tiers"]["cxl"]["used_bytes"] <= 2 * DRAM
        check_removed(store, calls.removed)
    with kvdepot.open(**tree) as store:
        assert store.admin.check()
        check_removed(store, calls.removed)


@pytest.mark.stress
@pytest.mark.slow
def test_six_threads_for_three_seconds(tmp_path: Path, seed: int) -> None:
    stress(tmp_path, seed, threads=6, seconds=3.0)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("below", ["write-through", "write-through-selective"])
def test_six_threads_on_four_tiers(tmp_path: Path, seed: int, below: str) -> None:
    stress(tmp_path, seed, threads=6, seconds=10.0, below=below)
