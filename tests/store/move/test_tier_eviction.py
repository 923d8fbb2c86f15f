"""`ssd.eviction`: what becomes of a prompt that was used, when the drive is written over."""

from pathlib import Path

import pytest

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import ConfigError
from kvdepot.index.table import NONE
from kvdepot.testing.images import payload_for

TOKENS = 16
BLOCK = 16384
RECORD = BLOCK + 4096
DISK = 8 << 20
PROMPT_BLOCKS = 10


def open_store(path: Path, eviction: str) -> kvdepot.Store:
    return kvdepot.open(
        dram={"capacity": 2 << 20, "prefault": False, "huge_pages": "never", "eviction": "lru"},
        ssd={"path": path, "capacity": DISK, "segment": "1MiB", "eviction": eviction},
        writeback={"staging": "2MiB"},
    )


def prompt(space: NamespaceHandle, number: int) -> list[kvdepot.BlockKey]:
    return space.keys([number, *range(1, TOKENS * PROMPT_BLOCKS)])


def put(store: kvdepot.Store, keys: list[kvdepot.BlockKey]) -> None:
    sources = [payload_for(key, BLOCK) for key in keys]
    assert all(store.put_many(keys, sources, timeout_s=20.0))


def read(store: kvdepot.Store, keys: list[kvdepot.BlockKey]) -> None:
    targets = [bytearray(BLOCK) for _ in keys]
    assert all(store.get_many(keys, targets))
    assert [bytes(target) for target in targets] == [payload_for(key, BLOCK) for key in keys]


@pytest.mark.parametrize(
    ("eviction", "moves"),
    [("fifo", False), ("s3fifo", True), ("lfu", False), ("lru", True), ("default", True)],
)
def test_a_prompt_that_is_read_again_and_again(tmp_path: Path, eviction: str, moves: bool) -> None:
    """Others come until the drive is written over twice. With fifo the drive loses it; lfu spares
    its segment, the others write it again."""
    with open_store(tmp_path / "kv", eviction) as store:
        space = store.namespace(model="m", layout=kvdepot.KVLayout.opaque(BLOCK, TOKENS))
        wanted, number = prompt(space, 1), 2
        put(store, wanted)
        while number * PROMPT_BLOCKS * RECORD < 2.5 * DISK:
            put(store, prompt(space, number))
            assert store.flush()
            number += 1
            if len(store.match(wanted)) == PROMPT_BLOCKS:
                read(store, wanted)
        counters = store.stats()["counters"]
        assert counters["reclaimed_segments"] >= 8, "it was written over"
        assert (counters["moved_ssd"] > 0) == moves
        rows = store.inspect().catalog.rows(wanted)
        on_drive = [row != NONE and store.inspect().catalog.files[0].ready(row) for row in rows]
        assert on_drive == [eviction != "fifo"] * PROMPT_BLOCKS
        assert store.admin.check()


def test_a_rule_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssd\.eviction"):
        open_store(tmp_path / "kv", "mru")
