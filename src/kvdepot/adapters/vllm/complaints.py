"""Warnings about a depot that fails, said once in a while: it may fail at every step."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 10.0
_logger = logging.getLogger("vllm.kvdepot")


class Complaints:
    """Logs each kind of warning at most every EVERY_S seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}

    def say(self, text: str, error: BaseException) -> bool:
        """Log `text` and the error, unless that was done lately. Whether it was logged."""
        now = self._clock()
        with self._lock:
            if now - self._said.get(text, -EVERY_S) < EVERY_S:
                return False
            self._said[text] = now
        _logger.warning("kvdepot: %s: %s: %s", text, type(error).__name__, error)
        return True
