"""The wrappers do what they say: fail, are slow and count."""

import pytest

from kvdepot.core.tier import Load, Outcome, segment_of
from kvdepot.format.record import HEAD_BYTES, record_bytes
from kvdepot.native import address_of
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.fakes import (
    GARBAGE,
    CountingTier,
    FaultyTier,
    MemoryTier,
    Rates,
    SlowTier,
)
from kvdepot.testing.images import loaded, make_image, make_key, make_load, payload_for

NBYTES = 10_000
CAPACITY_BYTES = 1 << 20
KEY = make_key(1)


def stored(tier: MemoryTier | FaultyTier | SlowTier | CountingTier) -> int:
    (location,) = tier.append(0, [make_image(KEY, payload_for(KEY, NBYTES))])
    assert location is not None
    tier.count(location, NBYTES)
    return location


def is_garbage(load: Load) -> bool:
    return set(load.image) == {GARBAGE}


def test_a_memory_tier_notices_damage() -> None:
    tier = MemoryTier(CAPACITY_BYTES)
    location = stored(tier)
    record = bytearray(tier.medium.records[segment_of(location)])
    record[HEAD_BYTES + 5000] ^= 1
    tier.medium.records[segment_of(location)] = bytes(record)
    whole = make_load(KEY, location, NBYTES)
    beside = make_load(KEY, location, NBYTES, span=(0, 4096))
    assert tier.load([whole, beside], 1.0) == ([Outcome.CORRUPT, Outcome.OK], None)


def test_scripted_appends_fail_and_the_rest_goes_through() -> None:
    tier = FaultyTier(MemoryTier(CAPACITY_BYTES))
    tier.fail_appends(2)
    images = [make_image(make_key(n), b"x") for n in range(3)]
    first, second, third = tier.append(0, images)
    assert (first, second) == (None, None)
    assert third is not None
    assert tier.usage().held_bytes == record_bytes(1)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT])
def test_a_failed_load_leaves_garbage(outcome: Outcome) -> None:
    tier = FaultyTier(MemoryTier(CAPACITY_BYTES))
    location = stored(tier)
    target = bytearray(NBYTES)
    bad = make_load(KEY, location, NBYTES, copy_to=address_of(target)[0])
    good = make_load(KEY, location, NBYTES)
    tier.fail_loads(outcome)
    assert tier.load([bad, good], 1.0) == ([outcome, Outcome.OK], None)
    assert is_garbage(bad)
    assert set(target) == {GARBAGE}
    assert loaded(good) == payload_for(KEY, NBYTES)


def test_a_late_load_is_busy_until_released() -> None:
    tier = FaultyTier(MemoryTier(CAPACITY_BYTES))
    load = make_load(KEY, stored(tier), NBYTES)
    tier.fail_loads(Outcome.LATE)
    outcomes, pending = tier.load([load], 1.0)
    assert outcomes == [Outcome.LATE]
    assert pending is not None
    assert not pending.wait(0.0)
    assert not is_garbage(load)
    tier.release_late()
    assert pending.wait(0.0)
    assert is_garbage(load)


def test_rates_are_drawn_from_the_seed() -> None:
    def answers(seed: int) -> list[Outcome]:
        rates = Rates(seed, load={Outcome.FAILED: 0.3, Outcome.CORRUPT: 0.3})
        tier = FaultyTier(MemoryTier(CAPACITY_BYTES), rates)
        location = stored(tier)
        return tier.load([make_load(KEY, location, NBYTES) for _ in range(40)], 1.0)[0]

    assert answers(1) == answers(1) != answers(2)
    assert set(answers(1)) == {Outcome.OK, Outcome.FAILED, Outcome.CORRUPT}


def test_a_slow_tier_takes_its_time() -> None:
    clock = ManualClock()
    tier = SlowTier(MemoryTier(CAPACITY_BYTES), 2.0, clock, clock.sleep)
    location = stored(tier)
    assert clock.now() == 2.0
    load = make_load(KEY, location, NBYTES)
    assert tier.load([load], 3.0) == ([Outcome.OK], None)
    assert clock.now() == 4.0
    assert loaded(load) == payload_for(KEY, NBYTES)


def test_a_slow_tier_is_late_at_the_deadline_and_not_after_it() -> None:
    clock = ManualClock()
    tier = SlowTier(MemoryTier(CAPACITY_BYTES), 2.0, clock, clock.sleep)
    location = stored(tier)
    clock.advance(8.0)
    outcomes, pending = tier.load([make_load(KEY, location, NBYTES)], 0.5)
    assert outcomes == [Outcome.LATE]
    assert clock.now() == 10.5
    assert pending is not None
    assert not pending.wait(1.0)
    assert clock.now() == 11.5
    assert pending.wait(1.0)
    assert clock.now() == 12.0


def test_a_counting_tier_counts() -> None:
    tier = CountingTier(FaultyTier(MemoryTier(record_bytes(NBYTES))))
    location = stored(tier)
    assert tier.append(0, [make_image(make_key(2), b"no room")]) == [None]
    wrong = make_load(make_key(2), location, NBYTES)
    part = make_load(KEY, location, NBYTES, span=(0, 4096))
    tier.load([wrong, part], 1.0)
    tier.discard([location], [NBYTES])
    tier.flush()
    tier.close()
    assert tier.calls == {"append": 2, "load": 1, "discard": 1, "flush": 1, "close": 1}
    assert tier.blocks == {"append": 1, "load": 1, "discard": 1, "flush": 0, "close": 0}
    assert tier.nbytes["append"] == record_bytes(NBYTES)
    assert tier.nbytes["load"] == 4096
    assert tier.outcomes == {Outcome.OK: 1, Outcome.CORRUPT: 1}
