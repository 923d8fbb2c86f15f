"""Background work: how long it rests, and how much it does in one go."""

import pytest

from kvdepot.store.state.background_throttle import FLASH_SHARE, REST_S_MAX, ChunkSizer, backoff_s

MIB = 1 << 20


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_work_and_rest_together_leave_the_share(share: float) -> None:
    spent_s = 0.01
    assert spent_s / (spent_s + backoff_s(spent_s, share)) == pytest.approx(share)


def test_nobody_rests_for_ever() -> None:
    assert backoff_s(3600.0, FLASH_SHARE) == REST_S_MAX


def test_a_slow_drive_gets_short_sizes_and_a_fast_one_whole_ones() -> None:
    size = ChunkSizer(4 * MIB)
    assert size.nbytes == 4 * MIB
    size.learn(4 * MIB, 2.0)
    assert size.nbytes == pytest.approx(2 * MIB * 0.05, rel=0.01)
    size.learn(size.nbytes, 0.0001)
    assert size.nbytes == 4 * MIB


def test_a_size_is_never_nothing() -> None:
    size = ChunkSizer(MIB)
    size.learn(1, 1e9)
    assert size.nbytes == 1
