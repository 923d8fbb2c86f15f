"""A plan: the mix to buy, what it is compared with, what it depends on, what to buy next."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.planner.analytic import AnalyticEvaluator
from kvdepot.planner.outcome import (
    HOURS_A_YEAR,
    Bottleneck,
    Evaluate,
    Evaluator,
    Mix,
    MixOutcome,
    bottleneck,
)
from kvdepot.planner.parts import Parts
from kvdepot.planner.scenario import Goal, Scenario

NODES_FACTOR_MAX: Final = 64
"""More nodes than this many times those given are not tried."""
GPU_MEMORY_ONLY: Final = "GPU memory only"
"""The way to serve without kvdepot."""
OVERLOADED: Final = 1e9
"""Stands for a time that does not exist, where outcomes are ordered."""


def all_mixes(parts: Parts) -> list[Mix]:
    counts = [sorted(set(device.counts)) for device in parts.tiers.values()]
    return [Mix(units) for units in itertools.product(*counts)]


def late_s(outcome: "MixOutcome | SwingEnd") -> float:
    """The 95th percentile; OVERLOADED where there is none."""
    return OVERLOADED if outcome.ttft_p95_s is None else outcome.ttft_p95_s


def shortfall(outcome: MixOutcome, goal: Goal) -> float:
    """How far the worse of the two goals is missed, as a logarithm; 0 where both are reached."""
    late = math.log(late_s(outcome) / goal.ttft_p95)
    short = math.log(goal.retention / max(outcome.retention_s, 1e-9)) if goal.retention else 0.0
    return max(0.0, late, short)


def best(outcomes: Sequence[MixOutcome], goal: Goal) -> MixOutcome:
    """The cheapest that reaches the goals; if none does, the closest."""
    return min(
        outcomes,
        key=lambda one: (shortfall(one, goal), one.cost.per_hour, late_s(one), one.mix.units),
    )


def frontier(outcomes: Sequence[MixOutcome], goal: Goal) -> list[MixOutcome]:
    """Mixes that no other beats in both cost and p95, the cheapest first.

    Only those that keep talks long enough count, unless there are none.
    """
    served = [one for one in outcomes if one.ttft_p95_s is not None]
    long_enough = [one for one in served if one.retention_s >= goal.retention]
    line: list[MixOutcome] = []
    for one in sorted(long_enough or served, key=lambda one: (one.cost.per_hour, late_s(one))):
        if not line or late_s(one) < late_s(line[-1]) * 0.999:
            line.append(one)
    return line


def enough_nodes(evaluate: Evaluate, mix: Mix, nodes: int, goal: Goal) -> MixOutcome | None:
    """The mix on the fewest nodes that reach the p95; None where no number of them does."""

    def reaches(count: int) -> bool:
        return late_s(evaluate(mix, count)) <= goal.ttft_p95

    low, high = 0, 1
    while not reaches(high):
        low, high = high, high * 2
        if high > nodes * NODES_FACTOR_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return evaluate(mix, high)


WORTH: Final = 0.005
"""The least change of the mean time that is worth a word."""


@dataclass(frozen=True, slots=True)
class Purchase:
    """One step more of one part, for every node; or one node more."""

    part: str
    units: int
    """More of it, on each node."""
    money: float
    """Over the years that prices are written off: price, power and rent."""
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    retention_s: float
    saved_ms_per_1000: float
    """Mean time to first token saved for each 1,000 of money."""


def purchases(evaluate: Evaluate, parts: Parts, chosen: MixOutcome) -> list[Purchase]:
    """One step more of everything that can still be bought, what saves most for its money first."""
    found = []
    for index, (name, device) in enumerate(parts.tiers.items()):
        have = chosen.mix.units[index]
        more = [count for count in sorted(device.counts) if count > have]
        if more:
            units = list(chosen.mix.units)
            units[index] = more[0]
            after = evaluate(replace(chosen.mix, units=tuple(units)), chosen.nodes)
            found.append(_purchase(name, more[0] - have, chosen, after, parts))
    node = evaluate(chosen.mix, chosen.nodes + 1)
    found.append(_purchase("node with GPUs", 1, chosen, node, parts))
    return sorted(found, key=lambda one: -one.saved_ms_per_1000)


def _purchase(
    part: str, units: int, before: MixOutcome, after: MixOutcome, parts: Parts
) -> Purchase:
    money = (after.cost.per_hour - before.cost.per_hour) * parts.years * HOURS_A_YEAR
    saved_ms = 0.0
    if before.ttft_mean_s is not None and after.ttft_mean_s is not None:
        saved_ms = (before.ttft_mean_s - after.ttft_mean_s) * 1000.0
        if saved_ms < WORTH * before.ttft_mean_s * 1000.0:
            saved_ms = 0.0
    elif after.ttft_mean_s is not None:
        saved_ms = 1e9
    return Purchase(
        part=part,
        units=units,
        money=money,
        ttft_mean_s=after.ttft_mean_s,
        ttft_p95_s=after.ttft_p95_s,
        retention_s=after.retention_s,
        saved_ms_per_1000=saved_ms / max(money, 1.0) * 1000.0,
    )


def worth_buying(found: Sequence[Purchase]) -> Purchase | None:
    """The purchase that saves most for its money; None where nothing saves anything."""
    return found[0] if found and found[0].saved_ms_per_1000 > 0.0 else None


def empty_mix(parts: Parts, *, reuse: bool = True) -> Mix:
    """Nothing but GPU memory; without reuse, not even that."""
    return Mix((0,) * len(parts.tiers), reuse)


Change = Callable[[Scenario, Parts, float], tuple[Scenario, Parts]]


@dataclass(frozen=True, slots=True)
class Uncertain:
    """An input, how far off it may be, and why."""

    name: str
    low: float
    high: float
    """Factors on the value that was given."""
    why: str
    change: Change


def _traffic(name: str) -> Change:
    def change(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
        traffic = scenario.traffic
        values = {name: getattr(traffic, name) * factor}
        if name == "history_tokens":
            values[name] = round(values[name])
        if name == "return_share":
            values[name] = min(1.0, values[name])
        if name == "requests_per_s" and traffic.gap is None:
            values["gap"] = traffic.turn_gap_s  # more users, with the same gaps
        return replace(scenario, traffic=replace(traffic, **values)), parts

    return change


def _prefill_speed(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
    gpus = {
        name: replace(gpu, efficiency=min(1.0, gpu.efficiency * factor))
        for name, gpu in parts.gpus.items()
    }
    return scenario, replace(parts, gpus=gpus)


def _devices(*names: str, kind: type[int] | type[float]) -> Change:
    def change(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
        tiers = {}
        for tier, device in parts.tiers.items():
            values: dict[str, Any] = {name: kind(getattr(device, name) * factor) for name in names}
            tiers[tier] = replace(device, **values)
        return scenario, replace(parts, tiers=tiers)

    return change


UNCERTAIN: Final = (
    Uncertain(
        "prefill speed",
        0.6,
        1.2,
        "measured with transformers on one H200; engines and parallel GPUs differ",
        _prefill_speed,
    ),
    Uncertain("requests a second", 0.7, 1.5, "a forecast", _traffic("requests_per_s")),
    Uncertain(
        "length of what a talk begins with", 0.5, 2.0, "contexts grow", _traffic("history_tokens")
    ),
    Uncertain("how long pauses last", 0.33, 3.0, "rarely measured", _traffic("return_gap")),
    Uncertain(
        "share of talks taken up again", 0.5, 2.0, "rarely measured", _traffic("return_share")
    ),
    Uncertain(
        "speed of memory and drives",
        0.5,
        1.1,
        "data sheets are peaks",
        _devices("read", "write", kind=int),
    ),
    Uncertain(
        "prices of memory and drives",
        0.6,
        1.6,
        "of 2025 and 2026, and moving",
        _devices("price", "price_per_tb_month", kind=float),
    ),
)


@dataclass(frozen=True, slots=True)
class SwingEnd:
    """The chosen mix with an input at one end of its range."""

    factor: float
    ttft_p95_s: float | None
    per_million_tokens: float
    retention_s: float
    misses: tuple[str, ...]
    cheapest: Mix
    """Of the mixes on the frontier, the one that would be chosen then."""
    reached: bool
    """Whether that one reaches the goals."""


@dataclass(frozen=True, slots=True)
class Swing:
    name: str
    why: str
    low: SwingEnd
    high: SwingEnd
    effect: float
    """The larger change of p95 or cost from end to end, as a logarithm."""


def swings(
    evaluator: Evaluator,
    scenario: Scenario,
    parts: Parts,
    chosen: MixOutcome,
    line: Sequence[MixOutcome],
) -> list[Swing]:
    """Every uncertain input that matters here, the one with the largest effect first."""
    mixes = list(dict.fromkeys([chosen.mix, *(one.mix for one in line)]))
    found = []
    for one in UNCERTAIN:
        ends = []
        for factor in (one.low, one.high):
            changed = one.change(scenario, parts, factor)
            ends.append(_end(evaluator(*changed), changed[0], factor, mixes, chosen.nodes))
        effect = max(
            abs(math.log(late_s(ends[1]) / late_s(ends[0]))),
            abs(math.log(ends[1].per_million_tokens / ends[0].per_million_tokens)),
        )
        found.append(Swing(one.name, one.why, ends[0], ends[1], effect))
    return sorted(found, key=lambda swing: -swing.effect)


def _end(
    evaluate: Evaluate, scenario: Scenario, factor: float, mixes: Sequence[Mix], nodes: int
) -> SwingEnd:
    outcomes = [evaluate(mix, nodes) for mix in mixes]
    chosen, cheapest = outcomes[0], best(outcomes, scenario.goal)
    return SwingEnd(
        factor=factor,
        ttft_p95_s=chosen.ttft_p95_s,
        per_million_tokens=chosen.cost.per_million_tokens,
        retention_s=chosen.retention_s,
        misses=chosen.misses(scenario.goal),
        cheapest=cheapest.mix,
        reached=not cheapest.misses(scenario.goal),
    )


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to serve the same traffic."""

    name: str
    outcome: MixOutcome
    enough: MixOutcome | None
    """On the fewest nodes that reach the p95; None where no number of them does."""


