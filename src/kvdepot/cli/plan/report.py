"""A plan for people: sentences and tables for the terminal, and a page with charts."""

import datetime

from kvdepot.cli.report.charts import Bars, Curve, Curves, Point, Range, Ranges, Series
from kvdepot.cli.report.page import Origin, page, paragraph, section, tiles
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_count, format_decimal_bytes, format_duration
from kvdepot.planner.outcome import HOURS_A_MONTH, Mix, MixOutcome
from kvdepot.planner.parts import Parts
from kvdepot.planner.plan import GPU_MEMORY_ONLY, Plan, Purchase, SwingEnd, worth_buying
from kvdepot.planner.retention import NEVER_S
from kvdepot.planner.savings import PlanSavings, bill_lines, savings_of
from kvdepot.planner.scenario import Scenario

SWINGS_SHOWN = 3
GOALS = {"ttft_p95": "the p95", "retention": "the retention"}
SAVINGS_CAPTION = (
    "Without kvdepot: an engine that reuses what its GPU memory still has. Both sides have the "
    "fewest nodes that reach the p95. Payback is the price of memory and drives over what is saved "
    "a month before they are written off: GPUs that are not needed, power, rent. GPUs that you "
    "have already and cannot sell or use otherwise save nothing."
)
BILL_CAPTION = "Memory and drives for all nodes, with their share of what they are plugged into."
HOUR_CAPTION = "The whole fleet, GPUs included."
FRONTIER_CAPTION = (
    "Each point is a mix that nothing beats in both cost and time to first token, among those that "
    "keep talks long enough. The large point is the chosen one: the cheapest below the goal."
)
HITS_CAPTION = (
    "Where the tokens of all prompts come from. What is computed is new, was dropped, or is sooner "
    "computed than fetched."
)
WHERE_CAPTION = (
    "The mean time to first token of each way to serve this traffic, by what it goes into. Ways "
    "that ask more of the GPUs than they have cannot be drawn."
)
SWING_CAPTION = (
    "The chosen mix's p95 with one input at either end of its range, and all others as given. The "
    "line is the plan, the dashes the goal."
)
MODEL_WORDS = (
    "An analytic model, not a measurement. How long talks pause gives how far back a tier has to "
    "reach; its size gives how far it does (least recently used goes first). Prefill takes time in "
    "proportion to new tokens, and to pairs of tokens that attend. Requests come at random, wait "
    "for the tier that has their context, then for the GPUs. Every tier also holds what the faster "
    "ones hold. A context is fetched only where an idle tier is sooner than an idle GPU. Layer by "
    "layer overlap of fetching and computing is not counted, nor is sharing between users beyond "
    "the head that all prompts have."
)


def as_text(plan: Plan) -> str:
    scenario = plan.scenario
    parts = [
        f"{scenario.title or scenario.model}\n  {fleet_words(scenario)}\n"
        f"  traffic  {traffic_words(scenario)}\n"
        f"  goal     {goal_words(scenario)}\n"
        f"  tried    {plan.tried:,} mixes",
        verdict(plan),
        chosen_table(plan).text(),
    ]
    if plan.chosen.tiers:
        parts.append(tiers_table(plan).text())
        parts.append(f"what to pay once\n{bill_table(plan).text()}")
    parts.append(f"what an hour costs\n{hour_table(plan).text()}")
    parts.append(f"saved: {savings_words(plan)}\n\n{savings_table(plan).text()}")
    parts += [
        f"bottleneck: {bottleneck_words(plan)}\nnext: {purchase_words(plan)}",
        next_table(plan).text(),
        f"compared with\n{alternatives_table(plan).text()}",
        f"mixes that nothing beats in both cost and p95\n{frontier_table(plan).text()}",
        f"the {SWINGS_SHOWN} inputs that matter most\n{swings_table(plan).text()}",
    ]
    return "\n\n".join(parts)


