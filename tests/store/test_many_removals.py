"""Removals of keys that no drive can have leave no trace; other removed keys take bounded memory
and disk: a namespace with too many is removed as a whole.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.store.check.repair import repair
from kvdepot.store.store import Store

CALLS, KEYS = 60, 500
LOG_BYTES = 1 << 20
LOG_GROWTH_BYTES = 8 << 10


def opened(path: Path, *drives: str) -> Store:
    settings = small(path / "kv")
    settings["ssd"]["path"] = [str(path / name) for name in drives or ("kv",)]
    return kvdepot.open(None, **settings)


def log_bytes(path: Path) -> list[int]:
    return [file.stat().st_size for file in (path / "kv").glob("metadata-?")]


def tombstones(store: Store) -> int:
    return len(store.engine.state.volumes.metadata.known().tombstones)


def test_removals_of_absent_keys_leave_no_trace(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        kept = prompt(space, 1, 8)
        put(store, kept)
        assert store.flush()
    sizes = log_bytes(tmp_path)
    with opened(tmp_path) as store:
        space_of(store)
        for number in range(CALLS):
            assert store.remove(prompt(space, 1000 + number, KEYS)) == 0
        assert tombstones(store) == 0
        assert len(store.match(kept)) == 8
        assert store.remove(kept[4:]) == 4
        assert tombstones(store) == 4
    assert max(log_bytes(tmp_path)) <= max(sizes) + LOG_GROWTH_BYTES
    with opened(tmp_path) as store:
        space_of(store)
        assert len(store.match(kept)) == 4


def test_without_a_drive_nothing_is_recorded(tmp_path: Path) -> None:
    settings = {key: value for key, value in small(tmp_path).items() if key != "ssd"}
    with kvdepot.open(None, **settings) as store:
        space = space_of(store)
        kept = prompt(space, 1, 8)
        put(store, kept)
        for number in range(CALLS):
            store.remove(prompt(space, 1000 + number, KEYS))
        assert tombstones(store) == 0
        assert len(store.match(kept)) == 8


def test_removals_while_a_drive_is_away_are_bounded(tmp_path: Path) -> None:
    """The absent drive may have any key."""
    with opened(tmp_path, "kv", "other") as store:
        assert tombstones(store) == 0
    (tmp_path / "other").rename(tmp_path / "away")
    (tmp_path / "other").write_bytes(b"")
    with opened(tmp_path, "kv", "other") as store:
        busy, quiet = space_of(store, "busy"), space_of(store, "quiet")
        removed, older = prompt(busy, 1, 4), prompt(busy, 2, 4)
        kept = prompt(quiet, 3, 8)
        for keys in (removed, older, kept):
            put(store, keys)
        assert store.flush()
        assert store.remove(removed) == 4
        for number in range(CALLS):
            assert store.remove(prompt(busy, 1000 + number, KEYS)) == 0
        assert store.stats()["counters"].get("removal_unrecorded", 0) == 0
        assert len(store.match(older)) == 0, "they went with their namespace"
        assert len(store.match(kept)) == 8
        newer = prompt(busy, 4, 4)
        put(store, newer)
        assert store.flush()
        sizes = log_bytes(tmp_path)
        assert len(sizes) == 2 and max(sizes) <= LOG_BYTES
        assert tombstones(store) < CALLS * KEYS / 4
    with opened(tmp_path, "kv", "other") as store:
        space_of(store, "busy"), space_of(store, "quiet")
        found = [len(store.match(keys)) for keys in (removed, older, kept, newer)]
        assert found == [0, 0, 8, 4]
        assert store.admin.check().ok


def test_a_tombstone_of_a_namespace_replaces_those_of_its_keys(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space, other = space_of(store, "one"), space_of(store, "other")
        keys, others = prompt(space, 1, 4), prompt(other, 1, 4)
        for some in (keys, others):
            put(store, some)
            assert store.flush()
            assert store.remove(some) == 4
        store.remove(namespace=space)
        names = store.engine.state.volumes.metadata.known().tombstones.keys()
        assert names == {space.tag, *others}
    with opened(tmp_path) as store:
        space_of(store, "one"), space_of(store, "other")
        assert not store.match(keys) and not store.match(others)


def evicted_blocks(store: Store, path: Path) -> list[BlockKey]:
    """Puts blocks until the first ones are in no tier. Copies the files before that to `before`."""
    space = space_of(store)
    first = prompt(space, 0, 8)
    put(store, first)
    assert store.flush()
    shutil.copytree(path / "kv", path / "before")
    for number in range(1, 500):
        put(store, prompt(space, number, 8))
        assert store.flush()
        if not store.match(first[:1]):
            return first
    raise AssertionError("nothing was evicted")


def all_put_back(path: Path) -> None:
    for file in (path / "before").glob("segment-*"):
        shutil.copy(file, path / "kv" / file.name)


def one_put_back(path: Path) -> None:
    shutil.copy(path / "before" / "segment-000000.kvs", path / "kv")


def headers_damaged(path: Path) -> None:
    for file in (path / "kv").glob("segment-*"):
        with file.open("r+b") as opened_file:
            opened_file.write(bytes(range(256)) * 16)


def repaired(path: Path) -> None:
    all_put_back(path)
    repair(path / "kv")


@pytest.mark.parametrize("harm", [all_put_back, one_put_back, headers_damaged, repaired])
@pytest.mark.parametrize("reopened", [False, True])
def test_an_evicted_block_does_not_come_back_after_its_removal(
    tmp_path: Path, harm: Callable[[Path], None], *, reopened: bool
) -> None:
    """Its removal is not recorded once its segment was freed."""
    with opened(tmp_path) as store:
        first = evicted_blocks(store, tmp_path)
        if not reopened:
            store.remove(first)
    if reopened:
        with opened(tmp_path) as store:
            space_of(store)
            store.remove(first)
    harm(tmp_path)
    with opened(tmp_path) as store:
        space_of(store)
        assert [len(store.match([key])) for key in first] == [0] * len(first)
