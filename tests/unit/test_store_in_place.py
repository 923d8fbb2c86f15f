"""Offloading and onboarding without a copy: reserved slots, and blocks read where they lie."""

import errno
import threading
from pathlib import Path

import pytest

import kvdepot
from kvdepot.core.block import Put
from kvdepot.core.config import load
from kvdepot.errors import KeyFormatError, LeaseError
from kvdepot.native import address_of
from kvdepot.store.opening import assemble
from kvdepot.store.reader import Arrival
from kvdepot.store.space import Space
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles
from kvdepot.testing.images import payload_for

TOKENS = 4
BLOCK_BYTES = 96 << 10
LAYOUT = kvdepot.KVLayout.opaque(BLOCK_BYTES, TOKENS, 3)


def config(path: Path | None, dram: int = 4 << 20) -> kvdepot.Config:
    parts: dict[str, object] = {
        "dram": {"capacity": dram, "huge_pages": "never", "prefault": False},
        "writeback": {"staging": 1 << 20},
    }
    if path is not None:
        parts["ssd"] = {"path": str(path), "capacity": "64MiB", "segment": "1MiB"}
    return load(overrides=parts)


def space_of(store: Store) -> Space:
    return store.namespace(model="m", layout=LAYOUT)


def keys_of(space: Space, blocks: int, first: int = 0) -> list[kvdepot.BlockKey]:
    return space.keys([first, *range(1, blocks * TOKENS)])


def fill(store: Store, keys: list[kvdepot.BlockKey]) -> list[Put]:
    with store.reserve(keys) as slots:
        for index, key in enumerate(keys):
            view = slots.view(index)
            if view is not None:
                view[:] = payload_for(key, BLOCK_BYTES)
        slots.seal()
        return slots.outcomes


class Collector:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.got: dict[int, bytes] = {}
        self.lasting: dict[int, memoryview] = {}
        self.calls = 0

    def __call__(self, arrivals: list[Arrival]) -> None:
        self.calls += 1
        for arrival in arrivals:
            self.got[arrival.index] = bytes(arrival.view)
            if arrival.lasting:
                self.lasting[arrival.index] = arrival.view