def as_page(plan: Plan, origin: Origin) -> str:
    scenario = plan.scenario
    title = scenario.title or scenario.model
    lead = f"{fleet_words(scenario)}. {traffic_words(scenario)}. Goal: {goal_words(scenario)}."
    bottleneck = paragraph(f"{bottleneck_words(plan)}.", strong="Bottleneck:")
    frontier = (frontier_chart(plan), frontier_table(plan))
    purchase = paragraph(f"{purchase_words(plan).capitalize()}.")
    parts = [
        paragraph(verdict(plan), "answer missed" if plan.misses else "answer"),
        plan_tiles(plan),
        section("What it is", tiers_table(plan), bottleneck),
        section(
            "What it saves",
            paragraph(f"{savings_words(plan).capitalize()}."),
            savings_table(plan),
            caption=SAVINGS_CAPTION,
        ),
        section("What to pay once", bill_table(plan), caption=BILL_CAPTION),
        section("What an hour costs", hour_table(plan), caption=HOUR_CAPTION),
        section("Cost against time to first token", *frontier, caption=FRONTIER_CAPTION),
        section("Compared with", alternatives_table(plan)),
        section("Where the time goes", where_chart(plan), caption=WHERE_CAPTION),
        section("Where the tokens come from", hits_chart(plan), caption=HITS_CAPTION),
        section("What the next money should buy", purchase, next_table(plan)),
        section(
            "What it depends on",
            swings_chart(plan),
            swings_table(plan),
            caption=SWING_CAPTION,
        ),
        section("Parts and their sources", parts_table(plan)),
        section("How this was found", paragraph(f"{plan.tried:,} mixes were tried. {MODEL_WORDS}")),
    ]
    return page(f"kvdepot plan: {title}", lead, parts, origin=origin, heading=title)


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


def exact_words(parts: Parts, amount: float) -> str:
    """With cents where there are any: what is listed so adds up."""
    cents = f"{amount:,.2f}"
    return f"{cents.removesuffix('.00')} {parts.currency}"


def wear_year(life_years: float) -> int | None:
    """The year in which a drive bought today is worn out; None: in more than a century."""
    year = datetime.date.today().year + life_years
    return int(year) if life_years < 100 else None


def wear_words(life_years: float | None) -> str:
    """`7.3 years, 2033`."""
    if life_years is None:
        return "-"
    year = wear_year(life_years)
    return "over 100 years" if year is None else f"{life_years:.1f} years, {year}"


def savings_words(plan: Plan) -> str:
    """One sentence: GPUs, money and payback, or why there is none."""
    found = savings_of(plan)
    if found is None:
        short = [one.name for one in plan.alternatives if one.enough is None]
        if "chosen" in short:
            return "nothing to compare: no number of nodes reaches the p95 with the chosen mix"
        return "without kvdepot no number of nodes reaches the p95"
    money = money_words(plan.parts, abs(found.per_month))
    if found.per_month <= 0:
        return (
            f"no money: {money} a month more than without kvdepot, which reaches the p95 on "
            f"{format_count(found.nodes_without, 'node')} too"
            if found.nodes_without <= found.nodes_with
            else f"{found.gpus_saved:,} GPUs, at {money} a month more than without kvdepot"
        )
    gpus = f"{found.gpus_saved:,} GPUs fewer, " if found.gpus_saved else ""
    return f"{gpus}{money} a month less; payback {payback_words(found)}"


def payback_words(found: PlanSavings) -> str:
    if found.payback_months is None:
        return "never"
    if not found.store_price:
        return "at once: nothing is bought"
    months = found.payback_months
    return f"after {months * 30.4:.0f} days" if months < 2 else f"after {months:.1f} months"


def savings_table(plan: Plan) -> Table:
    found = {one.name: one.enough for one in plan.alternatives}
    without, chosen = found[GPU_MEMORY_ONLY], found["chosen"]
    saved, gpus = savings_of(plan), plan.scenario.fleet.gpus_per_node

    def cells(one: MixOutcome | None) -> list[str]:
        if one is None:
            return ["no number does", "-", "-", "-"]
        month = money_words(plan.parts, one.cost.per_hour * HOURS_A_MONTH)
        kw = f"{one.cost.power_w / 1000:,.1f} kW"
        return [f"{one.nodes:,}", f"{one.nodes * gpus:,}", month, kw]

    last = ["-"] * 4
    if saved is not None:
        last = [
            f"{saved.nodes_without - saved.nodes_with:,}",
            f"{saved.gpus_saved:,}",
            money_words(plan.parts, saved.per_month),
            f"{saved.power_saved_w / 1000:,.1f} kW",
        ]
    heads = ("for the p95", "nodes", "GPUs", "cost a month", "power")
    rows = (["without kvdepot", *cells(without)], ["with", *cells(chosen)], ["saved", *last])
    return Table(heads, rows)


