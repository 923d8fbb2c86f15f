"""The store through its public face, as somebody types it who has only read the README."""

import threading
import time
from pathlib import Path

import pytest
from tests.support.small_store import (
    BLOCK,
    DISK,
    DRAM,
    IN_DRAM,
    RECORD,
    TOKENS,
    flood,
    prompt,
    put,
    settings,
    space_of,
    tiers,
)

import kvdepot
from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import payload_for


class TestPutAndGet:
    @pytest.mark.parametrize("offset", [1, 7, 4095])
    def test_buffers_need_no_alignment(self, tmp_path: Path, offset: int) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            key = prompt(space_of(store), 1, 1)[0]
            source = bytes(offset) + payload_for(key, BLOCK)
            assert store.put_many([key], [memoryview(source)[offset:]])[0]
            store.flush()
            for tier in ("dram", "ssd"):
                target = bytearray(b"\xee" * (offset + BLOCK + 9))
                assert (
                    store.get_many([key], [memoryview(target)[offset : offset + BLOCK]])[0].tier
                    == tier
                )
                expected = b"\xee" * offset + payload_for(key, BLOCK) + b"\xee" * 9
                assert bytes(target) == expected
                if tier == "dram":
                    flood(store, space_of(store), 2 * IN_DRAM)

    def test_memory_alone_is_a_store_too(self) -> None:
        with kvdepot.open(dram=DRAM) as store:
            keys = prompt(space_of(store), 1, 8)
            assert all(put(store, keys))
            assert tiers(store, keys) == ["dram"] * 8
            assert store.flush().complete
            assert store.admin.check()
            assert "ssd" not in store.stats()["tiers"]


