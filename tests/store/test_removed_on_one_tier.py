"""A tombstone that a power cut has left on one tier alone counts on all of them."""

import shutil
from pathlib import Path

import pytest
from tests.support.store_contract import WAIT_S, prompt, put, small, space_of

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store
from kvdepot.volumes.log.metadata import COPIES


def opened(path: Path) -> Store:
    tree = small(path / "ssd")
    tree["hdd"] = {
        "path": str(path / "hdd"),
        "capacity": 8 << 20,
        "segment": 256 << 10,
        "run": 64 << 10,
        "write_mode": "write-through",
    }
    store = kvdepot.open(**tree)
    assert isinstance(store, Store)
    return store


@pytest.mark.parametrize("forgets", ["ssd", "hdd"])
def test_a_removal_that_one_tier_has_lost(tmp_path: Path, forgets: str) -> None:
    with opened(tmp_path) as store:
        keys: list[BlockKey] = prompt(space_of(store), 1, 4)
        assert all(put(store, keys)) and store.flush(WAIT_S)
        volumes = store.inspect().volumes
        assert all(volumes.facts(number).used_bytes for number in (0, 1)), "both have the blocks"
        before = tmp_path / "before"
        before.mkdir()
        for name in COPIES:
            shutil.copy(tmp_path / forgets / name, before / name)
        assert store.remove(keys[:2]) == 2
        assert store.flush(WAIT_S)
    for name in COPIES:
        shutil.copy(before / name, tmp_path / forgets / name)
    for _ in range(2):
        with opened(tmp_path) as store:
            space_of(store)
            assert not store.match(keys[:2])
            assert all(len(store.match([key])) for key in keys[2:]), "others are still there"
            for number in (0, 1):
                known = store.inspect().log_volume(number).metadata.known
                assert set(keys[:2]) <= known.tombstones.keys()
