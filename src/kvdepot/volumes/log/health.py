"""The health of a log volume: its breakers, and whether its medium was removed."""

import errno
import os
from collections.abc import Callable
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.volume import Change, Ints
from kvdepot.io.breaker import Breaker, RetryPauses

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class LogHealth:
    """Counts the failures of one volume. Thread-safe."""

    def __init__(
        self, label: str, clock: Clock, pauses: RetryPauses, on_change: Callable[[Change], None]
    ) -> None:
        self.label = label
        self.breaker = Breaker(clock, pauses, changed=self._changed)
        self.growth = Breaker(clock, pauses)
        """Open while the disk has no room for one more segment."""
        self.room = Breaker(clock, pauses)
        """Open while the disk has no room for writes to the segments that exist."""
        self.lost = False
        self._on_change = on_change
        self._log = RateLimitedLog("kvdepot.volumes", clock.now)

    @property
    def works(self) -> bool:
        return self.breaker.closed and not self.lost

    def allows_writes(self) -> bool:
        """True if a write may be tried now. A failed volume is tried once after each pause."""
        if self.lost or not self.breaker.allows():
            return False
        return self.room.allows()

    def lose(self) -> None:
        """Record that the medium was removed: the volume must not be used any more."""
        if not self.lost:
            self.lost = True
            self.breaker.failed("the directory or a file in it was removed", at_once=True)

    def write_failed(self, error: OSError, *, at_once: bool = True) -> None:
        """Record a failed write. A full disk can still be read."""
        code = error.errno or errno.EIO
        if code not in _FULL:
            self.breaker.failed(os.strerror(code), at_once=at_once)
            return
        if self.room.closed:
            self._log.warning("%s: the disk is full: %s", self.label, os.strerror(code))
        self.room.failed(os.strerror(code), at_once=True)

    def no_segment(self, error: OSError, *, has_others: bool) -> None:
        """Record that a further segment could not be created."""
        is_full = error.errno in _FULL
        if self.growth.closed:
            self._log.warning("%s: cannot create a further segment: %s", self.label, error.strerror)
        if not is_full or not has_others:
            self.write_failed(error)
        if is_full:  # else segments would be reclaimed although there is room
            self.growth.failed(str(error.strerror), at_once=True)

    def judge_writes(self, codes: Ints) -> None:
        """Record the results of a batch of writes."""
        for code in (-codes[codes < 0]).tolist():
            at_once = code in (errno.ETIMEDOUT, errno.EROFS)
            self.write_failed(OSError(code, os.strerror(code)), at_once=at_once)
        if not (codes < 0).any():
            if self.breaker.troubled and not self.lost:  # a file that was removed takes writes too
                self.breaker.succeeded(by_writing=True)
            self.room.succeeded()

    def judge_reads(self, codes: Ints) -> None:
        """Record the results of reads in their order: a success between errors counts."""
        for code in (-codes).tolist():
            if not code:
                if self.breaker.troubled and not self.lost:
                    self.breaker.succeeded()
            elif code == errno.ETIMEDOUT:
                self.breaker.failed("reads do not finish", at_once=True)
            elif code != errno.EBADMSG:
                self.breaker.failed(f"read error {errno.errorcode.get(code, code)}")

    def _changed(self, reason: str) -> None:
        if reason:
            self._log.warning("%s: the volume is down: %s", self.label, reason)
        else:
            self._log.info("%s: the volume works again", self.label)
        self._on_change(Change.STATE)
