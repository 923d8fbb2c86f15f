"""When a prompt's first token comes, by how many of its matched blocks are fetched. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdepot.policy.fetching.prefill_model import PrefillPace
from kvdepot.policy.fetching.tier_model import TierPace

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine was asked, and how many of its first tokens it has the KV of."""

    tokens: int
    block_tokens: int
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Matched blocks in a row that are fetched from one tier; sizes as they lie there."""

    tier: str
    blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Queue:
    """What the engine does before this prompt, and beside it.

    `ahead_tokens`, `ahead_attention`: prefill that comes before, with its attention work.
    `decodes`, `decode_context_tokens`: requests that take one token of every step, and the sum of
    their contexts.
    """

    ahead_tokens: int = 0
    ahead_attention: float = 0.0
    decodes: int = 0
    decode_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """What the engine can do.

    `chunk_tokens`: the most new tokens of one step.
    `loads_while_queued`: blocks can be fetched for a prompt while others are computed.
    `layer_steps`: in how many pieces, by layers, a fetch can overlap with the step that uses it.
    `splits`: blocks behind a part that is being recomputed can be fetched meanwhile, and used.
    """

    chunk_tokens: int = 2048
    loads_while_queued: bool = True
    layer_steps: int = 1
    splits: bool = False


class Timetable:
    """Times of one prompt's prefill; index i of an array is for i blocks in place."""

    def __init__(
        self, prompt: Prompt, blocks: int, pace: PrefillPace, queue: Queue, engine: Engine
    ) -> None:
        self.blocks = blocks
        self._engine = engine
        self._pace = pace
        # Requests that decode take their share of every step, in time and in tokens.
        self._step_s = pace.step_s + pace.token_s * queue.decodes
        self._step_s += pace.pair_s * queue.decode_context_tokens
        self._chunk = float(max(engine.chunk_tokens - queue.decodes, 1))
        self.queue_s = self._step_s * queue.ahead_tokens / self._chunk
        self.queue_s += pace.token_s * queue.ahead_tokens + pace.pair_s * queue.ahead_attention
        first = prompt.local_tokens // prompt.block_tokens * prompt.block_tokens
        # The engine computes at least the last token itself, for its logits.
        last = prompt.tokens - 1
        self.positions: Floats = np.arange(blocks + 1, dtype=np.float64)
        self.positions *= prompt.block_tokens
        self.positions += first
        np.maximum(self.positions, min(prompt.local_tokens, last), out=self.positions)
        np.minimum(self.positions, last, out=self.positions)
        rest = prompt.tokens - self.positions
        self.suffix_s: Floats = self._step_s * np.maximum(rest / self._chunk, 1.0)
        self.suffix_s += rest * (
            pace.token_s + 0.5 * pace.pair_s * (prompt.tokens + self.positions)
        )

    @property
    def recompute_s(self) -> float:
        return self.queue_s + float(self.suffix_s[0])

    @property
    def saved_s(self) -> float:
        """What having all the blocks in place would save."""
        return float(self.suffix_s[0] - self.suffix_s[-1])

    def stretch_s(self, start: int, stop: int) -> float:
        """Recompute of the blocks start..stop, when all before them is in place."""
        begin, end = float(self.positions[start]), float(self.positions[stop])
        tokens = end - begin
        steps = max(tokens / self._chunk, 1.0) if tokens else 0.0
        pairs = tokens * (begin + end) / 2.0
        return self._step_s * steps + self._pace.token_s * tokens + self._pace.pair_s * pairs

    def finish_s(self, fetch_s: Floats) -> Floats:
        """The time to the first token, where fetching the first i blocks takes fetch_s[i]."""
        hidden = self.queue_s if self._engine.loads_while_queued else 0.0
        lag: Floats = np.maximum(fetch_s - hidden, 0.0)
        finish: Floats = self.queue_s + lag + self.suffix_s
        if self._engine.layer_steps > 1:
            finish -= self._overlap_s(lag)
        return finish

    def _overlap_s(self, lag: Floats) -> Floats:
        """What layer by layer saves: only the first step of the rest can run beside the fetch.

        Its attention to the context is left out, so that this never saves too much.
        """
        step_s = self._step_s + self._pace.token_s * self._chunk
        beside: Floats = np.minimum(np.minimum(self.suffix_s, step_s), lag)
        saved: Floats = beside * (1.0 - 1.0 / self._engine.layer_steps)
        return saved


def fetch_seconds(runs: Sequence[Run], paces: Mapping[str, TierPace]) -> Floats:
    """How long fetching the first i blocks takes; tiers work side by side, each in order."""
    seconds: Floats = np.arange(sum(run.blocks for run in runs) + 1, dtype=np.float64)
    until = dict.fromkeys(paces, 0.0)
    start = 0
    for run in runs:
        if not run.blocks:
            continue
        pace = paces[run.tier]
        begin = until[run.tier] or pace.wait_s
        others = max((end for tier, end in until.items() if tier != run.tier), default=0.0)
        until[run.tier] = begin + pace.byte_s * run.size_bytes
        ramp = seconds[start + 1 : start + run.blocks + 1]
        ramp -= start
        ramp *= pace.byte_s * run.size_bytes / run.blocks
        ramp += begin
        np.maximum(ramp, others, out=ramp)
        start += run.blocks
    return seconds
