"""What llama-server says of its prompts, for the ledger and the dashboard.

An answer ends with `timings`: how many tokens were computed, how many were in the slot, how long
it took. Only of requests that had the server to themselves: others wait for each other.
"""

import logging
import re
import threading
import time
from dataclasses import dataclass
from math import inf, isfinite
from typing import Final

from kvdepot.adapters.prefill_report import PrefillTeller
from kvdepot.core.depot import Depot
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillModel, attention_work

TELL_EVERY_S: Final = 10.0
_TOKEN_S_MIN: Final = 1e-12
_NUMBER: Final = re.compile(rb'"(cache_n|prompt_n|prompt_ms|predicted_n)"\s*:\s*([0-9.eE+-]{1,32})')
_logger = logging.getLogger("kvdepot.llama")


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """Of one answer."""

    computed: int
    cached: int
    predicted: int
    seconds: float | None
    """Of the prompt."""


def read_timing(tail: bytes) -> PromptTiming | None:
    """From the last bytes of an answer; None where they do not have it."""
    try:
        found = {name: float(value) for name, value in _NUMBER.findall(tail)}
        names = (b"prompt_n", b"cache_n", b"predicted_n")
        computed, cached, predicted = (int(found[name]) for name in names)
    except (KeyError, ValueError, OverflowError):
        return None
    took_ms = found.get(b"prompt_ms", 0.0)
    seconds = took_ms / 1e3 if 0.0 < took_ms < inf else None
    return PromptTiming(computed, cached, predicted, seconds)


class PromptTimings:
    """Of one run of a server, whose blocks are in one namespace."""

    def __init__(self, depot: Depot, tag: bytes) -> None:
        self._depot = depot
        self._tag = tag
        self._model = PrefillModel()
        self.teller = PrefillTeller(lambda: depot, self._warn)
        self._tell_at_s = -inf
        self._lock = threading.Lock()

    def answered(self, timing: PromptTiming, restored: int, before_s: float) -> None:
        """A request that was alone. `restored`: tokens that the depot gave its slot, which took
        `before_s` with the lookup."""
        seconds = timing.seconds
        if seconds is None or not isfinite(before_s):
            return
        with self._lock:
            work = attention_work(timing.computed, timing.cached)
            self._model.observe(timing.computed, work, seconds)
            pace = self._model.pace()
            if pace is None:
                return
            now_s = time.monotonic()
            if now_s >= self._tell_at_s:
                self._tell_at_s = now_s + TELL_EVERY_S
                self.teller.tell([self._tag], max(pace.token_s, _TOKEN_S_MIN), pace.pair_s)
        whole = timing.computed + timing.cached
        if not 0 < restored <= whole:
            return
        work = attention_work(whole, 0)
        recompute_s = pace.step_s + pace.token_s * whole + pace.pair_s * work
        took_s = max(0.0, before_s) + seconds
        first = FirstToken(whole, restored, took_s, inf, recompute_s, Reason.FETCH)
        try:
            self._depot.report_first_token(first)
        except KVDepotError as error:
            self._warn("the depot cannot be told of first tokens", error)

    def _warn(self, what: str, error: BaseException) -> None:
        _logger.warning("%s: %s", what, error)
