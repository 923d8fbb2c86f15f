"""Token ids that blocks were put with: wherever the blocks go, and after a restart."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import BLOCK, LAYOUT, TOKENS, settings, space_of

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.errors import KeyFormatError
from kvdepot.format.record import TABLE_OFFSET
from kvdepot.testing.images import payload_for

BLOCKS = 6


def put_with(
    store: kvdepot.Store, number: int, blocks: int = BLOCKS
) -> tuple[list[BlockKey], list[list[int]]]:
    """Blocks with their token ids: keys, and the ids of each."""
    ids = [number, *range(1, TOKENS * blocks)]
    keys = space_of(store).keys(ids)
    payloads = [payload_for(key, BLOCK) for key in keys]
    assert all(store.put_many(keys, payloads, timeout_s=20.0, token_ids=ids))
    return keys, [ids[at : at + TOKENS] for at in range(0, len(ids), TOKENS)]


def test_they_are_read_from_memory_from_drives_and_after_a_restart(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys, ids = put_with(store, 7)
        assert store.routing.token_ids(keys) == ids
        assert store.flush()
        store.inspect().drop_from_memory(keys)
        assert store.routing.token_ids(keys) == ids
        assert store.get_many([keys[0]], [bytearray(BLOCK)])[0].tier == "ssd"
        assert store.routing.token_ids(keys) == ids, "read back into memory with the block"
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        assert store.routing.token_ids(keys) == ids
        assert store.remove(keys[:1]) == 1
        assert store.routing.token_ids(keys) == [[], *ids[1:]]
        assert store.admin.check().ok


def test_a_slot_that_is_filled_in_place_has_them_too(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        ids = list(range(TOKENS * 2))
        keys = space_of(store).keys(ids)
        with store.reserve(keys, token_ids=ids) as slots:
            for index, key in enumerate(keys):
                view = slots.view(index)
                assert view is not None
                view[:] = payload_for(key, BLOCK)
            slots.seal()
        assert store.routing.token_ids(keys) == [ids[:TOKENS], ids[TOKENS:]]


def test_blocks_without_token_ids_have_none_and_get_none_of_others(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys, _ = put_with(store, 7)
        assert store.remove(keys) == len(keys)
        plain = space_of(store, "other").keys(list(range(TOKENS * BLOCKS)))
        assert all(store.put_many(plain, [payload_for(key, BLOCK) for key in plain]))
        assert store.routing.token_ids(plain) == [[]] * BLOCKS
        assert store.routing.token_ids(keys) == [[]] * BLOCKS


@pytest.mark.parametrize("count", [0, 1, TOKENS * 2 - 1, TOKENS * 2 + 1])
def test_a_wrong_number_of_them_is_the_callers_mistake(tmp_path: Path, count: int) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys = space_of(store).keys(list(range(TOKENS * 2)))
        payloads = [payload_for(key, BLOCK) for key in keys]
        with pytest.raises(KeyFormatError, match="2 blocks have 32 tokens"):
            store.put_many(keys, payloads, token_ids=[1] * count)
        with pytest.raises(KeyFormatError):
            store.reserve(keys, token_ids=[1] * count)
        assert not store.match(keys)


def test_a_damaged_head_gives_none(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys, ids = put_with(store, 7)
        inside = store.inspect()
        with inside.state.lock:
            image = inside.memory().image(inside.catalog.table.find(keys[0]))
            image[TABLE_OFFSET + 8 * LAYOUT.layers + 1] ^= 1
        assert store.routing.token_ids(keys) == [[], *ids[1:]]


def test_they_are_in_the_object_tier_and_told_without_a_request(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    given: dict[str, Any] = settings(tmp_path / "kv")
    del given["ssd"]
    given["object"] = {"url": f"file://{tmp_path}/bucket", "capacity": "16MiB"}
    (tmp_path / "bucket").mkdir()
    with kvdepot.open(**given) as store:
        keys, ids = put_with(store, 7)
        assert store.flush()
    with kvdepot.open(**given) as store:
        before = store.stats()["tiers"]["object"]["drives"][0]["requests"]["gets"]
        assert store.match(keys).tiers == ("object",) * BLOCKS
        assert store.routing.token_ids(keys) == ids
        assert store.stats()["tiers"]["object"]["drives"][0]["requests"]["gets"] == before


def test_inspect_shows_them_when_asked(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys, ids = put_with(store, 7, 2)
        assert store.flush()
    command = [sys.executable, "-m", "kvdepot", "inspect", str(tmp_path / "kv")]
    said = subprocess.run([*command, "--tokens", "9", "--json"], capture_output=True, check=True)
    rows = json.loads(said.stdout)["tokens"]
    assert rows == [
        {"key": key.hex(), "token_ids": own} for key, own in zip(keys, ids, strict=True)
    ]
    plain = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert keys[0].hex() not in plain
