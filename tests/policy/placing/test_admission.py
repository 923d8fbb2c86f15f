"""Admission, promise and thrash detection as pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.endurance import DAY_S, Endurance
from kvdepot.policy.placing.admission import ReuseChance, ThrashDetector, kind_of, worth_wear

Writes = st.lists(
    st.tuples(st.floats(0, 20_000), st.integers(1, 10**9), st.floats(0, 1)), max_size=60
)


@given(Writes, st.integers(10**9, 10**12))
def test_in_no_day_is_more_written_than_the_budget(
    writes: list[tuple[float, int, float]], daily_bytes: int
) -> None:
    budget = Endurance.full(daily_bytes, 0.0)
    now_s = 0.0
    written: list[tuple[float, int]] = []
    for gap_s, nbytes, chance in writes:
        now_s += gap_s
        budget.fill(now_s)
        if worth_wear(chance, (budget.level_bytes - nbytes) / budget.bucket_bytes):
            budget.spend(nbytes, now_s)
            written.append((now_s, nbytes))
    for start_s, _ in written:
        day = sum(nbytes for at_s, nbytes in written if start_s <= at_s <= start_s + DAY_S)
        assert day <= daily_bytes * (1 + 1e-9)


def test_a_busy_drive_uses_nearly_all_of_its_budget() -> None:
    """A block of a kilobyte every ten seconds for ten days; 86 kB may be written in one."""
    budget = Endurance.full(864_000 // 10, 0.0)
    written = 0
    for second in range(0, 10 * int(DAY_S), 10):
        budget.fill(float(second))
        if worth_wear(1.0, (budget.level_bytes - 1000) / budget.bucket_bytes):
            budget.spend(1000, float(second))
            written += 1000
    assert 0.95 < written / 864_000 <= 1.0


def test_the_least_promising_bypass_first() -> None:
    prices = {1.0: 0.0, 0.5: 0.0, 0.4: 0.2, 0.25: 0.5, 0.1: 0.8, 0.0: 1.0}
    for level, chance in prices.items():
        assert worth_wear(chance + 1e-9, level)
        assert not chance or not worth_wear(chance - 1e-9, level)
    assert not worth_wear(1.0, -0.01), "not even what is certain, once there is nothing left"


def test_an_idle_drive_saves_up_one_burst_and_no_more() -> None:
    budget = Endurance.full(25 * 3600, 0.0)
    assert (budget.bytes_per_s, budget.bucket_bytes) == (1.0, 3600.0)
    budget.spend(3600, 0.0)
    budget.fill(1000.0)
    assert budget.level_bytes == 1000.0
    budget.fill(1e9)
    assert budget.level_bytes == 3600.0


def test_what_had_to_be_written_is_paid_back() -> None:
    budget = Endurance.full(25 * 3600, 0.0)
    budget.spend(4600, 0.0)
    assert budget.level_bytes == -1000.0
    budget.fill(1500.0)
    assert budget.level_bytes == 500.0


def test_a_clock_that_goes_back_fills_nothing() -> None:
    budget = Endurance.full(25 * 3600, 10_000.0)
    budget.spend(3600, 10_000.0)
    for now_s in (5_000.0, 10_000.0):
        budget.fill(now_s)
        assert budget.level_bytes == 0.0


def play(promise: ReuseChance, blocks: int, returns: int) -> None:
    """Blocks of one page, of which the first `returns` of every four are asked for again soon."""
    for number in range(blocks):
        promise.seen(number, kind_of(0, 0), 4096)
        if number % 4 < returns:
            promise.seen(number, kind_of(1, 1), 4096)


@pytest.mark.parametrize("returns", [0, 1, 2, 3, 4])
def test_a_kind_promises_what_others_of_it_came_to(returns: int) -> None:
    promise = ReuseChance(200 * 4096)
    play(promise, 8000, returns)
    assert promise.chance(kind_of(0, 0)) == pytest.approx(returns / 4, abs=0.05)
    if returns:
        assert promise.chance(kind_of(1, 1)) < 0.1, "none of these came a third time"


def test_what_comes_back_after_the_tier_would_have_dropped_it_does_not_count() -> None:
    promise = ReuseChance(100 * 4096)
    for number in range(4000):
        promise.seen(number, kind_of(0, 0), 4096)
        if number >= 150:
            promise.seen(number - 150, kind_of(1, 1), 4096)
    assert promise.chance(kind_of(0, 0)) < 0.05


def test_nothing_is_known_at_first() -> None:
    assert {ReuseChance(1 << 20).chance(kind_of(turns, 0)) for turns in range(5)} == {0.25}


def test_a_large_tier_is_watched_in_part() -> None:
    promise = ReuseChance(1 << 40)
    play(promise, 100_000, 1)
    assert len(promise._watched) <= 1 << 14
    play(promise, 100_000, 4)
    assert promise.chance(kind_of(0, 0)) > 0.8


def serve(detector: ThrashDetector, tier: list[int], asked: list[int], blocks: int) -> None:
    """Ask for blocks; those that are not there are promoted and push out the oldest."""
    for block in asked:
        if block in tier:
            detector.hit()
            continue
        detector.missed(block)
        if detector.promotes(block % 256):
            tier.append(block)
        if len(tier) > blocks:
            detector.left(tier.pop(0), blocks)


def test_a_loop_larger_than_the_tier_is_thrashing_until_promotion_rests() -> None:
    detector = ThrashDetector(window_uses=100)
    tier: list[int] = []
    serve(detector, tier, list(range(150)) * 2, 100)
    assert detector.thrashing
    kept = set(tier)
    serve(detector, tier, list(range(150)), 100)
    assert len(kept & set(tier)) > 80, "what is there stays, and is hit"
    for _ in range(20):
        serve(detector, tier, list(range(60)), 100)
    assert not detector.thrashing


def test_new_blocks_alone_are_no_thrashing() -> None:
    detector = ThrashDetector(window_uses=100)
    serve(detector, [], list(range(1000)), 100)
    assert not detector.thrashing
    assert detector.late_share == 0.0


def test_where_new_blocks_push_others_out_promotion_goes_on() -> None:
    detector = ThrashDetector(window_uses=100)
    tier: list[int] = []
    for block in list(range(150)) * 3:
        serve(detector, tier, [block], 100)
        for new in range(2):
            detector.made(10_000 + 2 * block + new)
    assert detector.late_share > 0.5
    assert not detector.thrashing


def test_what_left_long_ago_came_too_late_for_a_larger_tier_too() -> None:
    detector = ThrashDetector(window_uses=100)
    serve(detector, [], list(range(400)) * 4, 100)
    assert detector.late_share == 0.0


def test_while_it_thrashes_every_sixteenth_prompt_is_promoted_and_not_always_the_same() -> None:
    detector = ThrashDetector(window_uses=100)
    tier: list[int] = []
    serve(detector, tier, list(range(150)) * 2, 100)
    first = {sample for sample in range(256) if detector.promotes(sample)}
    assert len(first) == 16
    serve(detector, tier, list(range(150)), 100)
    assert detector.thrashing
    assert first.isdisjoint(sample for sample in range(256) if detector.promotes(sample))
