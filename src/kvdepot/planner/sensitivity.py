"""How much a plan depends on what nobody knows well."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvdepot.planner.outcome import Evaluate, Evaluator, Mix, Outcome
from kvdepot.planner.parts import Parts
from kvdepot.planner.scenario import Scenario
from kvdepot.planner.search import OVERLOADED, best

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


def _traffic(**names: bool) -> Change:
    def change(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
        traffic = scenario.traffic
        values = {name: getattr(traffic, name) * factor for name in names}
        if "history_tokens" in values:
            values["history_tokens"] = round(values["history_tokens"])
        if "return_share" in values:
            values["return_share"] = min(1.0, values["return_share"])
        if "requests_per_s" in values and traffic.gap is None:
            values["gap"] = traffic.turn_gap_s  # more users, not users in more of a hurry
        return replace(scenario, traffic=replace(traffic, **values)), parts

    return change


def _speed(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
    gpus = {
        name: replace(gpu, efficiency=min(1.0, gpu.efficiency * factor))
        for name, gpu in parts.gpus.items()
    }
    return scenario, replace(parts, gpus=gpus)


def _drives(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
    tiers = {
        name: replace(device, read=int(device.read * factor), write=int(device.write * factor))
        for name, device in parts.tiers.items()
    }
    return scenario, replace(parts, tiers=tiers)


def _prices(scenario: Scenario, parts: Parts, factor: float) -> tuple[Scenario, Parts]:
    tiers = {
        name: replace(
            device,
            price=device.price * factor,
            price_per_tb_month=device.price_per_tb_month * factor,
        )
        for name, device in parts.tiers.items()
    }
    return scenario, replace(parts, tiers=tiers)


UNCERTAIN: Final = (
    Uncertain(
        "prefill speed",
        0.6,
        1.2,
        "measured with transformers on one H200; engines and parallel GPUs differ",
        _speed,
    ),
    Uncertain("requests a second", 0.7, 1.5, "a forecast", _traffic(requests_per_s=True)),
    Uncertain(
        "length of what a talk begins with",
        0.5,
        2.0,
        "contexts grow",
        _traffic(history_tokens=True),
    ),
    Uncertain("how long pauses last", 0.33, 3.0, "rarely measured", _traffic(return_gap=True)),
    Uncertain(
        "share of talks taken up again", 0.5, 2.0, "rarely measured", _traffic(return_share=True)
    ),
    Uncertain("speed of memory and drives", 0.5, 1.1, "data sheets are peaks", _drives),
    Uncertain("prices of memory and drives", 0.6, 1.6, "of 2025 and 2026, and moving", _prices),
)


@dataclass(frozen=True, slots=True)
class End:
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
    """What one uncertain input does to the plan."""

    name: str
    why: str
    low: End
    high: End
    effect: float
    """The larger change of p95 or cost from end to end, as a logarithm."""


def swings(
    evaluator: Evaluator, scenario: Scenario, parts: Parts, chosen: Outcome, line: Sequence[Outcome]
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
            abs(math.log(_p95(ends[1]) / _p95(ends[0]))),
            abs(math.log(ends[1].per_million_tokens / ends[0].per_million_tokens)),
        )
        found.append(Swing(one.name, one.why, ends[0], ends[1], effect))
    return sorted(found, key=lambda swing: -swing.effect)


def _end(
    evaluate: Evaluate, scenario: Scenario, factor: float, mixes: Sequence[Mix], nodes: int
) -> End:
    outcomes = [evaluate(mix, nodes) for mix in mixes]
    chosen, cheapest = outcomes[0], best(outcomes, scenario.goal)
    return End(
        factor=factor,
        ttft_p95_s=chosen.ttft_p95_s,
        per_million_tokens=chosen.cost.per_million_tokens,
        retention_s=chosen.retention_s,
        misses=chosen.misses(scenario.goal),
        cheapest=cheapest.mix,
        reached=not cheapest.misses(scenario.goal),
    )


def _p95(end: End) -> float:
    return OVERLOADED if end.ttft_p95_s is None else end.ttft_p95_s
