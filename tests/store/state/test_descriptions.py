"""Descriptions of namespaces: they take a part of a tier at most, and go with their namespace."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of
from tests.support.stores import settings
from tests.support.waiting import until

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.metadata import MetaKind
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store

SECRET_NAME = "tenant-whose-name-must-go"


def opened(path: Path, capacity: str = "2MiB") -> Store:
    tree: dict[str, Any] = settings(path, ssd={"capacity": capacity, "promote": False})
    del tree["hdd"]
    store = kvdepot.open(**tree)
    assert isinstance(store, Store)
    return store


def named(store: Store, tenant: str) -> NamespaceHandle:
    return store.namespace(model="m", layout=space_of(store).layout, tenant=tenant, secret=b"s")


def described(store: Store) -> list[str]:
    found = store.inspect().volumes.metadata.values(MetaKind.NAMESPACE).values()
    return [json.loads(text).get("tenant", "") for text in found]


def is_described(store: Store, tenant: str) -> bool:
    return tenant in described(store)


def reclaim_everything(store: Store) -> None:
    """Rewrite the drive until no segment is left that was there, but the one that is written to."""
    inspector = store.inspect()
    volume, room = inspector.log_volume(), inspector.drives.rooms[inspector.lower()]
    before = set(volume.segments().ids.tolist())
    for number in range(100):
        keys = prompt(space_of(store, "filler"), number, 4)
        put(store, keys)
        store.flush()
        room.reclaimer.reclaim(0)
        if not before.intersection(volume.segments().ids.tolist()):
            return
    raise AssertionError("a segment stays")


def names_on_disk(path: Path) -> list[str]:
    files = sorted(one for one in path.rglob("*") if one.is_file())
    return [one.name for one in files if SECRET_NAME.encode() in one.read_bytes()]


def test_namespaces_without_blocks_do_not_fill_a_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        spaces = [named(store, f"tenant-{number}") for number in range(120)]
        assert len(described(store)) < 64
        for number in (0, 119):
            keys = prompt(spaces[number], number, 4)
            assert all(put(store, keys)) and store.flush(keys=keys)
            until(partial(is_described, store, f"tenant-{number}"))
        assert store.admin.check().ok
    with opened(tmp_path) as store:
        keys = prompt(named(store, "tenant-119"), 119, 4)
        assert all(store.get_many(keys, [bytearray(BLOCK_BYTES) for _ in keys]))
        reclaim_everything(store)
        assert "tenant-5" not in described(store)


def test_namespaces_with_blocks_have_a_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        spaces: list[NamespaceHandle] = []

        def add_many() -> None:
            for number in range(300):
                spaces.append(named(store, f"tenant-{number}"))
                put(store, prompt(spaces[-1], number, 1))

        with pytest.raises(ConfigError, match="no room for the description") as refused:
            add_many()
        assert "capacity" in refused.value.hint
        for space in spaces[-5:]:
            assert store.remove(namespace=space) == 1
        assert named(store, "one-more").tag
        with pytest.raises(ConfigError, match="limit"):
            named(store, "x" * 20_000)


@pytest.mark.parametrize("reopened", [False, True])
def test_the_name_of_a_removed_tenant_leaves_the_disk(tmp_path: Path, reopened: bool) -> None:
    store = opened(tmp_path)
    try:
        space = named(store, SECRET_NAME)
        assert all(put(store, prompt(space, 1, 4))) and store.flush()
        reclaim_everything(store)  # its description was carried: there was more than one copy
        assert all(put(store, prompt(space, 2, 2))) and store.flush()
        assert names_on_disk(tmp_path)
        assert store.remove(namespace=space)
        if reopened:
            store.close()
            store = opened(tmp_path)
        reclaim_everything(store)
        assert SECRET_NAME not in described(store)
        assert not names_on_disk(tmp_path)
    finally:
        store.close()
    assert not names_on_disk(tmp_path)


def test_a_namespace_that_is_used_again_is_described_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = named(store, "again")
        put(store, prompt(space, 1, 2))
        store.remove(namespace=space)
        assert "again" not in described(store)
        put(store, prompt(space, 1, 2))
        until(lambda: "again" in described(store))
