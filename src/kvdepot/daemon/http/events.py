"""The latest lines of the daemon's log, for the dashboard."""

import logging
import time
from collections import deque
from typing import Any, Final

_KEPT: Final = 100
_LENGTH_MAX: Final = 500


class RecentEvents(logging.Handler):
    """Keeps the latest log lines between `attach` and `detach`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        level = "bad" if record.levelno >= logging.ERROR else "warn"
        level = level if record.levelno >= logging.WARNING else "info"
        said = record.getMessage()[:_LENGTH_MAX]
        self._lines.append({"at_s": round(record.created, 3), "level": level, "what": said})

    def attach(self) -> None:
        logging.getLogger("kvdepot").addHandler(self)

    def detach(self) -> None:
        logging.getLogger("kvdepot").removeHandler(self)

    def latest(self) -> list[dict[str, Any]]:
        """The lines, newest first, with their age in seconds."""
        now = time.time()
        lines = reversed(list(self._lines))
        return [{**line, "ago_s": round(max(0.0, now - line["at_s"]), 1)} for line in lines]
