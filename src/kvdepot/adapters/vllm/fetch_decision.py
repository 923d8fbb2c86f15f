"""Fetch or recompute: how much of what the depot has is worth fetching for a request.

The facts come from vLLM's steps, from finished loads and from the requests that are present;
`policy` decides, for all of these together. A decision holds until the request's match changes. The
speeds of the engine and of the tiers are kept in a file for the next start on this machine, which
trusts them as far as they agree with what the depot has measured of its drives.
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
from kvdepot.adapters.vllm.requests import DepotHit, FetchDecision, Phase, TrackedRequest
from kvdepot.core.first_token import FirstToken
from kvdepot.core.private import make_private_folder, open_private_file, replace_private_file
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import UnsafePathError
from kvdepot.policy.fetching.advisor import Advisor
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
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
ScheduledStep = Sequence[tuple[TrackedRequest, int]]
"""The requests of a step, and how many tokens of each it computes."""


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """The state of a load at its start."""

    blocks_by_tier: Counter[str]
    outstanding_bytes: dict[str, int]
    """Bytes of the loads that began before, by tier."""
    cold: frozenset[str]
    """Tiers of which no load had ended."""
    until_s: float = 0.0
    """The expected time of its end."""
    backoff_s: float = 0.0
    """Seconds of prefill that remain then."""


class FetchDecider:
    """Decides for one engine. Belongs to the scheduler's thread."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        speeds_path: Path | None = None,
        drives: Mapping[str, TierProfile] = {},
        report: Callable[[PrefillPace | FirstToken], None] = lambda _: None,
    ) -> None:
        """`drives`: what the depot has measured of its tiers. `report` gets the prefill speed
        whenever the speeds are written, and each first token."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._clock = clock
        self._speeds_path = speeds_path
        self._report = report
        self._next_write_s = 0.0
        speeds = read_speeds(speeds_path) if speeds_path is not None else LearnedSpeeds()
        self.advisor = Advisor(
            chunk_tokens,
            {
                tier: starting_profile(tier, drives.get(tier), speeds.tiers.get(tier))
                for tier in TIER_NAMES
            },
            prefill=speeds.prefill,
        )
        self._loading: dict[str, StartedLoad] = {}
        self._cold = set(TIER_NAMES)
        """Tiers of which no load of this process has ended."""
        self._outstanding = dict.fromkeys(TIER_NAMES, 0)
        self._busy_until_s = 0.0
        """The expected end of the steps that the engine was given."""
        self.probes: list[tuple[TrackedRequest, int, int]] = []
        """Blocks to be read only to measure a tier: the request, the first block, and the block
        after the last. The scheduler takes them."""
        self._answering: list[TrackedRequest] = []
        """Requests that get their first token in a step that was planned."""

    def decide(
        self, tracked: TrackedRequest, hit: DepotHit, others: Iterable[TrackedRequest]
    ) -> FetchDecision:
        """Decides how many blocks of a hit are fetched."""
        known = tracked.decided
        if known is not None and known.hit == hit:
            return known
        now_s, requests = self._clock(), list(others)
        busy_s = max(0.0, self._busy_until_s - now_s)
        queue = replace(queue_before(tracked, requests), busy_s=busy_s)
        prompt = self._matched(tracked, hit)
        advice = self.advisor.advise(
            prompt.lengths,
            prompt.runs,
            self._outstanding,
            queue,
            lambda: self._company(tracked, requests, queue.decodes),
        )
        if advice.probe is not None:
            first = hit.first_block + advice.probe.start
            self.probes.append((tracked, first, first + advice.probe.blocks))
        tracked.decided = FetchDecision(advice.decision, hit, now_s, tracked.request.num_tokens)
        return tracked.decided

    def _matched(self, tracked: TrackedRequest, hit: DepotHit) -> MatchedPrompt:
        lengths = PromptLengths(tracked.request.num_tokens, self._block_tokens, hit.local_tokens)
        counts = [(tier, sum(1 for _ in group)) for tier, group in groupby(hit.tiers)]
        runs = [TierRun(tier, blocks, blocks * self._block_bytes) for tier, blocks in counts]
        return MatchedPrompt(lengths, runs)

    def _company(
        self, tracked: TrackedRequest, others: Sequence[TrackedRequest], answered: int
    ) -> Company:
        """The loads in progress, and the requests that wait behind this one."""
        now_s = self._clock()
        loads = [
            FetchingPrompt(max(0.0, load.until_s - now_s), load.backoff_s)
            for load in self._loading.values()
            if load.backoff_s
        ]
        waiting: list[MatchedPrompt] = []
        behind, is_after = 0, False
        for other in others:
            if is_after and other.phase is Phase.QUEUED:
                if other.hit is not None and len(waiting) < WAITING_MAX:
                    waiting.append(self._matched(other, other.hit))
                else:
                    behind += 1
            is_after = is_after or other is tracked
        return Company(tuple(loads), tuple(waiting), answered, behind)

    def step_planned(self, step: ScheduledStep) -> tuple[int, float]:
        """The engine is given a step; it may ask for decisions before the step has ended. Returns
        the tokens and the attention work of a step that is to be timed, else zeros."""
        tokens, attention, has_prefill = step_work(step)
        pace, now_s = self.advisor.prefill.pace(), self._clock()
        if pace is not None and tokens:
            step_s = pace.step_s + pace.token_s * tokens + pace.pair_s * attention
            # An engine has one step planned while another runs, so a wrong guess does not add up.
            self._busy_until_s = min(max(now_s, self._busy_until_s), now_s + step_s) + step_s
        for tracked, count in step:
            request = tracked.request
            if request.num_computed_tokens + count == request.num_prompt_tokens:
                self._answering.append(tracked)
        return (tokens, attention) if has_prefill else (0, 0.0)

    def load_started(
        self, name: str, tiers: Sequence[str], decision: Decision | None = None
    ) -> None:
        """A load of blocks in these tiers begins, as it was decided."""
        blocks_by_tier = Counter(tiers)
        until_s = self._clock() + decision.fetch_s if decision is not None else 0.0
        backoff_s = decision.backoff_s if decision is not None else 0.0
        before, cold = dict(self._outstanding), frozenset(self._cold)
        self._loading[name] = StartedLoad(blocks_by_tier, before, cold, until_s, backoff_s)
        for tier, blocks in blocks_by_tier.items():
            self._outstanding[tier] += blocks * self._block_bytes

    def load_ended(self, end: LoadEnd) -> None:
        """Learn from the blocks that came, and from those that were late."""
        if end.request_id not in self._loading:
            return
        load = self._loading.pop(end.request_id)
        times = {time.tier: time for time in end.times}
        for tier, blocks in load.blocks_by_tier.items():
            self._outstanding[tier] -= blocks * self._block_bytes
            self._cold.discard(tier)
            came = times[tier].blocks if tier in times else 0
            late = min(end.late_blocks, max(0, blocks - came))
            seconds = end.seconds if late else (times[tier].seconds if tier in times else 0.0)
            if came + late and seconds > 0:
                size_bytes = (came + late) * self._block_bytes
                before, cold = load.outstanding_bytes[tier], tier in load.cold
                transfer = Transfer(came + late, size_bytes, seconds, before, late, cold)
                self.advisor.tiers[tier].observe(transfer)

    def step_ended(self, steps: Iterable[StepTime]) -> None:
        """Planned steps have ended. `steps`: those that were timed."""
        for step in steps:
            self.advisor.prefill.observe(step.tokens, step.attention, step.seconds)
        answering, self._answering = self._answering, []
        for tracked in answering:
            self.answered(tracked)

    def answered(self, tracked: TrackedRequest) -> None:
        """A request has its first token. Does nothing if nothing was decided for it."""
        decided, tracked.decided = tracked.decided, None
        if decided is None:
            return
        now_s, decision = self._clock(), decided.decision
        seconds = now_s - decided.decided_s
        self.advisor.log.record(decision, seconds)
        if now_s >= self._next_write_s:
            self.write_speeds()
            self._next_write_s = now_s + WRITE_EVERY_S
        self._report(
            FirstToken(
                decided.prompt_tokens,
                min(decided.prompt_tokens, decision.cut_blocks * self._block_tokens),
                max(0.0, seconds),
                decision.predicted_s,
                decision.recompute_s,
                decision.reason,
            )
        )

    def write_speeds(self) -> None:
        pace = self.advisor.prefill.pace()
        if pace is not None:
            self._report(pace)
        if self._speeds_path is not None:
            speeds = LearnedSpeeds(pace, self.advisor.profiles())
            write_speeds(self._speeds_path, speeds)

    def metrics(self) -> dict[str, float]:
        """The current estimates, and the error of predictions."""
        metrics: dict[str, float] = {}
        for tier, model in self.advisor.tiers.items():
            if model.known:
                metrics[f"tier_latency_seconds:{tier}"] = model.latency_s
                metrics[f"tier_bytes_per_second:{tier}"] = model.bandwidth_bytes_s
        for reason, count in self.advisor.log.counts.items():
            if count:
                metrics[f"decisions:{reason.name.lower()}"] = count
        error = self.advisor.log.error()
        if error is not None:
            for kind in ("p50", "p95", "bias"):
                metrics[f"prediction_error:{kind}"] = getattr(error, kind)
        return metrics


def queue_before(tracked: TrackedRequest, others: Iterable[TrackedRequest]) -> EngineQueue:
    """The work that vLLM has before this request and during it, without that of loading ones."""
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
            grain = other.keys.groups.grain
            have = max(other.hit.local_tokens, other.hit.stop_block * grain)
        rest = max(0, request.num_tokens - have)
        tokens, attention = tokens + rest, attention + attention_work(rest, have)
    return EngineQueue(tokens, attention, decodes, contexts)


def step_work(step: ScheduledStep) -> tuple[int, float, bool]:
    """New tokens and attention work of a step, and whether there is prefill in it."""
    tokens, attention, has_prefill = 0, 0.0, False
    for tracked, count in step:
        computed = tracked.request.num_computed_tokens
        tokens, attention = tokens + count, attention + attention_work(count, computed)
        has_prefill = has_prefill or computed + 1 < tracked.request.num_prompt_tokens
    return tokens, attention, has_prefill


@dataclass(frozen=True, slots=True)
class LearnedSpeeds:
    """The known speeds of an engine and its tiers. There is one file for each
    namespace; a file that cannot be read or written counts as no file."""

    prefill: PrefillPace | None = None
    tiers: Mapping[str, TierProfile] = field(default_factory=dict)


def speeds_file(folder: Path, tag: bytes) -> Path:
    return folder.expanduser() / f"{tag.hex()}.json"


def read_speeds(path: Path) -> LearnedSpeeds:
    try:
        with os.fdopen(open_private_file(path, os.O_RDONLY)) as file:
            content = json.load(file)
        prefill = content["prefill"] and PrefillPace(*_numbers(content["prefill"], 3))
        tiers = {name: TierProfile(*_numbers(pair, 2)) for name, pair in content["tiers"].items()}
    except (OSError, UnsafePathError, ValueError, KeyError, TypeError, AttributeError):
        return LearnedSpeeds()
    known = {name: profile for name, profile in tiers.items() if profile.bandwidth_bytes_s > 0}
    return LearnedSpeeds(prefill, known)


def write_speeds(path: Path, speeds: LearnedSpeeds) -> None:
    """Replace the file, whole or not at all."""
    prefill = speeds.prefill and list(asdict(speeds.prefill).values())
    tiers = {name: list(asdict(profile).values()) for name, profile in speeds.tiers.items()}
    # If the home folder cannot be written to, the next start has to learn again.
    with contextlib.suppress(OSError, UnsafePathError):
        make_private_folder(path.parent)
        text = json.dumps({"prefill": prefill, "tiers": tiers})
        replace_private_file(path, text.encode())


def _numbers(values: list[float], count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(isfinite(each) and each >= 0.0 for each in numbers):
        raise ValueError(f"expected {count} numbers: {values}")
    return numbers