class TestLayers:
    """Five layers of 30,001 bytes: three of them share a checksum, none ends on a page."""

    LAYOUT = kvdepot.KVLayout.opaque(5 * 30001, TOKENS, 5)

    @pytest.mark.parametrize("verify", [True, False])
    def test_every_range_of_layers_from_both_tiers(self, tmp_path: Path, verify: bool) -> None:
        options = settings(tmp_path / "kv", promote=False)
        options["dram"]["verify"] = verify
        with kvdepot.open(**options) as store:
            space = store.namespace(model="m", layout=self.LAYOUT)
            key = space.keys(range(TOKENS))[0]
            payload = payload_for(key, space.block_bytes)
            assert store.put_many([key], [payload])[0]
            self.check_ranges(store, key, payload, "dram")
            store.flush()
        with kvdepot.open(**options) as store:
            store.namespace(model="m", layout=self.LAYOUT)
            self.check_ranges(store, key, payload, "ssd")

    def check_ranges(
        self, store: kvdepot.Store, key: kvdepot.BlockKey, payload: bytes, tier: str
    ) -> None:
        for start in range(5):
            for stop in range(start + 1, 6):
                target = bytearray((stop - start) * 30001)
                answer = store.get_many([key], [target], layers=range(start, stop))[0]
                assert answer.tier == tier
                assert bytes(target) == payload[start * 30001 : stop * 30001]

    def test_a_range_from_disk_is_not_taken_for_the_whole_block(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space = store.namespace(model="m", layout=self.LAYOUT)
            keys = space.keys(range(TOKENS * 3))
            assert all(store.put_many(keys, [payload_for(k, space.block_bytes) for k in keys]))
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space = store.namespace(model="m", layout=self.LAYOUT)
            parts = [bytearray(2 * 30001) for _ in keys]
            assert all(store.get_many(keys, parts, layers=range(1, 3)))
            for key, part in zip(keys, parts, strict=True):
                whole = bytearray(space.block_bytes)
                assert store.get_many([key], [whole])[0]
                assert bytes(whole) == payload_for(key, space.block_bytes)
                assert part == whole[30001 : 3 * 30001]


class TestEviction:
    def test_leased_blocks_survive_on_disk_while_it_is_overwritten_twice(
        self, tmp_path: Path
    ) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space = space_of(store)
            keys = prompt(space, 1, 20)
            put(store, keys)
            store.flush()
            flood(store, space, 2 * IN_DRAM)
            with store.lease(keys) as lease:
                assert store.match(keys).tiers == ("ssd",) * 20
                assert lease.view(0) is None
                flood(store, space, 2 * DISK // RECORD, first=5000)
                assert tiers(store, keys) == ["ssd"] * 20
            flood(store, space, 5 * DISK // RECORD, first=9000)
            assert len(store.match(keys)) < 20, "without the lease they go"
            assert store.admin.check()


class TestThrottle:
    def test_memory_takes_blocks_beside_a_stalled_disk(self, tmp_path: Path) -> None:
        """Where a put does not wait; the disk gets them when it goes on."""
        files = FaultyFiles()
        options = settings(tmp_path / "kv", write_timeout="120s")
        with assemble(load(overrides=options), files=files) as store:
            space = space_of(store)
            files.add(Fault(Call.RUN_WRITE, Stall(), times=None))
            keys = prompt(space, 1, DRAM // 2 // RECORD)
            assert put(store, keys) == [kvdepot.PutResult.STORED] * len(keys)
            late = prompt(space, 2, 3)
            began = time.monotonic()
            payloads = [payload_for(k, BLOCK) for k in late]
            answers = store.put_many(late, payloads, timeout_s=0.2)
            took_s = time.monotonic() - began
            assert answers == [kvdepot.PutResult.THROTTLED] * 3, "it waited for the disk"
            assert 0.2 <= took_s < 100.0, "a write gives up after 120 s"
            assert store.put_many(late, payloads, timeout_s=0.0) == [kvdepot.PutResult.STORED] * 3
            assert tiers(store, keys + late) == ["dram"] * (len(keys) + 3)
            assert store.flush(0.05).waiting == len(keys) + 3
            files.clear()
            assert store.flush()
            assert store.admin.check()
        with kvdepot.open(**options) as store:
            space_of(store)
            assert tiers(store, keys + late) == ["ssd"] * (len(keys) + 3)

    def test_a_put_that_writes_through_is_throttled(self, tmp_path: Path) -> None:
        """It promises that the disk has what memory has."""
        files = FaultyFiles()
        options = settings(tmp_path / "kv", write_mode="write-through")
        with assemble(load(overrides=options), files=files) as store:
            keys = prompt(space_of(store), 1, IN_DRAM)
            files.add(Fault(Call.RUN_WRITE, Stall(), times=None))
            answers = store.put_many(keys, [payload_for(key, BLOCK) for key in keys], timeout_s=0.0)
            assert set(answers[DRAM // 2 // RECORD :]) == {kvdepot.PutResult.THROTTLED}
            files.clear()


class TestIdle:
    def test_an_idle_store_uses_no_processor(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 20)
            put(store, keys)
            tiers(store, keys)
            store.flush()

            def idle() -> bool:
                before = time.process_time()
                threading.Event().wait(0.5)
                return time.process_time() - before < 0.02

            assert any(idle() for _ in range(20)), "once all is done"

    def test_threads_are_named_and_gone_after_close(self, tmp_path: Path) -> None:
        store = kvdepot.open(**settings([tmp_path / "a", tmp_path / "b"]))
        names = {t.name for t in threading.enumerate() if t.name.startswith("kvdepot")}
        assert {f"kvdepot-ssd-write-{number}" for number in range(4)} <= names
        store.close()
        assert not [t.name for t in threading.enumerate() if t.name.startswith("kvdepot")]


def test_stats_tell_what_happened(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        keys = prompt(space_of(store), 1, 10)
        put(store, keys)
        put(store, keys[:4])
        tiers(store, keys + prompt(space_of(store), 2, 3))
        store.flush()
        store.remove(keys[9])
        stats = store.stats()
        counters = stats["counters"]
        assert (counters["put_stored"], counters["put_present"]) == (10, 4)
        assert counters["put_bytes"] == counters["get_bytes"] == 10 * BLOCK
        assert (counters["get_dram"], counters["get_ssd"], counters["get_miss"]) == (10, 0, 3)
        assert (counters["written"], counters["written_bytes"]) == (10, 10 * RECORD)
        assert counters["removed"] == 1
        assert stats["blocks"] == stats["tiers"]["dram"]["blocks"] == 9
        assert stats["tiers"]["ssd"]["blocks"] == 9
        assert stats["tiers"]["dram"]["used_bytes"] == 9 * RECORD
        assert stats["tiers"]["ssd"]["used_bytes"] == 9 * RECORD
        assert (stats["leased"], stats["dirty_bytes"], stats["staging_bytes"]) == (0, 0, 0)
        report = store.admin.check()
        assert (report.ok, report.blocks, report.nbytes) == (True, 9, 9 * BLOCK)
