"""Pins of retention: granted when durable, kept while others make room, ended in time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.store_contract import LAYOUT, prompt, put, small, space_of
from tests.support.waiting import until

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock, WallClock
from kvdepot.core.volume import NO_PLACE
from kvdepot.daemon.server.services import ServiceCalls
from kvdepot.daemon.wire.frames import Peer
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.clocks import ManualClock
from kvdepot.volumes.records import BlockingReads

pytestmark = pytest.mark.usefixtures("quick_watchdog")


def opened(path: Path, clock: Clock | None = None, **more: object) -> Store:
    tree = small(path / "kv")
    tree["dram"] |= {"capacity": 1 << 20, "eviction": "lru"}
    tree["ssd"] |= {"capacity": 2 << 20, "segment": 256 << 10}
    return assemble(load(overrides={**tree, **more}), wall=clock or ManualClock(1.8e9))


def chat(store: Store, seed: int = 1, blocks: int = 6, name: str = "chat") -> list[BlockKey]:
    keys = prompt(space_of(store), seed, blocks)
    put(store, keys)
    store.sessions.name(name, keys)
    return keys


def of_tenant(store: Store, tenant: str) -> None:
    """A session of six blocks, of a tenant that nobody has heard of, with its name."""
    space = store.namespace(model="m", layout=LAYOUT, tenant=tenant)
    keys = prompt(space, 1, 6)
    put(store, keys)
    store.sessions.name(tenant, keys)


def may_all() -> Any:
    """A client that has registered every namespace."""
    return SimpleNamespace(has_registered=lambda tag: True)


def pin(calls: ServiceCalls, name: str) -> Any:
    asked = {"service": "sessions", "call": "pin", "given": {"name": name, "for_s": 3600}}
    return json.loads(calls.serve(json.dumps(asked).encode()))


def crowd_out(store: Store, rounds: int = 20) -> None:
    """Put so much that all drives are written several times."""
    for seed in range(100, 100 + rounds):
        put(store, prompt(space_of(store), seed, 8))
    store.flush()


def test_pinned_blocks_stay_while_others_go(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        others = [chat(store, seed, name=f"other {seed}") for seed in range(2, 6)]
        receipt = store.sessions.pin("chat", for_s=3600)
        assert receipt and receipt.blocks == 6 and not receipt.reason
        for _ in range(10):  # which segment is reclaimed first is chance
            crowd_out(store)
            left = sum(len(store.match(one)) for one in others)
            if left <= 6:
                break
        assert len(store.match(keys)) == 6
        # A block that shares its segment with pinned ones may stay.
        assert left <= 6, "the drive has room for all: the test shows nothing"
        assert store.sessions.show("chat")[0]["pin"]["missing"] == 0
        assert store.admin.check()


def test_a_pin_outlives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1.8e9)
    with opened(tmp_path, clock) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", until_s=clock.now() + 100)
    with opened(tmp_path, clock) as store:
        (found,) = store.sessions.show("chat")
        assert found["pin"]["until_s"] == clock.now() + 100
        assert (found["turns"], found["blocks"], found["model"]) == (1, 6, "contract")
        crowd_out(store)
        assert len(store.match(keys)) == 6


def test_a_session_is_known_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        chat(store)
        chat(store, 2, 3, name="other")
    with opened(tmp_path) as store:
        known = {one["name"]: one["blocks"] for one in store.sessions.list()}
        assert known == {"chat": 6, "other": 3}
        space_of(store)
        assert store.sessions.name("chat", state="pending") == 6


def test_it_ends_in_time(tmp_path: Path) -> None:
    clock = ManualClock(1.8e9)
    with opened(tmp_path, clock) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", for_s=60)
        clock.advance(61)
        until(lambda: store.sessions.show("chat")[0]["pin"] is None)
        crowd_out(store)
        assert len(store.match(keys)) == 0


def test_closing_a_session_does_not_break_its_pin(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", for_s=60)
        store.sessions.name("chat", state="closed")
        crowd_out(store)
        assert len(store.match(keys)) == 6
        assert store.sessions.unpin("chat") == 1
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
            store.sessions.name("chat", keys)
            receipt = store.sessions.pin("chat", for_s=60)
            assert receipt.reason == "of 6 blocks 2 are not in the store"
            assert store.sessions.show("chat")[0]["pin"] is None

    def test_beyond_a_users_share(self, tmp_path: Path) -> None:
        with opened(tmp_path, sessions={"pinned_share": 0.02}) as store:
            chat(store)
            receipt = store.sessions.pin("chat", for_s=60)
            assert "the limit is" in receipt.reason and "pinned_share" in receipt.hint
            assert store.stats()["sessions"]["pinned_blocks"] == 0

    def test_beyond_a_users_share_under_invented_tenants(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            calls = [ServiceCalls(store, may_all(), Peer(1, uid, uid)) for uid in (7001, 7002)]
            for number in range(4):
                of_tenant(store, f"tenant {number}")
            pinned = [pin(calls[0], f"tenant {number}") for number in range(3)]
            assert [one["kept"] for one in pinned] == [True, True, False]
            assert "pins of user 7001 would take" in pinned[2]["reason"]
            assert "pinned_share" in pinned[2]["hint"]
            assert pin(calls[1], "tenant 2")["kept"], "another user has a share of its own"
            (shown,) = store.sessions.show("tenant 2")
            assert shown["pin"]["owner"] == "user 7002"
        with opened(tmp_path) as store:
            calls = [ServiceCalls(store, may_all(), Peer(1, uid, uid)) for uid in (7001, 7002)]
            of_tenant(store, "tenant 3")
            assert "user 7001" in pin(calls[0], "tenant 3")["reason"], "after a restart too"

    def test_an_end_that_makes_no_sense(self, tmp_path: Path) -> None:
        clock = ManualClock(1.8e9)
        with opened(tmp_path, clock) as store:
            chat(store)
            assert "past" in store.sessions.pin("chat", until_s=clock.now() - 1).reason
            assert "days at most" in store.sessions.pin("chat", for_s=1e9).reason
            with pytest.raises(kvdepot.ConfigError, match="not both"):
                store.sessions.pin("chat", for_s=1, until_s=clock.now() + 9)
            with pytest.raises(kvdepot.ConfigError, match="is not known"):
                store.sessions.pin("nobody's", for_s=1)

    def test_a_tier_does_not_shrink_below_its_pins(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            chat(store)
            assert store.sessions.pin("chat", for_s=60)
            with pytest.raises(kvdepot.ConfigError, match="are pinned"):
                store.volumes.resize("ssd", "200KiB")


@pytest.mark.parametrize("how", ["unpin", "time"])
def test_a_session_that_was_closed_is_closed_when_its_pin_ends(tmp_path: Path, how: str) -> None:
    clock = ManualClock(1.8e9)
    with opened(tmp_path, clock) as store:
        keys = chat(store)
        assert store.sessions.pin("chat", for_s=60)
        store.sessions.name("chat", state="closed")
        catalog = store.engine.state.catalog
        rows = catalog.rows(keys)
        assert not any(row in catalog.closed for row in rows), "it is pinned"
        assert [one["name"] for one in store.sessions.list()] == ["chat"]
        if how == "unpin":
            assert store.sessions.unpin("chat") == 1
        clock.advance(61)
        store.sessions.pins.look()
        assert all(row in catalog.closed for row in rows)
        assert store.sessions.list() == []


def test_pins_of_sessions_that_share_a_prefix_end_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        store.sessions.name("short", keys[:3])
        assert store.sessions.pin("chat", for_s=60) and store.sessions.pin("short", for_s=60)
        assert store.sessions.unpin("chat") == 1
        crowd_out(store)
        assert len(store.match(keys)) == 3
        assert store.sessions.unpin("short") == 1
        assert store.stats()["sessions"]["pinned_blocks"] == 0


def test_evicting_to_disk_frees_memory_and_a_prefetch_fills_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = chat(store)
        assert set(store.match(keys).tiers) == {"dram"}
        assert store.sessions.evict_to_disk("chat")["freed"] == 6
        assert set(store.match(keys).tiers) == {"ssd"}
        assert store.sessions.prefetch("chat").wanted == 6
        until(lambda: set(store.match(keys).tiers) == {"dram"})


class TestDrives:
    """Pins are kept while drives go, come back, or do not answer."""

    @pytest.fixture(autouse=True)
    def mounted(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir(mode=0o700)

    @staticmethod
    def two(path: Path) -> Store:
        paths = [str(path / "a" / "kv"), str(path / "b" / "kv")]
        quick = {"retry_initial": 0.01, "retry_max": 0.05, "write_timeout": 3.0}
        ssd = {"path": paths, "capacity": 4 << 20, "segment": 256 << 10, **quick}
        # Which drive takes how much of a session is chance: quotas are tested elsewhere.
        # Drives that are used apart are put in order by the time of day, which must go on.
        return opened(path, WallClock(), ssd=ssd, sessions={"pinned_share": 0.5})

    @staticmethod
    def everywhere(store: Store) -> list[list[BlockKey]]:
        """Pinned sessions, on both drives, and not in memory."""
        chains = [chat(store, seed, name=f"chat {seed}") for seed in range(4)]
        for seed in range(4):
            assert store.sessions.pin(f"chat {seed}", for_s=3600)
        store.inspect().drop_from_memory()
        drives = store.inspect().lower().volumes.describe()
        assert all(drive["used_bytes"] for drive in drives), "one drive has nothing"
        return chains

    @pytest.mark.parametrize("calls", ["read", "append"])
    def test_a_drive_stays_while_pinned_blocks_cannot_be_moved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str
    ) -> None:
        with self.two(tmp_path) as store:
            chains = self.everywhere(store)
            with monkeypatch.context() as patched:
                nothing = (
                    (lambda reads, *_: BlockingReads(reads, lambda place: None, 10.0))
                    if calls == "read"
                    else (lambda records, *_: np.full(len(records), NO_PLACE))
                )
                for entry in store.inspect().volumes.entries:
                    patched.setattr(entry.volume, calls, nothing)
                with pytest.raises(kvdepot.ConfigError, match="pinned blocks could not be moved"):
                    store.volumes.drain("ssd", tmp_path / "a" / "kv")
            assert [len(store.match(keys)) for keys in chains] == [6] * 4
            crowd_out(store)
            assert [len(store.match(keys)) for keys in chains] == [6] * 4
            store.volumes.drain("ssd", tmp_path / "a" / "kv")
            assert [len(store.match(keys)) for keys in chains] == [6] * 4
            assert store.admin.check().ok

    def test_a_drive_that_was_away_brings_back_pinned_blocks(self, tmp_path: Path) -> None:
        with self.two(tmp_path) as store:
            chains = self.everywhere(store)
            volumes = store.inspect().volumes
            (tmp_path / "a").rename(tmp_path / "away")
            until(lambda: volumes.down == {0})
            assert sum(len(store.match(keys)) for keys in chains) < 24
            (tmp_path / "away").rename(tmp_path / "a")
            until(lambda: not volumes.down)
            assert [len(store.match(keys)) for keys in chains] == [6] * 4
            crowd_out(store)
            assert [len(store.match(keys)) for keys in chains] == [6] * 4

    def test_nothing_is_pinned_while_a_drive_is_away(self, tmp_path: Path) -> None:
        """It may know that the blocks were removed. What was pinned before stays, or is ended."""
        with self.two(tmp_path) as store:
            for seed in (1, 2):
                chat(store, seed, name=f"chat {seed}")
                assert store.sessions.pin(f"chat {seed}", for_s=3600)
        for away in "ba":
            (tmp_path / away).rename(tmp_path / "away")
            with self.two(tmp_path) as store:
                chat(store, 3, name="chat 3")
                refused = store.sessions.pin("chat 3", for_s=3600)
                assert not refused and "a drive is missing" in refused.reason and refused.hint
                assert store.sessions.unpin("chat 1") <= 1
            (tmp_path / "away").rename(tmp_path / away)
        for _ in range(2):  # what the first one writes down says the same
            with self.two(tmp_path) as store:
                known = {one["name"]: one["pin"] for one in store.sessions.list()}
                assert {name for name, pin in known.items() if pin is not None} == {"chat 2"}
                assert known["chat 2"]["missing"] == 0
                assert store.sessions.pin("chat 2", for_s=7200)
