"""A drive is compared with itself: slow is many times slower than it was, twice."""

from kvdepot.testing.clocks import ManualClock
from kvdepot.volumes.log.reader import ThroughputMeter

MIB = 1 << 20


class Trial:
    """Reads of one megabyte each, that take as long as they are said to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gauge = ThroughputMeter(self.clock)

    def read(self, seconds: float, *, count: int = 8, trial: bool = False) -> bool:
        self.gauge.begin(trial=trial)
        self.clock.advance(seconds)
        return self.gauge.end(count * MIB, count, trial=trial)


def test_twenty_times_slower_is_seen_at_the_second_look() -> None:
    """The first look may have some of the good time before in it, and does not count then."""
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    drive.read(1.0)
    assert [drive.read(1.0), drive.read(1.0)][1] is False
    assert drive.gauge.bytes_per_s == 8 * MIB


def test_one_bad_moment_is_forgiven() -> None:
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    assert drive.read(60.0)
    assert all(drive.read(0.05) for _ in range(20))
    assert drive.read(60.0)


def test_four_times_slower_is_a_busy_drive_not_a_broken_one() -> None:
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    assert all(drive.read(0.2) for _ in range(20))


def test_other_reads_are_not_compared() -> None:
    """A single block takes longer for its size than many at once."""
    drive = Trial()
    assert all(drive.read(0.05, count=64) for _ in range(20))
    assert all(drive.read(0.05, count=1) for _ in range(20))


def test_slow_from_the_first_read_of_its_kind() -> None:
    """Calls become half as large at the moment in which the drive becomes slow."""
    drive = Trial()
    assert all(drive.read(0.25, count=80) for _ in range(10))
    drive.read(0.75, count=40)
    assert [drive.read(2.5, count=40) for _ in range(2)][1] is False


def test_on_trial_one_read_tells() -> None:
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    for _ in range(3):
        drive.read(1.0)
    assert not drive.read(1.0, trial=True)
    assert drive.read(0.05, trial=True)


def test_reads_at_the_same_time_share_the_drive() -> None:
    """Four callers who each wait four times as long get no less together."""
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    for _ in range(10):
        for _ in range(4):
            drive.gauge.begin()
        drive.clock.advance(0.2)
        assert all(drive.gauge.end(8 * MIB, 8) for _ in range(4))


def test_a_trial_unlike_all_before_is_compared_with_the_best_there_was() -> None:
    drive = Trial()
    assert all(drive.read(0.05) for _ in range(20))
    assert not drive.read(1.0, count=16, trial=True), "ten times slower, in other pieces"
    assert drive.read(0.2, count=16, trial=True)
