"""Arrival times: those of a trace, or of users who ask one question after the other."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload


class ArrivalTimes(Protocol):
    """The arrival times of a workload's requests, by number."""

    def first(self) -> Iterator[tuple[float, int]]:
        """Requests that do not depend on answers."""
        ...

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        """The request that follows the answer to a request."""
        ...


@dataclass(frozen=True, slots=True)
class AsRecorded:
    """The times of a trace."""

    workload: Workload

    def first(self) -> Iterator[tuple[float, int]]:
        begin_s = self.workload.arrivals_s[0] if len(self.workload) else 0.0
        for number, arrival_s in enumerate(self.workload.arrivals_s):
            yield arrival_s - begin_s, number

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        return None


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Users who each ask several questions, as LMBenchmark's multi-round QA does.

    Every prompt has the shared system prompt, the user's own history, and all questions and
    answers so far. A user asks the next question `users / qps` seconds after the last one, or
    `think_s` after the answer if that is later.
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
    """True: exponential gaps with the same mean. False: equal gaps."""

    @property
    def gap_s(self) -> float:
        """The time between two questions of one user."""
        return self.users / self.qps

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of the prompt of turn `turn`, from 0."""
        earlier = turn * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.history_tokens + earlier + self.question_tokens

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
