"""Namespaces in quarantine: nothing of them is served, also after a restart, until it is lifted."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import WAIT_S, prompt, put, small, space_of, tiers

import kvdepot
from kvdepot.core.audit import AuditFinding, producer_id
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.errors import ConfigError
from kvdepot.format.record import HEAD_BYTES, Kind, filled_producer, producer_of, write_head
from kvdepot.store.alerts import alerts
from kvdepot.store.metrics import values
from kvdepot.store.store import Store

FINE = {"matches": True, "error": 0.001, "tolerance": 0.01, "layer": 3, "producer": "engine 2"}


def finding(key: BlockKey, **others: Any) -> AuditFinding:
    return AuditFinding(key, **{**FINE, **others})


def failed(key: BlockKey) -> AuditFinding:
    return finding(key, matches=False, error=1.4)


def opened(folder: Path, **others: Any) -> Store:
    return kvdepot.open(None, **{**small(folder / "kv"), **others})


def test_a_comparison_that_matches_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        store.audits.report(finding(keys[0]))
        assert len(store.match(keys)) == 4
        assert store.audits.list()["compared"] == 1
        assert not alerts(store.stats())


class TestQuarantine:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        with opened(tmp_path) as store:
            yield store

    def test_nothing_is_served_and_nothing_taken(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        store.audits.report(failed(keys[0]))
        assert len(store.match(keys)) == 0
        assert len(store.routing.match(keys)) == 0
        with store.lease(keys) as lease:
            assert len(lease) == 0
        assert tiers(store, keys) == [None] * 4
        assert store.prefetch(keys, 1.0).wanted == 0
        assert store.routing.prefetch(keys, 1.0).wanted == 0
        assert put(store, prompt(space_of(store), 2, 2)) == [PutResult.REFUSED] * 2
        with store.reserve(prompt(space_of(store), 3, 2)) as slots:
            assert slots.outcomes == [PutResult.REFUSED] * 2

    def test_other_namespaces_go_on(self, store: Store) -> None:
        bad, good = prompt(space_of(store, "bad"), 1, 2), prompt(space_of(store, "good"), 1, 2)
        put(store, bad)
        put(store, good)
        store.audits.report(failed(bad[0]))
        assert len(store.match(good)) == 2
        assert tiers(store, [bad[0], good[0], bad[1], good[1]]) == [None, "dram", None, "dram"]
        assert len(store.match([good[0], bad[0], good[1]])) == 1

    def test_says_so_loudly(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        number = store.audits.producer("engine 1, kernels A")
        space = space_of(store)
        space.made_by(number)
        keys = prompt(space, 1, 2)
        put(store, keys)
        store.audits.report(failed(keys[1]))
        assert "is in quarantine" in caplog.text
        assert keys[1].hex() not in caplog.text
        stats = store.stats()
        assert values(stats)['kvdepot_audited_blocks_total{outcome="mismatched"}'] == 1
        assert values(stats)["kvdepot_quarantined_namespaces"] == 1
        (alert,) = [one for one in alerts(stats) if "quarantine" in one.what]
        assert alert.level == "bad"
        (one,) = store.audits.list()["quarantined"]
        assert (one["made_by"], one["found_by"]) == ("engine 1, kernels A", "engine 2")
        assert one["namespace"] == space.tag.hex()
        assert "model" not in json.dumps(stats["audit"])

    def test_purge_of_what_is_not_in_quarantine(self, store: Store) -> None:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        with pytest.raises(ConfigError, match="not in quarantine"):
            store.audits.purge(keys[0][:8].hex())
        assert len(store.match(keys)) == 4

    @pytest.mark.parametrize("name", ["", "xyz", "00", "00" * 9])
    def test_names_that_are_none(self, store: Store, name: str) -> None:
        with pytest.raises(ConfigError, match="tag"):
            store.audits.lift(name)


class TestAfterARestart:
    def test_it_goes_on_and_is_lifted_for_good(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = prompt(space_of(store), 1, 4)
            put(store, keys)
            assert store.flush(WAIT_S)
            store.audits.report(failed(keys[0]))
        with opened(tmp_path) as store:
            space_of(store)
            (one,) = store.audits.list()["quarantined"]
            assert one["model"] == "contract"
            assert len(store.match(keys)) == 0
            assert store.audits.lift(one["namespace"])
        with opened(tmp_path) as store:
            space_of(store)
            assert store.audits.list()["quarantined"] == []
            assert tiers(store, keys) == ["ssd"] * 4

    def test_a_purge_is_one(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = prompt(space_of(store), 1, 4)
            put(store, keys)
            assert store.flush(WAIT_S)
            store.audits.report(failed(keys[0]))
            store.audits.purge(keys[0][:8].hex())
        with opened(tmp_path) as store:
            space_of(store)
            assert len(store.match(keys)) == 0
            assert not store.audits.list()["quarantined"]

    def test_producers_of_blocks_on_disk(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            space = space_of(store)
            space.made_by(store.audits.producer("engine 1"))
            keys = prompt(space, 1, 2)
            put(store, keys)
            assert store.flush(WAIT_S)
        with opened(tmp_path) as store:
            assert store.audits.producer_of(keys[0]) == "engine 1"
            assert store.audits.producer_of(prompt(space_of(store), 9, 1)[0]) == ""

    def test_sessions_do_not_mind_a_quarantine(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = prompt(space_of(store), 1, 4)
            put(store, keys)
            store.sessions.name("chat", keys)
            store.audits.report(failed(keys[0]))
            assert store.flush(WAIT_S)
        with opened(tmp_path) as store:
            assert [one["name"] for one in store.sessions.list()] == ["chat"]
            assert store.audits.list()["quarantined"]

    def test_every_namespace_can_be_in_quarantine(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = [prompt(space_of(store, f"model {n}"), 1, 1)[0] for n in range(300)]
            put(store, keys)
            for key in keys:
                store.audits.report(failed(key))
            assert not any(store.match([key]) for key in keys)
            assert store.flush(WAIT_S)
        with opened(tmp_path) as store:
            for number in range(300):
                space_of(store, f"model {number}")
            assert len(store.audits.list()["quarantined"]) == 300
            assert not any(store.match([key]) for key in keys)

    def test_a_quarantine_whose_text_is_damaged_counts(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            keys = prompt(space_of(store), 1, 2)
            put(store, keys)
            stamp = store.inspect().state.stamps.next()
            entry = MetaEntry(MetaKind.QUARANTINE, keys[0][:8], stamp, b"{no json")
            store.inspect().log_volume().put_meta([entry])
            assert store.flush(WAIT_S)
        with opened(tmp_path) as store:
            space_of(store)
            assert len(store.audits.list()["quarantined"]) == 1
            assert not store.match(keys)


class TestDrives:
    """What drives know that are used one at a time, and then together again."""

    @pytest.fixture(autouse=True)
    def mounted(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir(mode=0o700)

    @staticmethod
    def two(path: Path) -> Store:
        paths = [str(path / "a" / "kv"), str(path / "b" / "kv")]
        quick = {"retry_initial": 0.01, "retry_max": 0.05, "write_timeout": 0.3}
        return opened(path, ssd={"path": paths, "capacity": 4 << 20, "segment": 256 << 10, **quick})

    @contextmanager
    def without(self, path: Path, away: str) -> Iterator[Store]:
        (path / away).rename(path / "away")
        with self.two(path) as store:
            yield store
        (path / "away").rename(path / away)

    @staticmethod
    def quarantine(store: Store, model: str) -> str:
        key = prompt(space_of(store, model), 1, 1)[0]
        store.audits.report(failed(key))
        return key[:8].hex()

    @staticmethod
    def quarantined(store: Store) -> set[str]:
        return {one["namespace"] for one in store.audits.list()["quarantined"]}

    def test_every_quarantine_counts_that_none_has_lifted(self, tmp_path: Path) -> None:
        with self.two(tmp_path) as store:
            lifted, stays = self.quarantine(store, "lifted"), self.quarantine(store, "stays")
            again = self.quarantine(store, "again")
        with self.without(tmp_path, "b") as store:
            of_a = self.quarantine(store, "of a")
            assert store.audits.lift(lifted)
        with self.without(tmp_path, "a") as store:
            of_b = self.quarantine(store, "of b")
            assert store.audits.lift(again)
            self.quarantine(store, "again")
        for _ in range(2):  # what the first one writes down says the same
            with self.two(tmp_path) as store:
                assert self.quarantined(store) == {stays, of_a, of_b, again}

    def test_what_only_a_drive_that_goes_knows_is_told_to_the_others(self, tmp_path: Path) -> None:
        with self.two(tmp_path) as store:
            assert store.admin.check().ok
        with self.without(tmp_path, "b") as store:
            named = self.quarantine(store, "of a")
        with self.two(tmp_path) as store:
            store.volumes.drain("ssd", tmp_path / "a" / "kv")
        ssd = {"path": str(tmp_path / "b" / "kv"), "capacity": 2 << 20, "segment": 256 << 10}
        with opened(tmp_path, ssd=ssd) as store:
            assert self.quarantined(store) == {named}


def test_producers_are_bounded(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(100):
            store.audits.producer(f"engine {number}")
        known = store.audits.list()["producers"]
        assert len(known) == 64
        assert known[-1]["text"] == "engine 99"


class TestRecord:
    def test_a_record_without_a_producer_is_as_ever(self) -> None:
        one, other = (memoryview(bytearray(HEAD_BYTES)) for _ in range(2))
        key = BlockKey(bytes(range(32)))
        write_head(one, Kind.BLOCK, key, 4096, 4096)
        write_head(other, Kind.BLOCK, key, 4096, 4096, b"", producer_id("engine 1"))
        assert producer_of(one, key) == 0
        assert producer_of(other, key) == producer_id("engine 1") == filled_producer(other)
        assert one[:112] == other[:112]
        assert one[120:] == other[120:]

    def test_of_another_block(self) -> None:
        image = memoryview(bytearray(HEAD_BYTES))
        write_head(image, Kind.BLOCK, BlockKey(bytes(32)), 4096, 4096, b"", 5)
        assert producer_of(image, BlockKey(bytes(range(32)))) == 0