def expected(keys: list[kvdepot.BlockKey]) -> dict[int, bytes]:
    return {index: payload_for(key, BLOCK_BYTES) for index, key in enumerate(keys)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return assemble(config(tmp_path / "kv"))


def test_what_is_filled_in_place_is_read_back_after_a_restart(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = keys_of(space_of(store), 8)
        assert fill(store, keys) == [Put.STORED] * 8
        assert store.stats()["counters"]["put_stored"] == 8
        assert store.flush()
    with assemble(config(tmp_path / "kv")) as store:
        space_of(store)
        sink = Collector()
        with store.lease(keys) as lease:
            answers = lease.deliver(sink)
        assert [answer.tier for answer in answers] == ["ssd"] * 8
        assert sink.got == expected(keys)


def test_views_lie_in_the_memory_that_the_store_names(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 3)
        ranges = [address_of(part) for part in store.memory]
        with store.reserve(keys) as slots:
            for index in range(3):
                view = slots.view(index)
                assert view is not None
                at, nbytes = address_of(view, writable=True)
                assert nbytes == BLOCK_BYTES and at % 4096 == 0
                assert any(
                    start <= at and at + nbytes <= start + length for start, length in ranges
                )


def test_what_is_not_sealed_is_given_back(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 4)
        with store.reserve(keys) as slots:
            for index in range(2):
                view = slots.view(index)
                assert view is not None
                view[:] = payload_for(keys[index], BLOCK_BYTES)
            slots.seal([0, 1])
            assert slots.view(0) is None
        assert len(store.match(keys)) == 2
        assert store.stats()["counters"]["put_stored"] == 2
        assert fill(store, keys) == [Put.PRESENT] * 2 + [Put.STORED] * 2
        assert store.check().ok


def test_an_error_while_filling_leaves_nothing_behind(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 4)
        used = store.stats()["tiers"]["dram"]["used_bytes"]
        with pytest.raises(ZeroDivisionError), store.reserve(keys):
            raise ZeroDivisionError
        assert not len(store.match(keys))
        assert store.stats()["tiers"]["dram"]["used_bytes"] == used
        assert store.check().ok


def test_a_reservation_takes_what_fits_and_throttles_the_rest() -> None:
    with assemble(config(None, dram=1 << 20)) as store:
        keys = keys_of(space_of(store), 40)
        with store.reserve(keys, timeout_s=0.0) as slots:
            stored = slots.outcomes.count(Put.STORED)
            assert 5 <= stored <= 10
            assert slots.outcomes == [Put.STORED] * stored + [Put.THROTTLED] * (40 - stored)
            assert slots.view(stored) is None
            with store.reserve(keys[stored:], timeout_s=0.0) as more:
                assert more.outcomes == [Put.THROTTLED] * (40 - stored)


def test_sealing_twice_or_what_was_not_reserved_is_an_error(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 2)
        with store.reserve(keys) as slots:
            slots.seal([0])
            with pytest.raises(LeaseError):
                slots.seal([0])
            with pytest.raises(LeaseError):
                slots.seal([7])
        with pytest.raises(KeyFormatError):
            store.reserve([kvdepot.BlockKey(bytes(32))])


def test_memory_comes_first_then_the_disk(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = keys_of(space_of(store), 6)
        fill(store, keys)
        assert store.flush()
    with assemble(config(tmp_path / "kv")) as store:
        space_of(store)
        target = bytearray(BLOCK_BYTES)
        assert store.get(keys[4], target)
        sink = Collector()
        with store.lease(keys) as lease:
            answers = lease.deliver(sink)
            assert sink.got == expected(keys)
            assert {index: bytes(view) for index, view in sink.lasting.items()} == expected(keys)
        assert [answer.tier for answer in answers] == ["ssd"] * 4 + ["dram", "ssd"]
        assert next(iter(sink.got)) == 4
        assert sink.calls >= 2


def test_lasting_views_stay_right_while_others_need_room(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv", dram=1 << 20)) as store:
        space = space_of(store)
        keys = keys_of(space, 4)
        fill(store, keys)
        assert store.flush()
        for number in range(1, 6):
            fill(store, keys_of(space, 6, first=number))
            assert store.flush()
        sink = Collector()
        with store.lease(keys) as lease:
            assert all(lease.deliver(sink))
            assert sink.lasting
            for number in range(6, 12):
                fill(store, keys_of(space, 6, first=number))
                assert store.flush()
            for index, view in sink.lasting.items():
                assert bytes(view) == payload_for(keys[index], BLOCK_BYTES)
        assert store.check().ok


def test_more_than_the_memory_can_hold_is_delivered_all_the_same(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv", dram=1 << 20)) as store:
        keys = keys_of(space_of(store), 40)
        for start in range(0, 40, 4):
            fill(store, keys[start : start + 4])
            assert store.flush()
        sink = Collector()
        with store.lease(keys) as lease:
            assert len(lease) == 40
            assert all(lease.deliver(sink))
        assert sink.got == expected(keys)
        assert len(sink.lasting) < 40
        assert store.check().ok


def test_part_of_a_lease(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 6)
        fill(store, keys)
        sink = Collector()
        with store.lease(keys) as lease:
            assert len(lease.deliver(sink, start=2, stop=5)) == 3
        assert sorted(sink.got) == [2, 3, 4]
        assert sink.got[2] == payload_for(keys[2], BLOCK_BYTES)
        with pytest.raises(LeaseError):
            lease.deliver(sink)


def test_damage_in_memory_is_seen_only_when_asked_for(store: Store) -> None:
    with store:
        keys = keys_of(space_of(store), 2)
        fill(store, keys)
        assert store.flush()
        with store.lease(keys) as lease:
            view = lease.view(1)
            assert view is not None
            at = address_of(view)[0] - address_of(store.memory[0])[0]
            store.memory[0][at] ^= 1
            assert all(lease.deliver(Collector(), verify=False))
            sink = Collector()
            answers = lease.deliver(sink)
            assert answers[0] and not answers[1] and answers[1].reason == "corrupt"
            assert list(sink.got) == [0]


def test_what_the_sink_raises_is_passed_on_and_nothing_is_held(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = keys_of(space_of(store), 30)
        for start in range(0, 30, 10):
            assert fill(store, keys[start : start + 10]) == [Put.STORED] * 10
            assert store.flush()
    with assemble(config(tmp_path / "kv", dram=2 << 20)) as store:
        space_of(store)

        def refuse(arrivals: list[Arrival]) -> None:
            raise ZeroDivisionError

        with store.lease(keys) as lease:
            with pytest.raises(ZeroDivisionError):
                lease.deliver(refuse)
            sink = Collector()
            assert all(lease.deliver(sink))
            assert sink.got == expected(keys)
        assert store.check().ok
        assert store.stats()["tiers"]["dram"]["used_bytes"] <= 2 << 20


def test_a_failing_disk_costs_only_what_is_on_it(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = keys_of(space_of(store), 6)
        fill(store, keys)
        assert store.flush()
    files = FaultyFiles("auto", faults=[])
    with assemble(config(tmp_path / "kv"), files=files) as store:
        space_of(store)
        target = bytearray(BLOCK_BYTES)
        assert store.get(keys[0], target)
        with store.lease(keys) as lease:
            files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
            sink = Collector()
            answers = lease.deliver(sink, timeout_s=5.0)
        assert answers[0] and not any(answers[1:])
        assert {answer.reason for answer in answers[1:]} == {"failed"}
        assert list(sink.got) == [0]


def test_close_waits_for_a_reservation(store: Store) -> None:
    keys = keys_of(space_of(store), 1)
    slots = store.reserve(keys)
    closed = threading.Event()

    def close() -> None:
        store.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.2)
    slots.close()
    thread.join(30.0)
    assert closed.is_set()
