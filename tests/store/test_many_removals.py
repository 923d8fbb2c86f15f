"""Removed keys take bounded memory and disk. A namespace with too many is removed as a whole."""

from pathlib import Path

from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.store.store import Store

CALLS, KEYS = 60, 500
LOG_BYTES = 1 << 20


def opened(path: Path) -> Store:
    return kvdepot.open(None, **small(path / "kv"))


def log_bytes(path: Path) -> list[int]:
    return [file.stat().st_size for file in (path / "kv").glob("metadata-?")]


def test_removals_of_absent_keys_are_bounded(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
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
        assert len(store.engine.state.volumes.metadata.known().tombstones) < CALLS * KEYS / 4
    with opened(tmp_path) as store:
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