@dataclass(frozen=True, slots=True)
class Plan:
    scenario: Scenario
    parts: Parts
    tried: int
    chosen: MixOutcome
    misses: tuple[str, ...]
    """Goals that no mix reaches; `chosen` is then the closest."""
    fastest_s: float | None
    """The lowest p95 of any mix."""
    longest_s: float
    """The longest retention of any mix."""
    frontier: list[MixOutcome]
    alternatives: list[Alternative]
    bottleneck: Bottleneck
    next: list[Purchase]
    swings: list[Swing]


def make_plan(
    scenario: Scenario,
    parts: Parts,
    *,
    evaluator: Evaluator = AnalyticEvaluator,
    advance: Callable[[], None] = lambda: None,
) -> Plan:
    """Tries every mix of the parts list; `advance` is called after each.

    Raises ConfigError for what does not fit together. Goals that nothing reaches are an answer.
    """
    evaluate = evaluator(scenario, parts)
    nodes, goal = scenario.fleet.nodes, scenario.goal
    outcomes = []
    for mix in all_mixes(parts):
        outcomes.append(evaluate(mix, nodes))
        advance()
    chosen = best(outcomes, goal)
    line = frontier(outcomes, goal)
    fastest = min(outcomes, key=late_s)
    return Plan(
        scenario=scenario,
        parts=parts,
        tried=len(outcomes),
        chosen=chosen,
        misses=chosen.misses(goal),
        fastest_s=fastest.ttft_p95_s,
        longest_s=max(outcome.retention_s for outcome in outcomes),
        frontier=line,
        alternatives=_alternatives(evaluate, scenario, parts, outcomes, chosen),
        bottleneck=bottleneck(chosen),
        next=purchases(evaluate, parts, chosen),
        swings=swings(evaluator, scenario, parts, chosen, line),
    )


def _alternatives(
    evaluate: Evaluate,
    scenario: Scenario,
    parts: Parts,
    outcomes: list[MixOutcome],
    chosen: MixOutcome,
) -> list[Alternative]:
    nodes = scenario.fleet.nodes
    mixes: dict[str, Mix] = {
        "recompute everything": empty_mix(parts, reuse=False),
        GPU_MEMORY_ONLY: empty_mix(parts),
    }
    for index, name in enumerate(parts.tiers):
        alone = [one for one in outcomes if _only(one.mix, index)]
        if name in ("dram", "ssd") and alone:
            mixes[f"{name} only"] = best(alone, scenario.goal).mix
    mixes["chosen"] = chosen.mix
    return [
        Alternative(name, evaluate(mix, nodes), enough_nodes(evaluate, mix, nodes, scenario.goal))
        for name, mix in mixes.items()
    ]


def _only(mix: Mix, index: int) -> bool:
    return all(bool(count) == (number == index) for number, count in enumerate(mix.units))
