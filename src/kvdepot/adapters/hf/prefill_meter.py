"""How fast a model computes prompts on the processor, and how soon answers begin.

A step is timed from the update of the first layer's cache to that of the last: all layers' work but
one's, whatever runs around the model.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.adapters.prefill_report import PrefillReport
from kvdepot.core.depot import Depot
from kvdepot.policy.fetching.speed_models import attention_work

_log: Final = logging.getLogger("transformers.kvdepot")


class PrefillMeter(PrefillReport):
    """Of one model in one state. Calls of several threads may be timed wrongly, nothing else."""

    def __init__(
        self,
        store: Depot,
        tags: Sequence[bytes],
        layers: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(store, tags, _log)
        self._layers = layers
        self.clock = clock

    @property
    def times_steps(self) -> bool:
        return self._layers > 1 and bool(self._tags)

    def step(self, rows: int, new_tokens: int, context: int, seconds: float) -> None:
        """A step has computed so many tokens of each row, from its first layer to its last."""
        whole_s = seconds * self._layers / (self._layers - 1)
        self.observe(rows * new_tokens, rows * attention_work(new_tokens, context), whole_s)
