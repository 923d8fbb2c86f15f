"""Waiting for what another process or thread does to show."""

import threading
from collections.abc import Callable

from tests.support.failures import HangError

_LOOK_S = 0.005


def eventually(true: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Whether it becomes true. The timeout only ends a hang, so it is long.

    It counts looks, not the clock: the whole machine may stand still for a while.
    """
    pause = threading.Event()
    for _ in range(int(timeout_s / _LOOK_S)):
        if true():
            return True
        pause.wait(_LOOK_S)
    return true()


def until(true: Callable[[], bool]) -> None:
    """Wait until it is true, or raise a HangError."""
    if not eventually(true):
        raise HangError("it never happened")
