"""`kvdepot plan`: chooses memory and drives for a model, its traffic and a goal."""

import argparse
import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import parse_settings
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.directories import write_page
from kvdepot.cli.report import Bars, Curve, Curves, Point, Report, Section, Series, origin
from kvdepot.cli.tables import Column, Table
from kvdepot.config.loader import show, to_toml
from kvdepot.config.settings import Config
from kvdepot.core.units import format_count, format_decimal_bytes, format_duration
from kvdepot.planner.outcome import Mix, MixOutcome, TierUse
from kvdepot.planner.parts import Parts, load_parts, shipped_parts
from kvdepot.planner.plan import CHOSEN, GPU_MEMORY_ONLY, Plan, Purchase, all_mixes, make_plan
from kvdepot.planner.retention import NEVER_S
from kvdepot.planner.scenario import Scenario, load_scenario, scenario_names

SWINGS_SHOWN: Final = 3
GOALS: Final = {"ttft_p95": "the p95", "retention": "the retention"}
TIMES: Final = {
    "tier queue": "c5",
    "fetch": "c2",
    "GPU queue": "c6",
    "prefill": "c0",
    "first step": "c3",
}
"""Parts of the time to first token, with their colours."""
SAVINGS_CAPTION: Final = (
    "Without kvdepot: an engine that reuses what its GPU memory still has. Both sides have the "
    "fewest nodes that reach the p95. Payback is the price of memory and drives over the savings a "
    "month before they are written off: GPUs that are not needed, power, rent. GPUs that you "
    "have already and cannot sell or use otherwise save nothing."
)
FRONTIER_CAPTION: Final = (
    "Each point is a mix that no other beats in both cost and time to first token, among those "
    "that reach the retention. The large point is the chosen mix: the cheapest below the goal."
)
METHOD: Final = (
    "An analytic model, not a measurement. The pauses in conversations give how far back a tier "
    "has to reach; its size gives how far it reaches (least recently used is evicted first). "
    "Prefill takes time in proportion to new tokens, and to pairs of tokens that attend. Requests "
    "come at random, wait for the tier that has their context, then for the GPUs. Every tier also "
    "holds what the faster tiers hold. A context is fetched only if an idle tier is faster than an "
    "idle GPU. Overlap of fetching and computing layer by layer is not counted, nor is sharing "
    "between users beyond the common head of all prompts."
)


def run(args: argparse.Namespace) -> Answer:
    if args.print_parts:
        return Answer({"parts": shipped_parts()}, shipped_parts().rstrip())
    overrides = parse_settings(args.set, "goal.ttft_p95=2s")
    scenario = load_scenario(args.scenario, overrides=overrides)
    if args.show:
        return Answer(show(scenario), to_toml(scenario).rstrip())
    parts, absent = existing_parts(load_parts(args.parts))
    with output.Progress("trying mixes", len(all_mixes(parts))) as progress:
        plan = make_plan(scenario, parts, advance=progress.advance)
    if absent:
        output.say(f"left out: {', '.join(absent)}; this version has no such tier")
    report = report_of(plan)
    if args.report is not None:
        write_page(args.report, report.html(origin(args.typed)))
        output.say(f"report: {args.report}")
    return Answer(document(plan), report.text(), status=1 if plan.misses else 0)


def existing_parts(parts: Parts) -> tuple[Parts, list[str]]:
    """The parts that this kvdepot can use, and the names of the other tiers."""
    known = {field.name for field in dataclasses.fields(Config)}
    absent = [name for name in parts.tiers if name not in known]
    tiers = {name: device for name, device in parts.tiers.items() if name in known}
    return dataclasses.replace(parts, tiers=tiers), absent