def bill_table(plan: Plan) -> Table:
    lines = bill_lines(plan)
    rows = [
        (
            one.part,
            f"{one.units:,}",
            exact_words(plan.parts, one.price),
            exact_words(plan.parts, one.total),
        )
        for one in lines
    ]
    total = exact_words(plan.parts, sum(one.total for one in lines))
    return Table(("part", "units", "each", "sum"), [*rows, ("total", "", "", total)])


def hour_table(plan: Plan) -> Table:
    cost = plan.chosen.cost
    rows = [
        (f"GPUs and servers, over {plan.parts.years:g} years", cost.servers_per_hour),
        ("memory and drives, likewise or over their life", cost.store_per_hour),
        ("power", cost.power_per_hour),
        ("rent, requests and traffic", cost.rent_per_hour),
    ]
    digits = 4 if cost.per_hour < 1000 else 2
    total = round(cost.per_hour, digits)
    parts = [round(amount, digits) for _, amount in rows]
    largest = parts.index(max(parts))
    parts[largest] += total - sum(parts)  # a digit that rounding has lost
    names = [*(name for name, _ in rows), "total"]
    amounts = [f"{amount:,.{digits}f} {plan.parts.currency}" for amount in (*parts, total)]
    raw = [*rows, ("total", cost.per_hour)]
    return Table(("", "an hour"), zip(names, amounts, strict=True), raw=raw)


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
    words = f"p95 {time_words(end.ttft_p95_s)}"
    if end.misses:
        words += f", misses {' and '.join(GOALS[name] for name in end.misses)}"
    if end.cheapest != plan.chosen.mix:
        word = "right" if end.reached else "closest"
        words += f"; {word} then: {mix_words(plan.parts, end.cheapest)}"
    return words


def enough_words(plan: Plan, enough: MixOutcome | None) -> str:
    if enough is None:
        return "no number of nodes"
    cost = money_words(plan.parts, enough.cost.per_hour)
    return f"{enough.nodes:,} at {cost}/h"


def plan_tiles(plan: Plan) -> str:
    chosen, goal = plan.chosen, plan.scenario.goal
    late = "bad" if "ttft_p95" in plan.misses else "good"
    short = "bad" if "retention" in plan.misses else "good"
    million = money_words(plan.parts, chosen.cost.per_million_tokens)
    return tiles(
        [
            (time_words(chosen.ttft_p95_s), f"p95, goal {time_words(goal.ttft_p95)}", late),
            (age_words(chosen.retention_s), "talks are kept for", short),
            (f"{chosen.hit_share:.0%}", "of prompt tokens are not computed"),
            (f"{chosen.gpu_busy:.0%}", "of the GPUs' time is asked for"),
            (money_words(plan.parts, chosen.cost.store_price), "for memory and drives"),
            *savings_tiles(plan),
            (million, "a million tokens, all in"),
        ]
    )


def savings_tiles(plan: Plan) -> list[tuple[str, str]]:
    found = savings_of(plan)
    if found is None:
        return []
    return [
        (money_words(plan.parts, found.per_month), "a month saved against no kvdepot"),
        (f"{found.gpus_saved:,}", "GPUs saved"),
        (payback_words(found), "memory and drives are paid back"),
    ]


