"""Two memories: blocks go down before room is needed, are served where they lie, and come up."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.cxl_world import MIB, damage, fill, opened, places, settings, settle
from tests.support.store_contract import BLOCK_BYTES, LAYERS, prompt, put, space_of, tiers
from tests.support.stores import counter

import kvdepot
from kvdepot.core.depot import Arrival
from kvdepot.native import address_of
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for

LAYER_BYTES = BLOCK_BYTES // LAYERS


@pytest.fixture
def store() -> Iterator[Store]:
    with kvdepot.open(**settings()) as depot:
        yield depot
        settle(depot)
        assert depot.admin.check().findings == []
        assert depot.stats()["leased"] == 0


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "kv") as depot:
        yield depot
        settle(depot)
        assert depot.admin.check().findings == []


class TestDown:
    def test_nothing_is_lost_while_the_slower_memory_has_room(self, store: Store) -> None:
        everything = fill(store, 10)
        tiers_of = [store.match(keys).tiers for keys in everything]
        assert all(len(found) == 10 for found in tiers_of)
        assert tiers_of[0] == ("cxl",) * 10
        assert tiers_of[-1] == ("dram",) * 10
        for keys in everything:
            assert None not in tiers(store, keys)
        assert counter(store, "get_cxl") >= 50
        assert counter(store, "evicted_cxl") == 0

    def test_some_of_the_first_memory_is_free_before_it_is_asked_for(self, store: Store) -> None:
        fill(store, 12)
        dram = store.stats()["tiers"]["dram"]
        assert dram["capacity_bytes"] - dram["used_bytes"] >= dram["capacity_bytes"] // 64

    def test_a_block_is_in_one_of_the_memories_only(self, store: Store) -> None:
        everything = fill(store, 12)
        assert all(len(found) == 1 for keys in everything for found in places(store, keys))

    def test_tails_leave_before_heads_in_both(self, store: Store) -> None:
        for keys in fill(store, 25):
            found = store.match(keys).tiers
            assert list(found) == sorted(found, key=["dram", "cxl"].index), "no tail above a head"
            rest = keys[len(found) :]
            assert not any(len(store.match([key])) for key in rest), "no tail without its head"
        assert counter(store, "evicted_cxl") > 50

    def test_what_waits_for_the_disk_stays(self, with_disk: Store) -> None:
        fill(with_disk, 12)
        assert with_disk.flush()
        assert counter(with_disk, "write_failed") == 0
        assert counter(with_disk, "written") == 120

    def test_what_is_in_use_stays_where_it_is_seen(self, store: Store) -> None:
        (keys,) = fill(store, 1, first=7)
        with store.lease(keys) as lease:
            views = [lease.view(index) for index in range(10)]
            fill(store, 25)
            for key, view in zip(keys, views, strict=True):
                assert view is not None and view == payload_for(key, BLOCK_BYTES)
                view.release()

    def test_what_is_in_use_below_stays_too(self, store: Store) -> None:
        everything = fill(store, 12)
        keys = everything[0]
        with store.lease(keys) as lease:
            views = [lease.view(index) for index in range(10)]
            for round_ in range(3):
                tiers(store, keys)
                fill(store, 25, first=1000 * (round_ + 1))
            for key, view in zip(keys, views, strict=True):
                assert view is not None and view == payload_for(key, BLOCK_BYTES)
                view.release()

    def test_other_sizes_find_room_too(self, store: Store) -> None:
        fill(store, 25)
        large = store.namespace(model="large", layout=kvdepot.KVLayout.opaque(150_000, 8, 2))
        keys = large.keys(range(8 * 12))
        for key in keys:
            assert store.put_many([key], [payload_for(key, 150_000)], timeout_s=5.0)[0]
            settle(store)
        for key in keys:
            target = bytearray(150_000)
            if store.get_many([key], [target])[0]:
                assert target == payload_for(key, 150_000)
        assert len(store.match(keys)) > 5


class TestUp:
    def test_a_hit_is_served_where_it_lies(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        cxl = store.inspect().memory(1).arena
        with store.lease(keys) as lease:
            seen: list[Arrival] = []
            answers = lease.deliver(seen.extend)
            assert [answer.tier for answer in answers] == ["cxl"] * 10
            assert all(arrival.lasting for arrival in seen)
            for arrival in seen:
                at = address_of(arrival.view)[0] - cxl.address
                assert 0 <= at < cxl.memory.nbytes
                assert arrival.view == payload_for(keys[arrival.index], BLOCK_BYTES)
                arrival.view.release()

    def test_layers_and_single_blocks(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        for layer in range(LAYERS):
            target = bytearray(LAYER_BYTES)
            got = store.get_many([keys[3 + layer]], [target], layers=range(layer, layer + 1))[0]
            assert got.tier == "cxl"
            start = layer * LAYER_BYTES
            assert target == payload_for(keys[3 + layer], BLOCK_BYTES)[start : start + LAYER_BYTES]

    def test_what_comes_back_often_comes_up_and_stays(self, store: Store) -> None:
        everything = fill(store, 12)
        popular = everything[0]
        for turn in range(12):
            tiers(store, popular)
            settle(store)
            fill(store, 1, first=5000 + turn)
        assert counter(store, "promoted") >= 10
        assert store.match(popular).tiers == ("dram",) * 10

    def test_what_is_read_once_does_not_come_up(self, store: Store) -> None:
        """A scan over cold blocks leaves those in the first memory alone that come back often."""
        everything = fill(store, 12)
        popular = everything[-1]
        for turn in range(12):
            tiers(store, popular)
            fill(store, 1, first=6000 + turn)
        for keys in everything[:6]:
            tiers(store, keys[: len(store.match(keys))])
            settle(store)
        assert store.match(popular).tiers == ("dram",) * 10

    def test_hints_leave_alone_what_is_in_memory(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        assert store.prefetch(keys, 20.0).wait(60.0)
        assert store.match(keys).tiers == ("cxl",) * 10
        assert counter(store, "hinted") == 0

    def test_removed_blocks_are_gone(self, store: Store) -> None:
        everything = fill(store, 12)
        before = store.stats()["tiers"]["cxl"]["blocks"]
        assert store.remove(everything[0]) == 10
        assert store.stats()["tiers"]["cxl"]["blocks"] == before - 10
        assert tiers(store, everything[0]) == [None] * 10

    def test_removed_namespaces_are_gone(self, store: Store) -> None:
        fill(store, 12)
        assert store.remove(namespace=space_of(store)) == 120
        assert [tier["blocks"] for tier in store.stats()["tiers"].values()] == [0, 0]

    def test_removed_while_leased(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        with store.lease(keys) as lease:
            store.remove(keys)
            view = lease.view(4)
            assert view is not None and view == payload_for(keys[4], BLOCK_BYTES)
            view.release()
        assert tiers(store, keys) == [None] * 10


class TestNeverAWrongByte:
    def test_a_damaged_block_is_not_served(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        damage(store, keys[5])
        assert tiers(store, keys) == ["cxl"] * 5 + [None] + ["cxl"] * 4
        assert counter(store, "quarantined") == 1
        assert tiers(store, [keys[5]]) == [None]

    def test_the_disk_answers_instead(self, with_disk: Store) -> None:
        keys = fill(with_disk, 12)[0]
        assert places(with_disk, keys) == [["cxl", "ssd"]] * 10
        damage(with_disk, keys[5])
        assert tiers(with_disk, keys) == ["cxl"] * 5 + ["ssd"] + ["cxl"] * 4
        assert counter(with_disk, "quarantined") == 1
        assert "cxl" not in places(with_disk, [keys[5]])[0]

    @pytest.mark.parametrize("at", [20, 75, 90, 97, 194, 4096 + 9000], ids=str)
    def test_damage_goes_neither_up_nor_down(self, with_disk: Store, at: int) -> None:
        """Anywhere in a record: its head, its checksums, its payload."""
        keys = fill(with_disk, 12)[-1]
        assert places(with_disk, keys) == [["dram", "ssd"]] * 10
        damage(with_disk, keys[9], at=at, tier=0)
        fill(with_disk, 12, first=4000)
        assert "cxl" not in places(with_disk, [keys[9]])[0]
        assert counter(with_disk, "quarantined") == 1
        assert tiers(with_disk, keys)[9] in ("dram", "ssd")

    def test_check_finds_it(self, store: Store) -> None:
        keys = fill(store, 12)[0]
        assert store.admin.check()
        damage(store, keys[5])
        assert store.admin.check(deep=False).findings == []
        (finding,) = store.admin.check().findings
        assert finding.where == "cxl" and keys[5].hex() in finding.what
        damage(store, keys[5])

    def test_check_compares_the_books(self, store: Store) -> None:
        fill(store, 12)
        arena = store.inspect().memory(1).arena
        arena.used_bytes += 4096
        assert [finding.where for finding in store.admin.check(deep=False).findings] == ["cxl"]
        arena.used_bytes -= 4096

    def test_random_flips(self, tmp_path: Path, seed: int) -> None:
        """A third of all blocks below are damaged somewhere; every hit is right."""
        rng = np.random.default_rng(seed)
        with opened(tmp_path / "kv") as store:
            everything = fill(store, 12)
            keys = [
                key for some in everything for key in some if store.match([key]).tiers == ("cxl",)
            ]
            chosen = rng.choice(len(keys), len(keys) // 3, replace=False).tolist()
            for number in chosen:
                damage(store, keys[number], at=4096 + int(rng.integers(BLOCK_BYTES)))
            found = tiers(store, keys)
            assert [found[number] for number in chosen] == ["ssd"] * len(chosen)
            assert found.count("cxl") == len(keys) - len(chosen)
            settle(store)
            assert store.admin.check().findings == []


class TestLife:
    def test_stats_say_what_stands_in(self, store: Store) -> None:
        cxl = store.stats()["tiers"]["cxl"]
        assert (cxl["emulated"], cxl["source"]) == (True, "ordinary memory")
        assert cxl["capacity_bytes"] == 4 * MIB
        assert list(store.stats()["tiers"]) == ["dram", "cxl"]

    def test_all_memory_is_told_of(self, store: Store) -> None:
        assert [len(view) for view in store.memory] == [2 * MIB, 4 * MIB, 2 * MIB]

    def test_a_store_closes_in_the_middle_of_moving(self) -> None:
        for _ in range(5):
            with kvdepot.open(**settings()) as store:
                space = space_of(store)
                for number in range(12):
                    put(store, prompt(space, number, 10))

    def test_killed_and_opened_again(self, tmp_path: Path) -> None:
        """What is in memory is gone, what is on disk is there."""
        device = tmp_path / "device"
        device.write_bytes(bytes(4 * MIB))
        program = f"""
            import os, signal, sys
            from pathlib import Path
            sys.path[:0] = {sys.path!r}
            from tests.support.cxl_world import fill, opened
            store = opened(Path({str(tmp_path / "kv")!r}), path={str(device)!r})
            fill(store, 12)
            assert store.flush()
            fill(store, 3, first=900)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == -signal.SIGKILL, result.stderr[-2000:]
        with opened(tmp_path / "kv", path=str(device)) as store:
            space = space_of(store)
            assert store.stats()["tiers"]["cxl"]["blocks"] == 0
            assert store.admin.check().findings == []
            for number in range(12):
                assert tiers(store, prompt(space, 100 + number, 10)) == ["ssd"] * 10

    def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        device = tmp_path / "device"
        device.write_bytes(bytes(4 * MIB))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            kvdepot.open(**settings(path=str(device))).close()
        assert len(os.listdir("/proc/self/fd")) == before