def document(plan: Plan) -> dict[str, Any]:
    names = list(plan.parts.tiers)
    return {
        "scenario": show(plan.scenario),
        "tried": plan.tried,
        "reached": not plan.misses,
        "misses": plan.misses,
        "verdict": verdict(plan),
        "chosen_units": dict(zip(names, plan.chosen.mix.units, strict=True)),
        "chosen": plan.chosen,
        "savings": plan.savings(),
        "wear_out_year": {use.tier: wear_year(use.life_years) for use in plan.chosen.tiers},
        "lowest_ttft_p95_s": plan.fastest_s,
        "longest_retention_s": plan.longest_s,
        "bottleneck": plan.bottleneck,
        "next": plan.next,
        "alternatives": plan.alternatives,
        "frontier": plan.frontier,
        "sensitivity": plan.swings,
        "currency": plan.parts.currency,
        "tiers": names,
    }


def report_of(plan: Plan) -> Report:
    scenario, bottleneck = plan.scenario, plan.bottleneck
    limit = f"limit: {bottleneck.name}, {bottleneck.share:.0%} of the mean time to first token; "
    tiers = [tiers_table(plan)] if plan.chosen.tiers else []
    return Report(
        scenario.title or scenario.model,
        f"{fleet_text(scenario)}; {traffic_text(scenario)}; goal: {goal_text(scenario)}; "
        f"{plan.tried:,} mixes tried",
        [
            Section("What to buy", [verdict(plan), *tiers]),
            Section(
                "What it does",
                [facts_table(plan), limit + bottleneck.reason, f"saved: {savings_text(plan)}"],
                SAVINGS_CAPTION,
            ),
            Section("What to buy next", [next_table(plan)]),
            Section(
                "Compared with",
                [*time_charts(plan), hits_chart(plan), alternatives_table(plan)],
                "Ways that ask more of the GPUs than they have are missing in the chart of times.",
            ),
            Section(
                "Cost against time to first token",
                [*frontier_charts(plan), frontier_table(plan)],
                FRONTIER_CAPTION,
            ),
            Section(
                f"The {SWINGS_SHOWN} inputs that matter most",
                [swings_table(plan)],
                "The chosen mix with one input at either end of its range, all others as given.",
            ),
            Section("How this was found", [METHOD], page_only=True),
        ],
    )


def mix_text(parts: Parts, mix: Mix) -> str:
    """`4 × 3.84TB ssd + 12 × 30TB hdd`."""
    if not mix.reuse:
        return "nothing is kept"
    items = zip(parts.tiers.items(), mix.units, strict=True)
    texts = [
        f"{n} × {format_decimal_bytes(device.unit)} {name}" for (name, device), n in items if n
    ]
    return " + ".join(texts) or GPU_MEMORY_ONLY


def time_text(seconds: float | None) -> str:
    """Three digits: `23ms`, `1.27s`."""
    if seconds is None:
        return "overloaded"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 1000 else format_duration(seconds)


