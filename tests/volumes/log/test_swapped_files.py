"""Any two files of two drives are swapped: no drive takes the identity of the other one, no removed
block is back, and no byte is wrong.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of, tiers

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.volumes.log.metadata import COPIES

NAMES = ["superblock", *COPIES, "segment-000000.kvs"]
"""Each drive has one segment: if it is swapped, all of its segments are another drive's."""
WORLDS = ["two ssds", pytest.param("ssd and hdd", marks=pytest.mark.slow)]


def opened(folder: Path, world: str) -> Store:
    room = {"capacity": "4MiB", "segment": "1MiB", "profile": "never"}
    tree: dict[str, Any] = {
        "dram": {"capacity": "512KiB", "prefault": False, "huge_pages": "never"},
        "writeback": {"staging": "2MiB"},
        "ssd": {"path": folder / "a", **room},
    }
    if world == "two ssds":
        tree["ssd"] |= {"path": [folder / "a", folder / "b"], "capacity": "8MiB"}
    else:
        tree["hdd"] = {"path": folder / "b", "write_mode": "write-through", **room}
    return assemble(load(overrides=tree))


def identities(store: Store) -> list[bytes]:
    return [entry.identity for entry in store.inspect().volumes.entries]


@pytest.fixture(scope="module", params=WORLDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[BlockKey], list[bytes]]:
    """A store on two drives that was closed after half of its blocks were removed."""
    folder = tmp_path_factory.mktemp("drives")
    with opened(folder, request.param) as store:
        keys = prompt(space_of(store), 1, 40)
        assert all(put(store, keys)) and store.flush()
        assert store.remove(keys[::2]) == 20
        names = identities(store)
    for drive in "ab":
        assert {path.name for path in (folder / drive).iterdir()} == {"lock", *NAMES}
    return request.param, folder, keys, names


def swap(folder: Path, one: str, other: str) -> None:
    (folder / "a" / one).rename(folder / "between")
    (folder / "b" / other).rename(folder / "a" / one)
    (folder / "between").rename(folder / "b" / other)


@pytest.mark.parametrize(("one", "other"), list(itertools.product(NAMES, NAMES)))
def test_two_files_of_two_drives(
    one: str, other: str, world: tuple[str, Path, list[BlockKey], list[bytes]], tmp_path: Path
) -> None:
    kind, before, keys, names = world
    repaired, folder = tmp_path / "repaired", tmp_path / "used"
    for copy in (repaired, folder):
        shutil.copytree(before, copy)
        swap(copy, one, other)
    for _ in range(2):
        found = use(folder, kind, keys, names)
        if not (one.startswith("segment") or other.startswith("segment")):
            assert found == set(keys[1::2]), "no block lay in these files"
        swap(folder, one, other)  # back, and once more
    for drive in "ab":
        repair(repaired / drive)
        assert audit(repaired / drive).ok
    use(repaired, kind, keys, names)


def use(folder: Path, kind: str, keys: list[BlockKey], names: list[bytes]) -> set[BlockKey]:
    """Open the store, and return which of the first blocks it still has."""
    with opened(folder, kind) as store:
        space = space_of(store)
        assert identities(store) == names
        found = {key for key, tier in zip(keys, tiers(store, keys), strict=True) if tier}
        assert not found & set(keys[::2]), "removed blocks are back"
        more = prompt(space, 2, 4)
        assert all(put(store, more)) and store.flush() and store.remove(more)
        assert store.admin.check().ok
    return found
