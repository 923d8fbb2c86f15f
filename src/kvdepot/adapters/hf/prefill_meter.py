"""How fast a model computes prompts on the processor, and how soon answers begin.

A step is timed from the update of the first layer's cache to that of the last: all layers' work but
one's, whatever runs around the model.
"""

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kvdepot.adapters.prefill_report import PrefillTeller
from kvdepot.core.depot import Depot
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillModel, attention_work

TELL_EVERY_S: Final = 10.0
_TOKEN_S_MIN: Final = 1e-12
"""A fit may find that only pairs take time."""
_log: Final = logging.getLogger("transformers.kvdepot")


class PrefillMeter:
    """Of one model in one state. Calls of several threads may be timed wrongly, nothing else."""

    def __init__(
        self,
        store: Depot,
        tags: Sequence[bytes],
        layers: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._tags = tags
        self._layers = layers
        self.clock = clock
        self.model = PrefillModel()
        self.teller = PrefillTeller(lambda: store, self._warn)
        self._tell_at_s = -inf

    @property
    def times_steps(self) -> bool:
        return self._layers > 1 and bool(self._tags)

    def step(self, rows: int, new_tokens: int, context: int, seconds: float) -> None:
        """A step has computed so many tokens of each row, from its first layer to its last."""
        whole_s = seconds * self._layers / (self._layers - 1)
        work = rows * attention_work(new_tokens, context)
        self.model.observe(rows * new_tokens, work, whole_s)
        now_s = time.monotonic()
        if now_s >= self._tell_at_s:
            self._tell_at_s = now_s + TELL_EVERY_S
            self.tell()

    def tell(self) -> None:
        """Let the ledger reckon with what is known now."""
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
        _log.warning("%s: %s", what, error)
