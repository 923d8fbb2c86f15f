"""Fetch-or-recompute decisions for one engine, from models that learn from their outcome.

Has no clock and no thread: callers pass times in. The simulator runs the same code.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineQueue,
    PromptLengths,
    TierRun,
)
from kvdepot.policy.fetching.queue_plan import Company, MatchedPrompt, decide_jointly
from kvdepot.policy.fetching.speed_models import (
    PrefillModel,
    PrefillPace,
    TierModel,
    TierProfile,
)

KEPT: Final = 256
"""Latest decisions that the error statistics cover."""


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Errors relative to the measured times.

    `bias`: the share of their time by which prompts took longer than predicted; negative: shorter.
    """

    count: int
    bias: float
    p50: float
    p95: float


class DecisionLog:
    """Predicted and actual times to the first token of the latest decisions."""

    def __init__(self) -> None:
        self._pairs = deque[tuple[float, float]](maxlen=KEPT)
        self.counts = dict.fromkeys(Reason, 0)

    def record(self, decision: Decision, actual_s: float) -> None:
        """Count a decision, and record its times if it has a finite prediction."""
        self.counts[decision.reason] += 1
        if isfinite(decision.predicted_s) and actual_s > 0.0:
            self._pairs.append((decision.predicted_s, actual_s))

    def error(self) -> PredictionError | None:
        """The errors of the predictions; None without decisions."""
        pairs = np.array(self._pairs)
        if not len(pairs):
            return None
        predicted, actual = pairs.T
        p50, p95 = np.quantile(np.abs(predicted - actual) / actual, [0.5, 0.95])
        bias = float((actual - predicted).sum() / actual.sum())
        return PredictionError(len(pairs), bias, float(p50), float(p95))


PROBE_EVERY: Final = 2
"""A tier is probed when it was passed over this many times in a row; a tier far below its profile
every time."""
PROBE_BYTES: Final = (4 << 20, 16 << 20)
"""Sizes of alternate probes, at least PROBE_BLOCKS. Two sizes separate latency from bandwidth."""
PROBE_BLOCKS: Final = (1, 3)
IDLE: Final = EngineQueue()


@dataclass(frozen=True, slots=True)
class Probe:
    """Blocks to fetch in the background while they are recomputed, to measure a tier."""

    tier: str
    start: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Advice:
    decision: Decision
    probe: Probe | None


class Advisor:
    """The models of one engine and its tiers.

    `chunk_tokens`: the most new tokens of one step of the engine. `profiles`: None for a tier that
    was not measured. `prefill`: the pace learnt before, if any.
    """

    def __init__(
        self,
        chunk_tokens: int,
        profiles: Mapping[str, TierProfile | None],
        prefill: PrefillPace | None = None,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self.prefill = PrefillModel(known=prefill)
        self.tiers = {tier: TierModel(profile) for tier, profile in profiles.items()}
        self.log = DecisionLog()
        self._passed_over = dict.fromkeys(self.tiers, 0)
        self._probes = dict.fromkeys(self.tiers, 0)

    def advise(
        self,
        prompt: PromptLengths,
        runs: Sequence[TierRun],
        outstanding_bytes: Mapping[str, int],
        queue: EngineQueue = IDLE,
        company: Callable[[], Company] = Company,
    ) -> Advice:
        """Returns the decision, and a probe if a tier that was passed over is due for one.

        `outstanding_bytes`: bytes in flight by tier; a missing tier has none. Not idempotent: each
        call counts as one pass over the tiers that are not used.
        """
        paces = {
            tier: model.pace(outstanding_bytes.get(tier, 0)) for tier, model in self.tiers.items()
        }
        matched, prefill = MatchedPrompt(prompt, runs), self.prefill.pace()
        decision = decide_jointly(matched, prefill, paces, queue, self._chunk_tokens, company)
        return Advice(decision, self._probe(decision, runs, outstanding_bytes))

    def profiles(self) -> dict[str, TierProfile]:
        """The learnt profiles of the tiers."""
        return {
            tier: TierProfile(model.latency_s, model.bandwidth_bytes_s)
            for tier, model in self.tiers.items()
            if model.known and isfinite(model.bandwidth_bytes_s)
        }

    def _probe(
        self, decision: Decision, runs: Sequence[TierRun], outstanding_bytes: Mapping[str, int]
    ) -> Probe | None:
        """A probe of the first tier that was passed over, if it is idle and a probe is due."""
        used = {run.tier for run, blocks in zip(runs, decision.by_run, strict=True) if blocks}
        for tier in used:
            self._passed_over[tier] = 0
        start = 0
        for run in runs:
            if run.blocks and run.tier not in used:
                tier, model = run.tier, self.tiers[run.tier]
                self._passed_over[tier] += 1
                often = self._passed_over[tier] >= PROBE_EVERY
                due = often or model.doubting or model.below_profile
                if outstanding_bytes.get(tier, 0) or not due:
                    return None
                self._passed_over[tier] = 0
                return self._probe_of(run, start)
            start += run.blocks
        return None

    def _probe_of(self, run: TierRun, start: int) -> Probe:
        turn = self._probes[run.tier] % len(PROBE_BYTES)
        self._probes[run.tier] += 1
        fit = PROBE_BYTES[turn] * run.blocks // max(run.size_bytes, 1)
        return Probe(run.tier, start, min(max(fit, PROBE_BLOCKS[turn]), run.blocks))
