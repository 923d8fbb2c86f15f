"""Background work: how long it rests, and how much it does in one go."""

import pytest

from kvdepot.store.state.yielding import FLASH_SHARE, REST_S_MAX, Stride, rest_s

MIB = 1 << 20


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_work_and_rest_together_leave_the_share(share: float) -> None:
    spent_s = 0.01
    assert spent_s / (spent_s + rest_s(spent_s, share)) == pytest.approx(share)


def test_nobody_rests_for_ever() -> None:
    assert rest_s(3600.0, FLASH_SHARE) == REST_S_MAX


def test_a_slow_drive_gets_short_strides_and_a_fast_one_whole_ones() -> None:
    stride = Stride(4 * MIB)
    assert stride.nbytes == 4 * MIB
    stride.took(4 * MIB, 2.0)
    assert stride.nbytes == pytest.approx(2 * MIB * 0.05, rel=0.01)
    stride.took(stride.nbytes, 0.0001)
    assert stride.nbytes == 4 * MIB


def test_a_stride_is_never_nothing() -> None:
    stride = Stride(MIB)
    stride.took(1, 1e9)
    assert stride.nbytes == 1
