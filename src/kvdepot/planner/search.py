"""Finds mixes that are worth their money, and the cheapest that reaches the goals."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvdepot.planner.outcome import Evaluate, Mix, Outcome
from kvdepot.planner.parts import Parts
from kvdepot.planner.scenario import Goal

NODES_FACTOR_MAX: Final = 64
"""More nodes than this many times those given are not tried."""

OVERLOADED: Final = 1e9
"""Stands for a time that does not exist, where outcomes are ordered."""


def all_mixes(parts: Parts) -> list[Mix]:
    """Every combination of the counts that the parts list allows."""
    counts = [sorted(set(device.counts)) for device in parts.tiers.values()]
    return [Mix(units) for units in itertools.product(*counts)]


def evaluate_all(
    evaluate: Evaluate, mixes: Iterable[Mix], nodes: int, advance: Callable[[], None]
) -> list[Outcome]:
    """`advance` is called after each."""
    outcomes = []
    for mix in mixes:
        outcomes.append(evaluate(mix, nodes))
        advance()
    return outcomes


def late_s(outcome: Outcome) -> float:
    """The 95th percentile, very late where there is none."""
    return OVERLOADED if outcome.ttft_p95_s is None else outcome.ttft_p95_s


def shortfall(outcome: Outcome, goal: Goal) -> float:
    """How far the worse of the two goals is missed, as a logarithm; 0 where both are reached."""
    late = math.log(late_s(outcome) / goal.ttft_p95)
    short = math.log(goal.retention / max(outcome.retention_s, 1e-9)) if goal.retention else 0.0
    return max(0.0, late, short)


def best(outcomes: Sequence[Outcome], goal: Goal) -> Outcome:
    """The cheapest that reaches the goals; if none does, the closest."""
    return min(
        outcomes,
        key=lambda one: (shortfall(one, goal), one.cost.per_hour, late_s(one), one.mix.units),
    )


def frontier(outcomes: Sequence[Outcome], goal: Goal) -> list[Outcome]:
    """Mixes that no other beats in both cost and p95, the cheapest first.

    Only those that keep talks long enough count, unless there are none.
    """
    served = [one for one in outcomes if one.ttft_p95_s is not None]
    long_enough = [one for one in served if one.retention_s >= goal.retention]
    line: list[Outcome] = []
    for one in sorted(long_enough or served, key=lambda one: (one.cost.per_hour, late_s(one))):
        if not line or late_s(one) < late_s(line[-1]) * 0.999:
            line.append(one)
    return line


def enough_nodes(evaluate: Evaluate, mix: Mix, nodes: int, goal: Goal) -> Outcome | None:
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
