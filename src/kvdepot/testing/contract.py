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
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvdepot.core.block import BlockKey
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.tier import Outcome, Tier, drive_of, segment_of
from kvdepot.format.record import HEAD_BYTES, PAGE, parse_head, parse_own, record_bytes
from kvdepot.native import address_of
from kvdepot.testing.images import (
    STAMPS,
    loaded,
    make_image,
    make_key,
    make_load,
    payload_for,
    removal_of,
)

TIMEOUT_S: Final = 30.0
PAYLOAD_BYTES: Final = 4 * PAGE - 100
AT_ONCE: Final = 8
SIZES: Final = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, PAYLOAD_BYTES, 16 * PAGE)

Reopen = Callable[[], Tier]


class TierContract:
    """Laws every tier obeys."""

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """Closes the tier and opens it again. None: the tier is volatile."""
        return None

    @pytest.mark.parametrize("payload_bytes", SIZES)
    def test_what_was_appended_comes_back(self, tier: Tier, payload_bytes: int) -> None:
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
        (location,) = put(tier, [make_image(key, payload, 1 << 20)])
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

    def test_images_are_the_callers_again_after_an_append(self, tier: Tier) -> None:
        key = make_key(1)
        image = make_image(key, payload_for(key, PAYLOAD_BYTES))
        (location,) = put(tier, [image])
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
        assert tier.append(0, []) == []
        assert tier.load([], TIMEOUT_S) == ([], None)
        assert tier.read_records([], [], []) == []
        assert tier.put_meta([]).have
        tier.discard([], [])

    def test_no_room_is_a_value_and_harms_nothing(self, tier: Tier) -> None:
        kept = fill(tier)
        assert kept, "not one record fits"
        assert tier.usage().used_bytes <= tier.usage().capacity_bytes
        for key, location in kept.items():
            assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)

    def test_released_room_is_used_again(self, tier: Tier) -> None:
        for _ in range(3):
            kept = fill(tier)
            tier.discard(list(kept.values()), [PAYLOAD_BYTES] * len(kept))
            assert tier.usage().used_bytes == 0
            assert release_dead(tier), "no segment was free to be released"
        again = fill(tier, first=1 << 20)
        assert 2 * len(again) >= len(kept)
        for key, location in again.items():
            assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)

    def test_a_released_segment_takes_its_own_blocks_only(self, tier: Tier) -> None:
        kept = fill(tier)
        drive, slot = next(
            (drive, one.slot)
            for drive in range(tier.drive_count())
            for one in tier.segments(drive)
            if one.live_count
        )
        gone = {key for key, at in kept.items() if (drive_of(at), segment_of(at)) == (drive, slot)}
        places = [kept[key] for key in gone]
        assert places
        tier.discard(places, [PAYLOAD_BYTES] * len(places))
        assert tier.release(drive, slot)
        assert slot not in [one.slot for one in tier.segments(drive)]
        for key, location in kept.items():
            if key not in gone:
                assert load(tier, key, location) == payload_for(key, PAYLOAD_BYTES)
        asked = [make_load(key, kept[key], PAYLOAD_BYTES) for key in gone]
        assert Outcome.OK not in tier.load(asked, TIMEOUT_S)[0]
        images = [image_of(key) for key in gone]
        assert not any(tier.read_records(list(gone), places, images))

    def test_segments_are_listed_when_their_blocks_are_counted(self, tier: Tier) -> None:
        keys = [make_key(number) for number in range(3)]
        places = [at for at in tier.append(0, [image_of(key) for key in keys]) if at is not None]
        assert len(places) == 3
        assert tier.has_unentered(0)
        assert not tier.segments(0)
        used = {segment_of(place) for place in places}
        assert used <= {one.slot for one in tier.segments(0, reclaimable=False)}
        for place in places:
            tier.count(place, PAYLOAD_BYTES)
        assert not tier.has_unentered(0)
        fill(tier, first=100)
        listed = tier.segments(0)
        assert listed
        ids = [one.segment_id for one in listed]
        assert ids == sorted(set(ids)), "oldest first"
        for one in listed:
            assert one.live_bytes == one.live_count * record_bytes(PAYLOAD_BYTES)

    def test_whole_records_are_read_and_verified(self, tier: Tier) -> None:
        keys = [make_key(number) for number in range(3)]
        places = store(tier, keys)
        images = [image_of(make_key(99)) for _ in keys]
        asked = [keys[0], make_key(98), keys[2]]
        assert tier.read_records(asked, places, images) == [True, False, True]
        for index in (0, 2):
            head = parse_head(images[index])
            assert head is not None and head.key == keys[index]
            assert bytes(images[index][HEAD_BYTES:])[:PAYLOAD_BYTES] == payload_for(
                keys[index], PAYLOAD_BYTES
            )

    def test_a_record_keeps_its_stamp(self, tier: Tier) -> None:
        key, image = make_key(1), image_of(make_key(1))
        stamp = parse_own(image)[2]
        (first,) = put(tier, [image])
        (second,) = put(tier, [image])
        for location in (first, second):
            assert location is not None
            target = image_of(make_key(2))
            assert tier.read_records([key], [location], [target]) == [True]
            assert parse_own(target)[2] == stamp

    def test_an_image_too_big_for_the_tier_takes_no_other_with_it(self, tier: Tier) -> None:
        big = make_key(1)
        too_many = tier.usage().capacity_bytes + PAGE
        images = [make_image(big, bytes(too_many), 1 << 20), image_of(make_key(2))]
        first, second = put(tier, images)
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

    def test_drives_are_described(self, tier: Tier) -> None:
        assert tier.drive_count() >= 1
        assert tier.is_up()
        assert len(tier.describe_drives()) == tier.drive_count()
        budget = tier.write_budget()
        assert budget is None or budget.left_bytes <= budget.bucket_bytes
        for drive, described in enumerate(tier.describe_drives()):
            facts = tier.drive(drive)
            assert tier.is_up(drive)
            assert facts.up and facts.takes_blocks and not (facts.lost or facts.retired)
            assert facts.record_bytes_max >= record_bytes(PAYLOAD_BYTES)
            assert facts.segments_max >= 1 and facts.segment_bytes > 0
            assert facts.spare_segments > 0
            assert tier.has_room(drive, record_bytes(PAYLOAD_BYTES))
            assert described["healthy"] and described["path"] == facts.label
            assert {"used_bytes", "capacity_bytes", "draining", "drained"} <= described.keys()

    def test_has_room_is_true_of_a_full_tier(self, tier: Tier) -> None:
        fill(tier)
        nbytes = record_bytes(PAYLOAD_BYTES)
        assert not any(tier.has_room(drive, nbytes) for drive in range(tier.drive_count()))

    def test_what_was_flushed_is_found_again(self, tier: Tier, reopen: Reopen | None) -> None:
        keys = [make_key(number) for number in range(8)]
        store(tier, keys)
        assert tier.flush()
        again = opened(reopen)
        found = contents_of(again)
        assert sorted(found) == sorted(keys)
        for key, (location, nbytes) in found.items():
            assert nbytes == PAYLOAD_BYTES
            assert load(again, key, location) == payload_for(key, PAYLOAD_BYTES)
        assert again.usage().used_bytes == len(keys) * record_bytes(PAYLOAD_BYTES)
        assert not contents_of(again), "it is told once"
        assert load(again, make_key(99), store(again, [make_key(99)])[0])

    def test_of_two_records_the_newer_is_found(self, tier: Tier, reopen: Reopen | None) -> None:
        key, short = make_key(1), PAGE
        store(tier, [key])
        store(tier, [key], short)
        ((location, nbytes),) = contents_of(again := opened(reopen)).values()
        assert nbytes == short
        assert load(again, key, location, short) == payload_for(key, short)

    def test_what_was_removed_stays_away(self, tier: Tier, reopen: Reopen | None) -> None:
        keys = [make_key(number) for number in range(4)]
        store(tier, keys)
        assert tier.put_meta(removal_of(*keys[:2])).have
        store(tier, [keys[1]])
        assert sorted(contents_of(opened(reopen))) == sorted(keys[1:])

    def test_a_namespace_that_was_removed_stays_away(
        self, tier: Tier, reopen: Reopen | None
    ) -> None:
        ours = [BlockKey(b"namespac" + make_key(number)[8:]) for number in range(3)]
        store(tier, [*ours, make_key(9)])
        assert tier.put_meta(removal_of(b"namespac")).have
        store(tier, ours[2:])
        assert sorted(contents_of(opened(reopen))) == sorted([ours[2], make_key(9)])

    def test_a_removal_outlives_the_segments_after_it(
        self, tier: Tier, reopen: Reopen | None
    ) -> None:
        keys = [make_key(number) for number in range(3)]
        places = store(tier, keys)
        kept = fill(tier, first=100)
        for key in keys[:2]:
            assert tier.put_meta(removal_of(key)).have
        tier.discard(places[:2], [PAYLOAD_BYTES] * 2)
        for _ in range(3):
            tier.discard(list(kept.values()), [PAYLOAD_BYTES] * len(kept))
            release_dead(tier)
            kept = fill(tier, first=1 << 20)
        found = contents_of(opened(reopen))
        assert keys[2] in found
        assert not found.keys() & set(keys[:2])

    def test_descriptions_are_remembered(self, tier: Tier, reopen: Reopen | None) -> None:
        known = {b"namespac": b"first", b"namespad": b"second"}
        entries = [
            MetaEntry(MetaKind.NAMESPACE, tag, STAMPS.next(), text) for tag, text in known.items()
        ]
        assert tier.put_meta(entries).have
        assert tier.metadata().values(MetaKind.NAMESPACE) == known
        assert opened(reopen).metadata().values(MetaKind.NAMESPACE) == known

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
        release_dead(self.tier)

    @rule(
        blocks=st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), min_size=1, max_size=4
        )
    )
    def append(self, blocks: list[tuple[int, int]]) -> None:
        made = [(make_key(number), nbytes) for number, nbytes in blocks]
        images = [make_image(key, payload_for(key, nbytes)) for key, nbytes in made]
        for block, location in zip(made, put(self.tier, images), strict=True):
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
    def release(self) -> None:
        release_dead(self.tier)

    @rule(number=st.integers(0, 9))
    def erase(self, number: int) -> None:
        assert self.tier.put_meta(removal_of(make_key(number))).have

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
    """Appends, loads and discards its own blocks, and says what went wrong."""

    def __init__(self, tier: Tier, number: int, wrong: list[str]) -> None:
        super().__init__(name=f"contract-user-{number}")
        self.tier = tier
        self.number = number
        self.wrong = wrong
        self.held: dict[BlockKey, int] = {}

    def run(self) -> None:
        for turn in range(12):
            keys = [make_key(self.number << 32 | turn << 8 | n) for n in range(3)]
            locations = put(self.tier, [image_of(key) for key in keys])
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
    return make_image(key, payload_for(key, payload_bytes))


