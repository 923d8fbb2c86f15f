"""`kvdepot plan`: which memory and drives to buy for a model and its traffic."""

import argparse
from pathlib import Path
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.config import parse_settings
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
from kvdepot.core.config_loader import show as shown
from kvdepot.core.units import format_decimal_bytes
from kvdepot.planner.parts import load_parts, shipped_parts
from kvdepot.planner.plan import Plan, all_mixes, make_plan
from kvdepot.planner.scenario import load_scenario, scenario_names

SETTINGS: Final = {
    "model": ("model", "NAME|FILE", "a well-known model or a config.json"),
    "dtype": ("dtype", "TYPE", "of the KV cache"),
    "codec": ("codec", "NAME|RATIO", "how tiers store it; see kvdepot size"),
    "gpu": ("fleet.gpu", "NAME", "a GPU of the parts list"),
    "nodes": ("fleet.nodes", "N", "GPU nodes"),
    "gpus-per-node": ("fleet.gpus_per_node", "N", ""),
    "tp": ("fleet.tp", "N", "GPUs for one copy of the model"),
    "requests-per-second": ("traffic.requests_per_s", "N", "of the whole fleet when it is busy"),
    "users": ("traffic.users", "N", "who talk at the same time"),
    "turns": ("traffic.turns", "N", "of one talk"),
    "system-tokens": ("traffic.system_tokens", "N", "at the head of every prompt"),
    "history-tokens": ("traffic.history_tokens", "N", "that a talk begins with"),
    "question-tokens": ("traffic.question_tokens", "N", "new in each turn"),
    "answer-tokens": ("traffic.answer_tokens", "N", "of each answer"),
    "gap": ("traffic.gap", "TIME", "from one turn of a talk to the next"),
    "return-share": ("traffic.return_share", "SHARE", "of turns that come after a long pause"),
    "return-gap": ("traffic.return_gap", "TIME", "mean of the long pauses"),
    "busy-share": ("traffic.busy_share", "SHARE", "of the day in which requests come"),
    "ttft-p95": ("goal.ttft_p95", "TIME", "goal: 95 of 100 first tokens within this time"),
    "retention": ("goal.retention", "TIME", "goal: talks are kept for this long"),
}
"""Options that are one setting of a scenario each."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        description="Find the memory and drives to buy for a model and its traffic: the cheapest "
        "mix that reaches the goals, what it is compared with, what limits it and what it depends "
        "on. Exits with 1 where no mix reaches the goals.",
        epilog="A scenario file has the settings of `kvdepot plan NAME --show`.",
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help=f"{', '.join(scenario_names())}, or a TOML file; options below change it",
    )
    parser.add_argument("--parts", type=Path, metavar="FILE", help="a parts list of your own")
    parser.add_argument("--print-parts", action="store_true", help="print the shipped parts list")
    parser.add_argument("--show", action="store_true", help="print the scenario, do not plan")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report too")
    for option, (_, value, words) in SETTINGS.items():
        parser.add_argument(f"--{option}", metavar=value, help=words or None)
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="any other setting of the scenario, such as traffic.gap_spread=0.5; may be repeated",
    )
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.print_parts:
        output.data(shipped_parts().rstrip())
        return 0
    scenario = load_scenario(args.scenario, env=args.env, overrides=overrides(args))
    if args.show:
        output.document(shown(scenario))
        return 0
    parts = load_parts(args.parts, env=args.env)
    with output.Progress("trying mixes", len(all_mixes(parts))) as progress:
        plan = make_plan(scenario, parts, advance=progress.advance)
    if args.report is not None:
        write_report(args.report, plan)
    if args.json:
        output.document(document(plan))
    else:
        show(plan)
    return 1 if plan.misses else 0


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = dict(parse_settings(args.settings))
    for option, (name, _, _) in SETTINGS.items():
        value = getattr(args, option.replace("-", "_"))
        if value is not None:
            given[name] = value
    return given


def write_report(path: Path, plan: Plan) -> None:
    from kvdepot.cli.plan.page import render

    path.write_text(render(plan), encoding="utf-8")
    output.say(f"report: {path}")


def document(plan: Plan) -> dict[str, Any]:
    """The plan for scripts: mixes by the names of their tiers, and the sentences."""
    names = list(plan.parts.tiers)
    found: dict[str, Any] = {
        "scenario": shown(plan.scenario),
        "tried": plan.tried,
        "reached": not plan.misses,
        "misses": plan.misses,
        "verdict": verdict(plan),
        "chosen_units": dict(zip(names, plan.chosen.mix.units, strict=True)),
        "chosen": plan.chosen,
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
    return found


def show(plan: Plan) -> None:
    scenario = plan.scenario
    output.data(scenario.title or scenario.model)
    output.data(f"  {fleet_words(scenario)}")
    output.data(f"  traffic  {traffic_words(scenario)}")
    output.data(f"  goal     {goal_words(scenario)}")
    output.data(f"  tried    {plan.tried:,} mixes\n")
    output.data(verdict(plan))
    output.data("\n" + chosen_table(plan))
    if plan.chosen.tiers:
        output.data("\n" + tiers_table(plan))
    output.data(f"\nbottleneck: {bottleneck_words(plan)}")
    output.data(f"next: {purchase_words(plan)}")
    output.data("\n" + next_table(plan))
    output.data("\ncompared with\n" + alternatives_table(plan))
    output.data("\nmixes that nothing beats in both cost and p95\n" + frontier_table(plan))
    output.data(f"\nthe {SWINGS_SHOWN} inputs that matter most\n" + swings_table(plan))


def chosen_table(plan: Plan) -> str:
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
    return output.table(("chosen", ""), rows)


def tiers_table(plan: Plan) -> str:
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
            f"{use.life_years:.1f} years" if use.life_years else "-",
        )
        for use in plan.chosen.tiers
    ]
    heads = ("tier of a node", "units", "size", "of prompt tokens", "reaches back", "reading")
    return output.table((*heads, "writing", "written a day", "worn out in"), rows)


def next_table(plan: Plan) -> str:
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
    return output.table((*heads, f"saved for 1,000 {plan.parts.currency}"), rows)


def alternatives_table(plan: Plan) -> str:
    rows = [
        (
            one.name,
            mix_words(plan.parts, one.outcome.mix),
            time_words(one.outcome.ttft_p95_s),
            f"{one.outcome.hit_share:.0%}",
            f"{one.outcome.gpu_busy:.0%}",
            age_words(one.outcome.retention_s),
            money_words(plan.parts, one.outcome.cost.per_hour),
            enough_words(plan, one.enough),
        )
        for one in plan.alternatives
    ]
    heads = ("", "each node has", "p95", "hits", "GPUs busy", "kept for", "an hour")
    return output.table((*heads, "nodes for the p95"), rows)


def frontier_table(plan: Plan) -> str:
    rows = [
        (
            mix_words(plan.parts, one.mix),
            money_words(plan.parts, one.cost.per_hour),
            time_words(one.ttft_p95_s),
            age_words(one.retention_s),
            "← chosen" if one.mix == plan.chosen.mix else "",
        )
        for one in plan.frontier
    ]
    return output.table(("each node has", "an hour", "p95", "kept for", ""), rows)


def swings_table(plan: Plan) -> str:
    rows = []
    for swing in plan.swings[:SWINGS_SHOWN]:
        for end in (swing.low, swing.high):
            rows.append((swing.name, f"× {end.factor:g}", end_words(plan, end), swing.why))
    return output.table(("input", "times", "the chosen mix then", "why it is uncertain"), rows)
