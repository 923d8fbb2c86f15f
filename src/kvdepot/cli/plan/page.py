"""The planner's report: one HTML file that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape

from kvdepot.cli.plan.words import (
    SWINGS_SHOWN,
    age_words,
    bottleneck_words,
    end_words,
    enough_words,
    fleet_words,
    goal_words,
    mix_words,
    money_words,
    more_words,
    purchase_words,
    time_words,
    traffic_words,
    verdict,
)
from kvdepot.cli.report.page import section, tile, whole
from kvdepot.cli.report.ranges import Range, Ranges
from kvdepot.cli.report.scatter import Point, Scatter
from kvdepot.cli.report.svg import Bars, Series
from kvdepot.core.units import format_decimal_bytes, format_duration
from kvdepot.planner.outcome import MixOutcome
from kvdepot.planner.plan import Plan

TEXT_HEADS = {
    "",
    "because",
    "each node has",
    "matters most",
    "one step more",
    "part",
    "source",
    "the chosen mix then",
    "tier of a node",
}
STYLES = ("dram", "cxl", "ssd", "hdd", "object")
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


def render(plan: Plan) -> str:
    """The whole page."""
    scenario = plan.scenario
    title = scenario.title or scenario.model
    missed = " missed" if plan.misses else ""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(fleet_words(scenario))}. {escape(traffic_words(scenario))}. '
        f"Goal: {escape(goal_words(scenario))}.</p>",
        f'<p class="answer{missed}">{escape(verdict(plan))}</p>',
        tiles(plan),
        "<h2>What it is</h2>",
        f'<div class="wide">{tiers_table(plan)}</div>',
        f"<p><b>Bottleneck:</b> {escape(bottleneck_words(plan))}.</p>",
        *section("Cost against time to first token", FRONTIER_CAPTION, frontier_plot(plan)),
        f'<div class="wide">{frontier_table(plan)}</div>',
        "<h2>Compared with</h2>",
        f'<div class="wide">{alternatives_table(plan)}</div>',
        *section("Where the time goes", WHERE_CAPTION, where_plot(plan)),
        *section("Where the tokens come from", HITS_CAPTION, hits_plot(plan)),
        "<h2>What the next money should buy</h2>",
        f"<p>{escape(purchase_words(plan).capitalize())}.</p>",
        f'<div class="wide">{next_table(plan)}</div>',
        *section("What it depends on", SWING_CAPTION, swing_plot(plan)),
        f'<div class="wide">{swing_table(plan)}</div>',
        "<h2>Parts and their sources</h2>",
        f'<div class="wide">{parts_table(plan)}</div>',
        "<h2>How this was found</h2>",
        f"<p>{escape(f'{plan.tried:,} mixes were tried. {MODEL_WORDS}')}</p>",
    ]
    return whole(f"kvdepot plan: {title}", "\n".join(body))


def tiles(plan: Plan) -> str:
    chosen, goal = plan.chosen, plan.scenario.goal
    late = "bad" if "ttft_p95" in plan.misses else "good"
    short = "bad" if "retention" in plan.misses else "good"
    found = [
        tile(time_words(chosen.ttft_p95_s), f"p95, goal {time_words(goal.ttft_p95)}", late),
        tile(age_words(chosen.retention_s), "talks are kept for", short),
        tile(f"{chosen.hit_share:.0%}", "of prompt tokens are not computed"),
        tile(f"{chosen.gpu_busy:.0%}", "of the GPUs' time is asked for"),
        tile(money_words(plan.parts, chosen.cost.store_price), "for memory and drives"),
        tile(money_words(plan.parts, chosen.cost.per_million_tokens), "a million tokens, all in"),
    ]
    return f'<div class="tiles">{"".join(found)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns are numbers unless their heads are among TEXT_HEADS."""
    kinds = ["" if head in TEXT_HEADS else ' class="number"' for head in heads]
    top = "".join(f"<th{kind}>{escape(head)}</th>" for head, kind in zip(heads, kinds, strict=True))
    lines = [
        "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        for row in rows
    ]
    body = "\n".join(f"<tr>{cells}</tr>" for cells in lines)
    return f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def tiers_table(plan: Plan) -> str:
    rows = [
        (
            use.tier,
            str(use.units),
            format_decimal_bytes(use.capacity_bytes),
            f"{use.hit_share:.1%}",
            age_words(use.horizon_s),
            f"{use.read_busy:.0%} / {use.write_busy:.0%}",
            format_decimal_bytes(use.writes_bytes_per_day),
            f"{use.life_years:.1f} years" if use.life_years else "–",
        )
        for use in plan.chosen.tiers
    ]
    heads = ("tier of a node", "units", "size", "of prompt tokens", "reaches back")
    return table((*heads, "reads / writes, of its time", "written a day", "worn out in"), rows)