def put(tier: Tier, images: Sequence[memoryview]) -> list[int | None]:
    """Append records to the drives in turn until each has a place, and count them."""
    places: list[int | None] = [None] * len(images)
    for drive in range(tier.drive_count()):
        left = [index for index, place in enumerate(places) if place is None]
        found = tier.append(drive, [images[index] for index in left])
        for index, place in zip(left, found, strict=True):
            places[index] = place
            if place is not None:
                tier.count(place, parse_own(images[index])[3])
    return places


def release_dead(tier: Tier) -> int:
    """Release the segments in which no block is in use; how many."""
    dead = [
        (drive, one.slot)
        for drive in range(tier.drive_count())
        for one in tier.segments(drive)
        if not one.live_count
    ]
    return sum(tier.release(drive, slot) for drive, slot in dead)


def opened(reopen: Reopen | None) -> Tier:
    """The tier after a restart. Skips the test where it keeps nothing."""
    if reopen is None:
        pytest.skip("this tier is volatile")
    return reopen()


def contents_of(tier: Tier) -> dict[BlockKey, tuple[int, int]]:
    """Location and payload bytes of the blocks that were found, by key; each is found once."""
    contents = tier.take_contents()
    keys = [BlockKey(words.tobytes()) for words in contents.words]
    assert len(set(keys)) == len(keys), "a key came twice"
    rows = zip(contents.locations.tolist(), contents.payload_bytes.tolist(), strict=True)
    return dict(zip(keys, rows, strict=True))


def store(tier: Tier, keys: Sequence[BlockKey], payload_bytes: int = PAYLOAD_BYTES) -> list[int]:
    """Store blocks in a tier that has room for them."""
    found = [
        at for at in put(tier, [image_of(key, payload_bytes) for key in keys]) if at is not None
    ]
    assert len(found) == len(keys), "the tier has no room, or does not work"
    return found


def load(tier: Tier, key: BlockKey, location: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    wanted = make_load(key, location, payload_bytes)
    assert tier.load([wanted], TIMEOUT_S) == ([Outcome.OK], None)
    return loaded(wanted)


def fill(tier: Tier, first: int = 0) -> dict[BlockKey, int]:
    """Store blocks until there is no room; where each of them is."""
    kept: dict[BlockKey, int] = {}
    most = tier.usage().capacity_bytes // record_bytes(PAYLOAD_BYTES) + 1
    for number in range(first, first + most, AT_ONCE):
        keys = [make_key(number + offset) for offset in range(AT_ONCE)]
        locations = put(tier, [image_of(key) for key in keys])
        kept.update({key: at for key, at in zip(keys, locations, strict=True) if at is not None})
        if None in locations:
            return kept
    raise AssertionError("the tier stored more than its capacity")
