"""A store opens without the drives that cannot be used, and takes them back when they can."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores import settings
from tests.support.waiting import until

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.errors import DriveError, KVDepotError
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import prompt, put, space_of, tiers

Harm = Callable[[Path], None]


def two_drives(folder: Path, **ssd: Any) -> dict[str, Any]:
    paths = [str(folder / "a"), str(folder / "b")]
    more = {"path": paths, "capacity": "8MiB", "retry_initial": 0.01, "retry_max": 0.05, **ssd}
    tree = settings(folder, ssd=more)
    del tree["hdd"]
    return tree


def in_place_of(name: str, make: Harm) -> Harm:
    """Something else has the name of a file of the drive; the file is kept aside."""

    def harm(drive: Path) -> None:
        there = drive / name
        if there.exists():
            there.rename(drive / f"{name}.kept")
        make(there)

    return harm


def undo(drive: Path, name: str) -> None:
    there, kept = drive / name, drive / f"{name}.kept"
    shutil.rmtree(there) if there.is_dir() and not there.is_symlink() else there.unlink()
    if kept.exists():
        kept.rename(there)


def fill(store: Store, prompts: int = 12) -> list[list[BlockKey]]:
    space = space_of(store)
    found = [prompt(space, number, 5) for number in range(prompts)]
    for keys in found:
        assert all(put(store, keys))
        assert store.flush()
    return found


def hits(store: Store, chains: list[list[BlockKey]]) -> int:
    space_of(store)
    return sum(tier is not None for keys in chains for tier in tiers(store, keys))


KINDS = {"folder": Path.mkdir}
FILES = ["segment-000000.kvs", "superblock", "lock"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
class TestSomethingElseInPlaceOfAFile:
    def test_the_store_opens_with_the_other_drive(
        self, tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with kvdepot.open(**two_drives(tmp_path)) as store:
            chains = fill(store)
        in_place_of(name, KINDS[kind])(tmp_path / "b")
        with caplog.at_level(logging.WARNING, "kvdepot.tiers"):
            store = kvdepot.open(**two_drives(tmp_path))
        with store:
            assert any(str(tmp_path / "b") in line for line in caplog.messages)
            assert 0 < hits(store, chains) < 60
            assert all(put(store, prompt(space_of(store), 100, 5)))
            assert store.flush()
            undo(tmp_path / "b", name)
            until(lambda: bool(store.inspect().log_tier().is_up(1)))
            assert hits(store, chains) == 60
            assert store.check().ok

    def test_a_store_without_any_other_drive_says_why(
        self, tmp_path: Path, name: str, kind: str
    ) -> None:
        alone = two_drives(tmp_path, path=str(tmp_path / "b"))
        with kvdepot.open(**alone) as store:
            fill(store, 1)
        in_place_of(name, KINDS[kind])(tmp_path / "b")
        with pytest.raises(KVDepotError, match=str(tmp_path / "b")):
            kvdepot.open(**alone)
        undo(tmp_path / "b", name)
        with kvdepot.open(**alone) as store:
            assert store.check().ok


def test_the_tier_above_may_be_missing(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path)) as store:
        fill(store)
    in_place_of("lock", Path.mkdir)(tmp_path / "ssd")
    with kvdepot.open(**settings(tmp_path)) as store:
        keys = prompt(space_of(store), 100, 5)
        assert all(put(store, keys))
        assert tiers(store, keys) == ["dram"] * 5
        assert store.inspect().log_tier(0).left_out
        assert not store.inspect().log_tier(1).left_out


def test_all_drives_are_named_where_none_works(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"a file")
    with pytest.raises(DriveError, match=r"/a is neither .*/b is neither"):
        kvdepot.open(**two_drives(tmp_path))
