"""Blocks put while a shared tier is away: remembered, and written when it is back."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of, tiers
from tests.support.stores import counter
from tests.support.waiting import until

from kvdepot.store.open import open_store
from kvdepot.store.store import Store

pytest.importorskip("obstore", reason="the extra s3 is not installed")
OpenStore = Callable[..., Store]


def tree_of(path: Path, ssd: str | None = "a", **more: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        "writeback": {"staging": "2MiB"},
        "object": {
            "url": f"file://{path}/shared", "capacity": "64MiB", "refresh": "20ms",
            "retry_initial": "20ms", "retry_max": "100ms",
        },
    }  # fmt: skip
    if ssd is not None:
        tree["ssd"] = {"path": path / ssd, "capacity": "8MiB", "segment": "1MiB"}
    return {**tree, **more}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one(ssd: str | None = "a", **more: Any) -> Store:
        opened.append(open_store(**tree_of(tmp_path, ssd, **more)))
        space_of(opened[-1])
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


class Folder:
    """The shared folder, which can be taken away."""

    def __init__(self, path: Path) -> None:
        self.path = path / "shared"
        self._kept = path / "kept"

    def take_away(self, store: Store | None = None) -> None:
        self.path.rename(self._kept)
        self.path.symlink_to(self.path)  # every access is an error
        if store is not None:
            until(lambda: not is_up(store))

    def bring_back(self) -> None:
        self.path.unlink()
        self._kept.rename(self.path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def is_up(store: Store) -> bool:
    return bool(store.stats()["tiers"]["object"]["healthy"])


def owed(store: Store) -> int:
    return int(store.stats()["tiers"]["object"]["owed"])


def found_by_another(stores: OpenStore, keys: list[Any]) -> None:
    other = stores(None)
    until(lambda: len(other.match(keys)) == len(keys))
    assert tiers(other, keys) == ["object"] * len(keys)


def test_they_reach_it_when_it_is_back(stores: OpenStore, folder: Folder) -> None:
    store = stores()
    folder.take_away(store)
    keys = prompt(space_of(store), 1, 24)
    assert all(put(store, keys))
    report = store.flush()
    assert not report and not report.complete and report.durable == 24
    assert report.tiers["ssd"].durable == 24
    assert (report.tiers["object"].durable, report.tiers["object"].owed) == (0, 24)
    report = store.flush(keys=keys[:5])
    assert not report.complete and report.tiers["object"].owed == 5
    assert owed(store) == 24
    folder.bring_back()
    until(lambda: is_up(store))
    report = store.flush()
    assert report and report.tiers["object"].durable == 24
    assert store.flush(keys=keys).tiers["object"].durable == 24
    assert owed(store) == 0
    until(lambda: counter(store, "owed_written") == 24)
    found_by_another(stores, keys)
    assert store.admin.check().ok


def test_those_that_have_left_memory_too(stores: OpenStore, folder: Folder) -> None:
    store = stores()
    folder.take_away(store)
    prompts = [prompt(space_of(store), number, 24) for number in range(6)]
    for keys in prompts:
        assert all(put(store, keys))
        store.flush()
    assert store.stats()["tiers"]["dram"]["blocks"] < 144 == owed(store)
    folder.bring_back()
    until(lambda: owed(store) == 0)
    for keys in prompts:
        found_by_another(stores, keys)


@pytest.mark.parametrize("away", [True, False], ids=["away at start", "back at start"])
def test_after_a_restart(stores: OpenStore, folder: Folder, away: bool) -> None:
    store = stores()
    before = prompt(space_of(store), 0, 8)
    put(store, before)
    assert store.flush()
    folder.take_away(store)
    keys = prompt(space_of(store), 1, 24)
    put(store, keys)
    store.flush()
    store.close()
    if not away:
        folder.bring_back()
    store = stores()
    if away:
        until(lambda: owed(store) >= 24)
        folder.bring_back()
    until(lambda: is_up(store) and owed(store) == 0)
    assert store.flush()
    until(lambda: counter(store, "owed_written") >= 24)
    assert counter(store, "owed_written") == 24, "and nothing that was there already"
    found_by_another(stores, keys)


_KILLED = """
import sys, pickle
from kvdepot.store.open import open_store
from tests.support.small_store import prompt, put, space_of
store = open_store(**pickle.loads(bytes.fromhex(sys.argv[1])))
keys = prompt(space_of(store), 1, 24)
print("opened", flush=True)
sys.stdin.readline()
assert all(put(store, keys))
print(store.flush().tiers["object"].owed, flush=True)
sys.stdin.read()
"""


@pytest.mark.crash
def test_after_a_kill(stores: OpenStore, folder: Folder, tmp_path: Path) -> None:
    import pickle

    text = pickle.dumps(tree_of(tmp_path)).hex()
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, text],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "opened\n"
        folder.take_away()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "24\n"
        process.kill()
    folder.bring_back()
    store = stores()
    keys = prompt(space_of(store), 1, 24)
    until(lambda: owed(store) == 0)
    found_by_another(stores, keys)


def test_at_most_half_of_the_drive_is_kept_and_the_rest_named(
    stores: OpenStore, folder: Folder
) -> None:
    store = stores()
    folder.take_away(store)
    kept, given_up, number = 0, 0, 0
    while given_up < 50:
        number += 1
        put(store, prompt(space_of(store), number, 8))
        report = store.flush()
        kept, given_up = report.tiers["object"].owed, given_up + report.tiers["object"].given_up
    first = prompt(space_of(store), 1, 8)
    assert set(store.match(first).tiers) <= {"dram", "ssd"} and len(store.match(first)) == 8
    assert owed(store) == kept > 0 and counter(store, "owed_given_up") == given_up
    for number in range(1000, 1100):  # the drive is full several times over
        put(store, prompt(space_of(store), number, 8))
        store.flush()
    assert len(store.match(first)) == 8, "what is owed is kept"
    ssd = store.stats()["tiers"]["ssd"]
    assert ssd["blocks"] > kept, "there is room for others"
    folder.bring_back()
    until(lambda: is_up(store) and owed(store) == 0)
    until(lambda: counter(store, "owed_written") == kept)
    found_by_another(stores, first)


def test_what_is_removed_meanwhile_is_not_written(stores: OpenStore, folder: Folder) -> None:
    store = stores()
    folder.take_away(store)
    keys = prompt(space_of(store), 1, 8)
    put(store, keys)
    store.flush()
    assert store.remove(keys[4:]) == 4
    folder.bring_back()
    until(lambda: is_up(store) and owed(store) == 0)
    assert store.flush()
    found_by_another(stores, keys[:4])
    other = stores(None)
    assert tiers(other, keys)[4:] == [None] * 4


def test_a_store_without_drives_writes_what_memory_still_has(
    stores: OpenStore, folder: Folder
) -> None:
    store = stores(None)
    folder.take_away(store)
    keys = prompt(space_of(store), 1, 8)
    put(store, keys)
    assert store.flush().tiers["object"].owed == 8
    folder.bring_back()
    until(lambda: owed(store) == 0)
    assert store.flush()
    found_by_another(stores, keys)
