"""A plan: the mix to buy, its alternatives and savings, uncertain inputs, the next purchase."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.planner.analytic import AnalyticEvaluator
from kvdepot.planner.outcome import (
    HOURS_A_MONTH,
    HOURS_A_YEAR,
    Bottleneck,
    Evaluate,
    Mix,
    MixOutcome,
    bottleneck,
)
from kvdepot.planner.parts import Parts
from kvdepot.planner.scenario import Goal, Scenario

NODES_FACTOR_MAX: Final = 64
"""Up to this many times the given nodes are tried."""
GPU_MEMORY_ONLY: Final = "GPU memory only"
"""Serving without kvdepot: an engine reuses what its GPU memory still has."""
CHOSEN: Final = "chosen"
OVERLOADED: Final = 1e9
"""The p95 of an overloaded fleet, for ordering."""
WORTH: Final = 0.005
"""The least relative change of the mean time that counts."""


def all_mixes(parts: Parts) -> list[Mix]:
    counts = [sorted(set(device.counts)) for device in parts.tiers.values()]
    return [Mix(units) for units in itertools.product(*counts)]


def late_s(outcome: "MixOutcome | SwingEnd") -> float:
    """The 95th percentile; OVERLOADED without one."""
    return OVERLOADED if outcome.ttft_p95_s is None else outcome.ttft_p95_s


def shortfall(outcome: MixOutcome, goal: Goal) -> float:
    """The larger miss of the two goals, as a logarithm; 0 if both are reached."""
    late = math.log(late_s(outcome) / goal.ttft_p95)
    short = math.log(goal.retention / max(outcome.retention_s, 1e-9)) if goal.retention else 0.0
    return max(0.0, late, short)


def best(outcomes: Sequence[MixOutcome], goal: Goal) -> MixOutcome:
    """The cheapest mix that reaches the goals; if none does, the closest."""
    return min(
        outcomes,
        key=lambda one: (shortfall(one, goal), one.cost.per_hour, late_s(one), one.mix.units),
    )


def frontier(outcomes: Sequence[MixOutcome], goal: Goal) -> list[MixOutcome]:
    """Mixes that no other beats in both cost and p95, the cheapest first.

    Only mixes that reach the retention count, unless there are none.
    """
    served = [one for one in outcomes if one.ttft_p95_s is not None]
    long_enough = [one for one in served if one.retention_s >= goal.retention]
    line: list[MixOutcome] = []
    for one in sorted(long_enough or served, key=lambda one: (one.cost.per_hour, late_s(one))):
        if not line or late_s(one) < late_s(line[-1]) * 0.999:
            line.append(one)
    return line


def enough_nodes(evaluate: Evaluate, mix: Mix, nodes: int, goal: Goal) -> MixOutcome | None:
    """The mix on the fewest nodes that reach the p95; None if no number of nodes does."""

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


@dataclass(frozen=True, slots=True)
class Purchase:
    """The next larger number of one part on every node, or one more node."""

    part: str
    units: int
    """Additional units on each node."""
    money: float
    """Price, power and rent over the years of the parts list."""
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    retention_s: float
    saved_ms_per_1000: float
    """Mean time to first token saved for each 1,000 of money."""


def purchases(evaluate: Evaluate, parts: Parts, chosen: MixOutcome) -> list[Purchase]:
    """The next purchase of every part, the one that saves most for its money first."""
    options = []
    for index, (name, device) in enumerate(parts.tiers.items()):
        have = chosen.mix.units[index]
        more = [count for count in sorted(device.counts) if count > have]
        if more:
            units = list(chosen.mix.units)
            units[index] = more[0]
            after = evaluate(replace(chosen.mix, units=tuple(units)), chosen.nodes)
            options.append(_purchase(name, more[0] - have, chosen, after, parts))
    node = evaluate(chosen.mix, chosen.nodes + 1)
    options.append(_purchase("node with GPUs", 1, chosen, node, parts))
    return sorted(options, key=lambda one: -one.saved_ms_per_1000)


def _purchase(
    part: str, units: int, before: MixOutcome, after: MixOutcome, parts: Parts
) -> Purchase:
    money = (after.cost.per_hour - before.cost.per_hour) * parts.years * HOURS_A_YEAR
    saved_ms = 0.0
    if after.ttft_mean_s is not None:
        if before.ttft_mean_s is None:
            saved_ms = 1e9
        elif before.ttft_mean_s - after.ttft_mean_s >= WORTH * before.ttft_mean_s:
            saved_ms = (before.ttft_mean_s - after.ttft_mean_s) * 1000.0
    return Purchase(
        part=part,
        units=units,
        money=money,
        ttft_mean_s=after.ttft_mean_s,
        ttft_p95_s=after.ttft_p95_s,
        retention_s=after.retention_s,
        saved_ms_per_1000=saved_ms / max(money, 1.0) * 1000.0,
    )


def empty_mix(parts: Parts, *, reuse: bool = True) -> Mix:
    """GPU memory alone; without reuse not even that."""
    return Mix((0,) * len(parts.tiers), reuse)


Change = Callable[[Scenario, Parts, float], tuple[Scenario, Parts]]


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


@dataclass(frozen=True, slots=True)
class Uncertain:
    """An input, its range as factors of the given value, and why it is uncertain."""

    name: str
    low: float
    high: float
    why: str
    change: Change


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
        "tokens at the beginning of a conversation",
        0.5,
        2.0,
        "contexts grow",
        _traffic("history_tokens"),
    ),
    Uncertain("length of pauses", 0.33, 3.0, "rarely measured", _traffic("return_gap")),
    Uncertain(
        "share of conversations that return", 0.5, 2.0, "rarely measured", _traffic("return_share")
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
    """The mix of the frontier that would be chosen."""
    reached: bool
    """True if `cheapest` reaches the goals."""


@dataclass(frozen=True, slots=True)
class Swing:
    name: str
    why: str
    low: SwingEnd
    high: SwingEnd
    effect: float
    """The larger change of p95 or cost from end to end, as a logarithm."""


def swings(
    scenario: Scenario, parts: Parts, chosen: MixOutcome, line: Sequence[MixOutcome]
) -> list[Swing]:
    """The uncertain inputs, the one with the largest effect first."""
    mixes = list(dict.fromkeys([chosen.mix, *(one.mix for one in line)]))

    def end(one: Uncertain, factor: float) -> SwingEnd:
        changed, list_then = one.change(scenario, parts, factor)
        evaluate = AnalyticEvaluator(changed, list_then)
        outcomes = [evaluate(mix, chosen.nodes) for mix in mixes]
        then, cheapest = outcomes[0], best(outcomes, changed.goal)
        return SwingEnd(
            factor=factor,
            ttft_p95_s=then.ttft_p95_s,
            per_million_tokens=then.cost.per_million_tokens,
            retention_s=then.retention_s,
            misses=then.misses(changed.goal),
            cheapest=cheapest.mix,
            reached=not cheapest.misses(changed.goal),
        )

    results = []
    for one in UNCERTAIN:
        low, high = end(one, one.low), end(one, one.high)
        effect = max(
            abs(math.log(late_s(high) / late_s(low))),
            abs(math.log(high.per_million_tokens / low.per_million_tokens)),
        )
        results.append(Swing(one.name, one.why, low, high, effect))
    return sorted(results, key=lambda swing: -swing.effect)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to serve the same traffic."""

    name: str
    outcome: MixOutcome
    enough: MixOutcome | None
    """The mix on the fewest nodes that reach the p95; None if no number of nodes does."""


