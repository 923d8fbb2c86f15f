"""Contracts of retention: granted when durable, kept while others make room, ended in time."""

from pathlib import Path

import pytest
from tests.support.waiting import until

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.config import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import prompt, put, small, space_of


class Watch:
    """A time of day that tests set."""

    def __init__(self) -> None:
        self.at_s = 1_800_000_000.0

    def now(self) -> float:
        return self.at_s


def opened(path: Path, watch: Watch | None = None, **more: object) -> Store:
    tree = small(path / "kv")
    tree["dram"] |= {"capacity": 1 << 20, "eviction": "lru"}
    tree["ssd"] |= {"capacity": 2 << 20, "segment": 256 << 10}
    return assemble(load(overrides={**tree, **more}), wall=watch or Watch())


def chat(store: Store, seed: int = 1, blocks: int = 6, name: str = "chat") -> list[BlockKey]:
    keys = prompt(space_of(store), seed, blocks)
    put(store, keys)
    store.session(name, keys)
    return keys


def crowd_out(store: Store, rounds: int = 14) -> None:
    """Put so much that all drives are written several times."""
    for seed in range(100, 100 + rounds):
        put(store, prompt(space_of(store), seed, 8))
    store.flush()


def test_what_is_under_contract_stays_while_all_else_goes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        others = chat(store, 2, name="other")
        receipt = store.sessions.pin("chat", for_s=3600)
        assert receipt and receipt.blocks == 6 and not receipt.reason
        crowd_out(store)
        assert len(store.match(keys)) == 6
        assert len(store.match(others)) == 0, "the drives have room for all: this says nothing"
        assert store.sessions.show("chat")[0]["contract"]["missing"] == 0
        assert store.check()


def test_a_contract_outlives_a_restart(tmp_path: Path) -> None:
    watch = Watch()
    with opened(tmp_path, watch) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", until_s=watch.at_s + 100)
    with opened(tmp_path, watch) as store:
        (found,) = store.sessions.show("chat")
        assert found["contract"]["until_s"] == watch.at_s + 100
        assert (found["turns"], found["blocks"], found["model"]) == (1, 6, "contract")
        crowd_out(store)
        assert len(store.match(keys)) == 6


def test_a_session_is_known_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        chat(store)
        chat(store, 2, 3, name="other")
    with opened(tmp_path) as store:
        known = {one["name"]: one["blocks"] for one in store.sessions.known()}
        assert known == {"chat": 6, "other": 3}
        space_of(store)
        assert store.session("chat", state="pending") == 6


def test_it_ends_in_time(tmp_path: Path) -> None:
    watch = Watch()
    with opened(tmp_path, watch) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", for_s=60)
        watch.at_s += 61
        until(lambda: store.sessions.show("chat")[0]["contract"] is None)
        crowd_out(store)
        assert len(store.match(keys)) == 0


def test_one_for_a_tool_call_ends_with_the_next_turn(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        store.session("chat", keys, "pending")
        assert store.sessions.pin("chat", for_s=600, through_turn=True)
        store.session("chat", state="pending")
        assert store.sessions.show("chat")[0]["contract"]
        store.session("chat", keys)
        assert store.sessions.show("chat")[0]["contract"] is None


def test_closing_a_session_does_not_break_its_contract(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", for_s=60)
        store.session("chat", state="closed")
        crowd_out(store)
        assert len(store.match(keys)) == 6
        assert store.sessions.expire("chat")["contracts_ended"] == 1
        crowd_out(store)
        assert len(store.match(keys)) == 0


class TestRefusals:
    def test_without_a_durable_tier(self, tmp_path: Path) -> None:
        with kvdepot.open(dram={"capacity": "4MiB", "prefault": False}) as store:
            chat(store)
            receipt = store.sessions.pin("chat", for_s=60)
            assert not receipt and "no durable tier" in receipt.reason and receipt.hint

    def test_without_fsync(self, tmp_path: Path) -> None:
        tree = small(tmp_path / "kv")
        tree["ssd"] = {**tree["ssd"], "fsync": "never"}
        with kvdepot.open(**tree) as store:
            chat(store)
            assert "no durable tier" in store.sessions.pin("chat", for_s=60).reason

    def test_when_not_all_blocks_are_there(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = prompt(space_of(store), 1, 6)
            put(store, keys[:4])
            store.session("chat", keys)
            receipt = store.sessions.pin("chat", for_s=60)
            assert receipt.reason == "of 6 blocks 2 are not in the store"
            assert store.sessions.show("chat")[0]["contract"] is None

    def test_beyond_a_tenants_share(self, tmp_path: Path) -> None:
        with opened(tmp_path, sessions={"pinned_share": 0.02}) as store:
            chat(store)
            receipt = store.sessions.pin("chat", for_s=60)
            assert "at most" in receipt.reason and "pinned_share" in receipt.hint
            assert store.stats()["sessions"]["promised_blocks"] == 0

    def test_an_end_that_makes_no_sense(self, tmp_path: Path) -> None:
        watch = Watch()
        with opened(tmp_path, watch) as store:
            chat(store)
            assert "past" in store.sessions.pin("chat", until_s=watch.at_s - 1).reason
            assert "days at most" in store.sessions.pin("chat", for_s=1e9).reason
            with pytest.raises(kvdepot.ConfigError, match="not both"):
                store.sessions.pin("chat", for_s=1, until_s=watch.at_s + 9)
            with pytest.raises(kvdepot.ConfigError, match="is not known"):
                store.sessions.pin("nobody's", for_s=1)

    def test_a_tier_does_not_shrink_below_its_contracts(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            chat(store)
            assert store.sessions.pin("chat", for_s=60)
            with pytest.raises(kvdepot.ConfigError, match="under contract"):
                store.resize("ssd", "200KiB")


def test_contracts_of_sessions_that_share_a_prefix_end_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        store.session("short", keys[:3])
        assert store.sessions.pin("chat", for_s=60) and store.sessions.pin("short", for_s=60)
        assert store.sessions.unpin("chat") == 1
        crowd_out(store)
        assert len(store.match(keys)) == 3
        assert store.sessions.unpin("short") == 1
        assert store.stats()["sessions"]["promised_blocks"] == 0


def test_parking_frees_memory_and_warming_brings_it_back(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        assert set(store.match(keys).tiers) == {"dram"}
        assert store.sessions.park("chat")["freed"] == 6
        assert set(store.match(keys).tiers) == {"ssd"}
        assert store.sessions.warm("chat")["wanted"] == 6
        until(lambda: set(store.match(keys).tiers) == {"dram"})
