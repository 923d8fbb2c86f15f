"""Many prompts at once: one engine and one tier, each serving in turn, and a virtual clock.

What is known here is exact, so that only the queues make a difference.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.fetch_world import TIER, Machine, Request

from kvdepot.policy.fetching.fetch_or_recompute import (
    EngineQueue,
    PromptLengths,
    TierRun,
    decide,
)
from kvdepot.policy.fetching.speed_models import PrefillPace, TierPace, attention_work


@dataclass(slots=True)
class Job:
    """Prefill that can start at `ready_s`."""

    ready_s: float
    arrived_s: float
    start: int
    tokens: int


Policy = Callable[["Rush", Request], int]


class Rush:
    """Serves prompts that arrive by themselves; how many blocks are fetched, a policy says."""

    def __init__(self, machine: Machine, bandwidth_bytes_s: float, policy: Policy) -> None:
        self.machine = machine
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.policy = policy
        self.now_s = 0.0
        self.engine_free_s = 0.0
        self.tier_free_s = 0.0
        self.waiting: list[Job] = []
        self.running: Job | None = None
        self.times: list[float] = []

    def serve(self, requests: list[Request], every_s: float, rng: random.Random) -> float:
        """The mean time to the first token."""
        for request in requests:
            self.advance(self.now_s + rng.expovariate(1.0 / every_s))
            self.accept(request, self.policy(self, request))
        self.advance(float("inf"))
        return sum(self.times) / len(self.times)

    def accept(self, request: Request, blocks: int) -> None:
        ready = self.now_s
        if blocks:
            size = blocks * self.machine.block_tokens * self.machine.token_bytes
            begin = max(self.now_s, self.tier_free_s)
            self.tier_free_s = begin + size / self.bandwidth_bytes_s
            ready = self.tier_free_s + self.machine.latency_s
        start = min(blocks * self.machine.block_tokens, request.tokens - 1)
        self.waiting.append(Job(ready, self.now_s, start, request.tokens))

    def advance(self, until_s: float) -> None:
        """Start every job that starts before then; the first that is ready goes first."""
        while self.waiting:
            job = min(self.waiting, key=lambda each: each.ready_s)
            begin = max(self.engine_free_s, job.ready_s)
            if begin >= until_s:
                break
            self.waiting.remove(job)
            self.running = job
            self.engine_free_s = begin + self.seconds(job)
            self.times.append(self.engine_free_s - job.arrived_s)
        self.now_s = until_s

    def seconds(self, job: Job) -> float:
        tokens = job.tokens - job.start
        steps = max(tokens / self.machine.chunk_tokens, 1.0)
        work = attention_work(tokens, job.start)
        linear = self.machine.step_s * steps + self.machine.token_s * tokens
        return linear + self.machine.pair_s * work

    def queue(self) -> EngineQueue:
        """Prefill that is ready and not done."""
        ready = [job for job in self.waiting if job.ready_s <= self.now_s]
        tokens = float(sum(job.tokens - job.start for job in ready))
        work = sum(attention_work(job.tokens - job.start, job.start) for job in ready)
        if self.running is not None and self.engine_free_s > self.now_s:
            left = (self.engine_free_s - self.now_s) / self.seconds(self.running)
            rest = self.running.tokens - self.running.start
            tokens += left * rest
            work += left * attention_work(rest, self.running.start)
        return EngineQueue(ahead_tokens=int(tokens), ahead_attention=work)


def always_fetch(_rush: Rush, request: Request) -> int:
    return request.matched_blocks


def never_fetch(_rush: Rush, _request: Request) -> int:
    return 0


def decided(rush: Rush, request: Request) -> int:
    return choose(rush, request, rush.queue(), max(rush.tier_free_s - rush.now_s, 0.0))


def decided_blindly(rush: Rush, request: Request) -> int:
    """As if nobody waited for anything."""
    return choose(rush, request, EngineQueue(), 0.0)


def choose(rush: Rush, request: Request, queue: EngineQueue, busy_s: float) -> int:
    machine = rush.machine
    size = request.matched_blocks * machine.block_tokens * machine.token_bytes
    decision = decide(
        PromptLengths(request.tokens, machine.block_tokens),
        [TierRun(TIER, request.matched_blocks, size)],
        PrefillPace(machine.step_s, machine.token_s, machine.pair_s),
        {TIER: TierPace(machine.latency_s + busy_s, 1.0 / rush.bandwidth_bytes_s)},
        queue,
        machine.chunk_tokens,
    )
    return decision.cut_blocks
