"""Drives get work as they are fast, and as little waits for them."""

from collections import Counter

from kvdepot.policy.placing.drive_shares import DriveLoad, Shares, are_uneven

RUN = 1000


def deal(shares: Shares, lanes: list[DriveLoad], runs: int) -> Counter[int]:
    taken: Counter[int] = Counter()
    for _ in range(runs):
        drive = shares.next(lanes)
        assert drive is not None
        shares.take(drive, RUN, lanes)
        taken[drive] += 1
    return taken


def test_drives_that_are_alike_take_turns() -> None:
    shares, lanes = Shares(), [DriveLoad(0, 5.0), DriveLoad(1, 5.0), DriveLoad(2, 5.0)]
    order = [next(iter(deal(shares, lanes, 1))) for _ in range(6)]
    assert order == [0, 1, 2, 0, 1, 2]


def test_speeds_one_and_three_get_one_and_three_of_four() -> None:
    assert deal(Shares(), [DriveLoad(0, 1e8), DriveLoad(1, 3e8)], 400) == {0: 100, 1: 300}


def test_any_stretch_of_a_prompt_is_spread_like_the_whole() -> None:
    shares, lanes = Shares(), [DriveLoad(0, 1.0), DriveLoad(1, 3.0)]
    for _ in range(20):
        taken = deal(shares, lanes, 8)
        assert taken[0] == 2


def test_where_one_speed_is_not_known_all_count_as_alike() -> None:
    assert deal(Shares(), [DriveLoad(0, 0.0), DriveLoad(1, 3e8)], 10) == {0: 5, 1: 5}


def test_who_has_a_queue_waits_until_the_others_have_one_too() -> None:
    busy = [DriveLoad(0, 1.0, queued_bytes=3 * RUN), DriveLoad(1, 1.0)]
    shares = Shares()
    assert deal(shares, busy, 3) == {1: 3}
    assert deal(shares, [DriveLoad(0, 1.0), DriveLoad(1, 1.0)], 3) == {0: 3}, "and makes up for it"


def test_a_drive_that_was_away_does_not_get_everything_when_it_is_back() -> None:
    shares = Shares()
    deal(shares, [DriveLoad(0, 1.0), DriveLoad(1, 1.0)], 1000)
    both = [DriveLoad(0, 1.0), DriveLoad(1, 1.0), DriveLoad(2, 1.0)]
    taken = deal(shares, both, 30)
    assert 9 <= taken[2] <= 12


def test_no_drive_no_turn() -> None:
    assert Shares().next([]) is None


def test_parts_add_up_to_all() -> None:
    lanes = [DriveLoad(0, 1.0), DriveLoad(1, 3.0)]
    assert [Shares().part(drive, lanes) for drive in (0, 1)] == [0.25, 0.75]


def test_uneven_is_a_matter_of_known_speeds() -> None:
    assert are_uneven([DriveLoad(0, 1.0), DriveLoad(1, 2.0)], 1.25)
    assert not are_uneven([DriveLoad(0, 1.0), DriveLoad(1, 1.2)], 1.25)
    assert not are_uneven([DriveLoad(0, 0.0), DriveLoad(1, 9.0)], 1.25)
    assert not are_uneven([DriveLoad(0, 9.0)], 1.25)
