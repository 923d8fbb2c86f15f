"""Reports of an engine to its depot: the prefill speed, for the ledger, and the times to first
tokens, for the dashboard."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillModel, attention_work

_REPORT_EVERY_S: Final = 10.0
_REFUSED_PAUSE_S: Final = 3600.0
_TOKEN_S_MIN: Final = 1e-12
"""A fit may find that a token takes no time, only pairs of tokens."""
Warn = Callable[[str, BaseException], object]


class PrefillReporter:
    """Reports prefill speeds in a thread: the engine's next step must not wait for a daemon.

    Must be used by one thread at a time.
    """

    def __init__(self, store: Depot, warn: Warn) -> None:
        self._store = store
        self._warn = warn
        self._thread: threading.Thread | None = None
        self._not_before_s = -inf

    def report(self, tags: Sequence[bytes], token_s: float, pair_s: float) -> None:
        """Report seconds per token and per pair of tokens that attend, for these namespaces.

        Does nothing while the last report is on its way, and for an hour after a refusal.
        """
        busy = self._thread is not None and self._thread.is_alive()
        if token_s <= 0.0 or busy or time.monotonic() < self._not_before_s:
            return

        def send() -> None:
            try:
                for tag in tags:
                    self._store.admin.report_prefill_speed(tag.hex(), token_s, pair_s)
            except KVDepotError as error:
                self._not_before_s = time.monotonic() + _REFUSED_PAUSE_S
                self._warn("the depot does not take the prefill speed", error)

        thread = threading.Thread(target=send, name="kvdepot-prefill", daemon=True)
        thread.start()
        self._thread = thread  # only once started, because `wait` may run concurrently

    def wait(self, timeout_s: float) -> None:
        """Wait until the last report has arrived."""
        if self._thread is not None:
            self._thread.join(timeout_s)


class PrefillReport:
    """Learns the prefill speed of an engine from its steps and reports it. Thread-safe.

    `tags`: the namespaces of the engine's blocks.
    """

    def __init__(self, store: Depot, tags: Sequence[bytes], log: logging.Logger) -> None:
        self._store = store
        self._tags = tags
        self._log = log
        self._lock = threading.Lock()
        self._next_report_s = -inf
        self.model = PrefillModel()
        self.reporter = PrefillReporter(store, self._warn)

    def observe(self, new_tokens: int, attention: float, seconds: float) -> None:
        """Learn from a step, as `PrefillModel.observe` does. Every 10 seconds report the speed."""
        with self._lock:
            self.model.observe(new_tokens, attention, seconds)
            due = time.monotonic() >= self._next_report_s
        if due:
            self.report()

    def report(self) -> None:
        """Report the current speed."""
        with self._lock:
            self._next_report_s = time.monotonic() + _REPORT_EVERY_S
            pace = self.model.pace()
            if pace is not None:
                self.reporter.report(self._tags, max(pace.token_s, _TOKEN_S_MIN), pace.pair_s)

    def report_first_token(self, prompt_tokens: int, fetched_tokens: int, seconds: float) -> None:
        """Report the time to the first token of a prompt that was partly fetched."""
        pace = self.model.pace()
        recompute_s = inf
        if pace is not None:
            work = attention_work(prompt_tokens, 0)
            recompute_s = pace.step_s + pace.token_s * prompt_tokens + pace.pair_s * work
        first = FirstToken(prompt_tokens, fetched_tokens, seconds, inf, recompute_s, Reason.FETCH)
        try:
            self._store.admin.report_first_token(first)
        except KVDepotError as error:
            self._warn("the depot does not take times to first tokens", error)

    def _warn(self, text: str, error: BaseException) -> None:
        self._log.warning("%s: %s", text, error)
