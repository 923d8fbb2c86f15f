"""When a failing medium is left alone, and when it is tried again. On a clock that we move."""

import pytest

from kvdepot.io.breaker import Breaker, RetryPauses
from kvdepot.testing.clocks import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock, RetryPauses(initial_s=1.0, max_s=5.0), tolerance=3)


def test_a_medium_that_works_is_always_allowed(breaker: Breaker) -> None:
    assert all(breaker.allows() for _ in range(10))
    assert breaker.health().ok
    assert breaker.health().errors == 0


def test_single_errors_are_tolerated_and_counted(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed("EIO")
    assert breaker.allows()
    assert breaker.health().ok
    assert breaker.health().errors == 2


def test_the_third_error_in_a_row_opens_it(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.failed("EIO")
    assert not breaker.allows()
    health = breaker.health()
    assert (health.ok, health.reason, health.errors) == (False, "EIO", 3)
    assert health.retry_in_s == pytest.approx(1.0)


def test_a_success_in_between_starts_the_count_anew(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failed("EIO")
        breaker.failed("EIO")
        breaker.succeeded()
    assert breaker.allows()
    assert breaker.health().errors == 10


def test_some_errors_need_no_second_one(breaker: Breaker) -> None:
    breaker.failed("no space left", at_once=True)
    assert not breaker.allows()
    assert breaker.health().reason == "no space left"


def test_after_the_pause_one_caller_may_try(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed("gone", at_once=True)
    clock.advance(0.99)
    assert not breaker.allows()
    assert breaker.health().retry_in_s == pytest.approx(0.01)
    clock.advance(0.01)
    assert breaker.allows()
    assert not breaker.allows(), "one caller a pause"
    clock.advance(1.0)
    assert breaker.allows(), "the one who tried never told: the next may"


def test_a_failed_try_doubles_the_pause_up_to_a_limit(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed("gone", at_once=True)
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert breaker.health().retry_in_s == pytest.approx(pause_s)
        clock.advance(pause_s * 0.99)
        assert not breaker.allows()
        clock.advance(pause_s * 0.02)
        assert breaker.allows()
        breaker.failed("still gone")
    assert breaker.health().reason == "still gone"


def test_one_good_try_closes_it_and_forgets_the_pause(breaker: Breaker, clock: ManualClock) -> None:
    breaker.failed("gone", at_once=True)
    clock.advance(1.0)
    assert breaker.allows()
    breaker.failed("gone")
    clock.advance(2.0)
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.health().ok
    assert breaker.health().reason == ""
    assert all(breaker.allows() for _ in range(5))
    breaker.failed("gone again", at_once=True)
    assert breaker.health().retry_in_s == pytest.approx(1.0), "the pause starts small again"


def test_the_failures_of_one_batch_are_one_failed_try(breaker: Breaker, clock: ManualClock) -> None:
    """Ten blocks of a batch fail together: that is no reason to wait two to the tenth longer."""
    for _ in range(10):
        breaker.failed("no space left", at_once=True)
    assert breaker.health().retry_in_s == pytest.approx(1.0)
    assert breaker.health().errors == 10
    clock.advance(1.0)
    assert breaker.allows()
    for _ in range(10):
        breaker.failed("no space left", at_once=True)
    assert breaker.health().retry_in_s == pytest.approx(2.0)


def test_what_is_written_does_not_bring_back_a_drive_that_reads_slowly() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, RetryPauses(1.0, 8.0))
    breaker.failed("slow", at_once=True, slow=True)
    breaker.succeeded(by_writing=True)
    assert not breaker.health().ok
    breaker.succeeded()
    assert breaker.health().ok
    breaker.failed("gone", at_once=True)
    breaker.succeeded(by_writing=True)
    assert breaker.health().ok