def age_text(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    return "forever" if seconds >= NEVER_S else format_duration(seconds)


def money_text(parts: Parts, amount: float) -> str:
    """Whole numbers from 100 on."""
    digits = 0 if abs(amount) >= 100 else 2 if abs(amount) >= 0.1 else 4
    return f"{amount:,.{digits}f} {parts.currency}"


def wear_year(life_years: float | None) -> int | None:
    """The year in which a drive bought today is worn out; None: never, or in over a century."""
    if life_years is None or life_years >= 100:
        return None
    return int(datetime.date.today().year + life_years)


def wear_text(life_years: float | None) -> str:
    """`7.3 years, 2033`."""
    if life_years is None:
        return "-"
    year = wear_year(life_years)
    return "over 100 years" if year is None else f"{life_years:.1f} years, {year}"


def fleet_text(scenario: Scenario) -> str:
    fleet = scenario.fleet
    copy = f", {fleet.tp} GPUs a copy" if fleet.tp > 1 else ""
    nodes = format_count(fleet.nodes, "node")
    return f"{scenario.model} on {nodes} of {fleet.gpus_per_node} × {fleet.gpu}{copy}"


def traffic_text(scenario: Scenario) -> str:
    traffic = scenario.traffic
    texts = [
        f"{traffic.requests_per_s:g} requests/s, conversations of {traffic.turns} turns "
        f"{format_duration(traffic.turn_gap_s)} apart",
        f"{traffic.context_tokens(1):,} tokens at first, {traffic.question_tokens:,} asked "
        f"and {traffic.answer_tokens:,} answered in a turn",
    ]
    if traffic.return_share:
        pause = format_duration(traffic.return_gap)
        texts.append(f"{traffic.return_share:.0%} of turns after a pause of about {pause}")
    if traffic.busy_share < 1:
        texts.append(f"busy {traffic.busy_share:.0%} of the day")
    return "; ".join(texts)


def goal_text(scenario: Scenario) -> str:
    goal = scenario.goal
    text = f"95 of 100 first tokens within {format_duration(goal.ttft_p95)}"
    return f"{text}, conversations kept for {age_text(goal.retention)}" if goal.retention else text


def verdict(plan: Plan) -> str:
    """One sentence: what to buy, or which goals no mix reaches."""
    mix = mix_text(plan.parts, plan.chosen.mix)
    price = money_text(plan.parts, plan.chosen.cost.store_price)
    if not plan.misses:
        return f"buy for each node: {mix}; {price} in all"
    goal, chosen, reached = plan.scenario.goal, plan.chosen, []
    if "ttft_p95" in plan.misses:
        found, best = time_text(chosen.ttft_p95_s), time_text(plan.fastest_s)
        goal_time = format_duration(goal.ttft_p95)
        reached.append(f"p95 {found} instead of {goal_time}; of any mix {best}")
    if "retention" in plan.misses:
        found, best = age_text(chosen.retention_s), age_text(plan.longest_s)
        reached.append(f"kept for {found} instead of {age_text(goal.retention)}; by any mix {best}")
    return f"no mix reaches the goal; the closest is {mix} ({', '.join(reached)})"


def savings_text(plan: Plan) -> str:
    """One sentence: GPUs, money and payback, or why there is none."""
    savings = plan.savings()
    if savings is None:
        enough = {one.name: one.enough for one in plan.alternatives}
        mix = "the chosen mix" if enough[CHOSEN] is None else "GPU memory alone"
        return f"cannot be compared: no number of nodes reaches the p95 with {mix}"
    money = money_text(plan.parts, abs(savings.per_month))
    if savings.per_month > 0:
        gpus = f"{savings.gpus_saved:,} GPUs fewer, " if savings.gpus_saved else ""
        return f"{gpus}{money} a month less; payback {payback_text(savings.payback_months)}"
    if savings.gpus_saved > 0:
        return f"{savings.gpus_saved:,} GPUs, at {money} a month more than without kvdepot"
    nodes = format_count(savings.nodes_without, "node")
    return f"nothing: {money} a month more than without kvdepot, which needs {nodes} for the p95"


def payback_text(months: float | None) -> str:
    if not months:
        return "never" if months is None else "at once: nothing is bought"
    return f"after {months * 30.4:.0f} days" if months < 2 else f"after {months:.1f} months"


def purchase_text(purchase: Purchase) -> str:
    if purchase.part.startswith("node"):
        return f"{purchase.units} {purchase.part}"
    return f"{purchase.units} more {purchase.part} a node"


def facts_table(plan: Plan) -> Table:
    chosen, cost, parts = plan.chosen, plan.chosen.cost, plan.parts
    rows = [
        ("time to first token, p50", time_text(chosen.ttft_p50_s)),
        ("… p95", time_text(chosen.ttft_p95_s)),
        ("… p99", time_text(chosen.ttft_p99_s)),
        ("prompt tokens not computed", f"{chosen.hit_share:.1%}"),
        ("… of them in GPU memory", f"{chosen.gpu_memory_hit_share:.1%}"),
        ("conversations kept for", age_text(chosen.retention_s)),
        ("GPUs busy", f"{chosen.gpu_busy:.0%}"),
        ("cost of a million tokens", money_text(parts, cost.per_million_tokens)),
        ("cost an hour, all in", money_text(parts, cost.per_hour)),
        (
            f"… GPUs and servers, over {parts.years:g} years",
            money_text(parts, cost.servers_per_hour),
        ),
        (
            "… memory and drives, over the same or their life",
            money_text(parts, cost.store_per_hour),
        ),
        ("… power", money_text(parts, cost.power_per_hour)),
        ("… rent, requests and traffic", money_text(parts, cost.rent_per_hour)),
        ("power at the meter", f"{cost.power_w / 1000:,.1f} kW"),
    ]
    return Table(("", "chosen mix"), rows)


def tiers_table(plan: Plan) -> Table:
    """The tiers of a node, and the bill for all nodes; the sums add up to the price."""
    parts, nodes = plan.parts, plan.scenario.fleet.nodes

    def price(use: TierUse) -> float:
        return parts.tiers[use.tier].price + parts.tiers[use.tier].slot_price

    columns: dict[str, Column] = {
        "tier of a node": "tier",
        "units": "units",
        "size": lambda use: format_decimal_bytes(use.capacity_bytes),
        "of prompt tokens": lambda use: f"{use.hit_share:.1%}",
        "reaches back": lambda use: age_text(use.horizon_s),
        "reading": lambda use: f"{use.read_busy:.0%}",
        "writing": lambda use: f"{use.write_busy:.0%}",
        "written a day": lambda use: format_decimal_bytes(use.writes_bytes_per_day),
        "worn out in": lambda use: wear_text(use.life_years),
        "price": lambda use: f"{price(use):,g}",
        f"all nodes, {parts.currency}": lambda use: f"{use.units * nodes * price(use):,g}",
    }
    return Table.of(plan.chosen.tiers, columns)


def next_table(plan: Plan) -> Table:
    def saved(one: Purchase) -> str:
        return f"{one.saved_ms_per_1000:.3g} ms" if one.saved_ms_per_1000 else "-"

    columns: dict[str, Column] = {
        "one step more": purchase_text,
        f"over {plan.parts.years:g} years": lambda one: money_text(plan.parts, one.money),
        "mean": lambda one: time_text(one.ttft_mean_s),
        "p95": lambda one: time_text(one.ttft_p95_s),
        "kept for": lambda one: age_text(one.retention_s),
        f"saved for 1,000 {plan.parts.currency}": saved,
    }
    return Table.of(plan.next, columns)


def alternatives_table(plan: Plan) -> Table:
    def enough_text(enough: MixOutcome | None) -> str:
        if enough is None:
            return "no number of nodes"
        return f"{enough.nodes:,} at {money_text(plan.parts, enough.cost.per_hour)}/h"

    columns: dict[str, Column] = {
        "": "name",
        "each node has": lambda one: mix_text(plan.parts, one.outcome.mix),
        "mean": lambda one: time_text(one.outcome.ttft_mean_s),
        "p95": lambda one: time_text(one.outcome.ttft_p95_s),
        "hits": lambda one: f"{one.outcome.hit_share:.0%}",
        "GPUs asked": lambda one: f"{one.outcome.gpu_busy:.0%}",
        "kept for": lambda one: age_text(one.outcome.retention_s),
        "an hour": lambda one: money_text(plan.parts, one.outcome.cost.per_hour),
        "power": lambda one: f"{one.outcome.cost.power_w / 1000:,.1f} kW",
        "nodes for the p95": lambda one: enough_text(one.enough),
    }
    return Table.of(plan.alternatives, columns)


def frontier_table(plan: Plan) -> Table:
    columns: dict[str, Column] = {
        "each node has": lambda one: mix_text(plan.parts, one.mix),
        "an hour": lambda one: money_text(plan.parts, one.cost.per_hour),
        "memory and drives": lambda one: money_text(plan.parts, one.cost.store_price),
        "p95": lambda one: time_text(one.ttft_p95_s),
        "hits": lambda one: f"{one.hit_share:.1%}",
        "kept for": lambda one: age_text(one.retention_s),
        "": lambda one: CHOSEN if one.mix == plan.chosen.mix else "",
    }
    return Table.of(plan.frontier, columns)


def swings_table(plan: Plan) -> Table:
    rows = []
    for swing in plan.swings[:SWINGS_SHOWN]:
        for end in (swing.low, swing.high):
            then = f"p95 {time_text(end.ttft_p95_s)}"
            if end.misses:
                then += f", misses {' and '.join(GOALS[name] for name in end.misses)}"
            if end.cheapest != plan.chosen.mix:
                word = "right" if end.reached else "closest"
                then += f"; {word} then: {mix_text(plan.parts, end.cheapest)}"
            price = money_text(plan.parts, end.per_million_tokens)
            rows.append((swing.name, f"× {end.factor:g}", then, price, swing.why))
    heads = ("input", "times", "the chosen mix then", "a million tokens", "why it is uncertain")
    return Table(heads, rows)


def frontier_charts(plan: Plan) -> list[Curves]:
    """Cost and p95 of the frontier; no chart if no mix can serve the traffic."""

    def points(outcomes: Sequence[MixOutcome]) -> list[Point]:
        found = []
        for one in outcomes:
            cost = money_text(plan.parts, one.cost.per_hour)
            tip = f"{mix_text(plan.parts, one.mix)}: {time_text(one.ttft_p95_s)}, {cost}/h"
            found.append(Point(one.cost.per_hour, one.ttft_p95_s or 0.0, tip))
        return found

    curves = [Curve("", "with", points(plan.frontier))] if plan.frontier else []
    if plan.chosen.ttft_p95_s is not None:
        curves.append(Curve("", "mark", points([plan.chosen]), joined=False))
    chart = Curves(
        title="Cost an hour and 95th percentile of the time to first token",
        x_unit=f"{plan.parts.currency} an hour, the whole fleet",
        y_unit="p95, seconds",
        curves=curves,
        limit=plan.scenario.goal.ttft_p95,
    )
    return [chart] if curves else []


def time_charts(plan: Plan) -> list[Bars]:
    """The parts of the mean time to first token; no chart if every way is overloaded."""
    served = [one for one in plan.alternatives if one.outcome.ttft_mean_s is not None]
    series = [
        Series(name, style, [one.outcome.where[name] for one in served], time_text)
        for name, style in TIMES.items()
    ]
    chart = Bars(
        title="Mean time to first token by its parts",
        unit="seconds",
        categories=[one.name for one in served],
        series=series,
        stacked=True,
        notes=[time_text(one.outcome.ttft_mean_s) for one in served],
    )
    return [chart] if served else []


def hits_chart(plan: Plan) -> Bars:
    every = [one.outcome for one in plan.alternatives]
    shares = {"GPU memory": ("memory", [one.gpu_memory_hit_share for one in every])}
    for name in plan.parts.tiers:
        hits = [sum(u.hit_share for u in one.tiers if u.tier == name) for one in every]
        if any(hits):
            shares[name] = (name, hits)
    shares["computed"] = ("computed", [1 - one.hit_share for one in every])
    return Bars(
        title="Prompt tokens by where they come from",
        unit="% of prompt tokens",
        categories=[one.name for one in plan.alternatives],
        series=[
            Series(name, style, [100 * share for share in values], lambda value: f"{value:.1f}")
            for name, (style, values) in shares.items()
        ],
        stacked=True,
    )


COMMAND = Command(
    more="Finds the cheapest mix of memory and drives that reaches the goal, and prints what it "
    "costs and saves, what limits it, and what it depends on. Exits with 1 if no mix reaches the "
    "goal. See docs/planning.md.",
    options=f"""
    [SCENARIO]          {", ".join(scenario_names())}, or a TOML or JSON file as --show prints it
    --set NAME=VALUE    one setting of the scenario, such as traffic.users=120 [repeat]
    --parts FILE        a parts list to use instead of the shipped one [not with: --show]
    --print-parts       print the shipped parts list [alone]
    --show              print the scenario with all settings, without a plan
    --report FILE       also write an HTML page [not with: --show]
    """,
    run=run,
)
