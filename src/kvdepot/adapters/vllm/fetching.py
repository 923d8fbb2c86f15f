"""How much of what the depot has is worth fetching now: the facts for `policy` and what it says.

Facts come from vLLM's own steps, from the loads that were made, and from the requests that are
there. Asked once for a request and a match; the answer holds until one of them changes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from kvdepot.adapters.vllm.messages import LoadEnd, StepTime
from kvdepot.adapters.vllm.paces import Paces, read_paces, write_paces
from kvdepot.adapters.vllm.requests import Hit, Phase, Tracked
from kvdepot.core.tier import TIER_NAMES
from kvdepot.policy.fetching.advisor import Advisor
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineFeatures,
    EngineQueue,
    PromptLengths,
    TierRun,
)
from kvdepot.policy.fetching.speed_models import Transfer, attention_work

KEEP_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ruling:
    """A decision, and when it was made."""

    decision: Decision
    hit: Hit
    at: float

    @property
    def stop_block(self) -> int:
        """Blocks of the request before this one are to be used."""
        return self.hit.first_block + self.decision.cut_blocks


@dataclass(frozen=True, slots=True)
class Asked:
    """What a load asked of the tiers, and what was asked of them before."""

    blocks: Counter[str]
    outstanding_bytes: dict[str, int]


class FetchDesk:
    """Decides for one engine. Belongs to the scheduler's thread."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        kept: Path | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._kept = kept
        self._keep_at = 0.0
        paces = read_paces(kept) if kept is not None else Paces()
        self.advisor = Advisor(
            EngineFeatures(chunk_tokens=chunk_tokens),
            {tier: paces.tiers.get(tier) for tier in TIER_NAMES},
            prefill=paces.prefill,
        )
        self._rulings: dict[str, Ruling] = {}
        self._asked: dict[str, Asked] = {}
        self._outstanding = dict.fromkeys(TIER_NAMES, 0)
        self.probes: list[tuple[str, int, int]] = []
        """Request, first block and number of blocks to be fetched for the sake of knowing."""

    def rule(self, tracked: Tracked, hit: Hit, others: Iterable[Tracked]) -> Ruling:
        """How many of the blocks of a hit to fetch."""
        name = tracked.request.request_id
        known = self._rulings.get(name)
        if known is not None and known.hit == hit:
            return known
        prompt = PromptLengths(tracked.request.num_tokens, self._block_tokens, hit.local_tokens)
        queue = queue_before(tracked, others)
        advice = self.advisor.advise(prompt, self._runs(hit.tiers), self._outstanding, queue)
        ruling = Ruling(advice.decision, hit, self._clock())
        self._rulings[name] = ruling
        if advice.probe is not None:
            first = hit.first_block + advice.probe.start
            self.probes.append((name, first, advice.probe.blocks))
        return ruling

    def loading(self, name: str, tiers: Sequence[str]) -> float | None:
        """A load of blocks in these tiers begins; how long it may take."""
        asked = Counter(tiers)
        self._asked[name] = Asked(asked, dict(self._outstanding))
        for tier, blocks in asked.items():
            self._outstanding[tier] += blocks * self._block_bytes
        ruling = self._rulings.get(name)
        return ruling.decision.deadline_s if ruling is not None else None

    def loaded(self, end: LoadEnd) -> None:
        """A load is over: learn from what came, and from what was late."""
        asked = self._asked.pop(end.request_id, None)
        if asked is None:
            return
        for tier, blocks in asked.blocks.items():
            self._outstanding[tier] -= blocks * self._block_bytes
        came = {time.tier: time for time in end.times}
        for tier, blocks in asked.blocks.items():
            got = came[tier].blocks if tier in came else 0
            late = min(end.late_blocks, max(0, blocks - got))
            seconds = end.seconds if late else (came[tier].seconds if tier in came else 0.0)
            if got + late and seconds > 0:
                size_bytes = (got + late) * self._block_bytes
                before = asked.outstanding_bytes[tier]
                transfer = Transfer(got + late, size_bytes, seconds, before, late)
                self.advisor.tiers[tier].observe(transfer)

    def stepped(self, steps: Iterable[StepTime]) -> None:
        """Steps of the engine, with prefill among their work."""
        for step in steps:
            self.advisor.prefill.observe(step.tokens, step.attention, step.seconds)

    def answered(self, name: str) -> None:
        """A request has its first token, or never will."""
        ruling = self._rulings.pop(name, None)
        if ruling is not None:
            now = self._clock()
            self.advisor.log.record(ruling.decision, now - ruling.at)
            if now >= self._keep_at:
                self.keep()
                self._keep_at = now + KEEP_EVERY_S

    def keep(self) -> None:
        """Write down what was learnt, for the next start."""
        if self._kept is not None:
            paces = Paces(self.advisor.prefill.pace(), self.advisor.profiles())
            write_paces(self._kept, paces)

    def forget(self, name: str) -> None:
        self._rulings.pop(name, None)

    def figures(self) -> dict[str, float]:
        """What is believed now, and how wrong it was."""
        found: dict[str, float] = {}
        for tier, model in self.advisor.tiers.items():
            if model.known:
                found[f"tier_latency_seconds:{tier}"] = model.latency_s
                found[f"tier_bytes_per_second:{tier}"] = model.bandwidth_bytes_s
        for reason, count in self.advisor.log.counts.items():
            if count:
                found[f"decisions:{reason.name.lower()}"] = count
        error = self.advisor.log.error()
        if error is not None:
            found |= {"prediction_error:p50": error.p50, "prediction_error:p95": error.p95}
            found["prediction_error:bias"] = error.bias
        return found

    def _runs(self, tiers: Sequence[str]) -> list[TierRun]:
        counts = [(tier, sum(1 for _ in group)) for tier, group in groupby(tiers)]
        return [TierRun(tier, blocks, blocks * self._block_bytes) for tier, blocks in counts]


def queue_before(tracked: Tracked, others: Iterable[Tracked]) -> EngineQueue:
    """What vLLM has to do before this request, and beside it."""
    tokens, attention, decodes, contexts = 0, 0.0, 0, 0
    for other in others:
        if other is tracked:
            break
        request = other.request
        have = request.num_computed_tokens
        if other.phase is Phase.COMPUTING and have >= request.num_prompt_tokens:
            decodes, contexts = decodes + 1, contexts + have
            continue
        if other.phase is Phase.QUEUED and not have and other.hit is not None:
            have = max(other.hit.local_tokens, other.hit.stop_block * other.chain.block_tokens)
        rest = max(0, request.num_tokens - have)
        tokens, attention = tokens + rest, attention + attention_work(rest, have)
    return EngineQueue(tokens, attention, decodes, contexts)


def step_work(tracked: Iterable[tuple[Tracked, int]]) -> tuple[int, float, bool]:
    """New tokens and attention work of a step, and whether there is prefill in it."""
    tokens, attention, prefill = 0, 0.0, False
    for one, count in tracked:
        computed = one.request.num_computed_tokens
        tokens, attention = tokens + count, attention + attention_work(count, computed)
        prefill = prefill or computed + 1 < one.request.num_prompt_tokens
    return tokens, attention, prefill
