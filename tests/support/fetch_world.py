"""A small world with a virtual clock: one engine, one tier, requests one after another."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp

from kvdepot.policy.fetching.advisor import Advice, Advisor, Probe
from kvdepot.policy.fetching.fetch_or_recompute import PromptLengths, TierRun
from kvdepot.policy.fetching.speed_models import TierProfile, Transfer, attention_work

TIER = "tier"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the models have to find out."""

    step_s: float
    token_s: float
    pair_s: float
    token_bytes: int
    block_tokens: int
    chunk_tokens: int
    latency_s: float
    prompt_tokens: tuple[int, int]


SMALL = Machine(0.06, 2.2e-3, 5e-7, 46_080, 128, 2048, 2e-3, (1000, 4000))
"""SmolLM2-135M in float32 on one core: some 17 MB of KV a second."""
LARGE = Machine(0.012, 26.5e-6, 8.6e-10, 131_072, 256, 8192, 1e-3, (4000, 24000))
"""A Llama-8B shape on an H200: some 4 GB of KV a second."""

SPEEDS = [10e9, 3e9, 1e9, 3e8, 1e8, 5e7, 3e7, 2e7, 1.5e7, 1e7, 3e6, 1e6]
"""Bytes a second of the tier, as it is throttled."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the luck it will have."""

    tokens: int
    matched_blocks: int
    fetch_luck: float
    compute_luck: float


