"""Drives are added, drained and resized while the store is in use."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import settings
from tests.support.waiting import until

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.index.table import NONE
from kvdepot.store.move import mover
from kvdepot.store.move.drain import MoveAway
from kvdepot.store.move.mover import PIECE_BYTES
from kvdepot.store.open import assemble
from kvdepot.store.read.reader import VolumeReads
from kvdepot.store.state.background_throttle import ChunkSizer
from kvdepot.store.state.state import TEMPORARY
from kvdepot.store.store import Store
from kvdepot.store.volume_entry import VolumeEntry
from kvdepot.store.volume_set import VolumeSet
from kvdepot.testing.emulation import DriveModel, open_emulated
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall

pytestmark = pytest.mark.usefixtures("quick_watchdog")


def two_drives(folder: Path, **ssd: Any) -> dict[str, Any]:
    paths = [str(folder / "a"), str(folder / "b")]
    tree = settings(folder, ssd={"path": paths, "capacity": "16MiB", "promote": False, **ssd})
    del tree["hdd"]
    return tree


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvdepot.open(**two_drives(tmp_path)) as opened:
        yield opened
        assert opened.admin.check().ok


def fill(store: Store, first: int, prompts: int) -> list[list[BlockKey]]:
    space = space_of(store)
    found = [prompt(space, number, 5) for number in range(first, first + prompts)]
    for keys in found:
        assert all(put(store, keys))
        assert store.flush()
    return found


def whole(store: Store, chains: list[list[BlockKey]]) -> list[bool]:
    return [None not in tiers(store, keys) for keys in chains]


def drive(store: Store, number: int) -> dict[str, Any]:
    found: dict[str, Any] = store.stats()["tiers"]["ssd"]["drives"][number]
    return found


class TestDrain:
    def test_the_last_drive_that_works_does_not_go(self, tmp_path: Path) -> None:
        """The one that is away may have blocks that were removed meanwhile; only this one knows."""
        (tmp_path / "b").touch()
        with kvdepot.open(**two_drives(tmp_path)) as store:
            chains = fill(store, 0, 2)
            with pytest.raises(ConfigError, match="no other volume is up"):
                store.volumes.drain("ssd", tmp_path / "a")
            assert all(whole(store, chains))

    def test_it_ends_with_the_store_also_where_a_write_stalls(self, tmp_path: Path) -> None:
        stall = Stall()
        files = FaultyFiles(faults=[])
        tree = two_drives(tmp_path, write_timeout=60.0)
        store = assemble(load(overrides=tree), files=files)
        fill(store, 0, 2)
        on_a = lambda operation: operation.path.startswith(str(tmp_path / "a"))  # noqa: E731
        fault = files.add(Fault(Call.RUN_WRITE, stall, times=None, where=on_a))
        for number in range(2, 12):
            put(store, prompt(space_of(store), number, 5))
        until(lambda: fault.hits > 0)

        def drain() -> None:
            with contextlib.suppress(StoreClosedError):
                store.volumes.drain("ssd", tmp_path / "a")

        draining = threading.Thread(target=drain)
        draining.start()
        until(lambda: drive(store, 0)["draining"])
        closing = threading.Thread(target=store.close, args=(0.2,))
        closing.start()
        draining.join(20.0)
        assert not draining.is_alive()
        files.clear()
        closing.join()

    def test_everything_is_on_the_other_drive_then(self, store: Store, tmp_path: Path) -> None:
        chains = fill(store, 0, 20)
        assert drive(store, 0)["segments"] > 0
        assert store.volumes.drain("ssd", tmp_path / "a") > 0
        assert drive(store, 0)["draining"]
        assert not list((tmp_path / "a").glob("segment-*"))
        assert whole(store, chains) == [True] * 20
        assert whole(store, fill(store, 100, 3)) == [True] * 3
        assert store.flush()

    def test_a_block_that_moves_before_its_turn_is_read_where_it_is_then(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chains = fill(store, 0, 10)
        read_waves = VolumeReads._read_waves

        def after_the_drain(reads: VolumeReads, *args: Any) -> None:
            monkeypatch.undo()
            store.volumes.drain("ssd", tmp_path / "a")
            read_waves(reads, *args)

        monkeypatch.setattr(VolumeReads, "_read_waves", after_the_drain)
        assert whole(store, chains) == [True] * 10
        assert drive(store, 0)["draining"]

    def test_while_others_read_and_write(self, store: Store, tmp_path: Path) -> None:
        chains = fill(store, 0, 10)
        stop = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not stop.is_set():
                    assert whole(store, chains) == [True] * 10
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        store.volumes.drain("ssd", tmp_path / "a")
        added = fill(store, 100, 5)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert whole(store, chains + added) == [True] * 15

    def test_the_rest_is_a_whole_store(self, tmp_path: Path) -> None:
        with kvdepot.open(**two_drives(tmp_path)) as store:
            chains = fill(store, 0, 15)
            removed = chains.pop()
            store.volumes.drain("ssd", tmp_path / "a")
            store.remove(removed)
        left = two_drives(tmp_path, path=str(tmp_path / "b"))
        with kvdepot.open(**left) as store:
            space_of(store)
            assert whole(store, chains) == [True] * 14
            assert len(store.match(removed)) == 0

    def test_the_last_drive_stays(self, store: Store, tmp_path: Path) -> None:
        store.volumes.drain("ssd", tmp_path / "a")
        with pytest.raises(ConfigError, match="no other volume"):
            store.volumes.drain("ssd", tmp_path / "b")
        with pytest.raises(ConfigError, match="not one of"):
            store.volumes.drain("ssd", tmp_path / "c")
        with pytest.raises(ConfigError, match="no such tier"):
            store.volumes.drain("hdd", tmp_path / "c")

    def test_closing_the_store_ends_it_and_nothing_is_lost(self, tmp_path: Path) -> None:
        slow = DriveModel(read_bandwidth=2 * 10**6, write_bandwidth=10**8, seek=0.001)
        store = open_emulated({"ssd": slow}, **two_drives(tmp_path))
        chains = fill(store, 0, 20)
        raised: list[BaseException] = []

        def drain() -> None:
            try:
                store.volumes.drain("ssd", tmp_path / "a")
            except StoreClosedError as error:
                raised.append(error)

        thread = threading.Thread(target=drain)
        thread.start()
        while not drive(store, 0)["draining"]:
            time.sleep(0.001)
        assert store.close().ok
        thread.join()
        assert [str(tmp_path / "a") in str(error) for error in raised] == [True]
        with kvdepot.open(**two_drives(tmp_path)) as store:
            space_of(store)
            assert whole(store, chains) == [True] * 20
            assert store.admin.check().ok

    def test_a_path_may_be_written_in_another_way(self, store: Store, tmp_path: Path) -> None:
        fill(store, 0, 4)
        (tmp_path / "link").symlink_to(tmp_path / "a")
        assert store.volumes.drain("ssd", tmp_path / "link") >= 0
        assert drive(store, 0)["drained"]


class TestManyChanges:
    """Drives come and go for weeks: descriptors and threads do not add up."""

    def test_descriptors_and_threads_stay_as_many(self, tmp_path: Path) -> None:
        with kvdepot.open(**two_drives(tmp_path)) as store:
            paths = [tmp_path / "a", tmp_path / "b"]
            fill(store, 0, 6)
            seen = []
            for number in range(24):
                if number % 2:
                    store.volumes.resize("ssd", "8MiB")
                    store.volumes.resize("ssd", "16MiB")
                else:
                    paths.append(tmp_path / f"drive-{number}")
                    store.volumes.add("ssd", paths[-1])
                    gone = paths.pop(0)
                    store.volumes.drain("ssd", gone)
                    assert not open_below(gone)
                chains = fill(store, 10 * number, 2)
                store.inspect().drop_from_memory()
                assert whole(store, chains) == [True] * 2
                seen.append(spare_descriptors())
            assert max(seen[4:]) <= max(seen[:4]), seen
            names = [thread.name.partition("_")[0] for thread in threading.enumerate()]
            ours = {name for name in names if name.startswith("kvdepot-ssd")}
            assert len(ours) <= 3 * 3, "two writers and a pool of readers for each of three drives"
            assert store.admin.check().ok

    def test_a_drained_drive_can_be_added_again(self, store: Store, tmp_path: Path) -> None:
        chains = fill(store, 0, 10)
        for name in ("a", "b", "a"):
            store.volumes.drain("ssd", tmp_path / name)
            store.volumes.add("ssd", tmp_path / name)
        assert len(store.stats()["tiers"]["ssd"]["drives"]) == 2
        assert whole(store, chains + fill(store, 100, 5)) == [True] * 15


def targets() -> list[str]:
    """What the descriptors of this process point to."""
    folder, found = Path("/proc/self/fd"), []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(folder / name))
    return found


def open_below(path: Path) -> list[str]:
    return [target for target in targets() if target.startswith(f"{path}/")]


def spare_descriptors() -> int:
    """Neither of a segment that there is nor of a ring of the I/O engine."""
    used = [target for target in targets() if "io_uring" in target or "segment-" in target]
    return len(targets()) - len(used) + sum("(deleted)" in target for target in used)


class TestAdd:
    def test_a_new_drive_takes_its_share(self, tmp_path: Path) -> None:
        with kvdepot.open(**two_drives(tmp_path)) as store:
            before = fill(store, 0, 4)
            room = store.stats()["tiers"]["ssd"]["capacity_bytes"]
            store.volumes.add("ssd", tmp_path / "c")
            assert store.stats()["tiers"]["ssd"]["capacity_bytes"] == room * 3 // 2
            chains = fill(store, 100, 30)
            assert drive(store, 2)["segments"] > 0
            store.volumes.drain("ssd", tmp_path / "a")
            assert whole(store, before + chains) == [True] * 34
            assert store.admin.check().ok
        moved = two_drives(tmp_path, path=[str(tmp_path / "b"), str(tmp_path / "c")])
        with kvdepot.open(**moved) as store:
            space_of(store)
            assert whole(store, before + chains) == [True] * 34

    def test_a_drive_with_something_on_it_is_refused(self, store: Store, tmp_path: Path) -> None:
        other = two_drives(tmp_path, path=str(tmp_path / "other"))
        with kvdepot.open(**other) as another:
            fill(another, 0, 1)
        with pytest.raises(ConfigError, match="holds a store"):
            store.volumes.add("ssd", tmp_path / "other")
        with pytest.raises(ConfigError, match="in use"):
            store.volumes.add("ssd", tmp_path / "a")
        assert whole(store, fill(store, 0, 2)) == [True] * 2


class TestResize:
    def test_more_room_keeps_more(self, store: Store) -> None:
        store.volumes.resize("ssd", "32MiB")
        assert store.stats()["tiers"]["ssd"]["capacity_bytes"] == 32 << 20
        assert whole(store, fill(store, 0, 100)) == [True] * 100, "20 MB"

    def test_less_room_is_given_back(self, store: Store, tmp_path: Path) -> None:
        chains = fill(store, 0, 60)
        store.volumes.resize("ssd", "6MiB")
        files = [*(tmp_path / "a").glob("segment-*"), *(tmp_path / "b").glob("segment-*")]
        assert sum(file.stat().st_size for file in files) <= 6 << 20
        assert 5 <= sum(len(store.match(keys)) == 5 for keys in chains) < 40
        assert whole(store, fill(store, 100, 3)) == [True] * 3

    @pytest.mark.parametrize("first", ["resized", "pulled"])
    def test_a_drive_that_was_away_has_its_new_room(self, tmp_path: Path, first: str) -> None:
        quick = {"retry_initial": 0.01, "retry_max": 0.05}
        with kvdepot.open(**two_drives(tmp_path, **quick)) as store:
            volumes = store.inspect().volumes
            if first == "resized":
                store.volumes.resize("ssd", "40MiB")
                chains = fill(store, 0, 100)
            (tmp_path / "b").rename(tmp_path / "hidden")
            (tmp_path / "b").write_text("in the way")
            until(lambda: volumes.facts(1).lost)
            if first == "pulled":
                store.volumes.resize("ssd", "40MiB")
            (tmp_path / "b").unlink()
            (tmp_path / "hidden").rename(tmp_path / "b")
            until(lambda: not volumes.down)
            assert drive(store, 1)["capacity_bytes"] == 20 << 20
            if first == "resized":
                until(lambda: all(whole(store, chains)))  # 20 MB, where the settings say 16
            assert store.admin.check().ok

    def test_too_little_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="3 segments"):
            store.volumes.resize("ssd", "1MiB")
        with pytest.raises(ConfigError, match="is not a size"):
            store.volumes.resize("ssd", "much")
        with pytest.raises(
            ConfigError, match="memory tiers cannot change while the store is open"
        ) as caught:
            store.volumes.resize("dram", "1GiB")
        assert "restart" in caught.value.hint


def test_what_is_written_to_a_drive_while_it_is_added_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, written = VolumeSet.add, []

    def add_and_fill(volumes: VolumeSet, *arguments: Any) -> VolumeEntry:
        entry = add(volumes, *arguments)
        written.extend(fill(store, 100, 12))
        return entry

    monkeypatch.setattr(VolumeSet, "add", add_and_fill)
    store.volumes.add("ssd", tmp_path / "c")
    assert drive(store, 2)["used_bytes"], "nothing went to the new drive"
    store.inspect().drop_from_memory()
    assert whole(store, written) == [True] * 12
    assert store.admin.check().ok


def test_a_move_does_not_wait_for_staging_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads may hold all of it until this one has made room for them, and room is told of
    again and again.
    """
    monkeypatch.setattr(mover, "_STAGING_S", 0.2)
    keys = [key for chain in fill(store, 0, 4) for key in chain]
    view = store.inspect()
    state, done = view.state, threading.Event()
    (lower,) = state.lower_tiers
    left: list[int] = []
    with state.lock:
        rows = [row for row in view.rows(keys) if lower.place_on(row, 0) != NONE]
        taken = list(iter(lambda: state.staging.allocate(50_000, TEMPORARY), None))
    assert rows and taken

    def move() -> None:
        mover = view.drives.mover
        job, size = MoveAway(state, lower, 0), ChunkSizer(PIECE_BYTES)
        left.extend(mover.copy_all(job, rows, lambda: [1], size=size))
        done.set()

    moving = threading.Thread(target=move)
    moving.start()
    for _ in range(400):
        with state.lock:
            state.lock.room.notify_all()
        if done.wait(0.05):
            break
    ended = done.is_set()
    with state.lock:
        for slot in taken:
            state.staging.free(slot)
        state.lock.room.notify_all()
    moving.join()
    assert ended and left == rows


