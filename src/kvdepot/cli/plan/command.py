"""`kvdepot plan`: which memory and drives to buy for a model and its traffic."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import (
    EffectRule,
    add_set,
    parse_settings,
    refuse_without_effect,
    remember_defaults,
)
from kvdepot.cli.directories import write_page
from kvdepot.cli.plan.report import as_page, as_text, verdict, wear_year
from kvdepot.cli.report.page import Origin
from kvdepot.config.loader import show as shown
from kvdepot.config.loader import to_toml
from kvdepot.config.settings import Config
from kvdepot.planner.parts import Parts, load_parts, shipped_parts
from kvdepot.planner.plan import Plan, all_mixes, make_plan
from kvdepot.planner.savings import bill_lines, savings_of
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
        epilog="A scenario file is what `kvdepot plan NAME --show` prints, or --show --json.",
    )
    parser.add_argument(
        "scenario",
        nargs="?",
        metavar="SCENARIO",
        help=f"{', '.join(scenario_names())}, or a TOML or JSON file; options below change it",
    )
    parser.add_argument("--parts", type=Path, metavar="FILE", help="a parts list of your own")
    parser.add_argument("--print-parts", action="store_true", help="print the shipped parts list")
    parser.add_argument("--show", action="store_true", help="print the scenario, do not plan")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report too")
    for option, (_, value, words) in SETTINGS.items():
        parser.add_argument(f"--{option}", metavar=value, help=words or None)
    add_set(
        parser, "any other setting of the scenario, such as traffic.gap_spread=0.5; may be repeated"
    )
    output.add_json_flag(parser)
    remember_defaults(parser)


def run(args: argparse.Namespace) -> int:
    refuse_without_effect(args, rules(args))
    if args.print_parts:
        output.data(shipped_parts().rstrip())
        return 0
    scenario = load_scenario(args.scenario, env=args.env, overrides=overrides(args))
    if args.show:
        if args.json:
            output.document(shown(scenario))
        else:
            output.data(to_toml(scenario).rstrip())
        return 0
    parts, absent = existing_parts(load_parts(args.parts, env=args.env))
    with output.Progress("trying mixes", len(all_mixes(parts))) as progress:
        plan = make_plan(scenario, parts, advance=progress.advance)
    if absent:
        output.say(f"left out: {', '.join(absent)}; this kvdepot has no such tier")
    if args.report is not None:
        write_page(args.report, as_page(plan, Origin.of(args.typed)))
        output.say(f"report: {args.report}")
    if args.json:
        output.document(document(plan))
    else:
        output.data(as_text(plan))
    return 1 if plan.misses else 0


def rules(args: argparse.Namespace) -> list[EffectRule]:
    """Which options do nothing beside which others."""
    others = [name for name in args.defaults if name not in ("print_parts", "help")]
    return [
        EffectRule(tuple(others), not args.print_parts, "with --print-parts"),
        EffectRule(("parts", "report"), not args.show, "with --show"),
    ]


def existing_parts(parts: Parts) -> tuple[Parts, list[str]]:
    """The parts that this kvdepot can use, and the names of the tiers that it cannot."""
    known = {field.name for field in dataclasses.fields(Config)}
    absent = [name for name in parts.tiers if name not in known]
    tiers = {name: device for name, device in parts.tiers.items() if name in known}
    return dataclasses.replace(parts, tiers=tiers), absent


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = dict(parse_settings(args.settings, "goal.ttft_p95=2s"))
    for option, (name, _, _) in SETTINGS.items():
        value = getattr(args, option.replace("-", "_"))
        if value is not None:
            given[name] = value
    return given


def document(plan: Plan) -> dict[str, Any]:
    """The plan for scripts: mixes by the names of their tiers, and the sentences."""
    names = list(plan.parts.tiers)
    return {
        "scenario": shown(plan.scenario),
        "tried": plan.tried,
        "reached": not plan.misses,
        "misses": plan.misses,
        "verdict": verdict(plan),
        "chosen_units": dict(zip(names, plan.chosen.mix.units, strict=True)),
        "chosen": plan.chosen,
        "savings": savings_of(plan),
        "bill": bill_lines(plan),
        "wear_out_year": {
            use.tier: wear_year(use.life_years) if use.life_years is not None else None
            for use in plan.chosen.tiers
        },
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
