"""The laws of core.volume.Volume as tests. Subclass VolumeContract and define a `volume` fixture:

    class TestMyVolume(VolumeContract):
        @pytest.fixture
        def volume(self) -> Iterator[Volume]:
            volume = MyVolume(capacity_bytes=4 << 20)
            yield volume
            volume.close()

The volume must be empty and have room for some dozens of records of 20 KiB; with 64 MiB or less the
tests that fill it are quick. If the volume is persistent, define a `reopen` fixture too.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
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
from kvdepot.core.keys import Keys
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind, surviving
from kvdepot.core.volume import (
    NO_PLACE,
    Outcome,
    Priority,
    Volume,
    segment_of,
)
from kvdepot.format.record import HEAD_BYTES, PAGE, parse_head, record_bytes
from kvdepot.native import address_of
from kvdepot.testing.images import (
    STAMPS,
    Reads,
    Records,
    make_image,
    make_key,
    make_records,
    payload_for,
    records_of,
    removal_of,
)

TIMEOUT_S: Final = 30.0
PAYLOAD_BYTES: Final = 4 * PAGE - 100
AT_ONCE: Final = 8
SIZES: Final = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, PAYLOAD_BYTES, 16 * PAGE)

Reopen = Callable[[], Volume]


class VolumeContract:
    """Laws every volume obeys."""

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """Closes the volume and opens it again; None if the volume is volatile."""
        return None

    @pytest.mark.parametrize("payload_bytes", SIZES)
    def test_what_was_appended_comes_back(self, volume: Volume, payload_bytes: int) -> None:
        keys = [make_key(number) for number in range(3)]
        places = store(volume, keys, payload_bytes)
        assert len(set(places)) == len(keys)
        for key, place in reversed(list(zip(keys, places, strict=True))):
            assert load(volume, key, place, payload_bytes) == payload_for(key, payload_bytes)

    def test_ranges_of_chunks(self, volume: Volume) -> None:
        key = make_key(1)
        (place,) = store(volume, [key])
        borders = [*range(0, PAYLOAD_BYTES, PAGE), PAYLOAD_BYTES]
        for start, stop in itertools.combinations(borders, 2):
            reads = Reads().add(key, place, PAYLOAD_BYTES, span=(start, stop))
            assert read(volume, reads) == [Outcome.OK]
            assert reads.payload(0) == payload_for(key, PAYLOAD_BYTES)[start:stop]

    def test_copies_to_a_target(self, volume: Volume) -> None:
        key = make_key(1)
        (place,) = store(volume, [key])
        for start, stop in ((0, PAYLOAD_BYTES), (PAGE, 3 * PAGE)):
            target = bytearray(stop - start)
            reads = Reads().add(
                key, place, PAYLOAD_BYTES, target=address_of(target)[0], span=(start, stop)
            )
            assert read(volume, reads) == [Outcome.OK]
            assert target == payload_for(key, PAYLOAD_BYTES)[start:stop]

    @pytest.mark.parametrize("asked", [1 << 20, 0])
    def test_large_chunks(self, volume: Volume, asked: int) -> None:
        """0 means the chunk size in the head."""
        key = make_key(1)
        (place,) = put(volume, make_records([key], PAYLOAD_BYTES, 1 << 20))
        reads = Reads().add(key, place, PAYLOAD_BYTES, chunk_bytes=asked)
        assert read(volume, reads) == [Outcome.OK]
        assert reads.payload(0) == payload_for(key, PAYLOAD_BYTES)

    def test_another_key_is_corrupt_and_harms_no_other_read(self, volume: Volume) -> None:
        keys = [make_key(number) for number in range(4)]
        places = store(volume, keys)
        asked = [keys[0], keys[1], make_key(99), keys[3]]
        reads = Reads()
        for key, place in zip(asked, [places[0], places[2], places[1], places[3]], strict=True):
            reads.add(key, place, PAYLOAD_BYTES)
        outcomes = [Outcome.OK, Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]
        assert read(volume, reads) == outcomes
        assert reads.payload(3) == payload_for(keys[3], PAYLOAD_BYTES)

    @pytest.mark.parametrize(
        "payload_bytes", [PAGE, PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, 16 * PAGE]
    )
    def test_another_size_never_gives_wrong_bytes(self, volume: Volume, payload_bytes: int) -> None:
        key = make_key(1)
        (place,) = store(volume, [key])
        reads = Reads().add(key, place, payload_bytes)
        right = payload_for(key, PAYLOAD_BYTES)
        assert read(volume, reads) != [Outcome.OK] or reads.payload(0) == right[:payload_bytes]

    def test_a_discarded_place_never_serves_its_next_block_as_the_old_one(
        self, volume: Volume
    ) -> None:
        old, new = make_key(1), make_key(2)
        (before,) = store(volume, [old])
        discard(volume, [before])
        (after,) = store(volume, [new])
        reads = Reads().add(old, before, PAYLOAD_BYTES)
        right = payload_for(old, PAYLOAD_BYTES)
        assert read(volume, reads) != [Outcome.OK] or reads.payload(0) == right
        assert load(volume, new, after) == payload_for(new, PAYLOAD_BYTES)

    def test_images_are_the_callers_again_after_an_append(self, volume: Volume) -> None:
        key = make_key(1)
        records = make_records([key], PAYLOAD_BYTES)
        (place,) = put(volume, records)
        records.images[0][:] = bytes(len(records.images[0]))
        assert load(volume, key, place) == payload_for(key, PAYLOAD_BYTES)

    def test_one_key_in_two_places(self, volume: Volume) -> None:
        key = make_key(1)
        first, second = store(volume, [key, key])
        assert first != second
        discard(volume, [first])
        assert load(volume, key, second) == payload_for(key, PAYLOAD_BYTES)

    def test_empty_batches(self, volume: Volume) -> None:
        assert len(volume.append(records_of([], [], []).rows)) == 0
        assert read(volume, Reads()) == []
        assert volume.put_meta([])
        discard(volume, [])

    def test_no_room_is_a_value_and_harms_nothing(self, volume: Volume) -> None:
        kept = fill(volume)
        assert kept, "not one record fits"
        assert volume.facts().used_bytes <= volume.facts().capacity_bytes
        assert volume.facts().room_bytes < record_bytes(PAYLOAD_BYTES)
        for key, place in kept.items():
            assert load(volume, key, place) == payload_for(key, PAYLOAD_BYTES)

    def test_released_room_is_used_again(self, volume: Volume) -> None:
        for _ in range(3):
            kept = fill(volume)
            discard(volume, list(kept.values()))
            assert volume.facts().used_bytes == 0
            assert release_dead(volume), "no segment was free to be released"
        again = fill(volume, first=1 << 20)
        assert 2 * len(again) >= len(kept)
        for key, place in again.items():
            assert load(volume, key, place) == payload_for(key, PAYLOAD_BYTES)

    def test_a_released_segment_takes_its_own_blocks_only(self, volume: Volume) -> None:
        kept = fill(volume)
        table = volume.segments()
        segment = int(table.segments[table.sealed & (table.live_count > 0)][0])
        gone = {key for key, place in kept.items() if segment_of(place) == segment}
        places = [kept[key] for key in gone]
        assert places
        discard(volume, places)
        assert volume.release(segment)
        assert segment not in volume.segments().segments
        for key, place in kept.items():
            if key not in gone:
                assert load(volume, key, place) == payload_for(key, PAYLOAD_BYTES)
        for chunk_bytes in (PAGE, 0):
            reads = Reads()
            for key in gone:
                reads.add(key, kept[key], PAYLOAD_BYTES, chunk_bytes=chunk_bytes)
            assert Outcome.OK not in read(volume, reads)

    def test_it_holds_what_may_be_found_on_it(self, volume: Volume, reopen: Reopen | None) -> None:
        may_hold = volume.facts().may_hold
        if may_hold is None:
            pytest.skip("any key may be on this volume")
        others = words_of([make_key(number) for number in range(1 << 21, (1 << 21) + 100)])
        assert not may_hold(others).any()
        kept = fill(volume)
        discard(volume, list(kept.values()))
        assert may_hold(words_of(list(kept))).all()
        if reopen is not None:
            volume = reopen()
            may_hold = volume.facts().may_hold
            assert may_hold is not None and may_hold(words_of(list(kept))).all()
            contents = volume.contents(None)
            volume.discard(contents.places, contents.payload_bytes)
        assert release_dead(volume)
        left = set(volume.segments().segments.tolist())
        held = [key for key, place in kept.items() if segment_of(place) in left]
        assert not held or may_hold(words_of(held)).all()
        assert not may_hold(others).any()

    def test_segments_are_listed_oldest_first(self, volume: Volume) -> None:
        places = store(volume, [make_key(number) for number in range(3)])
        table = volume.segments()
        assert {segment_of(place) for place in places} <= set(table.segments.tolist())
        assert table.live_count.sum() == 3
        fill(volume, first=100)
        table = volume.segments()
        assert table.sealed.any()
        ids = table.ids.tolist()
        assert ids == sorted(set(ids)), "oldest first"
        assert (table.live_bytes == table.live_count * record_bytes(PAYLOAD_BYTES)).all()

    def test_heads_are_read_alone(self, volume: Volume) -> None:
        keys = [make_key(number) for number in range(3)]
        places = store(volume, keys)
        reads = Reads()
        for key, place in zip([keys[0], make_key(98), keys[2]], places, strict=True):
            reads.add(key, place, PAYLOAD_BYTES, span=(0, 0))
        outcomes = read(volume, reads)
        assert [outcome == Outcome.OK for outcome in outcomes] == [True, False, True]
        for index in (0, 2):
            head = parse_head(reads.images[index][:HEAD_BYTES])
            assert head is None or head.key == keys[index]

    def test_a_record_keeps_its_stamp(self, volume: Volume) -> None:
        key = make_key(1)
        records = make_records([key], PAYLOAD_BYTES)
        for _ in range(2):
            (place,) = put(volume, records)
            reads = Reads().add(key, place, PAYLOAD_BYTES)
            assert read(volume, reads) == [Outcome.OK]
            head = parse_head(reads.images[0])
            assert head is not None and head.stamp == records.rows["stamp"][0]

    def test_a_record_too_big_for_the_volume_takes_no_other_with_it(self, volume: Volume) -> None:
        sizes = [volume.facts().capacity_bytes + PAGE, PAYLOAD_BYTES]
        keys = [make_key(1), make_key(2)]
        payloads = [bytes(sizes[0]), payload_for(keys[1], PAYLOAD_BYTES)]
        images = [
            make_image(key, payload, chunk_bytes)
            for key, payload, chunk_bytes in zip(keys, payloads, [1 << 20, PAGE], strict=True)
        ]
        first, second = put(volume, records_of(keys, sizes, images))
        assert first == NO_PLACE
        assert second != NO_PLACE
        assert load(volume, keys[1], second) == payload_for(keys[1], PAYLOAD_BYTES)

    def test_usage_counts_whole_records(self, volume: Volume) -> None:
        assert volume.facts().used_bytes == 0
        places = store(volume, [make_key(number) for number in range(4)])
        one = record_bytes(PAYLOAD_BYTES)
        assert volume.facts().used_bytes == 4 * one
        discard(volume, places[:3])
        assert volume.facts().used_bytes == one
        assert volume.facts().used_bytes <= volume.facts().held_bytes

    def test_a_fresh_volume_works_and_syncs(self, volume: Volume) -> None:
        facts = volume.facts(details=True)
        assert facts.up and facts.takes_blocks and facts.may_write
        assert not facts.lost and not facts.full and not facts.surplus_segments
        assert facts.record_bytes_max >= record_bytes(PAYLOAD_BYTES) <= facts.room_bytes
        assert facts.segments_max >= 1 and facts.segment_bytes > 0 and facts.spare_segments > 0
        assert facts.budget is None or facts.budget.left_bytes <= facts.budget.bucket_bytes
        assert volume.sync(TIMEOUT_S)
        store(volume, [make_key(1)])
        assert volume.sync(TIMEOUT_S)
        assert volume.sync(TIMEOUT_S)
        assert volume.maintain(lambda: False) > 0
        assert volume.facts().up

    def test_writing_can_be_ended(self, volume: Volume) -> None:
        key = make_key(1)
        (place,) = store(volume, [key])
        volume.set_limits(None, may_write=False)
        assert not volume.facts().takes_blocks
        assert put(volume, make_records([make_key(2)], PAYLOAD_BYTES)) == [NO_PLACE]
        assert load(volume, key, place) == payload_for(key, PAYLOAD_BYTES)
        volume.set_limits(None, may_write=True)
        assert volume.facts().takes_blocks
        store(volume, [make_key(2)])

    def test_close_twice(self, volume: Volume) -> None:
        store(volume, [make_key(1)])
        volume.close()
        volume.close()

    @pytest.mark.parametrize("in_background", [False, True])
    @pytest.mark.parametrize("timeout_s", [0.0, 0.001])
    def test_the_deadline_is_kept(
        self, volume: Volume, timeout_s: float, in_background: bool
    ) -> None:
        keys = [make_key(number) for number in range(16)]
        reads = Reads()
        for key, place in zip(keys, store(volume, keys), strict=True):
            reads.add(key, place, PAYLOAD_BYTES)
        started = time.monotonic()
        reading = volume.read(reads.rows, Priority.FOREGROUND, timeout_s)
        if in_background:
            reading.when_done(lambda: None)
        outcomes = reading.result().tolist()
        assert time.monotonic() - started < timeout_s + 5.0
        assert set(outcomes) <= {Outcome.OK, Outcome.LATE}
        for index, outcome in enumerate(outcomes):
            if outcome == Outcome.OK:
                assert reads.payload(index) == payload_for(keys[index], PAYLOAD_BYTES)
        assert reading.released(TIMEOUT_S)

    def test_the_end_of_a_read_is_told_once(self, volume: Volume) -> None:
        key = make_key(1)
        reads = Reads().add(key, store(volume, [key])[0], PAYLOAD_BYTES)
        ended = threading.Semaphore(0)
        reading = volume.read(reads.rows, Priority.FOREGROUND, TIMEOUT_S)
        reading.when_done(ended.release)
        assert ended.acquire(timeout=TIMEOUT_S)
        assert reading.result().tolist() == [Outcome.OK]
        assert not ended.acquire(blocking=False)
        assert reads.payload(0) == payload_for(key, PAYLOAD_BYTES)

    def test_a_cancelled_read_touches_nothing(self, volume: Volume) -> None:
        key = make_key(1)
        reads = Reads().add(key, store(volume, [key])[0], PAYLOAD_BYTES)
        before = bytes(reads.images[0])
        reading = volume.read(reads.rows, Priority.PREFETCH, TIMEOUT_S)
        if reading.cancel():
            assert bytes(reads.images[0]) == before
        else:
            assert reading.result().tolist() == [Outcome.OK]

    def test_threads_do_not_disturb_each_other(self, volume: Volume) -> None:
        wrong: list[str] = []
        users = [_User(volume, number, wrong) for number in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert not wrong
        held = sum(len(user.held) for user in users)
        assert volume.facts().used_bytes == held * record_bytes(PAYLOAD_BYTES)

    def test_what_was_synced_is_found_again(self, volume: Volume, reopen: Reopen | None) -> None:
        keys = [make_key(number) for number in range(8)]
        store(volume, keys)
        assert volume.sync(TIMEOUT_S)
        again = opened(reopen)
        found = contents_of(again)
        assert sorted(found) == sorted(keys)
        for key, (place, nbytes) in found.items():
            assert nbytes == PAYLOAD_BYTES
            assert load(again, key, place) == payload_for(key, PAYLOAD_BYTES)
        assert again.facts().used_bytes == len(keys) * record_bytes(PAYLOAD_BYTES)
        assert load(again, make_key(99), store(again, [make_key(99)])[0])

    def test_contents_are_given_once_and_then_what_is_new(
        self, volume: Volume, reopen: Reopen | None
    ) -> None:
        store(volume, [make_key(1)])
        again = opened(reopen)
        first = again.contents(None)
        assert len(first.words) == 1
        later = again.contents(first.token)
        assert not len(later.words) and not len(later.gone_words)

    def test_of_two_records_the_newer_is_found(self, volume: Volume, reopen: Reopen | None) -> None:
        key, short = make_key(1), PAGE
        store(volume, [key])
        store(volume, [key], short)
        ((place, nbytes),) = contents_of(again := opened(reopen)).values()
        assert nbytes == short
        assert load(again, key, place, short) == payload_for(key, short)

    def test_what_was_removed_stays_away(self, volume: Volume, reopen: Reopen | None) -> None:
        keys = [make_key(number) for number in range(4)]
        store(volume, keys)
        assert volume.put_meta(removal_of(*keys[:2]))
        store(volume, [keys[1]])
        assert sorted(contents_of(opened(reopen))) == sorted(keys[1:])

    def test_a_namespace_that_was_removed_stays_away(
        self, volume: Volume, reopen: Reopen | None
    ) -> None:
        ours = [BlockKey(b"namespac" + make_key(number)[8:]) for number in range(3)]
        store(volume, [*ours, make_key(9)])
        assert volume.put_meta(removal_of(b"namespac"))
        store(volume, ours[2:])
        assert sorted(contents_of(opened(reopen))) == sorted([ours[2], make_key(9)])

    def test_a_removal_outlives_the_segments_after_it(
        self, volume: Volume, reopen: Reopen | None
    ) -> None:
        keys = [make_key(number) for number in range(3)]
        places = store(volume, keys)
        kept = fill(volume, first=100)
        for key in keys[:2]:
            assert volume.put_meta(removal_of(key))
        discard(volume, places[:2])
        for _ in range(3):
            discard(volume, list(kept.values()))
            release_dead(volume)
            kept = fill(volume, first=1 << 20)
        found = contents_of(opened(reopen))
        assert keys[2] in found
        assert not found.keys() & set(keys[:2])

    def test_descriptions_are_remembered(self, volume: Volume, reopen: Reopen | None) -> None:
        known = {b"namespac": b"first", b"namespad": b"second"}
        assert volume.put_meta(
            [MetaEntry(MetaKind.NAMESPACE, tag, STAMPS.next(), text) for tag, text in known.items()]
        )
        found = Metadata()
        for entry in opened(reopen).contents(None).metadata:
            found.add(entry)
        assert found.values(MetaKind.NAMESPACE) == known

    def test_agrees_with_a_dict(self, volume: Volume) -> None:
        class Machine(VolumeMachine):
            def __init__(self) -> None:
                super().__init__(volume)

        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=20))


class VolumeMachine(RuleBasedStateMachine):
    """Random sequences of calls must leave the volume in agreement with a dict."""

    def __init__(self, volume: Volume) -> None:
        super().__init__()
        self.volume = volume
        self.model: dict[int, tuple[BlockKey, int]] = {}
        """Key and payload size by place."""

    def teardown(self) -> None:
        self._discard(list(self.model))
        assert self.volume.facts().used_bytes == 0
        release_dead(self.volume)

    def _discard(self, places: list[int]) -> None:
        sizes = [self.model.pop(place)[1] for place in places]
        self.volume.discard(np.array(places, np.int64), np.array(sizes, np.int64))

    @rule(
        blocks=st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(SIZES)), min_size=1, max_size=4
        )
    )
    def append(self, blocks: list[tuple[int, int]]) -> None:
        made = [(make_key(number), nbytes) for number, nbytes in blocks]
        records = make_records([key for key, _ in made], [nbytes for _, nbytes in made])
        for block, place in zip(made, put(self.volume, records), strict=True):
            assert place not in self.model, "two blocks in one place"
            if place != NO_PLACE:
                self.model[place] = block

    @rule(share=st.integers(0, 3), start=st.integers(0, 3))
    def discard(self, share: int, start: int) -> None:
        self._discard(list(self.model)[start::4][:share])

    @rule()
    def release(self) -> None:
        release_dead(self.volume)

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        assert self.volume.put_meta(removal_of(make_key(number)))

    @rule()
    def sync(self) -> None:
        assert self.volume.sync(TIMEOUT_S)

    @invariant()
    def every_block_comes_back(self) -> None:
        reads = Reads()
        for place, (key, nbytes) in self.model.items():
            reads.add(key, place, nbytes)
        assert set(read(self.volume, reads)) <= {Outcome.OK}
        for index, (key, nbytes) in enumerate(self.model.values()):
            assert reads.payload(index) == payload_for(key, nbytes)

    @invariant()
    def usage_is_exact(self) -> None:
        expected = sum(record_bytes(nbytes) for _, nbytes in self.model.values())
        assert self.volume.facts().used_bytes == expected


class _User(threading.Thread):
    """A thread that appends, reads and discards its own blocks, and records errors."""

    def __init__(self, volume: Volume, number: int, wrong: list[str]) -> None:
        super().__init__(name=f"contract-user-{number}")
        self.volume = volume
        self.number = number
        self.wrong = wrong
        self.held: dict[BlockKey, int] = {}

    def run(self) -> None:
        for turn in range(12):
            keys = [make_key(self.number << 32 | turn << 8 | n) for n in range(3)]
            fresh = zip(keys, put(self.volume, make_records(keys, PAYLOAD_BYTES)), strict=True)
            self.held.update({key: place for key, place in fresh if place != NO_PLACE})
            self._look()
            if turn % 3 == 2:
                discard(self.volume, [self.held.pop(key) for key in list(self.held)[:5]])

    def _look(self) -> None:
        reads = Reads()
        for key, place in self.held.items():
            reads.add(key, place, PAYLOAD_BYTES)
        outcomes = read(self.volume, reads)
        for index, (key, outcome) in enumerate(zip(self.held, outcomes, strict=True)):
            if outcome != Outcome.OK:
                self.wrong.append(f"thread {self.number}: {outcome}")
            elif reads.payload(index) != payload_for(key, PAYLOAD_BYTES):
                self.wrong.append(f"thread {self.number}: wrong bytes")


def put(volume: Volume, records: Records) -> list[int]:
    """Append records. Returns their places."""
    places: list[int] = volume.append(records.rows).tolist()
    return places


def read(volume: Volume, reads: Reads, timeout_s: float = TIMEOUT_S) -> list[int]:
    """Read and wait. Returns the outcomes."""
    reading = volume.read(reads.rows, Priority.FOREGROUND, timeout_s)
    outcomes: list[int] = reading.result().tolist()
    assert reading.released(TIMEOUT_S)
    return outcomes


def discard(volume: Volume, places: Sequence[int], payload_bytes: int = PAYLOAD_BYTES) -> None:
    sizes = np.full(len(places), payload_bytes, np.int64)
    volume.discard(np.array(places, np.int64), sizes)


def release_dead(volume: Volume) -> int:
    """Release the sealed segments without a block in use. Returns their number."""
    table = volume.segments()
    dead = table.segments[table.sealed & (table.live_count == 0)]
    return sum(volume.release(segment) for segment in dead.tolist())


def opened(reopen: Reopen | None) -> Volume:
    """The volume after a restart. Skips the test if the volume is volatile."""
    if reopen is None:
        pytest.skip("this volume is volatile")
    return reopen()


def contents_of(volume: Volume) -> dict[BlockKey, tuple[int, int]]:
    """Place and payload size of the recovered blocks that were not removed, by key."""
    contents = volume.contents(None)
    keys = [BlockKey(words.tobytes()) for words in contents.words]
    assert len(set(keys)) == len(keys), "a key came twice"
    known = Metadata()
    for entry in contents.metadata:
        known.add(entry)
    alive = surviving(contents.words, contents.stamps, known.tombstones).tolist()
    places, sizes = contents.places.tolist(), contents.payload_bytes.tolist()
    return {keys[index]: (places[index], sizes[index]) for index in alive}


def words_of(keys: Sequence[BlockKey]) -> Keys:
    return np.array([np.frombuffer(key, np.uint64) for key in keys]).reshape(-1, 4)


def store(
    volume: Volume, keys: Sequence[BlockKey], payload_bytes: int = PAYLOAD_BYTES
) -> list[int]:
    """Store blocks in a volume that has room for them."""
    places = put(volume, make_records(keys, payload_bytes))
    assert NO_PLACE not in places, "the volume has no room, or does not work"
    return places


def load(volume: Volume, key: BlockKey, place: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    reads = Reads().add(key, place, payload_bytes)
    assert read(volume, reads) == [Outcome.OK]
    return reads.payload(0)


def fill(volume: Volume, first: int = 0) -> dict[BlockKey, int]:
    """Store blocks until the volume is full. Returns the place of each."""
    kept: dict[BlockKey, int] = {}
    most = volume.facts().capacity_bytes // record_bytes(PAYLOAD_BYTES) + 1
    for number in range(first, first + most, AT_ONCE):
        keys = [make_key(number + offset) for offset in range(AT_ONCE)]
        places = put(volume, make_records(keys, PAYLOAD_BYTES))
        kept.update(
            {key: place for key, place in zip(keys, places, strict=True) if place != NO_PLACE}
        )
        if NO_PLACE in places:
            return kept
    raise AssertionError("the volume stored more than its capacity")
