"""Counts the bytes written to a volume, and limits them to a daily budget.

The budget is stored in the metadata log, so that a restart does not refill it. It is deducted in
parts before the writes: after a crash an unused part is lost, and the limit holds.
"""

import struct
import threading
from typing import Any, Final

from kvdepot.core.clock import Clock
from kvdepot.core.endurance import DAY_S, Endurance
from kvdepot.core.metadata import MetaKind
from kvdepot.io.breaker import Breaker
from kvdepot.volumes.log.metadata import MetadataLog

_PARTS: Final = 64
"""Number of parts in which a full bucket is deducted, each by a write of metadata."""
_KEPT: Final = struct.Struct("<dd")
_MOST: Final = 1e18


class Wear:
    """Counts one volume's writes. One thread at a time calls `take` and `keep`."""

    def __init__(
        self, metadata: MetadataLog, breaker: Breaker, daily_bytes: int, wall: Clock
    ) -> None:
        """`daily_bytes` may be written in a day, 0: no limit. `wall` continues across restarts."""
        self.written_bytes = 0
        self.limited = daily_bytes > 0
        self._metadata = metadata
        self._breaker = breaker
        self._wall = wall
        self._opened_s = wall.now()
        self._lock = threading.Lock()
        self._budget = Endurance.full(daily_bytes, self._opened_s)
        entry = metadata.own(MetaKind.BUDGET)
        if entry is not None and entry.value is not None and len(entry.value) == _KEPT.size:
            level_bytes, at_s = _KEPT.unpack(entry.value)
            if abs(level_bytes) < _MOST and 0 < at_s < _MOST:
                at_s = min(at_s, self._opened_s)
                self._budget = Endurance(daily_bytes, level_bytes, at_s)
        self._taken_bytes = 0.0
        """Bytes deducted from the stored budget and not written yet."""

    @property
    def bucket_bytes(self) -> float:
        """The most bytes that may be written at once."""
        return self._budget.bucket_bytes

    @property
    def level_bytes(self) -> float:
        """Bytes that may be written now; below 0 if the budget was exceeded."""
        with self._lock:
            self._budget.fill(self._wall.now())
            return self._budget.level_bytes

    @property
    def spent(self) -> bool:
        """True if the budget is used up for now."""
        return self.limited and self.level_bytes <= 0

    def take(self, nbytes: int) -> None:
        """Deduct bytes that are about to be written."""
        self.written_bytes += nbytes
        if not self.limited:
            return
        with self._lock:
            self._budget.spend(nbytes, self._wall.now())
        self._taken_bytes -= nbytes
        if self._taken_bytes < 0:
            self.keep(self._budget.bucket_bytes / _PARTS)

    def keep(self, taken_bytes: float = 0.0) -> None:
        """Store the remaining budget, less `taken_bytes` for writes to come."""
        if not self.limited:
            return
        left_bytes = self.level_bytes - taken_bytes
        try:
            self._metadata.put_own(MetaKind.BUDGET, _KEPT.pack(left_bytes, self._budget.at_s))
            self._taken_bytes = taken_bytes
        except OSError as error:
            self._breaker.failed(str(error.strerror))

    def describe(self) -> dict[str, Any]:
        """The values for `stats`."""
        day = max(self._wall.now() - self._opened_s, 1.0) / DAY_S
        facts = {"bytes": self.written_bytes, "bytes_per_day": round(self.written_bytes / day)}
        if not self.limited:
            return facts
        budget = {"daily_bytes": self._budget.daily_bytes, "bucket_bytes": self.bucket_bytes}
        budget["level_bytes"] = self.level_bytes
        return {**facts, **{name: round(value) for name, value in budget.items()}}
