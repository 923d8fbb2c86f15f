"""`ssd.eviction`: what becomes of a prompt that was used, when the drive is written over."""

from pathlib import Path

import pytest
from tests.support.small_store import DISK, RECORD, prompt, put, settings, space_of, tiers

import kvdepot
from kvdepot.errors import ConfigError
from kvdepot.index.table import NONE

BLOCKS = 10
"""Of a prompt."""


def open_store(path: Path, eviction: str) -> kvdepot.Store:
    tree = settings(path, eviction=eviction)
    tree["dram"]["eviction"] = "lru"
    store: kvdepot.Store = kvdepot.open(**tree)
    return store


@pytest.mark.parametrize(
    ("eviction", "moves"),
    [("fifo", False), ("s3fifo", True), ("lfu", False), ("lru", True), ("default", True)],
)
def test_a_prompt_that_is_read_again_and_again(tmp_path: Path, eviction: str, moves: bool) -> None:
    """Others come until the drive is written over twice. With fifo the drive loses it; lfu spares
    its segment, the others write it again."""
    with open_store(tmp_path / "kv", eviction) as store:
        space = space_of(store)
        wanted, number = prompt(space, 1, BLOCKS), 2
        assert all(put(store, wanted))
        while number * BLOCKS * RECORD < 2.5 * DISK:
            assert all(put(store, prompt(space, number, BLOCKS)))
            assert store.flush()
            number += 1
            if len(store.match(wanted)) == BLOCKS:
                assert None not in tiers(store, wanted)
        counters = store.stats()["counters"]
        assert counters["reclaimed_segments"] >= 8, "it was written over"
        assert (counters["moved_ssd"] > 0) == moves
        rows = store.inspect().catalog.rows(wanted)
        on_drive = [row != NONE and store.inspect().catalog.files[0].ready(row) for row in rows]
        assert on_drive == [eviction != "fifo"] * BLOCKS
        assert store.admin.check()


def test_a_rule_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssd\.eviction"):
        open_store(tmp_path / "kv", "mru")
