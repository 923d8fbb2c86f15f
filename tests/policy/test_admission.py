"""Admission, reuse, placement and thrash detection as pure decisions."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.admission import (
    DAY_S,
    Candidate,
    EnduranceBudget,
    Verdict,
    WriteMode,
    admit,
    price,
    wanted,
)
from kvdepot.policy.reuse import ReuseEstimator, middle_s, octave
from kvdepot.policy.thrash import ThrashDetector

Writes = st.lists(
    st.tuples(st.floats(0, 5000), st.integers(1, 10**9), st.floats(0, 1)), max_size=60
)


@given(Writes, st.floats(0.1, 10), st.floats(10, 7200))
def test_a_drive_never_writes_more_than_its_budget(
    writes: list[tuple[float, int, float]], per_day: float, burst_s: float
) -> None:
    budget = EnduranceBudget(10**12, per_day, burst_s)
    now_s, written = 0.0, 0
    for gap_s, nbytes, chance in writes:
        now_s += gap_s
        if admit(Candidate(nbytes, chance), WriteMode.THROUGH, budget, now_s):
            written += nbytes
        allowed = 10**12 * per_day * (now_s + burst_s) / DAY_S
        assert written <= allowed * (1 + 1e-9)


@given(Writes)
def test_whoever_is_refused_promised_less_than_who_was_admitted_at_that_level(
    writes: list[tuple[float, int, float]],
) -> None:
    budget = EnduranceBudget(10**12, 1.0)
    now_s = 0.0
    for gap_s, nbytes, chance in writes:
        now_s += gap_s
        level = budget.level(now_s)
        verdict = admit(Candidate(nbytes, chance), WriteMode.THROUGH, budget, now_s)
        enough = nbytes <= level * budget.bucket_bytes * (1 + 1e-12)
        assert bool(verdict) == (chance >= price(level) and enough)


def test_the_least_promising_bypass_first() -> None:
    levels = [1.0, 0.5, 0.4, 0.25, 0.1, 0.0]
    prices = [price(level) for level in levels]
    assert prices == pytest.approx([0.0, 0.0, 0.2, 0.5, 0.8, 1.0])


def test_an_idle_drive_saves_up_one_burst_and_no_more() -> None:
    budget = EnduranceBudget(int(DAY_S) * 100, 1.0, burst_s=50.0)
    assert budget.bucket_bytes == 5000
    assert budget.spend(5000, 0.0)
    assert not budget.spend(1, 0.0)
    assert budget.spend(1000, 10.0)
    assert not budget.spend(1, 10.0)
    assert not budget.spend(5001, 1e9)
    assert budget.spend(5000, 1e9)


def test_a_clock_that_goes_back_fills_nothing() -> None:
    budget = EnduranceBudget(10**6, 1.0, burst_s=100.0)
    budget.spend(int(budget.bucket_bytes), 1000.0)
    before = budget.level(1000.0)
    assert budget.level(500.0) == before
    assert budget.level(1000.0) == before


@pytest.mark.parametrize(
    ("mode", "fresh", "used", "promising", "leaving"),
    [
        (WriteMode.THROUGH, "admit", "admit", "admit", "admit"),
        (WriteMode.SELECTIVE, "later", "admit", "admit", "later"),
        (WriteMode.BACK, "later", "later", "later", "admit"),
        (WriteMode.AROUND, "bypass", "bypass", "bypass", "bypass"),
    ],
)
def test_write_modes(mode: WriteMode, fresh: str, used: str, promising: str, leaving: str) -> None:
    assert wanted(Candidate(1, 0.1), mode) is Verdict(fresh)
    assert wanted(Candidate(1, 0.1, uses=1), mode) is Verdict(used)
    assert wanted(Candidate(1, 0.5), mode) is Verdict(promising)
    assert wanted(Candidate(1, 0.1, leaving=True), mode) is Verdict(leaving)


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


def test_thrashing_starts_and_ends_once() -> None:
    detector = ThrashDetector(window_uses=100)
    assert not detector.saw(hits=90, late=10)
    assert detector.saw(hits=10, late=90)
    assert detector.saw(hits=60, late=40), "still more than calm"
    for _ in range(5):
        detector.saw(hits=95, late=5)
    assert not detector.thrashing


def test_new_blocks_alone_are_no_thrashing() -> None:
    detector = ThrashDetector(window_uses=100)
    assert not any(detector.saw(other=100) for _ in range(10))
