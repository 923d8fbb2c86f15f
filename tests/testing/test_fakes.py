"""The fakes do what they say: notice damage, fail, are slow and count."""

import pytest

from kvdepot.core.volume import NO_PLACE, Outcome, Priority, Volume
from kvdepot.format.record import HEAD_BYTES, record_bytes
from kvdepot.native import address_of
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.contract import discard, put, read, store
from kvdepot.testing.fakes import (
    GARBAGE,
    CountingVolume,
    FaultyVolume,
    MemoryVolume,
    Rates,
    SlowVolume,
)
from kvdepot.testing.images import Reads, make_key, make_records, payload_for

NBYTES = 10_000
CAPACITY_BYTES = 1 << 20
KEY = make_key(1)


def stored(volume: Volume) -> int:
    (place,) = store(volume, [KEY], NBYTES)
    return place


def is_garbage(image: memoryview | bytearray) -> bool:
    return set(image) == {GARBAGE}


def test_a_memory_volume_notices_damage() -> None:
    volume = MemoryVolume(CAPACITY_BYTES)
    place = stored(volume)
    (name,) = volume.medium
    record = bytearray(volume.medium[name])
    record[HEAD_BYTES + 5000] ^= 1
    volume.medium[name] = bytes(record)
    reads = Reads().add(KEY, place, NBYTES).add(KEY, place, NBYTES, span=(0, 4096))
    assert read(volume, reads) == [Outcome.CORRUPT, Outcome.OK]


def test_scripted_appends_fail_and_the_rest_goes_through() -> None:
    volume = FaultyVolume(MemoryVolume(CAPACITY_BYTES))
    volume.fail_appends(2)
    places = put(volume, make_records([make_key(number) for number in range(3)], 1))
    assert places[:2] == [NO_PLACE] * 2
    assert places[2] != NO_PLACE
    assert volume.facts().held_bytes == record_bytes(1)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT])
def test_a_failed_read_leaves_garbage(outcome: Outcome) -> None:
    volume = FaultyVolume(MemoryVolume(CAPACITY_BYTES))
    place = stored(volume)
    target = bytearray(NBYTES)
    reads = Reads().add(KEY, place, NBYTES, target=address_of(target)[0]).add(KEY, place, NBYTES)
    volume.fail_reads(outcome)
    assert read(volume, reads) == [outcome, Outcome.OK]
    assert is_garbage(reads.images[0]) and is_garbage(target)
    assert reads.payload(1) == payload_for(KEY, NBYTES)


def test_a_late_read_is_busy_until_released() -> None:
    volume = FaultyVolume(MemoryVolume(CAPACITY_BYTES))
    reads = Reads().add(KEY, stored(volume), NBYTES)
    volume.fail_reads(Outcome.LATE)
    pending = volume.read(reads.rows, Priority.FOREGROUND, 1.0)
    assert pending.result().tolist() == [Outcome.LATE]
    assert not pending.released(0.0)
    assert not is_garbage(reads.images[0])
    volume.release_late()
    assert pending.released(0.0)
    assert is_garbage(reads.images[0])


def test_rates_are_drawn_from_the_seed() -> None:
    def answers(seed: int) -> list[int]:
        rates = Rates(seed, read={Outcome.FAILED: 0.3, Outcome.CORRUPT: 0.3})
        volume = FaultyVolume(MemoryVolume(CAPACITY_BYTES), rates)
        place, reads = stored(volume), Reads()
        for _ in range(40):
            reads.add(KEY, place, NBYTES)
        return read(volume, reads)

    assert answers(1) == answers(1) != answers(2)
    assert set(answers(1)) == {Outcome.OK, Outcome.FAILED, Outcome.CORRUPT}


def test_a_slow_volume_takes_its_time() -> None:
    clock = ManualClock()
    volume = SlowVolume(MemoryVolume(CAPACITY_BYTES), 2.0, clock, clock.sleep)
    reads = Reads().add(KEY, stored(volume), NBYTES)
    assert clock.now() == 2.0
    assert read(volume, reads, 3.0) == [Outcome.OK]
    assert clock.now() == 4.0
    assert reads.payload(0) == payload_for(KEY, NBYTES)


def test_a_slow_volume_is_late_at_the_deadline_and_not_after_it() -> None:
    clock = ManualClock()
    volume = SlowVolume(MemoryVolume(CAPACITY_BYTES), 2.0, clock, clock.sleep)
    reads = Reads().add(KEY, stored(volume), NBYTES)
    clock.advance(8.0)
    pending = volume.read(reads.rows, Priority.FOREGROUND, 0.5)
    assert pending.result().tolist() == [Outcome.LATE]
    assert clock.now() == 10.5
    assert not pending.released(1.0)
    assert clock.now() == 11.5
    assert pending.released(1.0)
    assert clock.now() == 12.0


def test_a_counting_volume_counts() -> None:
    volume = CountingVolume(FaultyVolume(MemoryVolume(record_bytes(NBYTES))))
    place = stored(volume)
    assert put(volume, make_records([make_key(2)], 7)) == [NO_PLACE]
    reads = Reads().add(make_key(2), place, NBYTES).add(KEY, place, NBYTES, span=(0, 4096))
    assert read(volume, reads) == [Outcome.CORRUPT, Outcome.OK]
    discard(volume, [place], NBYTES)
    assert volume.sync(1.0)
    volume.close()
    assert volume.calls == {"append": 2, "read": 1, "discard": 1, "sync": 1, "close": 1}
    assert volume.blocks == {"append": 1, "read": 1, "discard": 1, "sync": 0, "close": 0}
    assert volume.nbytes["append"] == record_bytes(NBYTES)
    assert volume.nbytes["read"] == 4096
    assert volume.outcomes == {Outcome.OK: 1, Outcome.CORRUPT: 1}
