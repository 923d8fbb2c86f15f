"""Fetch or recompute: how much of what the depot has is worth fetching for a request.

The facts come from vLLM's own steps, from finished loads and from the requests that are present;
`policy` decides, for all of these together. Decided once for a request and a match; holds until
one of them changes. What was learnt (speeds of the engine and of the tiers) is kept in a file for
the next start on this machine, which believes it as far as it agrees with what the depot has
measured of its drives.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Final

from kvdepot.adapters.vllm.messages import LoadEnd, StepTime
from kvdepot.adapters.vllm.requests import DepotHit, Phase, TrackedRequest
from kvdepot.core.first_token import FirstToken
from kvdepot.core.private import make_private_folder, open_private_file, replace_private_file
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import UnsafePathError
from kvdepot.policy.fetching.advisor import Advisor
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineFeatures,
    EngineQueue,
    PromptLengths,
    TierRun,
)
from kvdepot.policy.fetching.queue_plan import (
    WAITING_MAX,
    Company,
    FetchingPrompt,
    MatchedPrompt,
)
from kvdepot.policy.fetching.speed_models import (
    PrefillPace,
    TierProfile,
    Transfer,
    attention_work,
    starting_profile,
)

WRITE_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """A decision for one hit, and when it was made."""

    decision: Decision
    hit: DepotHit
    at: float
    prompt_tokens: int

    @property
    def stop_block(self) -> int:
        """Blocks of the request before this one are to be used."""
        return self.hit.first_block + self.decision.cut_blocks


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """Blocks by tier, the bytes that were outstanding before, and the tiers that are cold."""

    blocks_by_tier: Counter[str]
    outstanding_bytes: dict[str, int]
    cold: frozenset[str]
    until: float = 0.0
    backoff_s: float = 0.0
    """When it is expected to be over, and the prefill that is left then."""


class FetchDecider:
    """Decides for one engine. Belongs to the scheduler's thread.

    `drives`: what the depot has measured of its tiers. `measured` is told of the prefill speed, as
    often as it is written down.
    """

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        speeds_path: Path | None = None,
        drives: Mapping[str, TierProfile] = {},
        measured: Callable[[PrefillPace], None] = lambda _: None,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._speeds_path = speeds_path
        self._measured = measured
        self._write_at = 0.0
        speeds = read_speeds(speeds_path) if speeds_path is not None else LearnedSpeeds()
        self.advisor = Advisor(
            EngineFeatures(chunk_tokens=chunk_tokens),
            {
                tier: starting_profile(tier, drives.get(tier), speeds.tiers.get(tier))
                for tier in TIER_NAMES
            },
            prefill=speeds.prefill,
        )
        self._decisions: dict[str, FetchDecision] = {}
        self._loading: dict[str, LoadUnderWay] = {}
        self._cold = set(TIER_NAMES)
        """Tiers of which no load of this process is over."""
        self._outstanding = dict.fromkeys(TIER_NAMES, 0)
        self._busy_until = 0.0
        """When the steps that were given to the engine are expected to be over."""
        self.probes: list[tuple[str, int, int]] = []
        """Request, first block and number of blocks to be fetched only to measure a tier."""

    def decide(
        self, tracked: TrackedRequest, hit: DepotHit, others: Iterable[TrackedRequest]
    ) -> FetchDecision:
        """How many of the blocks of a hit to fetch."""
        name = tracked.request.request_id
        known = self._decisions.get(name)
        if known is not None and known.hit == hit:
            return known
        now, requests = self._clock(), list(others)
        busy_s = max(0.0, self._busy_until - now)
        queue = replace(queue_before(tracked, requests), busy_s=busy_s)
        prompt = self._matched(tracked, hit)
        advice = self.advisor.advise(
            prompt.lengths,
            prompt.runs,
            self._outstanding,
            queue,
            lambda: self._company(tracked, requests, queue.decodes),
        )
        decided = self._decisions[name] = FetchDecision(
            advice.decision, hit, now, tracked.request.num_tokens
        )
        if advice.probe is not None:
            first = hit.first_block + advice.probe.start
            self.probes.append((name, first, advice.probe.blocks))
        return decided

    def _matched(self, tracked: TrackedRequest, hit: DepotHit) -> MatchedPrompt:
        lengths = PromptLengths(tracked.request.num_tokens, self._block_tokens, hit.local_tokens)
        counts = [(tier, sum(1 for _ in group)) for tier, group in groupby(hit.tiers)]
        runs = [TierRun(tier, blocks, blocks * self._block_bytes) for tier, blocks in counts]
        return MatchedPrompt(lengths, runs)

    def _company(
        self, tracked: TrackedRequest, others: Sequence[TrackedRequest], answered: int
    ) -> Company:
        """What is being loaded, and the requests that wait behind this one."""
        now = self._clock()
        loads = [
            FetchingPrompt(max(0.0, load.until - now), load.backoff_s)
            for load in self._loading.values()
            if load.backoff_s
        ]
        waiting: list[MatchedPrompt] = []
        behind, after = 0, False
        for other in others:
            if after and other.phase is Phase.QUEUED:
                if other.hit is not None and len(waiting) < WAITING_MAX:
                    waiting.append(self._matched(other, other.hit))
                else:
                    behind += 1
            after = after or other is tracked
        return Company(tuple(loads), tuple(waiting), answered, behind)

    def step_planned(self, tokens: int, attention: float) -> None:
        """The engine is given a step; it may be asked to decide before the step is over."""
        pace, now = self.advisor.prefill.pace(), self._clock()
        if pace is not None and tokens:
            step_s = pace.step_s + pace.token_s * tokens + pace.pair_s * attention
            # An engine has one step beside the one that runs, so a wrong guess does not add up.
            self._busy_until = min(max(now, self._busy_until), now + step_s) + step_s

    def load_started(self, name: str, tiers: Sequence[str]) -> Decision | None:
        """A load of blocks in these tiers begins; what was decided of it."""
        blocks_by_tier = Counter(tiers)
        decided = self._decisions.get(name)
        decision = decided.decision if decided is not None else None
        until = self._clock() + decision.fetch_s if decision is not None else 0.0
        backoff_s = decision.backoff_s if decision is not None else 0.0
        before, cold = dict(self._outstanding), frozenset(self._cold)
        self._loading[name] = LoadUnderWay(blocks_by_tier, before, cold, until, backoff_s)
        for tier, blocks in blocks_by_tier.items():
            self._outstanding[tier] += blocks * self._block_bytes
        return decision

    def load_ended(self, end: LoadEnd) -> None:
        """Learn from what came, and from what was late."""
        if end.request_id not in self._loading:
            return
        load = self._loading.pop(end.request_id)
        came = {time.tier: time for time in end.times}
        for tier, blocks in load.blocks_by_tier.items():
            self._outstanding[tier] -= blocks * self._block_bytes
            self._cold.discard(tier)
            got = came[tier].blocks if tier in came else 0
            late = min(end.late_blocks, max(0, blocks - got))
            seconds = end.seconds if late else (came[tier].seconds if tier in came else 0.0)
            if got + late and seconds > 0:
                size_bytes = (got + late) * self._block_bytes
                before, cold = load.outstanding_bytes[tier], tier in load.cold
                transfer = Transfer(got + late, size_bytes, seconds, before, late, cold)
                self.advisor.tiers[tier].observe(transfer)

    def observe_steps(self, steps: Iterable[StepTime]) -> None:
        """Steps of the engine, with prefill among their work."""
        for step in steps:
            self.advisor.prefill.observe(step.tokens, step.attention, step.seconds)

    def answered(self, name: str) -> FirstToken | None:
        """A request has its first token: how soon, if there was something to decide for it."""
        decided = self._decisions.pop(name, None)
        if decided is None:
            return None
        now, decision = self._clock(), decided.decision
        self.advisor.log.record(decision, now - decided.at)
        if now >= self._write_at:
            self.write_speeds()
            self._write_at = now + WRITE_EVERY_S
        return FirstToken(
            decided.prompt_tokens,
            min(decided.prompt_tokens, decision.fetched_blocks * self._block_tokens),
            max(0.0, now - decided.at),
            decision.predicted_s,
            decision.recompute_s,
            decision.reason,
        )

    def write_speeds(self) -> None:
        pace = self.advisor.prefill.pace()
        if pace is not None:
            self._measured(pace)
        if self._speeds_path is not None:
            speeds = LearnedSpeeds(pace, self.advisor.profiles())
            write_speeds(self._speeds_path, speeds)

    def forget(self, name: str) -> None:
        self._decisions.pop(name, None)

    def metrics(self) -> dict[str, float]:
        """The current estimates, and how wrong predictions were."""
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


def queue_before(tracked: TrackedRequest, others: Iterable[TrackedRequest]) -> EngineQueue:
    """What vLLM has to do before this request, and beside it; not for those that are loading."""
    tokens, attention, decodes, contexts = 0, 0.0, 0, 0
    for other in others:
        if other is tracked:
            break
        if other.phase is Phase.LOADING:
            continue
        request = other.request
        have = request.num_computed_tokens
        if other.phase is Phase.COMPUTING and have >= request.num_prompt_tokens:
            decodes, contexts = decodes + 1, contexts + have
            continue
        if other.phase is Phase.QUEUED and not have and other.hit is not None:
            block_tokens = other.block_tokens
            have = max(other.hit.local_tokens, other.hit.stop_block * block_tokens)
        rest = max(0, request.num_tokens - have)
        tokens, attention = tokens + rest, attention + attention_work(rest, have)
    return EngineQueue(tokens, attention, decodes, contexts)


def step_work(step: Iterable[tuple[TrackedRequest, int]]) -> tuple[int, float, bool]:
    """New tokens and attention work of a step, and whether there is prefill in it."""
    tokens, attention, prefill = 0, 0.0, False
    for tracked, count in step:
        computed = tracked.request.num_computed_tokens
        tokens, attention = tokens + count, attention + attention_work(count, computed)
        prefill = prefill or computed + 1 < tracked.request.num_prompt_tokens
    return tokens, attention, prefill


@dataclass(frozen=True, slots=True)
class LearnedSpeeds:
    """Speeds of an engine and its tiers; what is left out is not known.

    One file for each namespace. A file that cannot be read or written counts as no file.
    """

    prefill: PrefillPace | None = None
    tiers: Mapping[str, TierProfile] = field(default_factory=dict)


def speeds_file(folder: Path, tag: bytes) -> Path:
    return folder.expanduser() / f"{tag.hex()}.json"


def read_speeds(path: Path) -> LearnedSpeeds:
    try:
        with os.fdopen(open_private_file(path, os.O_RDONLY)) as file:
            found = json.load(file)
        prefill = found["prefill"] and PrefillPace(*_numbers(found["prefill"], 3))
        tiers = {name: TierProfile(*_numbers(one, 2)) for name, one in found["tiers"].items()}
    except (OSError, UnsafePathError, ValueError, KeyError, TypeError, AttributeError):
        return LearnedSpeeds()
    known = {name: one for name, one in tiers.items() if one.bandwidth_bytes_s > 0}
    return LearnedSpeeds(prefill, known)


def write_speeds(path: Path, speeds: LearnedSpeeds) -> None:
    """Replace the file, whole or not at all."""
    prefill = speeds.prefill and list(asdict(speeds.prefill).values())
    tiers = {name: list(asdict(one).values()) for name, one in speeds.tiers.items()}
    # On a read-only home, or one of another user, the next start has to learn again, nothing else.
    with contextlib.suppress(OSError, UnsafePathError):
        make_private_folder(path.parent)
        text = json.dumps({"prefill": prefill, "tiers": tiers})
        replace_private_file(path, text.encode())


def _numbers(values: list[float], count: int) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != count or not all(isfinite(one) and one >= 0.0 for one in found):
        raise ValueError(f"not {count} numbers: {values}")
    return found
