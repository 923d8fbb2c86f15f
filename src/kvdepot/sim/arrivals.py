"""When requests come: at the times of a trace, or as users ask on when they were answered, or so
many at a time."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload


class ArrivalTimes(Protocol):
    """Numbers of requests of a workload, and when they come."""

    def first(self) -> Iterator[tuple[float, int]]:
        """What comes whatever is answered."""
        ...

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        """What follows the answer to a request."""
        ...


@dataclass(frozen=True, slots=True)
class AsRecorded:
    """A trace's own times, `speed` times as fast."""

    workload: Workload
    speed: float = 1.0

    def first(self) -> Iterator[tuple[float, int]]:
        begin_s = self.workload.arrivals_s[0] if len(self.workload) else 0.0
        for number, arrival_s in enumerate(self.workload.arrivals_s):
            yield (arrival_s - begin_s) / self.speed, number

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        return None


class InFlight:
    """The requests of a workload in order, so many at a time: the next when one is answered."""

    def __init__(self, workload: Workload, at_once: int) -> None:
        self._count = len(workload)
        self._begun = min(at_once, self._count)

    def first(self) -> Iterator[tuple[float, int]]:
        for number in range(self._begun):
            yield 0.0, number

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        if self._begun == self._count:
            return None
        self._begun += 1
        return answered_s, self._begun - 1


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Users who each ask several questions, as LMBenchmark's multi-round QA does.

    Every prompt begins with the system prompt that all share and the user's own history, and
    brings all questions and answers so far. A user asks the next question `users / qps` seconds
    after the last one, or `think_s` after the answer where that is later.
    """

    users: int = 15
    turns: int = 10
    system_tokens: int = 1000
    history_tokens: int = 20000
    question_tokens: int = 100
    answer_tokens: int = 100
    qps: float = 1.0
    think_s: float = 0.0
    poisson: bool = False
    """Gaps are exponential with the same mean; otherwise all alike."""

    def __post_init__(self) -> None:
        for name in ("users", "turns", "question_tokens", "answer_tokens", "qps"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"--{name.replace('_', '-')}", "should be above 0")
        for name in ("system_tokens", "history_tokens", "think_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"--{name.replace('_', '-')}", "should not be below 0")

    @property
    def gap_s(self) -> float:
        """Between two questions of one user."""
        return self.users / self.qps

    def prompt_tokens(self, turn: int) -> int:
        """Of turn `turn`, from 0."""
        said = turn * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.history_tokens + said + self.question_tokens

    def workload(self, block_tokens: int) -> Workload:
        """All prompts, user after user; only full blocks have numbers."""
        workload = Workload(block_tokens)
        shared = workload.new_blocks(NO_PARENT, self.system_tokens // block_tokens)
        last = int(shared[-1]) if len(shared) else NO_PARENT
        longest = self.prompt_tokens(self.turns - 1) // block_tokens
        for _ in range(self.users):
            own = workload.new_blocks(last, longest - len(shared))
            chain = np.concatenate((shared, own))
            for turn in range(self.turns):
                tokens = self.prompt_tokens(turn)
                blocks = chain[: tokens // block_tokens]
                workload.add(PromptRequest(0.0, tokens, self.answer_tokens, blocks))
        return workload


class Conversations:
    def __init__(self, talks: MultiTurn, seed: int = 0) -> None:
        self._talks = talks
        self._draw = random.Random(seed)

    def first(self) -> Iterator[tuple[float, int]]:
        talks, at_s = self._talks, 0.0
        for user in range(talks.users):
            yield at_s, user * talks.turns
            at_s += self._gap_s(1.0 / talks.qps)

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        if (number + 1) % self._talks.turns == 0:
            return None
        next_s = asked_s + self._gap_s(self._talks.gap_s)
        return max(next_s, answered_s + self._talks.think_s), number + 1

    def _gap_s(self, mean_s: float) -> float:
        return self._draw.expovariate(1.0 / mean_s) if self._talks.poisson else mean_s
