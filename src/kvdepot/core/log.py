"""Rate-limited logging of events that may happen often.

Loggers are named "kvdepot.server", "kvdepot.client", "kvdepot.store". Nothing is printed unless the
program configures logging. Keys, tokens and secrets are never logged.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_EVERY_S: Final = 10.0

logging.getLogger("kvdepot").addHandler(logging.NullHandler())


class RateLimitedLog:
    """A logger that logs each message text at most once in 10 seconds. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(name)
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def info(self, text: str, *values: object) -> None:
        self._log(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        self._log(logging.WARNING, text, values)

    def error(self, text: str, *values: object, cause: BaseException) -> None:
        """Log an error with the traceback of `cause`."""
        self._log(logging.ERROR, text, values, cause)

    def _log(
        self,
        level: int,
        text: str,
        values: tuple[object, ...],
        cause: BaseException | None = None,
    ) -> None:
        """`text` is a format string. The limit is per `text`, for any `values`."""
        now = self._clock()
        with self._lock:
            if now - self._last.get(text, -_EVERY_S) < _EVERY_S:
                self._held_back[text] = self._held_back.get(text, 0) + 1
                return
            self._last[text] = now
            held_back = self._held_back.pop(text, 0)
        if held_back:
            text += f" ({held_back} more like this since the last line)"
        self._logger.log(level, text, *values, exc_info=cause)
