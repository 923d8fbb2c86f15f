"""The store through its public face, as somebody types it who has only read the README."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.small_store import (
    BLOCK,
    DISK,
    DRAM,
    IN_DRAM,
    RECORD,
    TOKENS,
    files_bytes,
    flood,
    prompt,
    put,
    settings,
    space_of,
    tiers,
)
from tests.support.waiting import eventually

import kvdepot
from kvdepot.config.settings import load
from kvdepot.errors import LeaseError, StoreClosedError
from kvdepot.store.open import assemble
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import payload_for
from kvdepot.testing.store_contract import touch


@pytest.mark.usefixtures("embedded_or_attached")
class TestPutAndGet:
    def test_blocks_come_back_from_memory_and_after_a_restart_from_disk(
        self, tmp_path: Path
    ) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 8)
            assert put(store, keys) == [kvdepot.PutResult.STORED] * 8
            assert put(store, keys) == [kvdepot.PutResult.PRESENT] * 8
            assert tiers(store, keys) == ["dram"] * 8
            assert store.flush()
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 8)
            assert store.match(keys).tiers == ("ssd",) * 8
            assert tiers(store, keys) == ["ssd"] * 8
            assert store.admin.check()

    def test_a_hit_on_disk_brings_the_block_to_memory(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 8)
            put(store, keys)
            store.flush()
            flood(store, space_of(store), 2 * IN_DRAM)
            assert tiers(store, keys) == ["ssd"] * 8
            assert tiers(store, keys) == ["dram"] * 8
            assert store.stats()["counters"]["promoted"] == 8

    def test_promotion_can_be_switched_off(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv", promote=False)) as store:
            keys = prompt(space_of(store), 1, 8)
            put(store, keys)
            store.flush()
            flood(store, space_of(store), 2 * IN_DRAM)
            assert tiers(store, keys) == ["ssd"] * 8
            assert tiers(store, keys) == ["ssd"] * 8

    def test_a_batch_answers_for_each_block(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 40)
            put(store, keys[::2])
            assert tiers(store, keys) == ["dram", None] * 20
            assert store.get_many([keys[1]], [bytearray(BLOCK)])[0].reason == "absent"
            assert len(store.match(keys)) == 1
            assert store.get_many([], []) == []
            assert store.put_many([], []) == []

    def test_the_same_block_twice_in_a_batch(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            key = prompt(space_of(store), 1, 1)[0]
            assert put(store, [key, key]) == [kvdepot.PutResult.STORED, kvdepot.PutResult.PRESENT]
            store.flush()
            flood(store, space_of(store), 2 * IN_DRAM)
            assert tiers(store, [key] * 20) == ["ssd"] + ["dram"] * 19, "read once"
            assert store.flush()
            assert store.stats()["leased"] == 0

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "numpy", "float16"])
    def test_any_contiguous_buffer_will_do(self, tmp_path: Path, kind: str) -> None:
        payload = bytes(range(256)) * (BLOCK // 256)
        given: Any = {
            "bytes": payload,
            "bytearray": bytearray(payload),
            "memoryview": memoryview(payload),
            "numpy": np.frombuffer(payload, np.uint8).reshape(2, 64, -1),
            "float16": np.frombuffer(payload, np.float16),
        }[kind]
        target: Any = np.zeros(BLOCK // 4, np.float32) if kind == "numpy" else bytearray(BLOCK)
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            key = prompt(space_of(store), 1, 1)[0]
            assert store.put_many([key], [given])[0]
            assert store.get_many([key], [target])[0]
            assert bytes(target) == payload

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


@pytest.mark.usefixtures("embedded_or_attached")
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


@pytest.mark.usefixtures("embedded_or_attached")
class TestEviction:
    def test_the_tail_of_a_prompt_goes_before_its_head(self, seed: int) -> None:
        """Whatever is used and put: a block in memory has its whole prefix in memory."""
        rng = random.Random(seed)
        with kvdepot.open(dram=DRAM) as store:
            prompts = [prompt(space_of(store), number, 25) for number in range(12)]
            for _ in range(60):
                keys = rng.choice(prompts)[: rng.randrange(1, 26)]
                if rng.random() < 0.5:
                    touch(store, keys)
                else:
                    put(store, keys)
                for other in prompts:
                    resident = sum(len(store.match([key])) for key in other)
                    assert resident == len(store.match(other))
            assert store.stats()["counters"]["evicted_dram"] > 0

    def test_the_prompt_used_least_recently_goes_first(self) -> None:
        with kvdepot.open(dram=DRAM) as store:
            space = space_of(store)
            first, second = prompt(space, 1, 10), prompt(space, 2, 10)
            put(store, first)
            put(store, second)
            assert touch(store, first) == 10
            flood(store, space, IN_DRAM - 10)
            assert len(store.match(first)) == 10
            assert len(store.match(second)) < 10

    def test_leased_blocks_survive_in_memory_while_both_tiers_overflow(
        self, tmp_path: Path
    ) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space = space_of(store)
            keys = prompt(space, 1, 20)
            put(store, keys)
            store.flush()
            with store.lease(keys) as lease:
                assert len(lease) == 20
                assert list(lease) == keys
                flood(store, space, 2 * DISK // RECORD)
                assert store.match(keys).tiers == ("dram",) * 20
                views = [lease.view(index) for index in range(20)]
                for key, view in zip(keys, views, strict=True):
                    assert view is not None
                    assert view.readonly
                    assert view == payload_for(key, BLOCK)
                    view.release()
            assert store.flush()
            stats = store.stats()
            assert stats["leased"] == 0
            assert stats["counters"]["reclaimed_segments"] > 0
            assert store.admin.check()

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

    def test_disk_use_stays_within_its_capacity(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            flood(store, space_of(store), 2 * DISK // RECORD)
            store.flush()
            assert files_bytes(tmp_path / "kv") <= DISK
            assert store.stats()["tiers"]["ssd"]["held_bytes"] <= DISK

    def test_a_lease_ends_once(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 4)
            put(store, keys[:3])
            lease = store.lease(keys)
            assert len(lease) == 3
            assert store.stats()["leased"] == 3
            lease.release()
            with pytest.raises(LeaseError, match="released"):
                lease.release()
            with pytest.raises(LeaseError, match="released"):
                lease.view(0)
            assert store.stats()["leased"] == 0


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

    def test_a_flush_ends_at_its_deadline_and_tells_what_waits(self, tmp_path: Path) -> None:
        files = FaultyFiles()
        options = settings(tmp_path / "kv", write_timeout="120s")
        with assemble(load(overrides=options), files=files) as store:
            keys = prompt(space_of(store), 1, 20)
            files.add(Fault(Call.RUN_WRITE, Stall(), times=None))
            put(store, keys)
            assert eventually(lambda: files.counts[Call.RUN_WRITE] > 0), "the writer has begun"
            began = time.monotonic()
            report = store.flush(timeout_s=0.05)
            took_s = time.monotonic() - began
            files.clear()
            assert not report
            assert report.waiting == 20
            assert took_s < 100.0, "a write gives up after 120 s"

    def test_without_patience_a_put_does_not_wait_at_all(self, tmp_path: Path) -> None:
        files = FaultyFiles()
        with assemble(load(overrides=settings(tmp_path / "kv")), files=files) as store:
            keys = prompt(space_of(store), 1, IN_DRAM)
            files.add(Fault(Call.RUN_WRITE, Stall(), times=None))
            payloads = [payload_for(key, BLOCK) for key in keys]
            answers = store.put_many(keys, payloads, timeout_s=0.0)
            limit = DRAM // 2 // RECORD
            assert answers == [kvdepot.PutResult.STORED] * len(keys)
            counters = store.stats()["counters"]
            assert (counters["put_throttled"], counters["put_deferred"]) == (0, len(keys) - limit)
            files.clear()

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


@pytest.mark.usefixtures("embedded_or_attached")
class TestClose:
    def test_closing_writes_down_what_waits(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = prompt(space_of(store), 1, 30)
            put(store, keys)
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            space_of(store)
            assert tiers(store, keys) == ["ssd"] * 30

    def test_closing_twice_is_closing_once(self, tmp_path: Path) -> None:
        store = kvdepot.open(**settings(tmp_path / "kv"))
        assert store.close()
        assert store.close()

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        store = kvdepot.open(**settings(tmp_path / "kv"))
        space = space_of(store)
        key = prompt(space, 1, 1)[0]
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.put_many([key], [bytes(BLOCK)])[0],
            lambda: store.put_many([key], [bytes(BLOCK)]),
            lambda: store.get_many([key], [bytearray(BLOCK)])[0],
            lambda: store.get_many([key], [bytearray(BLOCK)]),
            lambda: store.match([key]),
            lambda: store.lease([key]),
            lambda: touch(store, [key]),
            lambda: store.remove(key),
            lambda: store.remove(namespace=space),
            lambda: space_of(store),
            store.flush,
            store.admin.check,
            store.stats,
        ]
        for call in calls:
            with pytest.raises(StoreClosedError, match="closed"):
                call()

    def test_a_lease_may_outlive_the_store(self, tmp_path: Path) -> None:
        store = kvdepot.open(**settings(tmp_path / "kv"))
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        lease = store.lease(keys)
        view = lease.view(0)
        assert view is not None
        assert store.close()
        assert view == payload_for(keys[0], BLOCK), "a view keeps its memory"
        lease.release()
        view.release()


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
