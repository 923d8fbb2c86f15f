"""The laws of filling and reading blocks in place, for every store; see store_contract."""

from collections.abc import Iterator

import pytest

from kvdepot.core.block import BlockKey, Put
from kvdepot.core.depot import Arrival, Depot
from kvdepot.errors import KeyFormatError, LeaseError
from kvdepot.native import address_of
from kvdepot.testing.images import payload_for
from kvdepot.testing.store_contract import (
    BLOCK_BYTES,
    WAIT_S,
    OpenDepot,
    flood,
    prompt,
    put,
    space_of,
    spoil,
)


def fill(store: Depot, keys: list[BlockKey]) -> list[Put]:
    with store.reserve(keys, timeout_s=WAIT_S) as slots:
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
            assert arrival.view.readonly
            assert address_of(arrival.view)[0] % 4096 == 0
            self.got[arrival.index] = bytes(arrival.view)
            if arrival.lasting:
                self.lasting[arrival.index] = arrival.view


def expected(keys: list[BlockKey]) -> dict[int, bytes]:
    return {index: payload_for(key, BLOCK_BYTES) for index, key in enumerate(keys)}


class InPlaceContract:
    """Laws every store obeys."""

    @pytest.fixture
    def store(self, depot: OpenDepot) -> Iterator[Depot]:
        with depot() as opened:
            yield opened

    def test_what_is_filled_in_place_is_read_back_in_place(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 8)
            assert fill(store, keys) == [Put.STORED] * 8
            assert fill(store, keys) == [Put.PRESENT] * 8
            assert self.delivered(store, keys) == ["dram"] * 8
        with depot() as store:
            space_of(store)
            assert self.delivered(store, keys) == ["ssd"] * 8
            assert self.delivered(store, keys) == ["dram"] * 8
            assert store.check()

    def delivered(self, store: Depot, keys: list[BlockKey]) -> list[str | None]:
        sink = Collector()
        with store.lease(keys) as lease:
            answers = lease.deliver(sink, timeout_s=WAIT_S)
        assert sink.got == expected(keys)
        return [answer.tier for answer in answers]

    def test_views_lie_in_the_memory_that_the_store_names(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 3)
        ranges = [address_of(part) for part in store.memory]
        with store.reserve(keys) as slots:
            for index in range(3):
                view = slots.view(index)
                assert view is not None
                at, nbytes = address_of(view, writable=True)
                assert nbytes == BLOCK_BYTES and at % 4096 == 0
                assert any(a <= at and at + nbytes <= a + length for a, length in ranges)

    def test_what_is_not_sealed_is_given_back(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 4)
        used = store.stats()["tiers"]["dram"]["used_bytes"]
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
        assert store.remove(keys) == 4
        assert store.flush()
        assert store.stats()["tiers"]["dram"]["used_bytes"] == used
        assert store.check()

    def test_an_error_while_filling_leaves_nothing_behind(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 4)
        with pytest.raises(ZeroDivisionError), store.reserve(keys):
            raise ZeroDivisionError
        assert not len(store.match(keys))
        assert store.stats()["tiers"]["dram"]["used_bytes"] == 0
        assert store.check()

    def test_a_reservation_takes_what_fits_and_throttles_the_rest(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 100)
        with store.reserve(keys, timeout_s=0.0) as slots:
            stored = slots.outcomes.count(Put.STORED)
            assert 10 <= stored <= 60
            assert slots.outcomes == [Put.STORED] * stored + [Put.THROTTLED] * (100 - stored)
            assert slots.view(stored) is None
            assert len(slots) == 100

    def test_sealing_twice_or_what_was_not_reserved_is_an_error(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 2)
        with store.reserve(keys) as slots:
            for index in range(2):
                view = slots.view(index)
                assert view is not None
                view[:] = payload_for(keys[index], BLOCK_BYTES)
            slots.seal([0])
            for wrong in (0, 7):
                with pytest.raises(LeaseError):
                    slots.seal([wrong])
        with pytest.raises(KeyFormatError):
            store.reserve([BlockKey(bytes(32))])

    def test_part_of_a_lease(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 6)
        fill(store, keys)
        sink = Collector()
        with store.lease(keys) as lease:
            assert len(lease.deliver(sink, start=2, stop=5)) == 3
            assert sorted(sink.got) == [2, 3, 4]
            assert sink.got[2] == payload_for(keys[2], BLOCK_BYTES)
            assert lease.deliver(sink, start=4, stop=4) == []
        with pytest.raises(LeaseError):
            lease.deliver(sink)

    def test_a_view_appears_when_the_block_comes_to_memory(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 2)
            fill(store, keys)
        with depot() as store:
            space_of(store)
            with store.lease(keys) as lease:
                assert lease.view(1) is None
                assert all(lease.deliver(Collector()))
                view = lease.view(1)
                assert view is not None
                assert view == payload_for(keys[1], BLOCK_BYTES)

    def test_lasting_views_stay_right_while_others_need_room(self, store: Depot) -> None:
        space = space_of(store)
        keys = prompt(space, 1, 6)
        fill(store, keys)
        assert store.flush()
        flood(store, space, 120)
        sink = Collector()
        with store.lease(keys) as lease:
            assert all(lease.deliver(sink, timeout_s=WAIT_S))
            assert sink.lasting
            flood(store, space_of(store, "other"), 120)
            for index, view in sink.lasting.items():
                assert bytes(view) == payload_for(keys[index], BLOCK_BYTES)
        assert store.check()

    def test_more_than_the_memory_can_hold_is_delivered_all_the_same(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 120)
        for start in range(0, 120, 10):
            assert all(put(store, keys[start : start + 10]))
        assert store.flush()
        sink = Collector()
        with store.lease(keys) as lease:
            assert len(lease) == 120
            assert all(lease.deliver(sink, timeout_s=WAIT_S))
        assert sink.got == expected(keys)
        assert len(sink.lasting) < 120
        assert store.stats()["staging_bytes"] == 0
        assert store.check()

    def test_damage_in_memory_is_seen_only_when_asked_for(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 2)
        fill(store, keys)
        assert store.flush()
        spoil(store, payload_for(keys[1], BLOCK_BYTES))
        with store.lease(keys) as lease:
            assert all(lease.deliver(lambda _: None, verify=False))
            sink = Collector()
            answers = lease.deliver(sink)
            assert answers[0] and not answers[1] and answers[1].reason == "corrupt"
            assert list(sink.got) == [0]

    def test_what_the_sink_raises_is_passed_on_and_nothing_is_held(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 100)
            for start in range(0, 100, 10):
                assert all(put(store, keys[start : start + 10]))
        with depot() as store:
            space_of(store)

            def refuse(arrivals: list[Arrival]) -> None:
                raise ZeroDivisionError

            with store.lease(keys) as lease:
                with pytest.raises(ZeroDivisionError):
                    lease.deliver(refuse, timeout_s=WAIT_S)
                sink = Collector()
                assert all(lease.deliver(sink, timeout_s=WAIT_S))
                assert sink.got == expected(keys)
            assert store.stats()["leased"] == 0
            assert store.check()
