"""How much of each waiting prompt to fetch, so that all requests together lose least. Pure.

For one prompt alone a tier that is slower than the engine is of no use. With others waiting it is
capacity beside the engine: what it brings, the engine need not compute, and the others are served
sooner. The model: tiers serve prompts in order, each its own; the engine takes prompts in the order
in which they are ready; a second of prefill is a second lost for every request that is being
answered or comes after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineFeatures,
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
"""No prompt is made to wait for its first token so many times longer than the way that is fastest
for it, as things are."""
ANSWER_SHARE: Final = 0.5
"""A request that is being answered loses this share of each second of prefill: on the average it is
half through."""
WAITING_MAX: Final = 3
"""Prompts that are planned for beside the one to decide on."""
CUTS_MAX: Final = 4
"""Ways to cut a prompt that are tried besides nothing, all and its own fastest."""
SWEEPS: Final = 3
"""How often each prompt of a plan is thought over."""


@dataclass(frozen=True, slots=True)
class FetchingPrompt:
    """A prompt that is being fetched: when it is ready, and what is left to compute then."""

    ready_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class MatchedPrompt:
    """A prompt and where its blocks are: `runs` as `decide` takes them."""

    lengths: PromptLengths
    runs: Sequence[TierRun]


@dataclass(frozen=True, slots=True)
class Company:
    """Requests besides the prompt to decide on.

    `loads`: what is being fetched. `waiting`: prompts that come after it. `answered`: requests that
    are being answered; `behind`: those that wait and of which nothing is known.
    """

    loads: tuple[FetchingPrompt, ...] = ()
    waiting: tuple[MatchedPrompt, ...] = ()
    answered: int = 0
    behind: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.waiting or self.answered or self.behind)


@dataclass(frozen=True, slots=True)
class FetchOption:
    """One way to serve a prompt: how long each tier works for it, and the engine after that."""

    cut: int
    tiers_s: Mapping[str, float]
    work_s: float


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt with its ways to be served, and when its first token is due."""

    options: tuple[FetchOption, ...]
    deadline_s: float = inf


@dataclass(frozen=True, slots=True)
class QueueModel:
    """What is there when the first prompt is decided on.

    `waits_s`: when each tier begins with what is asked of it next; `engine_s`: when the engine has
    computed what is ready now; `losers`: how many requests lose each second of prefill besides.
    """

    waits_s: Mapping[str, float]
    engine_s: float = 0.0
    loads: tuple[FetchingPrompt, ...] = ()
    losers: float = 0.0

    def finish_s(self, chosen: Sequence[FetchOption]) -> tuple[list[float], float]:
        """When each prompt has its first token, and the sum of what all requests wait."""
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
    """An option for each prompt: the least sum of waits that was found.

    Never a larger one than fetching all, recomputing all or each prompt's own fastest way in turn,
    of those that keep to the deadlines; if none does, the fewest prompts are late. The first option
    of a prompt is to recompute all, the last to fetch all.
    """
    starts = [
        decide_separately(model, prompts),
        [prompt.options[0] for prompt in prompts],
        [prompt.options[-1] for prompt in prompts],
    ]
    best, best_cost = starts[0], _cost(model, prompts, starts[0])
    for start in starts:
        found, cost = _improved(model, prompts, start)
        if cost < best_cost:
            best, best_cost = found, cost
    return best


def _improved(
    model: QueueModel, prompts: Sequence[QueuedPrompt], start: Sequence[FetchOption]
) -> tuple[list[FetchOption], tuple[int, float]]:
    """Change one prompt at a time for as long as that helps."""
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
    """Prompts that are late, then the sum of waits."""
    finish_s, total_s = model.finish_s(chosen)
    late = sum(at > prompt.deadline_s for at, prompt in zip(finish_s, prompts, strict=True))
    return late, total_s


def decide_separately(model: QueueModel, prompts: Sequence[QueuedPrompt]) -> list[FetchOption]:
    """The shortest time to the first token for one prompt after the other."""
    chosen: list[FetchOption] = []
    for prompt in prompts:
        chosen.append(
            min(
                reversed(prompt.options),
                key=lambda option: model.finish_s([*chosen, option])[0][-1],
            )
        )
    return chosen


def decide_jointly(
    prompt: MatchedPrompt,
    prefill: PrefillPace | None,
    tiers: Mapping[str, TierPace | None],
    queue: EngineQueue,
    engine: EngineFeatures,
    company: Callable[[], Company],
) -> Decision:
    """As `decide`, but more is fetched where the other requests gain more than this one loses.

    The first token is not predicted later than STRETCH_MAX times that of the prompt's own fastest
    way. Where speeds are not known, or there are no others, the decision is that of `decide`.
    `company` is asked only if that leaves blocks to recompute.
    """
    runs = prompt.runs
    alone = decide(prompt.lengths, runs, prefill, tiers, queue, engine)
    blocks = sum(run.blocks for run in runs)
    paces = {tier: pace for tier, pace in tiers.items() if pace is not None}
    unknown = prefill is None or any(run.tier not in paces for run in runs)
    if unknown or alone.hole_blocks or alone.cut_blocks == blocks or not (others := company()):
        return alone
    assert prefill is not None
    times = PrefillTimes(prompt.lengths, blocks, prefill, queue, engine)
    waits_s = {tier: pace.wait_s for tier, pace in paces.items()}
    losers = ANSWER_SHARE * others.answered + others.behind
    model = QueueModel(waits_s, times.queue_s, others.loads, losers)
    options = [_options(runs, paces, times, alone.cut_blocks)]
    for other in others.waiting[:WAITING_MAX]:
        known = [run for run in other.runs if run.tier in paces]
        count = sum(run.blocks for run in known)
        its_times = PrefillTimes(other.lengths, count, prefill, queue, engine)
        options.append(_options(known, paces, its_times, count))
    own_s = alone.predicted_s + sum(load.ready_s + load.work_s for load in others.loads)
    (chosen, *_), finish_s, due_s = _within_stretch(model, options, own_s)
    if chosen.cut <= alone.cut_blocks or finish_s > due_s:
        return alone
    fetch_s = float(fetch_seconds(runs, paces)[chosen.cut])
    plan = FetchPlan(chosen.cut, 0, 0, fetch_s, times.queue_s, finish_s)
    by_run = split_by_run(runs, plan)
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
    """A plan, when the first prompt has its first token by it, and by when it is due.

    `own_s`: when it would have it by a decision for itself, after all that is being fetched.
    """
    selfish = decide_separately(model, [QueuedPrompt(each) for each in options])
    soonest_s, _ = model.finish_s(selfish)
    due_s = [STRETCH_MAX * one for one in (min(soonest_s[0], own_s), *soonest_s[1:])]
    prompts = [QueuedPrompt(each, due) for each, due in zip(options, due_s, strict=True)]
    chosen = plan_queue(model, prompts)
    finish_s, _ = model.finish_s(chosen)
    return chosen, finish_s[0], due_s[0]


def _options(
    runs: Sequence[TierRun], paces: Mapping[str, TierPace], times: PrefillTimes, preferred: int
) -> tuple[FetchOption, ...]:
    """Nothing, all, the preferred cut, and some cuts between: at borders, in the middle of runs."""
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