def chosen_table(plan: Plan) -> Table:
    one, money = plan.chosen, plan.parts
    rows = [
        ("time to first token, p50", time_words(one.ttft_p50_s)),
        ("… p95", time_words(one.ttft_p95_s)),
        ("… p99", time_words(one.ttft_p99_s)),
        ("prompt tokens not computed", f"{one.hit_share:.1%}"),
        ("… of them in GPU memory", f"{one.gpu_memory_hit_share:.1%}"),
        ("talks kept for", age_words(one.retention_s)),
        ("GPUs busy", f"{one.gpu_busy:.0%}"),
        ("cost an hour, all in", money_words(money, one.cost.per_hour)),
        ("cost of a million tokens", money_words(money, one.cost.per_million_tokens)),
        ("price of memory and drives", money_words(money, one.cost.store_price)),
        ("power at the meter", f"{one.cost.power_w / 1000:,.1f} kW"),
    ]
    return Table(("chosen", ""), rows)


def tiers_table(plan: Plan) -> Table:
    rows = [
        (
            use.tier,
            use.units,
            format_decimal_bytes(use.capacity_bytes),
            f"{use.hit_share:.1%}",
            age_words(use.horizon_s),
            f"{use.read_busy:.0%}",
            f"{use.write_busy:.0%}",
            format_decimal_bytes(use.writes_bytes_per_day),
            wear_words(use.life_years),
        )
        for use in plan.chosen.tiers
    ]
    heads = ("tier of a node", "units", "size", "of prompt tokens", "reaches back", "reading")
    return Table((*heads, "writing", "written a day", "worn out in"), rows)


def next_table(plan: Plan) -> Table:
    rows = [
        (
            more_words(one),
            money_words(plan.parts, one.money),
            time_words(one.ttft_mean_s),
            time_words(one.ttft_p95_s),
            age_words(one.retention_s),
            f"{one.saved_ms_per_1000:.3g} ms" if one.saved_ms_per_1000 else "-",
        )
        for one in plan.next
    ]
    heads = ("one step more", f"over {plan.parts.years:g} years", "mean", "p95", "kept for")
    return Table((*heads, f"saved for 1,000 {plan.parts.currency}"), rows)


def alternatives_table(plan: Plan) -> Table:
    rows = [
        (
            one.name,
            mix_words(plan.parts, one.outcome.mix),
            time_words(one.outcome.ttft_mean_s),
            time_words(one.outcome.ttft_p95_s),
            f"{one.outcome.hit_share:.0%}",
            f"{one.outcome.gpu_busy:.0%}",
            age_words(one.outcome.retention_s),
            money_words(plan.parts, one.outcome.cost.per_hour),
            f"{one.outcome.cost.power_w / 1000:,.1f} kW",
            enough_words(plan, one.enough),
        )
        for one in plan.alternatives
    ]
    heads = ("", "each node has", "mean", "p95", "hits", "GPUs asked", "kept for", "an hour")
    return Table((*heads, "power", "nodes for the p95"), rows)


def frontier_table(plan: Plan) -> Table:
    rows = [
        (
            mix_words(plan.parts, one.mix),
            money_words(plan.parts, one.cost.per_hour),
            money_words(plan.parts, one.cost.store_price),
            time_words(one.ttft_p95_s),
            f"{one.hit_share:.1%}",
            age_words(one.retention_s),
            "chosen" if one.mix == plan.chosen.mix else "",
        )
        for one in plan.frontier
    ]
    return Table(
        ("each node has", "an hour", "memory and drives", "p95", "hits", "kept for", ""), rows
    )


def swings_table(plan: Plan) -> Table:
    rows = [
        (
            swing.name,
            f"× {end.factor:g}",
            end_words(plan, end),
            money_words(plan.parts, end.per_million_tokens),
            swing.why,
        )
        for swing in plan.swings[:SWINGS_SHOWN]
        for end in (swing.low, swing.high)
    ]
    heads = ("input", "times", "the chosen mix then", "a million tokens", "why it is uncertain")
    return Table(heads, rows)


