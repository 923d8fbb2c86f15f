"""The laws of core.tier.Tier as tests: subclass TierContract, give a `tier` fixture, done.

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self) -> Iterator[Tier]:
            tier = MyTier(capacity_bytes=4 << 20)
            yield tier
            tier.close()

The tier must be fresh, and hold some dozens of records of 20 KiB; with 64 MiB or less the tests
that fill it are quick. A tier that keeps its blocks also gives a `reopen` fixture.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvdepot.codec.record import PAGE, record_bytes
from kvdepot.core.block import BlockKey
from kvdepot.core.tier import Outcome
from kvdepot.native import address_of
from kvdepot.testing.images import loaded, make_image, make_key, make_load, payload_for
from kvdepot.testing.twins import PlainTier as Tier

TIMEOUT_S: Final = 30.0
PAYLOAD_BYTES: Final = 4 * PAGE - 100
SIZES: Final = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, PAYLOAD_BYTES, 16 * PAGE)

Reopen = Callable[[], Tier]


class TierContract:
    """Laws every tier obeys."""

    reuses_room: ClassVar[bool] = True
    """Discarded room is used again without help from above. False: somebody else reclaims it."""

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """Closes the tier and opens it again. None: the tier is volatile."""
        return None

    @pytest.mark.parametrize("payload_bytes", SIZES)
    def test_what_was_stored_comes_back(self, tier: Tier, payload_bytes: int) -> None:
        keys = [make_key(number) for number in range(3)]
        locations = store(tier, keys, payload_bytes)
        assert len(set(locations)) == len(keys)
        for key, location in reversed(list(zip(keys, locations, strict=True))):
            assert load(tier, key, location, payload_bytes) == payload_for(key, payload_bytes)

    def test_ranges_of_chunks(self, tier: Tier) -> None:
        key = make_key(1)
        (location,) = store(tier, [key])
        borders = [*range(0, PAYLOAD_BYTES, PAGE), PAYLOAD_BYTES]
        for start, stop in itertools.combinations(borders, 2):
            wanted = make_load(key, location, PAYLOAD_BYTES, span=(start, stop))
            assert tier.load([wanted], TIMEOUT_S) == ([Outcome.OK], None)
            assert loaded(wanted) == payload_for(key, PAYLOAD_BYTES)[start:stop]

    def test_copies_to_a_target(self, tier: Tier) -> None:
        key = make_key(1)
        (location,) = store(tier, [key])
        for start, stop in ((0, PAYLOAD_BYTES), (PAGE, 3 * PAGE)):
            target = bytearray(stop - start)
            wanted = make_load(
                key, location, PAYLOAD_BYTES, copy_to=address_of(target)[0], span=(start, stop)
            )
            assert tier.load([wanted], TIMEOUT_S) == ([Outcome.OK], None)
            assert target == payload_for(key, PAYLOAD_BYTES)[start:stop]

    def test_large_chunks(self, tier: Tier) -> None:
        key, payload = make_key(1), payload_for(make_key(1), PAYLOAD_BYTES)
        (location,) = tier.store([make_image(key, payload, 1 << 20)])
        assert location is not None
        wanted = make_load(key, location, PAYLOAD_BYTES, 1 << 20)
        assert tier.load([wanted], TIMEOUT_S) == ([Outcome.OK], None)
        assert loaded(wanted) == payload

    def test_another_key_is_corrupt_and_harms_no_other_load(self, tier: Tier) -> None:
        keys = [make_key(number) for number in range(4)]
        places = store(tier, keys)
        asked = [
            make_load(keys[0], places[0], PAYLOAD_BYTES),
            make_load(keys[1], places[2], PAYLOAD_BYTES),
            make_load(make_key(99), places[1], PAYLOAD_BYTES),
            make_load(keys[3], places[3], PAYLOAD_BYTES),
        ]
        outcomes, pending = tier.load(asked, TIMEOUT_S)
        assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]
        assert pending is None
        assert loaded(asked[3]) == payload_for(keys[3], PAYLOAD_BYTES)

    @pytest.mark.parametrize(
        "payload_bytes", [PAGE, PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, 16 * PAGE]
    )
    def test_another_size_never_gives_wrong_bytes(self, tier: Tier, payload_bytes: int) -> None:
        key = make_key(1)
        (location,) = store(tier, [key])
        wanted = make_load(key, location, payload_bytes)
        (outcome,), _ = tier.load([wanted], TIMEOUT_S)
        right = payload_for(key, PAYLOAD_BYTES)
        assert outcome is not Outcome.OK or loaded(wanted) == right[:payload_bytes]

    def test_a_discarded_place_never_serves_its_next_block_as_the_old_one(self, tier: Tier) -> None:
        old, new = make_key(1), make_key(2)
        (before,) = store(tier, [old])
        tier.discard([before], [PAYLOAD_BYTES])
        (after,) = store(tier, [new])
        wanted = make_load(old, before, PAYLOAD_BYTES)
        (outcome,), _ = tier.load([wanted], TIMEOUT_S)
        assert outcome is not Outcome.OK or loaded(wanted) == payload_for(old, PAYLOAD_BYTES)
        assert load(tier, new, after) == payload_for(new, PAYLOAD_BYTES)

    def test_images_are_the_callers_again_after_a_store(self, tier: Tier) -> None:
        key = make_key(1)
        image = make_image(key, payload_for(key, PAYLOAD_BYTES))
        (location,) = tier.store([image])
        image[:] = bytes(len(image))
        assert location is not None
        assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)

    def test_one_key_in_two_places(self, tier: Tier) -> None:
        key = make_key(1)
        first, second = store(tier, [key, key])
        assert first != second
        tier.discard([first], [PAYLOAD_BYTES])
        assert load(tier, key, second) == payload_for(key, PAYLOAD_BYTES)

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.store([]) == []
        assert tier.load([], TIMEOUT_S) == ([], None)
        tier.discard([], [])

    def test_no_room_is_a_value_and_harms_nothing(self, tier: Tier) -> None:
        kept = fill(tier)
        assert kept, "not one record fits"
        assert tier.usage().used_bytes <= tier.usage().capacity_bytes
        for key, location in kept.items():
            assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)

    def test_discarded_room_is_used_again(self, tier: Tier) -> None:
        if not self.reuses_room:
            pytest.skip("this tier's room is reclaimed from above")
        for _ in range(3):
            kept = fill(tier)
            tier.discard(list(kept.values()), [PAYLOAD_BYTES] * len(kept))
            assert tier.usage().used_bytes == 0
        again = fill(tier, first=1 << 20)
        assert 2 * len(again) >= len(kept)
        for key, location in again.items():
            assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)

    def test_an_image_too_big_for_the_tier_takes_no_other_with_it(self, tier: Tier) -> None:
        big = make_key(1)
        too_many = tier.usage().capacity_bytes + PAGE
        images = [make_image(big, bytes(too_many), 1 << 20), image_of(make_key(2))]
        first, second = tier.store(images)
        assert first is None
        assert second is not None
        assert load(tier, make_key(2), second) == payload_for(make_key(2), PAYLOAD_BYTES)

    def test_usage_counts_whole_records(self, tier: Tier) -> None:
        assert tier.usage().used_bytes == 0
        locations = store(tier, [make_key(number) for number in range(4)])
        one = record_bytes(PAYLOAD_BYTES)
        assert tier.usage().used_bytes == 4 * one
        tier.discard(locations[:3], [PAYLOAD_BYTES] * 3)
        assert tier.usage().used_bytes == one
        assert tier.usage().used_bytes <= tier.usage().held_bytes

    def test_a_fresh_tier_is_healthy_and_flushes(self, tier: Tier) -> None:
        assert tier.health().ok
        assert tier.flush()
        store(tier, [make_key(1)])
        assert tier.flush()
        assert tier.flush()
        assert tier.health().ok

    def test_close_twice(self, tier: Tier) -> None:
        store(tier, [make_key(1)])
        tier.close()
        tier.close()

    @pytest.mark.parametrize("timeout_s", [0.0, 0.001])
    def test_the_deadline_is_kept(self, tier: Tier, timeout_s: float) -> None:
        keys = [make_key(number) for number in range(16)]
        locations = store(tier, keys)
        asked = [
            make_load(key, location, PAYLOAD_BYTES)
            for key, location in zip(keys, locations, strict=True)
        ]
        started = time.monotonic()
        outcomes, pending = tier.load(asked, timeout_s)
        assert time.monotonic() - started < timeout_s + 5.0
        assert set(outcomes) <= {Outcome.OK, Outcome.LATE}
        assert (pending is not None) == (Outcome.LATE in outcomes)
        for wanted, outcome in zip(asked, outcomes, strict=True):
            if outcome is Outcome.OK:
                assert loaded(wanted) == payload_for(wanted.key, PAYLOAD_BYTES)
        assert pending is None or pending.wait(TIMEOUT_S)

    def test_threads_do_not_disturb_each_other(self, tier: Tier) -> None:
        wrong: list[str] = []
        users = [_User(tier, number, wrong) for number in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert not wrong
        held = sum(len(user.held) for user in users)
        assert tier.usage().used_bytes == held * record_bytes(PAYLOAD_BYTES)

    def test_what_was_flushed_is_found_again(self, tier: Tier, reopen: Reopen | None) -> None:
        if reopen is None:
            pytest.skip("this tier is volatile")
        keys = [make_key(number) for number in range(8)]
        store(tier, keys)
        assert tier.flush()
        again = reopen()
        found = {one.key: one for one in again.scan()}
        assert sorted(found) == sorted(keys)
        assert sorted(one.key for one in again.scan()) == sorted(keys), "a key came twice"
        for key, one in found.items():
            assert one.payload_bytes == PAYLOAD_BYTES
            assert load(again, key, one.location) == payload_for(key, PAYLOAD_BYTES)
        assert again.usage().used_bytes == len(keys) * record_bytes(PAYLOAD_BYTES)
        assert load(again, make_key(99), store(again, [make_key(99)])[0])

    def test_agrees_with_a_dict(self, tier: Tier) -> None:
        class Machine(TierMachine):
            def __init__(self) -> None:
                super().__init__(tier)

        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=20))


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the tier and a dict in agreement."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier
        self.model: dict[int, tuple[BlockKey, int]] = {}
        """Location to key and payload bytes."""

    def teardown(self) -> None:
        self.tier.discard(list(self.model), [nbytes for _, nbytes in self.model.values()])
        assert self.tier.usage().used_bytes == 0

    @rule(
        blocks=st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), min_size=1, max_size=4
        )
    )
    def store(self, blocks: list[tuple[int, int]]) -> None:
        made = [(make_key(number), nbytes) for number, nbytes in blocks]
        images = [make_image(key, payload_for(key, nbytes)) for key, nbytes in made]
        for block, location in zip(made, self.tier.store(images), strict=True):
            assert location is None or location not in self.model, "two blocks in one place"
            if location is not None:
                self.model[location] = block

    @rule(share=st.integers(0, 3), start=st.integers(0, 3))
    def discard(self, share: int, start: int) -> None:
        gone = list(self.model)[start::4][:share]
        self.tier.discard(gone, [self.model[location][1] for location in gone])
        for location in gone:
            del self.model[location]

    @rule()
    def flush(self) -> None:
        assert self.tier.flush()

    @invariant()
    def every_block_comes_back(self) -> None:
        asked = [make_load(key, at, nbytes) for at, (key, nbytes) in self.model.items()]
        outcomes, pending = self.tier.load(asked, TIMEOUT_S)
        assert (set(outcomes), pending) in (({Outcome.OK}, None), (set(), None))
        for wanted in asked:
            assert loaded(wanted) == payload_for(wanted.key, wanted.payload_bytes)

    @invariant()
    def usage_is_exact(self) -> None:
        expected = sum(record_bytes(nbytes) for _, nbytes in self.model.values())
        assert self.tier.usage().used_bytes == expected


class _User(threading.Thread):
    """Stores, loads and discards its own blocks, and says what went wrong."""

    def __init__(self, tier: Tier, number: int, wrong: list[str]) -> None:
        super().__init__(name=f"contract-user-{number}")
        self.tier = tier
        self.number = number
        self.wrong = wrong
        self.held: dict[BlockKey, int] = {}

    def run(self) -> None:
        for turn in range(12):
            keys = [make_key(self.number << 32 | turn << 8 | n) for n in range(3)]
            locations = self.tier.store([image_of(key) for key in keys])
            fresh = zip(keys, locations, strict=True)
            self.held.update({key: at for key, at in fresh if at is not None})
            self._look()
            if turn % 3 == 2:
                gone = list(self.held)[:5]
                places = [self.held.pop(key) for key in gone]
                self.tier.discard(places, [PAYLOAD_BYTES] * len(places))

    def _look(self) -> None:
        asked = [make_load(key, at, PAYLOAD_BYTES) for key, at in self.held.items()]
        outcomes, _ = self.tier.load(asked, TIMEOUT_S)
        for wanted, outcome in zip(asked, outcomes, strict=True):
            if outcome is not Outcome.OK:
                self.wrong.append(f"thread {self.number}: {outcome}")
            elif loaded(wanted) != payload_for(wanted.key, PAYLOAD_BYTES):
                self.wrong.append(f"thread {self.number}: wrong bytes")


def image_of(key: BlockKey, payload_bytes: int = PAYLOAD_BYTES) -> memoryview:
    """The image of a key with its right payload."""
    return make_image(key, payload_for(key, payload_bytes))


def store(tier: Tier, keys: Sequence[BlockKey], payload_bytes: int = PAYLOAD_BYTES) -> list[int]:
    """Store blocks in a tier that has room for them."""
    locations = tier.store([image_of(key, payload_bytes) for key in keys])
    found = [location for location in locations if location is not None]
    assert len(found) == len(keys), "the tier has no room, or does not work"
    return found


def load(tier: Tier, key: BlockKey, location: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The whole payload of a block that must be there."""
    wanted = make_load(key, location, payload_bytes)
    assert tier.load([wanted], TIMEOUT_S) == ([Outcome.OK], None)
    return loaded(wanted)


def fill(tier: Tier, first: int = 0) -> dict[BlockKey, int]:
    """Store blocks until there is no room; where each of them is."""
    kept: dict[BlockKey, int] = {}
    most = tier.usage().capacity_bytes // record_bytes(PAYLOAD_BYTES) + 1
    for number in range(first, first + most):
        key = make_key(number)
        (location,) = tier.store([image_of(key)])
        if location is None:
            return kept
        kept[key] = location
    raise AssertionError("the tier stored more than its capacity")