def requests(machine: Machine, count: int, noise: float, rng: random.Random) -> list[Request]:
    made = []
    for _ in range(count):
        tokens = rng.randint(*machine.prompt_tokens)
        blocks = max(int(tokens * rng.uniform(0.75, 1.0)) // machine.block_tokens, 1)
        luck = [exp(rng.gauss(0.0, noise)) for _ in range(2)]
        made.append(Request(tokens, blocks, luck[0], luck[1]))
    return made


Choice = Callable[[PromptLengths, list[TierRun], int], Advice]


@dataclass
class World:
    machine: Machine
    bandwidth_bytes_s: float
    advisor: Advisor
    choose: Choice | None = None
    """Another policy than the advisor's; it learns all the same."""
    now_s: float = 0.0
    probe: tuple[float, Transfer] | None = None
    """When the probe under way will be there."""
    outcomes: list[tuple[Advice, float]] = field(default_factory=list)

    @property
    def block_bytes(self) -> int:
        return self.machine.token_bytes * self.machine.block_tokens

    def outstanding_bytes(self) -> int:
        if self.probe is None:
            return 0
        until, transfer = self.probe
        left = (until - self.now_s) * self.bandwidth_bytes_s
        return max(min(int(left), transfer.size_bytes), 1)

    def wait_until(self, moment_s: float) -> None:
        self.now_s = moment_s
        if self.probe is not None and self.probe[0] <= moment_s:
            self.advisor.tiers[TIER].observe(self.probe[1])
            self.probe = None

    def throttle(self, bandwidth_bytes_s: float) -> None:
        """From now on the tier has another speed, for what is under way too."""
        if self.probe is not None:
            until, probe = self.probe
            longer = (until - self.now_s) * (self.bandwidth_bytes_s / bandwidth_bytes_s - 1.0)
            late = replace(probe, seconds=probe.seconds + longer)
            self.probe = (until + longer, late)
        self.bandwidth_bytes_s = bandwidth_bytes_s

    def serve(self, request: Request) -> float:
        """The time to the first token."""
        self.wait_until(self.now_s + 1.0)
        prompt = PromptLengths(request.tokens, self.machine.block_tokens)
        runs = [TierRun(TIER, request.matched_blocks, request.matched_blocks * self.block_bytes)]
        outstanding = self.outstanding_bytes()
        if self.choose is not None:
            advice = self.choose(prompt, runs, outstanding)
        else:
            advice = self.advisor.advise(prompt, runs, {TIER: outstanding})
        ttft_s = self.play(request, advice, outstanding)
        self.advisor.log.record(advice.decision, ttft_s)
        self.outcomes.append((advice, ttft_s))
        if advice.probe is not None:
            self.start_probe(advice.probe, request)
        self.wait_until(self.now_s + ttft_s)
        return ttft_s

    def start_probe(self, probe: Probe, request: Request) -> None:
        size = probe.blocks * self.block_bytes
        seconds = self.fetch_seconds(probe.blocks, request.fetch_luck, 0)
        self.probe = (self.now_s + seconds, Transfer(probe.blocks, size, seconds))

    def fetch_seconds(self, blocks: int, luck: float, outstanding: int) -> float:
        size = blocks * self.block_bytes + outstanding
        return (self.machine.latency_s + size / self.bandwidth_bytes_s) * luck

    def play(self, request: Request, advice: Advice, outstanding: int) -> float:
        """Fetch with the deadline, then compute what is missing."""
        choice = advice.decision
        asked = choice.cut_blocks
        if not asked:
            return self.compute(0, request.tokens, request.compute_luck)
        waited = self.fetch_seconds(asked, request.fetch_luck, outstanding)
        came = asked
        if waited > choice.deadline_s:
            waited = choice.deadline_s
            share = waited / request.fetch_luck - self.machine.latency_s
            came = int((share * self.bandwidth_bytes_s - outstanding) / self.block_bytes)
            came = min(max(came, 0), asked)
        transfer = Transfer(asked, asked * self.block_bytes, waited, outstanding, asked - came)
        self.advisor.tiers[TIER].observe(transfer)
        start = min(came * self.machine.block_tokens, request.tokens - 1)
        return waited + self.compute(start, request.tokens, request.compute_luck)

    def compute(self, start: int, stop: int, luck: float) -> float:
        """Prefill of the tokens start..stop, in steps of the engine, each of them observed."""
        total = 0.0
        while start < stop:
            tokens = min(stop - start, self.machine.chunk_tokens)
            work = attention_work(tokens, start)
            seconds = self.step_seconds(tokens, work) * luck
            self.advisor.prefill.observe(tokens, work, seconds)
            total += seconds
            start += tokens
        return total

    def step_seconds(self, tokens: int, work: float) -> float:
        return self.machine.step_s + self.machine.token_s * tokens + self.machine.pair_s * work

    def prefill_seconds(self, start: int, stop: int) -> float:
        steps = ceil((stop - start) / self.machine.chunk_tokens)
        work = attention_work(stop - start, start)
        return self.step_seconds(stop - start, work) + (steps - 1) * self.machine.step_s

    def always_fetch(self, request: Request) -> float:
        start = min(request.matched_blocks * self.machine.block_tokens, request.tokens - 1)
        backoff_s = self.prefill_seconds(start, request.tokens) * request.compute_luck
        return self.fetch_seconds(request.matched_blocks, request.fetch_luck, 0) + backoff_s

    def always_recompute(self, request: Request) -> float:
        return self.prefill_seconds(0, request.tokens) * request.compute_luck


def new_world(machine: Machine, bandwidth: float) -> World:
    profile = TierProfile(machine.latency_s, bandwidth)
    return World(machine, bandwidth, Advisor(machine.chunk_tokens, {TIER: profile}))


@dataclass(frozen=True, slots=True)
class Step:
    """Mean times to the first token while the tier had one speed, its first requests left out."""

    bandwidth_bytes_s: float
    decided_s: float
    fetch_s: float
    recompute_s: float
    fetched_share: float

    @property
    def of_the_better(self) -> float:
        return self.decided_s / min(self.fetch_s, self.recompute_s)


def throttle(
    world: World, speeds: Sequence[float], load: Callable[[], list[Request]], switch_within: int
) -> list[Step]:
    """Serve the same kind of load at one speed after another."""
    steps = []
    for speed in speeds:
        world.throttle(speed)
        served = load()
        times = [world.serve(request) for request in served]
        counted = served[switch_within:]
        decided = world.outcomes[-len(counted) :]
        fetched = sum(advice.decision.cut_blocks for advice, _ in decided)
        matched = sum(request.matched_blocks for request in counted)
        steps.append(
            Step(
                speed,
                sum(times[switch_within:]) / len(counted),
                sum(map(world.always_fetch, counted)) / len(counted),
                sum(map(world.always_recompute, counted)) / len(counted),
                fetched / matched,
            )
        )
    return steps
