"""Whole stores over one shared folder, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of, tiers
from tests.support.waiting import until

from kvdepot.errors import ConfigError, ExtraMissingError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

pytest.importorskip("obstore", reason="the extra s3 is not installed")
OpenStore = Callable[..., Store]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one(ssd: str = "", **more: Any) -> Store:
        tree: dict[str, Any] = {
            "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
            "writeback": {"staging": "2MiB"},
            "object": {
                "url": f"file://{tmp_path}/shared",
                "capacity": "32MiB",
                "refresh": "50ms",
                **more,
            },
        }
        if ssd:
            tree["ssd"] = {"path": tmp_path / ssd, "capacity": "8MiB", "segment": "1MiB"}
        opened.append(open_store(**tree))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def wait_for(store: Store, keys: list[Any]) -> None:
    until(lambda: len(store.match(keys)) == len(keys))


def test_a_block_put_on_one_is_got_on_the_others(stores: OpenStore) -> None:
    first, second, third = stores(), stores(ssd="b"), stores()
    keys = prompt(space_of(first), 1, 8)
    assert all(put(first, keys))
    assert first.flush()
    for other in (second, third):
        space_of(other)
        wait_for(other, keys)
        assert set(other.match(keys).tiers) == {"object"}
        assert tiers(other, keys) == ["object"] * 8
        assert tiers(other, keys) == ["dram"] * 8


def test_a_block_that_is_in_the_bucket_is_not_uploaded_again(stores: OpenStore) -> None:
    first, second = stores(), stores()
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    first.flush()
    space_of(second)
    until(lambda: len(second.match(keys)) == 4)
    put(second, keys)
    second.flush()
    (drive,) = second.stats()["tiers"]["object"]["drives"]
    assert drive["own_bytes"] == 0


def test_a_removal_goes_to_all_tiers_of_all_nodes(stores: OpenStore) -> None:
    first, second = stores(ssd="a"), stores(ssd="b")
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    assert first.flush()
    space_of(second)
    until(lambda: len(second.match(keys)) == 4)
    assert tiers(second, keys) == ["object"] * 4
    second.flush()
    assert first.remove(keys[:2]) == 2
    until(lambda: not second.match(keys[:1]))
    assert tiers(second, keys[:2]) == [None, None]
    second.close()
    third = stores(ssd="b")
    space_of(third)
    assert tiers(third, keys)[:2] == [None, None]
    assert None not in tiers(third, keys)[2:]


def test_ranges_of_layers(stores: OpenStore) -> None:
    import kvdepot

    layout = kvdepot.KVLayout.gqa(
        layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16
    )
    first, second = stores(), stores(promote=False)
    space = first.namespace(model="layers", layout=layout)
    keys = space.keys(list(range(48)))
    payload = bytes(range(256)) * (layout.block_bytes // 256)
    assert all(first.put_many(keys, [payload] * 3))
    assert first.flush()
    second.namespace(model="layers", layout=layout)
    until(lambda: len(second.match(keys)) == 3)
    part = layout.block_bytes // 8
    targets = [bytearray(part) for _ in keys]
    assert all(second.get_many(keys, targets, layers=range(5, 6)))
    assert all(bytes(target) == payload[5 * part : 6 * part] for target in targets)


def test_blocks_make_room_when_the_bucket_is_full(stores: OpenStore) -> None:
    store = stores(capacity="4MiB")
    space = space_of(store)
    for number in range(60):
        assert all(put(store, prompt(space, number, 8)))
        store.flush()
    (drive,) = store.stats()["tiers"]["object"]["drives"]
    assert drive["used_bytes"] <= 4 << 20
    assert tiers(store, prompt(space, 59, 8)) == ["dram"] * 8
    assert store.admin.check().ok


def test_a_read_only_store_reads(stores: OpenStore, tmp_path: Path) -> None:
    first = stores()
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    assert first.flush()
    settings = {"url": f"file://{tmp_path}/shared", "capacity": "32MiB"}
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with open_store(mode="r", dram=dram, object=settings, writeback={"staging": "2MiB"}) as reader:
        space_of(reader)
        assert tiers(reader, keys) == ["object"] * 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "bucket/prefix"}, "object.url"),
        ({"url": "s3://"}, "object.url"),
        ({"url": "s3://key:secret@bucket/p"}, "must not hold credentials"),
        ({"url": "s3://b/p", "endpoint": "minio:9000"}, "object.endpoint"),
        ({"url": "s3://b/p", "capacity": "1KiB"}, "object.capacity"),
        ({"url": "s3://b/p", "object_size": "1GiB"}, "object.object_size"),
        ({"url": "s3://b/p", "profile": "none"}, "object\\.(profile|credentials_file)"),
        ({"url": "file:///proc/no/folder"}, "object.url"),
    ],
)
def test_wrong_settings_are_one_clear_error(settings: dict[str, Any], said: str) -> None:
    tree = {"capacity": "1GiB", **settings}
    with pytest.raises(ConfigError, match=said) as caught:
        open_store(dram="2MiB", object=tree)
    assert "key:secret" not in str(caught.value)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ExtraMissingError) as caught:
        open_store(dram="2MiB", object={"url": "s3://b/p", "capacity": "1GiB"})
    assert "kvdepot[s3]" in caught.value.hint


def test_two_nodes_that_remove_the_same_block_hang_no_third_one(stores: OpenStore) -> None:
    first, second, third = stores(), stores(), stores(refresh="1h")
    keys = prompt(space_of(first), 1, 4)
    put(first, keys)
    assert first.flush()
    for other in (second, third):
        space_of(other)
        assert len(other.wait_for(keys, 60.0, idle_s=60.0)) == 4
    first.remove(keys)
    second.remove(keys)
    third.inspect().state.request_refresh()
    until(lambda: len(third.match(keys)) == 0)
    assert third.admin.check().ok


def test_a_key_that_is_named_twice_is_removed_once(stores: OpenStore) -> None:
    store = stores()
    keys = prompt(space_of(store), 1, 4)
    put(store, keys)
    assert store.remove([keys[0], keys[0]]) == 1
    assert store.admin.check().ok
