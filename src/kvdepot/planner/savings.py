"""What a plan saves against the same traffic without kvdepot, and what is paid for it. Pure."""

from dataclasses import dataclass
from typing import Final

from kvdepot.planner.outcome import HOURS_A_MONTH, MixOutcome
from kvdepot.planner.plan import GPU_MEMORY_ONLY, Plan

BASELINE: Final = GPU_MEMORY_ONLY
"""Without kvdepot an engine reuses what its GPU memory still has."""


@dataclass(frozen=True, slots=True)
class PlanSavings:
    """Both sides on the fewest nodes that reach the p95."""

    nodes_without: int
    nodes_with: int
    gpus_saved: int
    """Below 0: so many more."""
    per_month: float
    """All in: prices written off, power, rent. Below 0: it costs more, and is sooner."""
    store_price: float
    """Of memory and drives for these nodes."""
    payback_months: float | None
    """Until what is saved has paid for memory and drives; None: it never does."""
    power_saved_w: float


def savings_of(plan: Plan) -> PlanSavings | None:
    """None where either side cannot reach the p95 with any number of nodes: see `enough`."""
    found = {one.name: one.enough for one in plan.alternatives}
    without, chosen = found[BASELINE], found["chosen"]
    if without is None or chosen is None:
        return None
    return _compared(without, chosen, plan.scenario.fleet.gpus_per_node)


def _compared(without: MixOutcome, chosen: MixOutcome, gpus_per_node: int) -> PlanSavings:
    per_hour = without.cost.per_hour - chosen.cost.per_hour
    # What the store costs to write off is what is to be paid back: it does not count against it.
    earned = (per_hour + chosen.cost.store_per_hour) * HOURS_A_MONTH
    price = chosen.cost.store_price
    return PlanSavings(
        nodes_without=without.nodes,
        nodes_with=chosen.nodes,
        gpus_saved=(without.nodes - chosen.nodes) * gpus_per_node,
        per_month=per_hour * HOURS_A_MONTH,
        store_price=price,
        payback_months=price / earned if earned > 0 else None,
        power_saved_w=without.cost.power_w - chosen.cost.power_w,
    )


@dataclass(frozen=True, slots=True)
class BillLine:
    """One part of the purchase, for all nodes."""

    part: str
    units: int
    """Of all nodes."""
    price: float
    """Of one unit, with its share of what it is plugged into."""
    total: float


def bill_lines(plan: Plan) -> list[BillLine]:
    """Memory and drives of the chosen mix; the totals add up to its price."""
    nodes = plan.scenario.fleet.nodes
    found = []
    for (name, device), units in zip(plan.parts.tiers.items(), plan.chosen.mix.units, strict=True):
        price = device.price + device.slot_price
        if units and price:
            found.append(BillLine(name, units * nodes, price, units * nodes * price))
    return found