def parts_table(plan: Plan) -> Table:
    parts = plan.parts
    rows = [
        (
            name,
            format_decimal_bytes(device.unit),
            money_words(parts, device.price)
            if device.price
            else f"{money_words(parts, device.price_per_tb_month)}/TB/month",
            f"{format_decimal_bytes(device.read)}/s",
            f"{format_decimal_bytes(device.write)}/s",
            format_duration(device.latency + device.seek),
            f"{device.power_w:g} W",
            device.source,
        )
        for name, device in parts.tiers.items()
    ]
    gpu = parts.gpus[plan.scenario.fleet.gpu]
    rows.append(
        (
            plan.scenario.fleet.gpu,
            format_decimal_bytes(gpu.memory),
            money_words(parts, gpu.price),
            f"{format_decimal_bytes(gpu.memory_bandwidth)}/s",
            f"{gpu.flops * gpu.efficiency / 1e12:,.0f} Tflop/s",
            "",
            f"{gpu.power_w:g} W",
            gpu.source,
        )
    )
    heads = ("part", "size", "price", "reads", "writes, computes", "latency", "power", "source")
    return Table(heads, rows)


def frontier_chart(plan: Plan) -> Curves | str:
    def point(one: MixOutcome, *, named: bool = False) -> Point:
        name = mix_words(plan.parts, one.mix)
        cost = money_words(plan.parts, one.cost.per_hour)
        tip = f"{name}: {time_words(one.ttft_p95_s)}, {cost}/h"
        return Point(one.cost.per_hour, one.ttft_p95_s or 0.0, tip, name if named else "")

    curves = [Curve("", "with", [point(one) for one in plan.frontier])] if plan.frontier else []
    if plan.chosen.ttft_p95_s is not None:
        curves.append(Curve("", "mark", [point(plan.chosen, named=True)], joined=False))
    if not curves:
        return "<p>No mix keeps up with this traffic.</p>"
    return Curves(
        title="Cost an hour and 95th percentile of the time to first token",
        x_unit=f"{plan.parts.currency} an hour, the whole fleet",
        y_unit="p95, seconds",
        curves=curves,
        limit=plan.scenario.goal.ttft_p95,
    )


def where_chart(plan: Plan) -> Bars | str:
    served = [one for one in plan.alternatives if one.outcome.ttft_mean_s is not None]
    if not served:
        return "<p>None of them keeps up.</p>"
    styles = {
        "tier queue": "c5",
        "fetch": "c2",
        "GPU queue": "c6",
        "prefill": "c0",
        "first step": "c3",
    }
    series = [
        Series(name, style, [one.outcome.where[name] for one in served], time_words)
        for name, style in styles.items()
    ]
    return Bars(
        title="Mean time to first token by what it goes into",
        unit="seconds",
        categories=[one.name for one in served],
        series=series,
        stacked=True,
        notes=[time_words(one.outcome.ttft_mean_s) for one in served],
    )


def hits_chart(plan: Plan) -> Bars:
    every = [one.outcome for one in plan.alternatives]
    shares = [100 * one.gpu_memory_hit_share for one in every]
    series = [Series("GPU memory", "memory", shares, percent_words)]
    for name in plan.parts.tiers:
        shares = [100 * sum(u.hit_share for u in one.tiers if u.tier == name) for one in every]
        if any(shares):
            series.append(Series(name, name, shares, percent_words))
    computed = [100 * (1 - one.hit_share) for one in every]
    series.append(Series("computed", "computed", computed, percent_words))
    return Bars(
        title="Prompt tokens by where they come from",
        unit="% of prompt tokens",
        categories=[one.name for one in plan.alternatives],
        series=series,
        stacked=True,
    )


def percent_words(value: float) -> str:
    return f"{value:.1f}"


def swings_chart(plan: Plan) -> Ranges | str:
    if plan.chosen.ttft_p95_s is None:
        return "<p>The plan has no p95 to vary.</p>"
    rows = [
        Range(
            swing.name,
            swing.low.ttft_p95_s,
            swing.high.ttft_p95_s,
            f"× {swing.low.factor:g}",
            f"× {swing.high.factor:g}",
        )
        for swing in plan.swings
    ]
    return Ranges(
        title="p95 with each input at the ends of its range",
        unit="p95, seconds",
        rows=rows,
        middle=plan.chosen.ttft_p95_s,
        limit=plan.scenario.goal.ttft_p95,
    )
