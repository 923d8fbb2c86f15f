"""What the next money should buy: one step more of each part, by what it saves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvdepot.planner.cost import HOURS_A_YEAR
from kvdepot.planner.outcome import Evaluate, Mix, Outcome
from kvdepot.planner.parts import Parts

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


def purchases(evaluate: Evaluate, parts: Parts, chosen: Outcome) -> list[Purchase]:
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


def _purchase(part: str, units: int, before: Outcome, after: Outcome, parts: Parts) -> Purchase:
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
