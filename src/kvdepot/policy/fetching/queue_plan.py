"""Decides how much of each waiting prompt to fetch so that the sum of all waits is smallest. Pure.

For one prompt alone, a tier that is slower than the engine does not help. If others wait, it does:
the engine need not compute the blocks that are fetched, and the others are served sooner. The
model: each tier serves prompts in order; the engine takes prompts in the order in which they are
ready; a second of prefill delays every request that is being answered or comes later by a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineQueue,
    FetchPlan,
    PrefillTimes,
    PromptLengths,
    TierRun,
    deadline_of,
    decide,
    fetch_seconds,
    split_by_run,
)
from kvdepot.policy.fetching.speed_models import PrefillPace, TierPace

STRETCH_MAX: Final = 2.0
"""Limit of a prompt's time to the first token, relative to its own fastest plan."""
ANSWER_SHARE: Final = 0.5
"""The share of a second of prefill by which a request that is being answered is delayed: on average
half of its answer is done."""
WAITING_MAX: Final = 3
"""Maximum number of waiting prompts that are planned together with the one to decide on."""
CUTS_MAX: Final = 4
"""Cuts of a prompt that are tried besides nothing, all and its own fastest."""
SWEEPS: Final = 3
"""Maximum number of passes over the prompts of a plan."""


@dataclass(frozen=True, slots=True)
class FetchingPrompt:
    """A prompt that is being fetched: the time until it is ready, and its remaining prefill."""

    ready_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class MatchedPrompt:
    """A prompt and its matched blocks; `runs` as for `decide`."""

    lengths: PromptLengths
    runs: Sequence[TierRun]


@dataclass(frozen=True, slots=True)
class Company:
    """Other requests than the prompt to decide on.

    `loads`: prompts that are being fetched. `waiting`: prompts that come later. `answered`: the
    number of requests that are being answered; `behind`: of waiting ones without known lengths.
    """

    loads: tuple[FetchingPrompt, ...] = ()
    waiting: tuple[MatchedPrompt, ...] = ()
    answered: int = 0
    behind: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.waiting or self.answered or self.behind)