@dataclass(frozen=True, slots=True)
class PlanSavings:
    """The plan against serving without kvdepot, both on the fewest nodes that reach the p95."""

    nodes_without: int
    nodes_with: int
    gpus_saved: int
    """Negative: GPUs that are needed in addition."""
    per_month: float
    """All in: prices written off, power, rent. Negative: the plan costs more, and is faster."""
    store_price: float
    """Price of memory and drives for these nodes."""
    payback_months: float | None
    """Months until the savings have paid for memory and drives; None: never."""
    power_saved_w: float


@dataclass(frozen=True, slots=True)
class Plan:
    scenario: Scenario
    parts: Parts
    tried: int
    chosen: MixOutcome
    misses: tuple[str, ...]
    """Goals that no mix reaches; `chosen` is then the closest mix."""
    fastest_s: float | None
    """The lowest p95 of all mixes."""
    longest_s: float
    """The longest retention of all mixes."""
    frontier: list[MixOutcome]
    alternatives: list[Alternative]
    bottleneck: Bottleneck
    next: list[Purchase]
    swings: list[Swing]

    def savings(self) -> PlanSavings | None:
        """None if a side cannot reach the p95 with any number of nodes."""
        enough = {one.name: one.enough for one in self.alternatives}
        without, chosen = enough[GPU_MEMORY_ONLY], enough[CHOSEN]
        if without is None or chosen is None:
            return None
        per_hour = without.cost.per_hour - chosen.cost.per_hour
        # Writing off the store is what has to be paid back, so it does not count against it.
        earned = (per_hour + chosen.cost.store_per_hour) * HOURS_A_MONTH
        price = chosen.cost.store_price
        return PlanSavings(
            nodes_without=without.nodes,
            nodes_with=chosen.nodes,
            gpus_saved=(without.nodes - chosen.nodes) * self.scenario.fleet.gpus_per_node,
            per_month=per_hour * HOURS_A_MONTH,
            store_price=price,
            payback_months=price / earned if earned > 0 else None,
            power_saved_w=without.cost.power_w - chosen.cost.power_w,
        )


def make_plan(
    scenario: Scenario, parts: Parts, *, advance: Callable[[], None] = lambda: None
) -> Plan:
    """Try every mix of the parts list; `advance` is called after each.

    Raises ConfigError for inputs that contradict each other. Goals that no mix reaches are not an
    error.
    """
    evaluate = AnalyticEvaluator(scenario, parts)
    nodes, goal = scenario.fleet.nodes, scenario.goal
    outcomes = []
    for mix in all_mixes(parts):
        outcomes.append(evaluate(mix, nodes))
        advance()
    chosen = best(outcomes, goal)
    line = frontier(outcomes, goal)
    return Plan(
        scenario=scenario,
        parts=parts,
        tried=len(outcomes),
        chosen=chosen,
        misses=chosen.misses(goal),
        fastest_s=min(outcomes, key=late_s).ttft_p95_s,
        longest_s=max(outcome.retention_s for outcome in outcomes),
        frontier=line,
        alternatives=_alternatives(evaluate, scenario, parts, outcomes, chosen),
        bottleneck=bottleneck(chosen),
        next=purchases(evaluate, parts, chosen),
        swings=swings(scenario, parts, chosen, line),
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
        alone = [
            one
            for one in outcomes
            if all(bool(units) == (at == index) for at, units in enumerate(one.mix.units))
        ]
        if name in ("dram", "ssd") and alone:
            mixes[f"{name} only"] = best(alone, scenario.goal).mix
    mixes[CHOSEN] = chosen.mix
    return [
        Alternative(name, evaluate(mix, nodes), enough_nodes(evaluate, mix, nodes, scenario.goal))
        for name, mix in mixes.items()
    ]