def frontier_plot(plan: Plan) -> str:
    def point(one: MixOutcome, style: str) -> Point:
        name = mix_words(plan.parts, one.mix)
        cost = money_words(plan.parts, one.cost.per_hour)
        tip = f"{name}: {time_words(one.ttft_p95_s)}, {cost}/h"
        return Point(one.cost.per_hour, one.ttft_p95_s or 0.0, style, tip, name)

    others = [point(one, "with") for one in plan.frontier]
    marked = [point(plan.chosen, "mark")] if plan.chosen.ttft_p95_s is not None else []
    if not others and not marked:
        return "<p>No mix keeps up with this traffic.</p>"
    return Scatter(
        title="Cost an hour and 95th percentile of the time to first token",
        x_unit=f"{plan.parts.currency} an hour, the whole fleet",
        y_unit="p95, seconds",
        points=marked,
        joined=[Point(p.x, p.y, p.style, p.tip) for p in others],
        limit=plan.scenario.goal.ttft_p95,
    ).draw()


def frontier_table(plan: Plan) -> str:
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
    return table(
        ("each node has", "an hour", "memory and drives", "p95", "hits", "kept for", ""), rows
    )


def alternatives_table(plan: Plan) -> str:
    rows = [
        (
            one.name,
            mix_words(plan.parts, one.outcome.mix),
            time_words(one.outcome.ttft_mean_s),
            time_words(one.outcome.ttft_p95_s),
            f"{one.outcome.gpu_busy:.0%}",
            age_words(one.outcome.retention_s),
            money_words(plan.parts, one.outcome.cost.per_hour),
            f"{one.outcome.cost.power_w / 1000:,.1f} kW",
            enough_words(plan, one.enough),
        )
        for one in plan.alternatives
    ]
    heads = ("", "each node has", "mean", "p95", "GPUs asked", "kept for", "an hour", "power")
    return table((*heads, "nodes for the p95"), rows)


def where_plot(plan: Plan) -> str:
    served = [one for one in plan.alternatives if one.outcome.ttft_mean_s is not None]
    if not served:
        return "<p>None of them keeps up.</p>"
    styles = {
        "tier queue": "object",
        "fetch": "ssd",
        "GPU queue": "computed",
        "prefill": "with",
        "first step": "dram",
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
    ).draw()


def hits_plot(plan: Plan) -> str:
    every = [one.outcome for one in plan.alternatives]
    series = [Series("GPU memory", "memory", [100 * one.gpu_memory_hit_share for one in every])]
    for number, name in enumerate(plan.parts.tiers):
        shares = [100 * sum(u.hit_share for u in one.tiers if u.tier == name) for one in every]
        if any(shares):
            series.append(Series(name, STYLES[number % len(STYLES)], shares))
    series.append(Series("computed", "computed", [100 * (1 - one.hit_share) for one in every]))
    return Bars(
        title="Prompt tokens by where they come from",
        unit="% of prompt tokens",
        categories=[one.name for one in plan.alternatives],
        series=series,
        stacked=True,
    ).draw()


def next_table(plan: Plan) -> str:
    rows = [
        (
            more_words(one),
            money_words(plan.parts, one.money),
            time_words(one.ttft_mean_s),
            time_words(one.ttft_p95_s),
            age_words(one.retention_s),
            f"{one.saved_ms_per_1000:.3g} ms" if one.saved_ms_per_1000 else "–",
        )
        for one in plan.next
    ]
    heads = ("one step more", f"over {plan.parts.years:g} years", "mean", "p95", "kept for")
    return table((*heads, f"saved for 1,000 {plan.parts.currency}"), rows)


def swing_plot(plan: Plan) -> str:
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
    ).draw()


def swing_table(plan: Plan) -> str:
    rows = [
        (
            swing.name,
            swing.why,
            f"× {end.factor:g}",
            end_words(plan, end),
            money_words(plan.parts, end.per_million_tokens),
        )
        for swing in plan.swings[:SWINGS_SHOWN]
        for end in (swing.low, swing.high)
    ]
    return table(
        ("matters most", "because", "times", "the chosen mix then", "a million tokens"), rows
    )


def parts_table(plan: Plan) -> str:
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
    return table(heads, rows)
