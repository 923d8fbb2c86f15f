"""Many threads on a small store: every hit has the right bytes, and nothing is left over.

Memory and disk are far smaller than what is put, so eviction, promotion and reclaim go on all the
time. A block's payload follows from its key: whoever reads it can tell a wrong byte.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_calls import (
    BUSY,
    RandomCalls,
    check_after,
    check_removed,
    check_reopened,
    settings,
)

import kvdepot


def stress(folder: Path, seed: int, threads: int, seconds: float, **tiers: Any) -> None:
    """`tiers`: those of the settings of random calls."""
    tree = settings(folder, **tiers)
    busy = [*BUSY, "get_hdd" if "hdd" in tree else "get_ssd"]
    if "cxl" in tree:
        busy = [*BUSY, "get_cxl", "demoted", "evicted_cxl"]
    with kvdepot.open(**tree) as store:
        calls = RandomCalls(store, seed)
        calls.run(threads, seconds, busy)
        check_after(store, calls, folder)
        assert calls.removed
        check_removed(store, calls.removed)
    with kvdepot.open(**tree) as store:
        check_reopened(store, calls)


@pytest.mark.stress
def test_six_threads(tmp_path: Path, seed: int) -> None:
    """Until all that is looked at has happened."""
    stress(tmp_path, seed, threads=6, seconds=1.0)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize(
    "below", ["write-back", "write-through", "write-through-selective", "pass-through"]
)
def test_six_threads_on_three_tiers(tmp_path: Path, seed: int, below: str) -> None:
    stress(tmp_path, seed, threads=6, seconds=5.0, below=below)


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.parametrize("below", ["", "write-through", "write-through-selective"])
def test_six_threads_with_a_slower_memory(tmp_path: Path, seed: int, below: str) -> None:
    stress(tmp_path, seed, threads=6, seconds=5.0, below=below, cxl=True)


@pytest.mark.slow
@pytest.mark.stress
def test_eight_threads_for_a_minute(tmp_path: Path, seed: int) -> None:
    stress(tmp_path, seed, threads=8, seconds=60.0)


@pytest.mark.stress
@pytest.mark.parametrize("times", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_closing_under_the_feet_of_readers_ends_them_with_an_error_not_a_crash(
    tmp_path: Path, seed: int, times: int
) -> None:
    """In a process of its own: memory that is unmapped too early kills it."""
    program = f"""
        import random, sys, threading
        sys.path[:0] = {sys.path!r}
        import kvdepot
        from kvdepot.errors import StoreClosedError
        from tests.support.failures import check_data
        size = 1 << 20
        rng = random.Random({seed})
        for _ in range({times}):
            store = kvdepot.open(dram={{"capacity": "32MiB", "prefault": False}})
            space = store.namespace(model="m", layout=kvdepot.KVLayout.opaque(size, 16))
            keys = space.keys(range(16 * 20))
            store.put_many(keys, [bytes([7]) * size] * 20)
            ready = threading.Barrier(5)
            wrong = []
            def read():
                targets = [bytearray(size) for _ in keys]
                ready.wait()
                try:
                    while True:
                        for target, got in zip(targets, store.get_many(keys, targets)):
                            if got and target != bytes([7]) * size:
                                wrong.append(got)
                except StoreClosedError:
                    pass
                except BaseException as error:
                    wrong.append(error)
            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            ready.wait()
            threading.Event().wait(rng.uniform(0.0, 0.05))
            store.close()
            for thread in threads:
                thread.join()
            check_data(not wrong, wrong)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
