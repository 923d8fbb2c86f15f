"""The laws of an embedded or attached store as tests. Subclass StoreContract, define `depot`:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def depot(self, tmp_path: Path) -> OpenDepot:
            def opened(**settings: Any) -> Depot: ...
            return opened

`depot(**settings)` opens the store: a new one the first time, the same one after a close. The tests
use only the public interface. InPlaceContract tests filling and reading blocks in place.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Arrival, NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.depot import Depot
from kvdepot.errors import (
    BadBufferError,
    ConfigError,
    KeyFormatError,
    LeaseError,
    StoreClosedError,
)
from kvdepot.format.record import HEAD_BYTES
from kvdepot.native import address_of
from kvdepot.testing.images import payload_for

TOKENS: Final = 8
LAYERS: Final = 4
BLOCK_BYTES: Final = LAYERS * 8200
"""Layers end in the middle of a page and share checksums."""
LAYOUT: Final = KVLayout.opaque(BLOCK_BYTES, TOKENS, LAYERS)
WAIT_S: Final = 60.0
MANY: Final = 2000
"""More keys than one message holds."""

OpenDepot = Callable[..., Depot]


def small(path: Path) -> dict[str, Any]:
    """Settings of a store in `path` whose memory is full after some dozens of blocks, which one
    client of a daemon may hold.
    """
    return {
        "dram": {
            "capacity": 2 << 20,
            "prefault": False,
            "huge_pages": "never",
            "client_share": 1.0,
        },
        "ssd": {"path": str(path), "capacity": 16 << 20, "segment": 1 << 20},
        "writeback": {"staging": 2 << 20},
    }


def space_of(store: Depot, model: str = "contract") -> NamespaceHandle:
    return store.namespace(model=model, layout=LAYOUT)


def prompt(space: NamespaceHandle, number: int, blocks: int) -> list[BlockKey]:
    """Keys of a prompt without blocks in common with other numbers."""
    return space.keys([number, *range(1, TOKENS * blocks)])


def put(store: Depot, keys: Sequence[BlockKey]) -> list[PutResult]:
    """Put blocks with the payloads of their keys."""
    return store.put_many(keys, [payload_for(k, BLOCK_BYTES) for k in keys], timeout_s=WAIT_S)


def touch(store: Depot, keys: Sequence[BlockKey]) -> int:
    """Use the resident prefix. Returns its length."""
    with store.lease(keys) as lease:
        return len(lease)


def tiers(store: Depot, keys: Sequence[BlockKey]) -> list[str | None]:
    """The tier that each block came from, None for a miss. Fails if a hit has a wrong byte."""
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    answers = store.get_many(keys, targets, timeout_s=WAIT_S)
    for key, target, answer in zip(keys, targets, answers, strict=True):
        assert not answer or target == payload_for(key, BLOCK_BYTES)
    return [answer.tier for answer in answers]


def flood(store: Depot, space: NamespaceHandle, blocks: int) -> None:
    """Put blocks that are not requested again."""
    for number in range(blocks // 10):
        assert all(put(store, prompt(space, 1000 + number, 10)))


class OpenedStore:
    """Gives tests a `store`, opened by `depot`."""

    @pytest.fixture
    def store(self, depot: OpenDepot) -> Iterator[Depot]:
        with depot() as opened:
            yield opened


class StoreContract(OpenedStore):
    """Laws every store obeys."""

    def test_what_was_put_comes_back(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 8)
        assert put(store, keys) == [PutResult.STORED] * 8
        assert put(store, keys) == [PutResult.PRESENT] * 8
        assert tiers(store, keys) == ["dram"] * 8
        assert store.match(keys).tiers == ("dram",) * 8

    def test_and_after_a_restart_too(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 8)
            assert all(put(store, keys))
            assert store.flush()
        with depot() as store:
            space_of(store)
            assert store.match(keys).tiers == ("ssd",) * 8
            assert tiers(store, keys) == ["ssd"] * 8
            assert tiers(store, keys) == ["dram"] * 8
            assert store.admin.check()

    def test_what_is_on_disk_only_and_offered_again_is_in_memory(self, depot: OpenDepot) -> None:
        """The block was computed again, so the put has its bytes; the disk already has it."""
        with depot() as store:
            keys = prompt(space_of(store), 1, 8)
            assert all(put(store, keys[:6]))
            assert store.flush()
        with depot() as store:
            space_of(store)
            assert store.match(keys).blocks_in_memory == 0
            assert put(store, keys) == [PutResult.STORED] * 8
            assert store.match(keys).blocks_in_memory == 8
            assert put(store, keys) == [PutResult.PRESENT] * 8
            assert tiers(store, keys) == ["dram"] * 8
            assert store.flush().durable == 8
            assert store.stats()["counters"]["written"] == 2
            assert store.remove(keys) == 8
            assert store.admin.check()

    def test_what_is_hinted_at_comes_from_memory(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 8)
            assert all(put(store, keys))
            assert store.flush()
        with depot() as store:
            space_of(store)
            hint = store.prefetch(keys, WAIT_S)
            assert hint.wait(WAIT_S)
            assert (hint.wanted, hint.brought) == (8, 8)
            assert tiers(store, keys) == ["dram"] * 8
            assert store.prefetch(keys, WAIT_S).wait(0.0), "it is there"

    def test_a_session_has_a_name_and_a_state(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 8)
        assert store.sessions.name("chat", keys) == 0
        assert all(put(store, keys[:5]))
        assert store.sessions.name("chat", state="pending") == 5
        assert store.sessions.prefetch("chat", WAIT_S).wait(WAIT_S)
        assert store.sessions.name("chat", state="closed") == 5
        assert store.sessions.name("chat") == 0
        with pytest.raises(ConfigError, match="alive, pending, closed"):
            store.sessions.name("chat", keys, "asleep")

    def test_a_batch_answers_for_each_block(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 20)
        put(store, keys[::2])
        assert tiers(store, keys) == ["dram", None] * 10
        assert store.get_many([keys[1]], [bytearray(BLOCK_BYTES)])[0].reason == "absent"
        assert len(store.match(keys)) == 1
        assert store.get_many([], []) == []
        assert store.put_many([], []) == []
        assert len(store.match([])) == len(store.lease([])) == touch(store, []) == 0
        assert store.remove([]) == 0

    def test_the_same_block_twice_in_a_batch(self, store: Depot) -> None:
        key = prompt(space_of(store), 1, 1)[0]
        assert put(store, [key, key]) == [PutResult.STORED, PutResult.PRESENT]
        assert tiers(store, [key] * 5) == ["dram"] * 5
        assert store.flush()
        flood(store, space_of(store), 120)
        found = tiers(store, [key] * 5)
        assert "ssd" in found and set(found) <= {"ssd", "dram"}, "read once, or each time"
        assert store.stats()["leased"] == 0

    def test_every_range_of_layers_from_both_tiers(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 2)
            assert all(put(store, keys))
            self.check_ranges(store, keys)
        with depot() as store:
            space_of(store)
            self.check_ranges(store, keys)

    def check_ranges(self, store: Depot, keys: list[BlockKey]) -> None:
        layer_bytes = BLOCK_BYTES // LAYERS
        for start in range(LAYERS):
            for stop in range(start + 1, LAYERS + 1):
                targets = [bytearray((stop - start) * layer_bytes) for _ in keys]
                assert all(store.get_many(keys, targets, layers=range(start, stop)))
                for key, target in zip(keys, targets, strict=True):
                    whole = payload_for(key, BLOCK_BYTES)
                    assert target == whole[start * layer_bytes : stop * layer_bytes]

    def test_blocks_of_several_namespaces_in_a_batch(self, store: Depot) -> None:
        spaces = [
            store.namespace(model=f"m{size}", layout=KVLayout.opaque(size, TOKENS, 2))
            for size in (8192, 50000)
        ]
        keys = [key for space in spaces for key in prompt(space, 1, 3)]
        sizes = [space.block_bytes for space in spaces for _ in range(3)]
        payloads = [payload_for(k, n) for k, n in zip(keys, sizes, strict=True)]
        assert all(store.put_many(keys, payloads))
        targets = [bytearray(size) for size in sizes]
        assert all(store.get_many(keys, targets))
        assert targets == payloads
        halves = [bytearray(size // 2) for size in sizes]
        assert all(store.get_many(keys, halves, layers=range(1, 2)))
        assert halves == [payload[len(payload) // 2 :] for payload in payloads]

    def test_buffers_of_any_kind_and_alignment(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 3)
        payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
        array = np.frombuffer(payloads[1], np.float16).reshape(2, -1)
        shifted = memoryview(b"x" + payloads[2])[1:]
        assert all(store.put_many(keys, [bytearray(payloads[0]), array, shifted]))
        room = bytearray(BLOCK_BYTES + 9)
        for key, payload in zip(keys, payloads, strict=True):
            assert store.get_many([key], [memoryview(room)[7 : 7 + BLOCK_BYTES]])[0]
            assert room == bytes(7) + payload + bytes(2)

    def test_a_batch_of_more_than_goes_over_a_wire(self, store: Depot) -> None:
        space = store.namespace(model="tiny", layout=KVLayout.opaque(64, 1))
        keys = space.keys(range(MANY))
        some = keys[:100]
        assert all(store.put_many(some, [payload_for(key, 64) for key in some]))
        answers = store.get_many(keys, [bytearray(64) for _ in keys])
        assert [bool(answer) for answer in answers] == [True] * 100 + [False] * (MANY - 100)
        assert len(store.match(keys)) == touch(store, keys) == 100
        with store.lease(keys) as lease:
            assert list(lease) == some
        assert store.remove(keys) == 100
        assert len(store.match(keys)) == 0

    def test_memory_overflows_to_disk_and_nothing_is_lost(self, store: Depot) -> None:
        space = space_of(store)
        prompts = [prompt(space, number, 10) for number in range(15)]
        for keys in prompts:
            assert all(put(store, keys))
            assert store.flush()
        for keys in prompts:
            assert None not in tiers(store, keys)
        assert store.stats()["counters"]["evicted_dram"] > 0
        assert store.admin.check()

    def test_leased_blocks_stay_while_others_need_room(self, store: Depot) -> None:
        space = space_of(store)
        keys = prompt(space, 1, 10)
        put(store, keys)
        assert store.flush()
        with store.lease([*keys, *prompt(space, 2, 1)]) as lease:
            assert list(lease) == keys
            assert store.stats()["leased"] == 10
            flood(store, space, 150)
            assert store.match(keys).tiers == ("dram",) * 10
            for index, key in enumerate(keys):
                view = lease.view(index)
                assert view is not None
                with view:
                    assert view.readonly
                    assert view == payload_for(key, BLOCK_BYTES)
        assert store.stats()["leased"] == 0

    def test_a_lease_ends_once(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        lease = store.lease(keys)
        assert len(lease) == 2
        lease.release()
        with pytest.raises(LeaseError, match="released"):
            lease.release()
        with pytest.raises(LeaseError, match="released"):
            lease.view(0)
        with pytest.raises(LeaseError, match="released"):
            lease.deliver(print)

    def test_what_is_removed_is_gone_also_after_a_restart(self, depot: OpenDepot) -> None:
        with depot() as store:
            space, other = space_of(store), space_of(store, "other")
            keys, others = prompt(space, 1, 6), prompt(other, 1, 3)
            put(store, keys)
            put(store, others)
            assert store.flush()
            assert store.remove(keys[4]) == 1
            assert store.remove(keys[3:]) == 2
            assert store.remove(namespace=other) == 3
            assert tiers(store, keys + others) == ["dram"] * 3 + [None] * 6
        with depot() as store:
            space_of(store), space_of(store, "other")
            assert tiers(store, keys + others) == ["ssd"] * 3 + [None] * 6
            assert store.admin.check()

    def test_touching_keeps_a_prompt_longer(self, store: Depot) -> None:
        space = space_of(store)
        first, second = prompt(space, 1, 10), prompt(space, 2, 10)
        put(store, first)
        put(store, second)
        assert store.flush()
        assert touch(store, first) == 10
        flood(store, space, 40)
        assert store.match(first).tiers.count("dram") > store.match(second).tiers.count("dram")

    def test_damage_in_memory_is_never_served(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        assert store.flush()
        spoil(store, payload_for(keys[1], BLOCK_BYTES))
        assert tiers(store, keys) == ["dram", "ssd", "dram"]
        assert store.stats()["counters"]["quarantined"] == 1
        assert tiers(store, keys) == ["dram"] * 3
        assert store.admin.check()

    def test_a_callers_mistakes_raise_and_change_nothing(self, store: Depot) -> None:
        space = space_of(store)
        (key,) = prompt(space, 1, 1)
        stranger = space_of(store, "other").keys(range(TOKENS))[0][:8] + key[8:]
        unknown = BlockKey(bytes(8) + key[8:])
        mistakes: list[tuple[type[Exception], Callable[[], object]]] = [
            (BadBufferError, lambda: store.put_many([key], [bytes(BLOCK_BYTES - 1)])[0]),
            (BadBufferError, lambda: store.get_many([key], [bytes(BLOCK_BYTES)])[0]),
            (BadBufferError, lambda: store.put_many([key], [])),
            (
                BadBufferError,
                lambda: store.get_many([key], [bytearray(1)], layers=range(0, 4, 2))[0],
            ),
            (KeyFormatError, lambda: store.put_many([unknown], [bytes(BLOCK_BYTES)])[0]),
            (KeyFormatError, lambda: store.get_many([unknown], [bytearray(BLOCK_BYTES)])[0]),
            (KeyFormatError, lambda: store.match([BlockKey(b"short")])),
            (KeyFormatError, lambda: store.lease([BlockKey(key + b"x")])),
            (KeyFormatError, lambda: store.reserve([unknown])),
            (ConfigError, lambda: store.namespace(model="", layout=LAYOUT)),
            (ConfigError, lambda: store.namespace(model="m", layout=LAYOUT, modle="x")),
            (ConfigError, lambda: space_too_large(store)),
        ]
        for error, mistake in mistakes:
            with pytest.raises(error):
                mistake()
        assert len(store.match([BlockKey(stranger)])) == 0
        assert store.stats()["blocks"] == 0
        assert put(store, [key]) == [PutResult.STORED]

    def test_a_closed_store_says_so(self, depot: OpenDepot) -> None:
        store = depot()
        space = space_of(store)
        (key,) = prompt(space, 1, 1)
        put(store, [key])
        lease = store.lease([key])
        view = lease.view(0)
        assert view is not None
        assert store.close()
        assert view == payload_for(key, BLOCK_BYTES), "a view keeps its memory"
        lease.release()
        assert store.close()
        for call in (
            lambda: put(store, [key]),
            lambda: tiers(store, [key]),
            lambda: store.match([key]),
            lambda: store.lease([key]),
            lambda: store.reserve([key]),
            lambda: touch(store, [key]),
            lambda: store.remove(key),
            lambda: store.remove(namespace=space),
            lambda: space_of(store),
            lambda: store.memory,
            store.flush,
            store.admin.check,
            store.stats,
        ):
            with pytest.raises(StoreClosedError, match="closed"):
                call()

    def test_threads_may_share_it(self, store: Depot) -> None:
        space = space_of(store)
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                for turn in range(6):
                    keys = prompt(space, 10 * number + turn, 6)
                    put(store, keys)
                    with store.lease(keys) as lease:
                        held = list(lease)
                        answers = store.get_many(held, [bytearray(BLOCK_BYTES) for _ in held])
                        wrong.extend(answer for answer in answers if not answer)
                    store.remove(keys[3:])
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.flush()
        assert store.stats()["leased"] == 0
        assert store.admin.check()

    def test_it_behaves_like_a_dictionary(self, depot: OpenDepot) -> None:
        with depot() as store:
            space = space_of(store)

            class StoreMachine(LikeADictionary):
                def __init__(self) -> None:
                    super().__init__(store, space)

            chosen = settings(
                max_examples=10,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            run_state_machine_as_test(StoreMachine, settings=chosen)
            assert store.flush()
            assert store.admin.check()


class LikeADictionary(RuleBasedStateMachine):
    """Random puts, gets and removals of few blocks that fit in memory and on disk."""

    chains = st.tuples(st.integers(0, 2), st.integers(1, 5))

    def __init__(self, store: Depot, space: NamespaceHandle) -> None:
        super().__init__()
        self.store, self.space = store, space
        self.there: set[BlockKey] = set()
        store.remove(namespace=space)

    @rule(chain=chains)
    def put(self, chain: tuple[int, int]) -> None:
        keys = prompt(self.space, *chain)
        expected = [PutResult.PRESENT if key in self.there else PutResult.STORED for key in keys]
        assert put(self.store, keys) == expected
        self.there.update(keys)

    @rule(chain=chains)
    def get(self, chain: tuple[int, int]) -> None:
        keys = prompt(self.space, *chain)
        found = [tier is not None for tier in tiers(self.store, keys)]
        assert found == [key in self.there for key in keys]

    @rule(chain=chains, start=st.integers(0, 4))
    def remove(self, chain: tuple[int, int], start: int) -> None:
        keys = prompt(self.space, *chain)[start:]
        assert self.store.remove(keys) == len(self.there & set(keys))
        self.there.difference_update(keys)

    @rule(chain=chains)
    def lease(self, chain: tuple[int, int]) -> None:
        keys = prompt(self.space, *chain)
        with self.store.lease(keys) as lease:
            assert len(lease) == len(self.store.match(keys)) == self.prefix(keys)

    @invariant()
    def nothing_is_held(self) -> None:
        stats = self.store.stats()
        assert stats["leased"] == 0
        assert stats["blocks"] == len(self.there)

    def prefix(self, keys: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.there), len(keys))


def space_too_large(store: Depot) -> NamespaceHandle:
    return store.namespace(model="m", layout=KVLayout.opaque(1 << 30, TOKENS))


def spoil(store: Depot, payload: bytes) -> None:
    """Change one byte of a block in memory."""
    for part in store.memory:
        at = bytes(part).find(payload)
        if at >= 0:
            part[at + len(payload) // 2] ^= 1
            return
    raise AssertionError("the block is not in memory")


def swap_slots(store: Depot, first: bytes, other: bytes) -> None:
    """Exchange two blocks in memory with their heads, as if the index had swapped their places."""
    memory = store.memory[0]
    places = [bytes(memory).find(payload) - HEAD_BYTES for payload in (first, other)]
    assert min(places) >= 0, "the blocks are not in memory"
    spans = [slice(at, at + HEAD_BYTES + len(first)) for at in places]
    kept = [bytes(memory[span]) for span in spans]
    memory[spans[0]], memory[spans[1]] = kept[1], kept[0]


def fill(store: Depot, keys: list[BlockKey]) -> list[PutResult]:
    with store.reserve(keys, timeout_s=WAIT_S) as slots:
        for index, key in enumerate(keys):
            view = slots.view(index)
            if view is not None:
                view[:] = payload_for(key, BLOCK_BYTES)
        slots.seal()
        return slots.outcomes


class Collector:
    """A sink that collects the delivered blocks."""

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


class InPlaceContract(OpenedStore):
    """Laws of filling and reading blocks in place."""

    def test_what_is_filled_in_place_is_read_back_in_place(self, depot: OpenDepot) -> None:
        with depot() as store:
            keys = prompt(space_of(store), 1, 8)
            assert fill(store, keys) == [PutResult.STORED] * 8
            assert fill(store, keys) == [PutResult.PRESENT] * 8
            assert self.delivered(store, keys) == ["dram"] * 8
        with depot() as store:
            space_of(store)
            assert fill(store, keys[:4]) == [PutResult.STORED] * 4
            assert self.delivered(store, keys) == ["dram"] * 4 + ["ssd"] * 4
            assert self.delivered(store, keys) == ["dram"] * 8
            assert store.admin.check()

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
        assert fill(store, keys) == [PutResult.PRESENT] * 2 + [PutResult.STORED] * 2
        assert store.remove(keys) == 4
        assert store.flush()
        assert store.stats()["tiers"]["dram"]["used_bytes"] == used
        assert store.admin.check()

    def test_an_error_while_filling_leaves_nothing_behind(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 4)
        with pytest.raises(ZeroDivisionError), store.reserve(keys):
            raise ZeroDivisionError
        assert not len(store.match(keys))
        assert store.stats()["tiers"]["dram"]["used_bytes"] == 0
        assert store.admin.check()

    def test_a_reservation_takes_what_fits_and_throttles_the_rest(self, store: Depot) -> None:
        keys = prompt(space_of(store), 1, 100)
        with store.reserve(keys, timeout_s=0.0) as slots:
            stored = slots.outcomes.count(PutResult.STORED)
            assert 10 <= stored <= 60
            assert slots.outcomes == [PutResult.STORED] * stored + [PutResult.THROTTLED] * (
                100 - stored
            )
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
        assert store.admin.check()

    def test_a_block_put_again_after_its_removal_is_not_lasting(self, store: Depot) -> None:
        """The lease is on the removed block: it does not keep the new one in memory."""
        space = space_of(store)
        keys = prompt(space, 1, 3)
        fill(store, keys)
        sink = Collector()
        with store.lease(keys) as lease:
            assert store.remove(keys[1:]) == 2
            fill(store, keys[1:2])
            for start in (0, 1):
                answers = lease.deliver(sink, start=start, timeout_s=WAIT_S)
                assert list(map(bool, answers)) == [True, True, False][start:]
            assert sink.got == expected(keys[:2])
            assert 1 not in sink.lasting
            assert store.flush()
            flood(store, space_of(store, "other"), 120)
            removed = lease.view(1)
            assert removed is not None
            assert removed == payload_for(keys[1], BLOCK_BYTES)
        assert store.admin.check()

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
        assert store.admin.check()

    @pytest.mark.parametrize("concurrently", [False, True])
    def test_damage_in_memory_is_no_success(self, store: Depot, concurrently: bool) -> None:
        keys = prompt(space_of(store), 1, 2)
        fill(store, keys)
        assert store.flush()
        spoil(store, payload_for(keys[1], BLOCK_BYTES))
        with store.lease(keys) as lease:
            sink = Collector()
            answers = lease.deliver(sink, verify_concurrently=concurrently)
            assert answers[0] and not answers[1] and answers[1].reason == "corrupt"
            assert concurrently or list(sink.got) == [0], "only a checked block is delivered"
            assert sink.got[0] == payload_for(keys[0], BLOCK_BYTES)

    @pytest.mark.parametrize("how", ["get", "deliver", "verify later"])
    def test_a_slot_that_holds_another_block_is_no_success(self, store: Depot, how: str) -> None:
        keys = prompt(space_of(store), 1, 3)
        fill(store, keys)
        assert store.flush()
        swap_slots(store, *(payload_for(keys[at], BLOCK_BYTES) for at in (0, 2)))
        into = [bytearray(BLOCK_BYTES) for _ in keys]
        sink = Collector()
        if how == "get":
            answers = store.get_many(keys, into)
            sink.got.update({at: bytes(into[at]) for at, answer in enumerate(answers) if answer})
        else:
            with store.lease(keys) as lease:
                answers = lease.deliver(
                    sink, verify_concurrently=how == "concurrent", timeout_s=WAIT_S
                )
        assert answers[1]
        for at, answer in enumerate(answers):
            assert not answer or sink.got[at] == payload_for(keys[at], BLOCK_BYTES)
            assert at == 1 or answer.tier != "dram", "the swapped slots are not served"

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
            assert store.admin.check()
