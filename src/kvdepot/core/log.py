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


_TEXTS_MAX: Final = 256
"""Further texts share one limit."""


class _Repeats:
    """Lets each text pass once in 10 seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def passing(self, text: str) -> str | None:
        """The text, with the number of those held back before it; None if it is held back."""
        now = self._clock()
        with self._lock:
            known = text in self._last or len(self._last) < _TEXTS_MAX
            kind = text if known else ""
            if now - self._last.get(kind, -_EVERY_S) < _EVERY_S:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return None
            self._last[kind] = now
            held_back = self._held_back.pop(kind, 0)
        return f"{text} ({held_back} more like this since the last line)" if held_back else text


class RateLimitedLog:
    """A logger that logs each message text at most once in 10 seconds. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logging.getLogger(name)
        self._repeats = _Repeats(clock)

    def info(self, text: str, *values: object) -> None:
        self._log(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        self._log(logging.WARNING, text, values)

    def error(self, text: str, *values: object, cause: BaseException | None = None) -> None:
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
        passing = self._repeats.passing(text)
        if passing is not None:
            self._logger.log(level, passing, *values, exc_info=cause)


class RepeatFilter(logging.Filter):
    """Limits the lines of another package's logger as RateLimitedLog does: for `addFilter`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._repeats = _Repeats(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        passing = self._repeats.passing(str(record.msg))
        if passing is None:
            return False
        record.msg = passing
        return True
