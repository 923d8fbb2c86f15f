"""A plan in words: the same for the terminal and the report."""

from kvdepot.core.units import format_decimal_bytes, format_duration
from kvdepot.planner.outcome import Mix, MixOutcome
from kvdepot.planner.parts import Parts
from kvdepot.planner.plan import Plan, Purchase, SwingEnd, worth_buying
from kvdepot.planner.retention import NEVER_S
from kvdepot.planner.scenario import Scenario

SWINGS_SHOWN = 3
GOALS = {"ttft_p95": "the p95", "retention": "the retention"}


def mix_words(parts: Parts, mix: Mix) -> str:
    """`4 × 3.84TB ssd + 12 × 30TB hdd`."""
    if not mix.reuse:
        return "nothing is kept"
    items = zip(parts.tiers.items(), mix.units, strict=True)
    words = [f"{n} × {format_decimal_bytes(d.unit)} {name}" for (name, d), n in items if n]
    return " + ".join(words) or "GPU memory only"


def time_words(seconds: float | None) -> str:
    """Three digits: `23ms`, `1.27s`."""
    if seconds is None:
        return "overloaded"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 1000 else format_duration(seconds)


def age_words(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    return "for ever" if seconds >= NEVER_S else format_duration(seconds)


def money_words(parts: Parts, amount: float) -> str:
    """Whole numbers where there are enough digits."""
    digits = 0 if abs(amount) >= 100 else 2 if abs(amount) >= 0.1 else 4
    return f"{amount:,.{digits}f} {parts.currency}"


def traffic_words(scenario: Scenario) -> str:
    traffic = scenario.traffic
    words = [
        f"{traffic.requests_per_s:g} requests/s, talks of {traffic.turns} turns "
        f"{format_duration(traffic.turn_gap_s)} apart",
        f"{traffic.context_tokens(1):,} tokens to begin with, {traffic.question_tokens:,} asked "
        f"and {traffic.answer_tokens:,} answered in a turn",
    ]
    if traffic.return_share:
        pause = format_duration(traffic.return_gap)
        words.append(f"{traffic.return_share:.0%} of turns after a pause of about {pause}")
    if traffic.busy_share < 1:
        words.append(f"busy {traffic.busy_share:.0%} of the day")
    return "; ".join(words)


def fleet_words(scenario: Scenario) -> str:
    fleet = scenario.fleet
    nodes = "1 node" if fleet.nodes == 1 else f"{fleet.nodes:,} nodes"
    each = f"{fleet.gpus_per_node} × {fleet.gpu}"
    copy = f", {fleet.tp} GPUs a copy" if fleet.tp > 1 else ""
    return f"{scenario.model} on {nodes} of {each}{copy}"


def goal_words(scenario: Scenario) -> str:
    goal = scenario.goal
    words = f"95 of 100 first tokens within {format_duration(goal.ttft_p95)}"
    return f"{words}, talks kept for {age_words(goal.retention)}" if goal.retention else words


def verdict(plan: Plan) -> str:
    """One sentence: what to buy, or that nothing does it."""
    mix = mix_words(plan.parts, plan.chosen.mix)
    price = money_words(plan.parts, plan.chosen.cost.store_price)
    if not plan.misses:
        return f"buy for each node: {mix}; {price} in all"
    reached = ", ".join(missed_words(plan, name) for name in plan.misses)
    return f"no mix meets this; the closest is {mix} ({reached})"


def missed_words(plan: Plan, name: str) -> str:
    """How far a goal is missed, by the closest mix and by the best of all for that goal."""
    goal, chosen = plan.scenario.goal, plan.chosen
    if name == "ttft_p95":
        found, best = time_words(chosen.ttft_p95_s), time_words(plan.fastest_s)
        return f"p95 {found} instead of {format_duration(goal.ttft_p95)}; of any mix {best}"
    found, best = age_words(chosen.retention_s), age_words(plan.longest_s)
    return f"kept for {found} instead of {age_words(goal.retention)}; by any mix {best}"


def bottleneck_words(plan: Plan) -> str:
    found = plan.bottleneck
    return f"{found.name}, {found.share:.0%} of the mean time to first token: {found.reason}"


def purchase_words(plan: Plan) -> str:
    """What the next money should buy."""
    found, chosen = worth_buying(plan.next), plan.chosen
    if found is None:
        return "nothing on the list makes first tokens come noticeably sooner: keep the money"
    mean = f"mean {time_words(chosen.ttft_mean_s)} → {time_words(found.ttft_mean_s)}"
    p95 = f"p95 {time_words(chosen.ttft_p95_s)} → {time_words(found.ttft_p95_s)}"
    money = money_words(plan.parts, found.money)
    return f"the next {money} should buy {more_words(found)}: {mean}, {p95}"


def more_words(purchase: Purchase) -> str:
    if purchase.part.startswith("node"):
        return f"{purchase.units} {purchase.part}"
    return f"{purchase.units} more {purchase.part} a node"


def end_words(plan: Plan, end: SwingEnd) -> str:
    """What happens at one end of an uncertain input."""
    words = f"p95 {time_words(end.ttft_p95_s)}"
    if end.misses:
        words += f", misses {' and '.join(GOALS[name] for name in end.misses)}"
    if end.cheapest != plan.chosen.mix:
        word = "right" if end.reached else "closest"
        words += f"; {word} then: {mix_words(plan.parts, end.cheapest)}"
    return words


def enough_words(plan: Plan, enough: MixOutcome | None) -> str:
    """The nodes that would reach the p95, and their cost."""
    if enough is None:
        return "no number of nodes"
    cost = money_words(plan.parts, enough.cost.per_hour)
    return f"{enough.nodes:,} at {cost}/h"