class TestSmallerWhileLeased:
    """Leases hold up a resize: it ends after them, and removals are recorded meanwhile."""

    def test_it_shrinks_when_the_leases_have_ended(self, tmp_path: Path) -> None:
        tree = two_drives(tmp_path, path=str(tmp_path / "a"), capacity="8MiB")
        with kvdepot.open(**tree) as store:
            assert isinstance(store, Store)
            chains = fill(store, 0, 40)
            store.inspect().drop_from_memory()
            before = drive(store, 0)["segments"]
            leases = [store.lease(keys) for keys in chains]
            held = [key for lease in leases for key in lease]
            assert before > 28 and len(held) > 100
            store.volumes.resize("ssd", "4MiB")
            assert drive(store, 0)["segments"] > 16
            removed = held[:108]
            for key in removed:
                assert store.remove(key) == 1
            assert store.stats()["counters"]["removal_unrecorded"] == 0
            assert drive(store, 0)["segments"] <= before + 2
            for lease in leases:
                lease.release()
            until(lambda: len(list((tmp_path / "a").glob("segment-*"))) <= 16)

            def slots() -> int:  # one that becomes free in between is counted twice
                shrunk = drive(store, 0)
                return int(shrunk["segments"] + shrunk["free_segments"])

            until(lambda: slots() <= 16)
            assert store.admin.check().ok
        with kvdepot.open(**{**tree, "ssd": {**tree["ssd"], "capacity": "4MiB"}}) as store:
            space_of(store)
            assert not any(store.match([key]).tiers for key in removed), "removed blocks are back"

    def test_it_does_not_move_the_same_blocks_round_and_round(self, tmp_path: Path) -> None:
        """Two leased blocks and notes need two segments, and neither is half full of leases."""
        segment = 64 << 10
        tree = two_drives(tmp_path, path=str(tmp_path / "a"), capacity=8 * segment, segment=segment)
        with kvdepot.open(**tree) as store:
            large = Namespace(model="large", layout=KVLayout.opaque(20_480, 4))
            small = Namespace(model="small", layout=KVLayout.opaque(4_096, 4))
            for space in (large, small):
                store.namespace(space)
            keys = [large.keys([number] * 4)[0] for number in range(7)]
            for key in keys:
                assert store.put_many([key], [bytes(20_480)]) == [PutResult.STORED]
                assert store.flush()
            leases = [store.lease([keys[1]]), store.lease([keys[3]])]
            for number in range(4):
                store.remove(small.keys([number] * 4)[0])
            resizing = threading.Thread(target=store.volumes.resize, args=("ssd", 3 * segment))
            resizing.start()
            resizing.join(20.0)
            hung = resizing.is_alive()
            reclaimed = store.stats()["counters"]["reclaimed_segments"]
            for lease in leases:
                lease.release()
            resizing.join()
            assert not hung and reclaimed < 30
            until(lambda: len(list((tmp_path / "a").glob("segment-*"))) <= 3)
            assert store.admin.check().ok