@dataclass(frozen=True, slots=True)
class FetchOption:
    """One way to serve a prompt: the time of each tier, and the time of the engine after that."""

    cut: int
    tiers_s: Mapping[str, float]
    work_s: float


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt with its options, and the deadline of its first token."""

    options: tuple[FetchOption, ...]
    deadline_s: float = inf


@dataclass(frozen=True, slots=True)
class QueueModel:
    """The state of tiers and engine when the first prompt is decided on.

    `waits_s`: the time until each tier starts with the next request; `engine_s`: until the engine
    has computed the prompts that are ready; `losers`: the number of other requests that each second
    of prefill delays.
    """

    waits_s: Mapping[str, float]
    engine_s: float = 0.0
    loads: tuple[FetchingPrompt, ...] = ()
    losers: float = 0.0

    def finish_s(self, chosen: Sequence[FetchOption]) -> tuple[list[float], float]:
        """The time to the first token of each prompt, and the sum of the waits of all requests."""
        jobs = [(load.ready_s, load.work_s, -1) for load in self.loads]
        free = dict(self.waits_s)
        for number, option in enumerate(chosen):
            ready_s = 0.0
            for tier, seconds in option.tiers_s.items():
                free[tier] += seconds
                ready_s = max(ready_s, free[tier])
            jobs.append((ready_s, option.work_s, number))
        jobs.sort(key=lambda job: job[0])
        clock_s, total_s, finish_s = self.engine_s, 0.0, [0.0] * len(chosen)
        for ready_s, work_s, number in jobs:
            clock_s = max(clock_s, ready_s) + work_s
            total_s += clock_s
            if number >= 0:
                finish_s[number] = clock_s
        return finish_s, total_s + self.losers * sum(option.work_s for option in chosen)


def plan_queue(model: QueueModel, prompts: Sequence[QueuedPrompt]) -> list[FetchOption]:
    """Choose an option for each prompt, with the smallest sum of waits that a local search finds.

    The fewest late prompts come first, then the sum. The search starts with each prompt's own
    fastest option, recomputing all and fetching all, and is never worse than these. The first
    option of a prompt is to recompute all, the last to fetch all.
    """
    starts = [
        decide_separately(model, prompts),
        [prompt.options[0] for prompt in prompts],
        [prompt.options[-1] for prompt in prompts],
    ]
    best, best_cost = starts[0], _cost(model, prompts, starts[0])
    for start in starts:
        options, cost = _improved(model, prompts, start)
        if cost < best_cost:
            best, best_cost = options, cost
    return best


def _improved(
    model: QueueModel, prompts: Sequence[QueuedPrompt], start: Sequence[FetchOption]
) -> tuple[list[FetchOption], tuple[int, float]]:
    """Change one prompt at a time as long as that lowers the cost."""
    best, cost = list(start), _cost(model, prompts, start)
    for _ in range(SWEEPS):
        before = cost
        for number, prompt in enumerate(prompts):
            for option in prompt.options:
                tried = [*best[:number], option, *best[number + 1 :]]
                tried_cost = _cost(model, prompts, tried)
                if tried_cost < cost:
                    best, cost = tried, tried_cost
        if cost == before:
            break
    return best, cost


def _cost(
    model: QueueModel, prompts: Sequence[QueuedPrompt], chosen: Sequence[FetchOption]
) -> tuple[int, float]:
    """The number of late prompts, then the sum of waits."""
    finish_s, total_s = model.finish_s(chosen)
    late = sum(
        seconds > prompt.deadline_s for seconds, prompt in zip(finish_s, prompts, strict=True)
    )
    return late, total_s


def decide_separately(model: QueueModel, prompts: Sequence[QueuedPrompt]) -> list[FetchOption]:
    """Choose for one prompt after the other the shortest time to its first token."""
    chosen: list[FetchOption] = []
    for prompt in prompts:
        last_first = reversed(prompt.options)
        chosen.append(min(last_first, key=lambda one: model.finish_s([*chosen, one])[0][-1]))
    return chosen


def decide_jointly(
    prompt: MatchedPrompt,
    prefill: PrefillPace | None,
    tiers: Mapping[str, TierPace | None],
    queue: EngineQueue,
    chunk_tokens: int,
    company: Callable[[], Company],
) -> Decision:
    """Like `decide`, but fetches more if the other requests gain more than this one loses.

    The predicted time to the first token is at most STRETCH_MAX times that of the prompt's own
    fastest plan. Returns the decision of `decide` if speeds are unknown or there are no other
    requests. `company` is called only if that decision leaves blocks to recompute.
    """
    runs = prompt.runs
    alone = decide(prompt.lengths, runs, prefill, tiers, queue, chunk_tokens)
    blocks = sum(run.blocks for run in runs)
    paces = {tier: pace for tier, pace in tiers.items() if pace is not None}
    unknown = prefill is None or any(run.tier not in paces for run in runs)
    if unknown or alone.cut_blocks == blocks or not (others := company()):
        return alone
    assert prefill is not None
    times = PrefillTimes(prompt.lengths, blocks, prefill, queue, chunk_tokens)
    waits_s = {tier: pace.wait_s for tier, pace in paces.items()}
    losers = ANSWER_SHARE * others.answered + others.behind
    model = QueueModel(waits_s, times.queue_s, others.loads, losers)
    options = [_options(runs, paces, times, alone.cut_blocks)]
    for other in others.waiting[:WAITING_MAX]:
        known = [run for run in other.runs if run.tier in paces]
        count = sum(run.blocks for run in known)
        its_times = PrefillTimes(other.lengths, count, prefill, queue, chunk_tokens)
        options.append(_options(known, paces, its_times, count))
    own_s = alone.predicted_s + sum(load.ready_s + load.work_s for load in others.loads)
    (chosen, *_), finish_s, due_s = _within_stretch(model, options, own_s)
    if chosen.cut <= alone.cut_blocks or finish_s > due_s:
        return alone
    fetch_s = float(fetch_seconds(runs, paces)[chosen.cut])
    plan = FetchPlan(chosen.cut, fetch_s, times.queue_s, finish_s)
    by_run = split_by_run(runs, chosen.cut)
    used = [paces[run.tier] for run, count in zip(runs, by_run, strict=True) if count]
    return replace(
        alone,
        cut_blocks=chosen.cut,
        by_run=by_run,
        fetch_s=fetch_s,
        deadline_s=deadline_of(plan, used, max(alone.recompute_s, due_s)),
        saved_s=times.saved_s(chosen.cut),
        backoff_s=chosen.work_s,
        predicted_s=finish_s,
        reason=Reason.RELIEVE,
    )


def _within_stretch(
    model: QueueModel, options: Sequence[tuple[FetchOption, ...]], own_s: float
) -> tuple[list[FetchOption], float, float]:
    """A plan, the first prompt's time to the first token by that plan, and its deadline.

    `own_s`: its time by a decision for itself, after all that is being fetched.
    """
    separate = decide_separately(model, [QueuedPrompt(each) for each in options])
    soonest_s, _ = model.finish_s(separate)
    due_s = [STRETCH_MAX * seconds for seconds in (min(soonest_s[0], own_s), *soonest_s[1:])]
    prompts = [QueuedPrompt(each, due) for each, due in zip(options, due_s, strict=True)]
    chosen = plan_queue(model, prompts)
    finish_s, _ = model.finish_s(chosen)
    return chosen, finish_s[0], due_s[0]


def _options(
    runs: Sequence[TierRun], paces: Mapping[str, TierPace], times: PrefillTimes, preferred: int
) -> tuple[FetchOption, ...]:
    """Options with nothing, all, `preferred`, and some cuts at the ends and middles of runs."""
    between, start = list[int](), 0
    for run in runs:
        between += [start + run.blocks // 2, start + run.blocks]
        start += run.blocks
    cuts = {0, preferred, start, *between[:: -(-len(between) // CUTS_MAX) or 1]}
    return tuple(_option(cut, runs, paces, times) for cut in sorted(cuts))


def _option(
    cut: int, runs: Sequence[TierRun], paces: Mapping[str, TierPace], times: PrefillTimes
) -> FetchOption:
    tiers_s: dict[str, float] = {}
    start = 0
    for run in runs:
        blocks = min(max(cut - start, 0), run.blocks)
        if blocks:
            seconds = paces[run.tier].byte_s * run.size_bytes * blocks / run.blocks
            tiers_s[run.tier] = tiers_s.get(run.tier, 0.0) + seconds
        start += run.blocks
    return FetchOption(cut, tiers_s, float(times.suffix_s[cut]))
