"""Engines tell the depot how fast they compute prompts, for the ledger, and how soon answers begin,
for the dashboard."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kvdepot.core.depot import Depot
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillModel, attention_work

TELL_EVERY_S: Final = 10.0
_TELL_AGAIN_S: Final = 3600.0
_TOKEN_S_MIN: Final = 1e-12
"""A fit may find that only pairs take time."""
Warn = Callable[[str, BaseException], object]


class PrefillReporter:
    """Tells in a thread: the next step must not wait for a daemon. For one thread."""

    def __init__(self, store: Callable[[], Depot], warn: Warn) -> None:
        self._store = store
        self._warn = warn
        self._telling: threading.Thread | None = None
        self._tell_again_s = -inf

    def tell(self, tags: Sequence[bytes], token_s: float, pair_s: float) -> None:
        """Seconds for each token and for each pair that attends, of these namespaces."""
        if token_s <= 0.0 or (self._telling is not None and self._telling.is_alive()):
            return
        if time.monotonic() < self._tell_again_s:
            return

        def tell() -> None:
            try:
                for tag in tags:
                    self._store().sessions.tell_prefill(tag.hex(), token_s, pair_s)
            except KVDepotError as error:
                # A daemon from before the ledger ends the connection: not again and again.
                self._tell_again_s = time.monotonic() + _TELL_AGAIN_S
                self._warn("the depot's ledger cannot be told of prefill", error)

        self._telling = threading.Thread(target=tell, name="kvdepot-prefill", daemon=True)
        self._telling.start()

    def wait(self, timeout_s: float) -> None:
        """Until what was told last has arrived."""
        if self._telling is not None:
            self._telling.join(timeout_s)


class PrefillReport:
    """What the prompts of an engine took, told to the depot. Thread-safe.

    `tags`: the namespaces of its blocks.
    """

    def __init__(self, store: Depot, tags: Sequence[bytes], log: logging.Logger) -> None:
        self._store = store
        self._tags = tags
        self._log = log
        self._lock = threading.Lock()
        self._tell_at_s = -inf
        self.model = PrefillModel()
        self.teller = PrefillReporter(lambda: store, self._warn)

    def observe(self, new_tokens: int, attention: float, seconds: float) -> None:
        """A step of the engine, as for `PrefillModel`. The ledger hears of it now and then."""
        with self._lock:
            self.model.observe(new_tokens, attention, seconds)
            now_s = time.monotonic()
            due = now_s >= self._tell_at_s
            if due:
                self._tell_at_s = now_s + TELL_EVERY_S
        if due:
            self.tell()

    def tell(self) -> None:
        """Let the ledger reckon with what is known now."""
        with self._lock:
            pace = self.model.pace()
            if pace is not None:
                self.teller.tell(self._tags, max(pace.token_s, _TOKEN_S_MIN), pace.pair_s)

    def answered(self, prompt_tokens: int, fetched_tokens: int, seconds: float) -> None:
        """A prompt of which the depot had something is computed."""
        pace = self.model.pace()
        recompute_s = inf
        if pace is not None:
            work = attention_work(prompt_tokens, 0)
            recompute_s = pace.step_s + pace.token_s * prompt_tokens + pace.pair_s * work
        first = FirstToken(prompt_tokens, fetched_tokens, seconds, inf, recompute_s, Reason.FETCH)
        try:
            self._store.report_first_token(first)
        except KVDepotError as error:
            self._warn("the depot cannot be told of first tokens", error)

    def _warn(self, what: str, error: BaseException) -> None:
        self._log.warning("%s: %s", what, error)
