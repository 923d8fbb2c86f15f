"""KV events over ZMQ, followed by a subscriber that knows nothing but the documented form."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from tests.support.routers import EventFollower
from tests.support.small_store import BLOCK, LAYOUT, TOKENS, settings
from tests.support.waiting import until

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import ConfigError
from kvdepot.store.open import open_store as opened
from kvdepot.testing.images import payload_for

ANY = "tcp://127.0.0.1:0"


def open_store(path: Path, **events: Any) -> kvdepot.Store:
    given = {"endpoint": ANY, "replay": ANY, "interval": 0.01, "resync_interval": 0.25, **events}
    return opened(**settings(path), events=given)


def put(store: kvdepot.Store, space: NamespaceHandle, ids: list[int], *, told: bool = True) -> None:
    keys = space.keys(ids)
    payloads = [payload_for(key, BLOCK) for key in keys]
    known = ids if told else None
    assert all(store.put_many(keys, payloads, timeout_s=20.0, token_ids=known))


def blocks(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[at : at + TOKENS]) for at in range(0, len(ids), TOKENS)}


def follower(store: kvdepot.Store) -> EventFollower:
    told = store.stats()["events"]
    return EventFollower(told["endpoint"], told["replay"])


def assert_told(router: EventFollower, memory: set[Any], below: set[Any]) -> None:
    def same() -> bool:
        router.follow(0.05)
        return (router.held("CPU"), router.held("STORAGE")) == (memory, below)

    until(same)


PROMPT = list(range(100, 100 + 4 * TOKENS))
OTHER = list(range(900, 900 + 2 * TOKENS))


def test_stores_moves_and_removals_are_told_and_at_a_start_what_is_there(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store:
        space = store.namespace(model="m", layout=LAYOUT)
        put(store, space, PROMPT)
        with follower(store) as router:
            assert_told(router, blocks(PROMPT), blocks(PROMPT))
            put(store, space, OTHER)
            assert_told(router, blocks(PROMPT) | blocks(OTHER), blocks(PROMPT) | blocks(OTHER))
            assert store.flush()
            store.inspect().drop_from_memory(space.keys(PROMPT)[2:])
            left = blocks(PROMPT[: 2 * TOKENS]) | blocks(OTHER)
            assert_told(router, left, blocks(PROMPT) | blocks(OTHER))
            store.remove(space.keys(OTHER))
            assert_told(router, blocks(PROMPT[: 2 * TOKENS]), blocks(PROMPT))
            parents = {ids: parent for parent, ids in router.blocks["STORAGE"].values()}
            digests = {ids: digest for digest, (_, ids) in router.blocks["STORAGE"].items()}
            chain = [tuple(PROMPT[at : at + TOKENS]) for at in range(0, len(PROMPT), TOKENS)]
            assert [parents[ids] for ids in chain] == [None, *(digests[ids] for ids in chain[:-1])]
            assert router.topics <= {"kv@kvdepot@", "kv@kvdepot@m"}
    with open_store(tmp_path / "kv") as store, follower(store) as router:
        assert_told(router, set(), blocks(PROMPT))


def test_a_gap_is_filled_from_the_replay_socket(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, follower(store) as router:
        space = store.namespace(model="m", layout=LAYOUT)
        put(store, space, PROMPT)
        assert_told(router, blocks(PROMPT), blocks(PROMPT))
        assert router.expected is not None
        first = router.expected - 2
        router.blocks.clear()
        assert router.ask_again(first)[:2] == [first, first + 1]
        numbers = router.ask_again(0)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert router.held("CPU") == blocks(PROMPT)
        assert store.stats()["events"]["replays"] == 2
        assert store.stats()["events"]["cleared"] == 2, "the batches were kept"


def test_who_has_missed_more_than_is_kept_is_told_everything_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", buffer="4KiB") as store, follower(store) as router:
        space = store.namespace(model="m", layout=LAYOUT)
        for number in range(12):
            put(store, space, [number, *range(1, 4 * TOKENS)])
        until(lambda: store.stats()["events"]["stored"] >= 48)
        before = store.stats()["events"]["cleared"]
        router.ask_again(0)
        until(lambda: store.stats()["events"]["cleared"] > before)
        all_blocks = {ids for n in range(12) for ids in blocks([n, *range(1, 4 * TOKENS)])}
        assert_told(router, all_blocks, all_blocks)


def test_a_router_that_comes_late_needs_no_replay(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", replay="") as store:
        put(store, store.namespace(model="m", layout=LAYOUT), PROMPT)
        until(lambda: store.stats()["events"]["blocks"] == 4)
        for _ in range(2):
            with EventFollower(store.stats()["events"]["endpoint"]) as router:
                assert_told(router, blocks(PROMPT), blocks(PROMPT))


def test_only_named_tenants_are_told_of_and_only_the_first_shard(tmp_path: Path) -> None:
    def put_all(store: kvdepot.Store) -> None:
        put(store, store.namespace(model="m", layout=LAYOUT), OTHER)
        private = store.namespace(model="m", layout=LAYOUT, tenant="t", secret=b"s" * 16)
        put(store, private, PROMPT)
        shard = store.namespace(model="m", layout=LAYOUT, shard_rank=1, shard_size=2)
        put(store, shard, [7] * TOKENS)
        put(store, store.namespace(model="n", layout=LAYOUT), [8] * TOKENS, told=False)

    with open_store(tmp_path / "kv") as store, follower(store) as router:
        put_all(store)
        until(lambda: store.stats()["events"]["silent"] >= 6)
        assert_told(router, blocks(OTHER), blocks(OTHER))
        assert "silent" in kvdepot.metrics(store)
        assert "kvdepot_events_announced_blocks 2" in kvdepot.metrics(store)
    with open_store(tmp_path / "kv", tenants=["t"]) as store, follower(store) as router:
        assert_told(router, set(), blocks(PROMPT))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"endpoint": "tcp://0.0.0.0:0"}, "other machines"),
        ({"endpoint": "tcp://127.0.0.1:0", "replay": "tcp://*:0"}, "other machines"),
        ({"endpoint": "127.0.0.1:5557"}, "is not an address"),
        ({"endpoint": "tcp://127.0.0.1:0", "interval": 0}, "interval"),
        ({"endpoint": "tcp://127.0.0.1:0", "buffer": 1}, "buffer"),
        ({"endpoint": "ipc:///nowhere/at/all"}, "cannot listen"),
    ],
)
def test_what_cannot_be_listened_on_is_one_error(given: dict[str, Any], reason: str) -> None:
    memory = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with pytest.raises(ConfigError, match=reason) as caught:
        kvdepot.open(dram=memory, events=given)
    assert caught.value.path.startswith("events.")


def test_a_store_that_cannot_publish_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        open_store(tmp_path / "kv", endpoint="ipc:///nowhere/at/all")
    with open_store(tmp_path / "kv") as store:
        assert store.admin.check().ok


def test_a_socket_in_a_folder_is_for_its_owner(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short:  # the path of a socket is short
        address = f"ipc://{short}/e"
        with open_store(tmp_path / "kv", endpoint=address) as store:
            assert (Path(short) / "e").stat().st_mode & 0o777 == 0o600
            put(store, store.namespace(model="m", layout=LAYOUT), PROMPT)
            with EventFollower(address) as router:
                assert_told(router, blocks(PROMPT), blocks(PROMPT))


def test_other_machines_are_let_in_when_told_so() -> None:
    memory = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    told = {"endpoint": "tcp://0.0.0.0:0", "allow_remote": True}
    with kvdepot.open(dram=memory, events=told) as store:
        assert store.stats()["events"]["endpoint"].startswith("tcp://0.0.0.0:")
