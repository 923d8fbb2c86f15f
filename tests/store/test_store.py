"""The store through its public face, as somebody types it who has only read the README."""

import threading
import time
from pathlib import Path

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


class TestLayers:
    """Five layers of 30,001 bytes: three of them share a checksum, none ends on a page."""

    LAYOUT = kvdepot.KVLayout.opaque(5 * 30001, TOKENS, 5)

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
