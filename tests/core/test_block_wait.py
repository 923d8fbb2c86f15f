"""When a wait for another machine's blocks looks again, and when it ends."""

from kvdepot.core.block_wait import BlockWait


def test_it_ends_without_a_sign() -> None:
    wait = BlockWait(100.0, 60.0, 1.0)
    assert not wait.note(100.0, 3), "these were here before"
    assert wait.left_s(100.9) > 0 >= wait.left_s(101.0)


def test_each_block_that_comes_is_a_sign() -> None:
    wait = BlockWait(0.0, 60.0, 1.0)
    wait.note(0.0, 0)
    for turn in range(1, 70):
        assert wait.note(0.9 * turn, turn)
        assert (wait.left_s(0.9 * turn) > 0) == (0.9 * turn < 60)


def test_it_looks_more_and_more_rarely_until_something_comes() -> None:
    wait, now_s, looks = BlockWait(0.0, 60.0, 60.0), 0.0, 0
    while wait.left_s(now_s) > 0:
        wait.note(now_s, 0)
        now_s, looks = wait.look_s, looks + 1
    assert 200 < looks < 260, "about four times a second"
    wait = BlockWait(0.0, 60.0, 60.0)
    for found in (0, 0, 0, 0, 0, 1):
        wait.note(10.0, found)
    assert wait.look_s - 10.0 < 0.05
