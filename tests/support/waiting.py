"""Waiting for what another process or thread does to show."""

import threading
import time
from collections.abc import Callable


def eventually(true: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while time.monotonic() < deadline:
        if true():
            return True
        pause.wait(0.005)
    return true()
