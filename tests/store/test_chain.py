"""A store of three tiers: dram, ssd and hdd."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.stores import settings

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.errors import ConfigError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store


def stored_apart(path: Path) -> tuple[list[BlockKey], list[BlockKey]]:
    """Two prompts, the first in what becomes the ssd, the second in what becomes the hdd."""
    both = settings(path)
    with kvdepot.open(dram=both["dram"], ssd=both["ssd"]) as store:
        first = prompt(space_of(store), 1, 6)
        assert all(put(store, first))
    with kvdepot.open(dram=both["dram"], ssd={**both["hdd"], "segment": "1MiB"}) as store:
        second = prompt(space_of(store), 2, 6)
        assert all(put(store, [*second, *first[:2]]))
    return first, second


class TestRecovery:
    def test_blocks_of_both_file_tiers_are_found(self, tmp_path: Path) -> None:
        first, second = stored_apart(tmp_path)
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            assert store.match(first).tiers == ("ssd",) * 6
            assert store.match(second).tiers == ("hdd",) * 6
            assert store.stats()["tiers"]["ssd"]["blocks"] == 6
            assert store.stats()["tiers"]["hdd"]["blocks"] == 8, "two lie in both"
            assert store.admin.check().ok
            assert tiers(store, second + first) == ["hdd"] * 6 + ["ssd"] * 6
            assert tiers(store, second + first) == ["dram"] * 12

    def test_a_removal_reaches_every_tier(self, tmp_path: Path) -> None:
        first, second = stored_apart(tmp_path)
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            assert store.remove([*first[:2], second[0]]) == 3
            assert len(store.match(first)) == len(store.match(second)) == 0
        with kvdepot.open(**settings(tmp_path)) as store:
            assert store.match(first[:1]).tiers == store.match(second[:1]).tiers == ()
            assert store.admin.check().ok


class TestReading:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> list[BlockKey]:
        return stored_apart(tmp_path)[0][:2]

    def damage(self, path: Path) -> None:
        """Overwrite every block in a tier's segments, heads and all."""
        for file in path.glob("segment-*.kvs"):
            with file.open("r+b") as raw:
                raw.seek(4096)
                raw.write(bytes(12 * (BLOCK_BYTES + 8192)))

    def test_a_damaged_copy_is_replaced_by_the_one_below(
        self, tmp_path: Path, keys: list[BlockKey]
    ) -> None:
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            self.damage(tmp_path / "ssd")
            assert tiers(store, keys) == ["hdd", "hdd"]
            assert store.stats()["counters"]["quarantined"] == 2
            assert tiers(store, keys) == ["dram", "dram"]

    def test_damaged_everywhere_is_a_miss(self, tmp_path: Path, keys: list[BlockKey]) -> None:
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            self.damage(tmp_path / "ssd")
            self.damage(tmp_path / "hdd")
            assert tiers(store, keys) == [None, None]
            assert len(store.match(keys)) == 0


def test_a_store_may_have_hard_drives_only(tmp_path: Path) -> None:
    tree = settings(tmp_path)
    del tree["ssd"]

    def opened() -> Store:
        return open_store(**tree)

    with opened() as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))
    with opened() as store:
        space_of(store)
        assert tiers(store, keys) == ["hdd"] * 6


@pytest.mark.parametrize(
    ("hdd", "path", "reason"),
    [
        ({"path": "/a", "capacity": "9GiB"}, "hdd.path", "also in ssd.path"),
        ({"path": "/b", "capacity": "1MiB"}, "hdd.capacity", "less than 3 segments"),
        ({"path": "/b", "capacity": "9GiB", "run": 0}, "hdd.run", "at least"),
        ({"path": "/b", "capacity": "9GiB", "io_depth": 0}, "hdd.io_depth", "between"),
    ],
)
def test_settings_that_cannot_work_are_named(hdd: dict[str, Any], path: str, reason: str) -> None:
    ssd = {"path": "/a", "capacity": "9GiB"}
    with pytest.raises(ConfigError, match=reason) as caught:
        load(overrides={"ssd": ssd, "hdd": hdd})
    assert caught.value.path == path


def test_segments_of_hard_drives_are_large() -> None:
    config = load(overrides={"hdd": {"path": "/a", "capacity": "30TiB"}})
    assert config.hdd is not None
    assert config.hdd.segment_bytes == 30 << 40 >> 12, "4096 of them, for every one is a file"
    config = load(overrides={"hdd": {"path": "/a", "capacity": "1TiB"}})
    assert config.hdd is not None
    assert config.hdd.segment_bytes == 1 << 30
