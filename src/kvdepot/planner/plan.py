"""A plan: the mix to buy, what it is compared with, and what it depends on."""

from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.planner.analytic import AnalyticEvaluator
from kvdepot.planner.bottleneck import Bottleneck, bottleneck
from kvdepot.planner.outcome import Evaluate, Evaluator, Mix, Outcome
from kvdepot.planner.parts import Parts
from kvdepot.planner.purchase import Purchase, empty_mix, purchases
from kvdepot.planner.scenario import Scenario
from kvdepot.planner.search import all_mixes, best, enough_nodes, evaluate_all, frontier, late_s
from kvdepot.planner.sensitivity import Swing, swings


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to serve the same traffic."""

    name: str
    outcome: Outcome
    enough: Outcome | None
    """On the fewest nodes that reach the p95; None where no number of them does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to buy, and why."""

    scenario: Scenario
    parts: Parts
    tried: int
    chosen: Outcome
    misses: tuple[str, ...]
    """Goals that no mix reaches; `chosen` is then the closest."""

    fastest_s: float | None
    """The lowest p95 of any mix."""

    longest_s: float
    """The longest retention of any mix."""

    frontier: list[Outcome]
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
    outcomes = evaluate_all(evaluate, all_mixes(parts), nodes, advance)
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
    outcomes: list[Outcome],
    chosen: Outcome,
) -> list[Alternative]:
    nodes = scenario.fleet.nodes
    mixes: dict[str, Mix] = {
        "recompute everything": empty_mix(parts, reuse=False),
        "GPU memory only": empty_mix(parts),
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
