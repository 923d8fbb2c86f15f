"""One copy of a model on its GPUs: steps of chunked prefill and decode. Pure.

A step computes up to `chunk_tokens` new tokens: one of each running answer, the rest of waiting
prompts in order of arrival. It takes the longer of its arithmetic and reading the weights once, and
the time to read the KV of the answers' contexts.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.policy.fetching.fetch_or_recompute import EngineQueue
from kvdepot.policy.fetching.speed_models import PrefillPace, attention_work
from kvdepot.sim.event_queue import EventQueue


@dataclass(frozen=True, slots=True)
class GpuPace:
    prefill: PrefillPace
    weights_s: float
    """Reading all weights once."""
    context_token_s: float
    """Reading the KV of one token of an answer's context."""
    chunk_tokens: int = 2048


@dataclass(slots=True)
class PrefillJob:
    """A prompt with `context_tokens` in place, and the calls at its first and last token."""

    new_tokens: int
    context_tokens: int
    output_tokens: int
    first: Callable[[], None]
    """Called with the first token."""
    last: Callable[[], None]
    """Called with the last one."""


class SimulatedGpu:
    """Jobs in steps. `busy_s` is the time spent in steps, `prefill_s` of those with prompts."""

    def __init__(self, events: EventQueue, pace: GpuPace) -> None:
        self._events = events
        self._pace = pace
        self._waiting: deque[PrefillJob] = deque()
        self._answers: list[tuple[int, int, PrefillJob]] = []
        self._context_tokens = 0
        self._steps = 0
        self._jobs = 0
        self._running = False
        self._round = 0
        self._rest: tuple[float, float, int] | None = None
        self._step_ends_s = 0.0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        self.waiting_tokens = 0

    def add(self, job: PrefillJob) -> None:
        self._waiting.append(job)
        self.waiting_tokens += job.new_tokens
        if self._rest is not None:
            self._cut_rest()
        elif not self._running:
            self._step()

    @property
    def answers(self) -> int:
        """Number of running answers."""
        return len(self._answers)

    def queue(self) -> EngineQueue:
        work = sum(attention_work(job.new_tokens, job.context_tokens) for job in self._waiting)
        busy_s = max(0.0, self._step_ends_s - self._events.now_s)
        decodes = len(self._answers)
        return EngineQueue(self.waiting_tokens, work, decodes, self._context_tokens, busy_s)

    def _step(self) -> None:
        """Begin the next step, or many equal ones if there is only decoding to do."""
        if not self._waiting and not self._answers:
            self._running = False
            return
        self._running = True
        if self._waiting:
            self._prefill_step()
        else:
            self._decode_steps()

    def _prefill_step(self) -> None:
        """One chunk; prompts that it completes give their first token at its end."""
        left = max(1, self._pace.chunk_tokens - len(self._answers))
        tokens, work, finished = 0, 0.0, []
        while left and self._waiting:
            job = self._waiting[0]
            part = min(left, job.new_tokens)
            work += attention_work(part, job.context_tokens)
            job.new_tokens -= part
            job.context_tokens += part
            tokens += part
            left -= part
            if job.new_tokens:
                break
            finished.append(self._waiting.popleft())
        self.waiting_tokens -= tokens
        seconds = self._step_s(tokens, work)
        self.prefill_s += seconds
        self.busy_s += seconds
        self._step_ends_s = self._events.now_s + seconds
        self._events.at(self._step_ends_s, lambda: self._after(1, finished))

    def _decode_steps(self) -> None:
        """The steps until an answer ends; a new prompt ends them earlier."""
        steps = self._answers[0][0] - self._steps
        first_s = self._step_s(0, 0.0)
        growth_s = self._pace.context_token_s * len(self._answers)
        self._round += 1
        self._rest = (self._events.now_s, first_s, steps)
        self._end_rest(steps, first_s, growth_s, self._events.now_s)

    def _end_rest(self, steps: int, first_s: float, growth_s: float, start_s: float) -> None:
        seconds = steps * first_s + growth_s * steps * (steps - 1) / 2.0
        known = self._round
        end_s = max(self._events.now_s, start_s + seconds)

        def end() -> None:
            if known == self._round:
                self._rest = None
                self.busy_s += end_s - start_s
                self._after(steps, [])

        self._events.at(end_s, end)

    def _cut_rest(self) -> None:
        """Finish the running step, and cancel those after it."""
        assert self._rest is not None
        start_s, first_s, steps = self._rest
        growth_s = self._pace.context_token_s * len(self._answers)
        passed_s, done = self._events.now_s - start_s, 0
        if growth_s > 0.0:
            half = first_s - growth_s / 2.0
            done = int(((half * half + 2.0 * growth_s * passed_s) ** 0.5 - half) / growth_s)
        else:
            done = int(passed_s / first_s)
        self._round += 1
        self._end_rest(min(steps, done + 1), first_s, growth_s, start_s)

    def _after(self, steps: int, finished: list[PrefillJob]) -> None:
        """`steps` steps are done, and these prompts are computed."""
        self._steps += steps
        self._context_tokens += steps * len(self._answers)
        while self._answers and self._answers[0][0] <= self._steps:
            job = heapq.heappop(self._answers)[2]
            self._context_tokens -= job.context_tokens + job.output_tokens - 1
            job.last()
        for job in finished:
            job.first()
            if job.output_tokens <= 1:
                job.last()
                continue
            self._jobs += 1
            heapq.heappush(self._answers, (self._steps + job.output_tokens - 1, self._jobs, job))
            self._context_tokens += job.context_tokens
        self._step()

    def _step_s(self, tokens: int, work: float) -> float:
        prefill, answers = self._pace.prefill, len(self._answers)
        sums_s = prefill.token_s * (tokens + answers) + prefill.pair_s * work
        read_s = self._pace.context_token_s * self._context_tokens
        return prefill.step_s + max(sums_s, self._pace.weights_s) + read_s
