"""Waiting for what another process does to show."""

import threading
import time
from collections.abc import Callable


def eventually(true: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not true() and time.monotonic() < deadline:
        pause.wait(0.005)
    return true()
