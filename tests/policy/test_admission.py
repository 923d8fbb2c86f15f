"""Admission, promise, reuse, placement and thrash detection as pure decisions."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.endurance import DAY_S, Endurance
from kvdepot.policy.admission import price, worth_wear
from kvdepot.policy.placement import DROP, TierFacts, break_even_s, place
from kvdepot.policy.promise import Promise, kind_of
from kvdepot.policy.reuse import Expectation, ReuseEstimator, middle_s, octave
from kvdepot.policy.thrash import ThrashDetector

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
    """A block of a kilobyte every second for ten days; 864 kB may be written in one."""
    budget = Endurance.full(864_000, 0.0)
    written = 0
    for second in range(10 * int(DAY_S)):
        budget.fill(float(second))
        if worth_wear(1.0, (budget.level_bytes - 1000) / budget.bucket_bytes):
            budget.spend(1000, float(second))
            written += 1000
    assert 0.95 < written / 8_640_000 <= 1.0


def test_the_least_promising_bypass_first() -> None:
    levels = [1.0, 0.5, 0.4, 0.25, 0.1, 0.0]
    prices = [price(level) for level in levels]
    assert prices == pytest.approx([0.0, 0.0, 0.2, 0.5, 0.8, 1.0])
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


def play(promise: Promise, blocks: int, returns: int) -> None:
    """Blocks of one page, of which the first `returns` of every four are asked for again soon."""
    for number in range(blocks):
        promise.seen(number, kind_of(0, 0), 4096)
        if number % 4 < returns:
            promise.seen(number, kind_of(1, 1), 4096)


@pytest.mark.parametrize("returns", [0, 1, 2, 3, 4])
def test_a_kind_promises_what_others_of_it_came_to(returns: int) -> None:
    promise = Promise(200 * 4096)
    play(promise, 8000, returns)
    assert promise.chance(kind_of(0, 0)) == pytest.approx(returns / 4, abs=0.05)
    if returns:
        assert promise.chance(kind_of(1, 1)) < 0.1, "none of these came a third time"


def test_what_comes_back_after_the_tier_would_have_dropped_it_does_not_count() -> None:
    promise = Promise(100 * 4096)
    for number in range(4000):
        promise.seen(number, kind_of(0, 0), 4096)
        if number >= 150:
            promise.seen(number - 150, kind_of(1, 1), 4096)
    assert promise.chance(kind_of(0, 0)) < 0.05


def test_nothing_is_known_at_first() -> None:
    assert {Promise(1 << 20).chance(kind_of(turns, 0)) for turns in range(5)} == {0.25}


def test_a_large_tier_is_watched_in_part() -> None:
    promise = Promise(1 << 40)
    play(promise, 100_000, 1)
    assert len(promise._watched) <= 1 << 14
    play(promise, 100_000, 4)
    assert promise.chance(kind_of(0, 0)) > 0.8


@given(st.floats(0, 1e8))
def test_octaves_hold_their_gaps(gap_s: float) -> None:
    number = octave(gap_s)
    if 0 < number < 31:
        assert middle_s(number) / 2**0.5 <= gap_s * (1 + 1e-9)
        assert gap_s <= middle_s(number) * 2**0.5 * (1 + 1e-9)


def test_a_session_with_a_rhythm_is_expected_at_its_beat() -> None:
    estimator = ReuseEstimator()
    for turn in range(20):
        estimator.used("steady", 60.0 * turn)
    for stranger in range(80):
        estimator.used(stranger, 2000.0 + stranger)
    steady = estimator.expect("steady", 19 * 60.0)
    assert steady.chance > 0.8
    assert 60 / 1.5 < steady.interval_s < 60 * 1.5
    unknown = estimator.expect("nobody", 3000.0)
    assert 0 < unknown.chance < 0.3


def test_idle_time_makes_a_return_less_likely() -> None:
    estimator = ReuseEstimator()
    for session in range(50):
        estimator.used(session, 0.0)
    for session in range(25):
        estimator.used(session, 10.0)
    fresh = estimator.expect(49, 0.0)
    stale = estimator.expect(49, 3600.0)
    assert fresh.chance > stale.chance == 0.0
    assert stale.interval_s == inf


def test_a_return_after_the_horizon_does_not_count() -> None:
    estimator = ReuseEstimator()
    for turn in range(10):
        estimator.used("s", 1000.0 * turn)
    assert estimator.expect("s", 9000.0, horizon_s=100.0).chance == 0.0
    assert estimator.expect("s", 9000.0, horizon_s=5000.0).chance > 0.5


def test_sessions_are_bounded_and_closed_ones_forgotten() -> None:
    estimator = ReuseEstimator(sessions_max=10)
    for session in range(1000):
        estimator.used(session, float(session))
    assert len(estimator._sessions) == 10
    estimator.closed(999)
    assert 999 not in estimator._sessions


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1000)), max_size=60))
def test_chances_are_chances(uses: list[tuple[int, float]]) -> None:
    estimator = ReuseEstimator()
    now_s = 0.0
    for session, gap_s in uses:
        now_s += gap_s
        estimator.used(session, now_s)
    for session in range(7):
        found = estimator.expect(session, now_s, 500.0)
        assert 0.0 <= found.chance <= 1.0 + 1e-9
        assert found.interval_s >= 0.0


DRAM = TierFacts("dram", fetch_s=0.001, keep_cost_per_s=1e-3)
CXL = TierFacts("cxl", fetch_s=0.002, keep_cost_per_s=3e-4)
SSD = TierFacts("ssd", fetch_s=0.01, keep_cost_per_s=1e-5)
HDD = TierFacts("hdd", fetch_s=0.2, keep_cost_per_s=1e-7)


@pytest.mark.parametrize(
    ("interval_s", "tier"), [(0.1, "dram"), (5.0, "cxl"), (600.0, "ssd"), (86_400.0, "hdd")]
)
def test_the_later_the_reuse_the_lower_the_tier(interval_s: float, tier: str) -> None:
    chosen = place([DRAM, CXL, SSD, HDD], Expectation(1.0, interval_s), recompute_s=1.0)
    assert chosen == tier


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.floats(0.01, 1.0))
def test_a_longer_wait_never_leads_to_a_faster_tier(a_s: float, b_s: float, chance: float) -> None:
    tiers = [DRAM, CXL, SSD, HDD]
    names = [*(tier.name for tier in tiers), DROP]
    soon, late = sorted((a_s, b_s))
    first = place(tiers, Expectation(chance, soon), 1.0)
    second = place(tiers, Expectation(chance, late), 1.0)
    assert names.index(first) <= names.index(second)


def test_what_is_cheaper_to_recompute_or_never_returns_is_dropped() -> None:
    assert place([HDD], Expectation(1.0, 1.0), recompute_s=0.1) == DROP
    assert place([DRAM, HDD], Expectation(0.0, inf), recompute_s=10.0) == DROP


def test_break_even_is_where_the_choice_changes() -> None:
    at_s = break_even_s(DRAM, CXL)
    assert place([DRAM, CXL], Expectation(1.0, at_s * 0.99), 1.0) == "dram"
    assert place([DRAM, CXL], Expectation(1.0, at_s * 1.01), 1.0) == "cxl"


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
