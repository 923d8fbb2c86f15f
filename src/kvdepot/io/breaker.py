"""A circuit breaker for a medium: closed while it works, open after failures, with growing pauses
between trials.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.core.clock import Clock


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a medium, and the reason if it cannot be used."""

    ok: bool
    reason: str = ""
    errors: int = 0
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RetryPauses:
    """First and longest pause between attempts on a failed medium."""

    initial_s: float = 0.1
    max_s: float = 30.0


class Breaker:
    """Decides whether a medium may be used now. Thread-safe.

    After a failure the medium is not used for a pause. Then one attempt is allowed, whose outcome
    closes the breaker or doubles the pause. Single errors are tolerated up to `tolerance` in a row.
    """

    def __init__(
        self,
        clock: Clock,
        pauses: RetryPauses,
        tolerance: int = 3,
        changed: Callable[[str], None] | None = None,
    ) -> None:
        """`changed` is called when it opens, with the reason, and with "" when it closes."""
        self._clock = clock
        self._changed = changed
        self._pauses = pauses
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._trying = False
        self._is_slow = False
        self._reason = ""
        self.errors = 0
        self.closed = True
        """True if the medium works, as far as is known."""
        self.troubled = False
        """True if it is open or has counted an error: successes must be reported."""

    def allows(self) -> bool:
        """True if the medium may be used now. While it is open, one caller per pause gets True."""
        if not self._pause_s:
            return True
        with self._lock:
            now = self._clock.now()
            if self._pause_s and now < self._retry_at:
                return False
            self._retry_at = now + self._pause_s
            self._trying = True
            return True

    def succeeded(self, *, by_writing: bool = False) -> None:
        """Report a success. `by_writing`: a write does not prove that reads are fast again."""
        if (self._in_a_row or self._pause_s) and not (by_writing and self._is_slow):
            with self._lock:
                was_open = self._pause_s > 0
                self._is_slow = False
                self._in_a_row = 0
                self._pause_s = 0.0
                self._reason = ""
                self.closed, self.troubled = True, False
            if was_open and self._changed is not None:
                self._changed("")

    def failed(self, reason: str, *, at_once: bool = False, slow: bool = False) -> None:
        """Report a failure. `at_once`: open without waiting for more failures. `slow`: it did not
        fail, but took too long.

        Only a failed attempt after a pause makes the next pause longer, so that many failures of
        one batch count once.
        """
        with self._lock:
            self.errors += 1
            self._in_a_row += 1
            self.troubled = True
            if self._in_a_row < self._tolerance and not at_once and not self._pause_s:
                return
            if self._pause_s and not self._trying:
                return
            self._trying = False
            self._is_slow = slow
            self._reason = reason
            was_open = self._pause_s > 0
            doubled = self._pause_s * 2 or self._pauses.initial_s
            self._pause_s = min(doubled, self._pauses.max_s)
            self.closed = False
            self._retry_at = self._clock.now() + self._pause_s
        if not was_open and self._changed is not None:
            self._changed(reason)

    def health(self) -> Health:
        with self._lock:
            if not self._pause_s:
                return Health(True, "", self.errors)
            wait_s = max(0.0, self._retry_at - self._clock.now())
            return Health(False, self._reason, self.errors, wait_s)
