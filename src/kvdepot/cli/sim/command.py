"""`kvdepot sim`: what a trace would hit, and how long a fleet would take for it."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import EffectRule, refuse_without_effect, remember_defaults
from kvdepot.cli.directories import write_page
from kvdepot.cli.report.page import Origin
from kvdepot.cli.report.tables import Table
from kvdepot.cli.sim import fleet as sim_fleet
from kvdepot.cli.sim.report import hits_page
from kvdepot.core.units import format_count
from kvdepot.errors import ConfigError, TraceError
from kvdepot.sim.hits_only import POLICIES, Case, HitCounts, check_case, parse_capacity, play
from kvdepot.sim.traces.agent_sessions import GAP_S, Replay
from kvdepot.sim.traces.formats import read_trace
from kvdepot.sim.workload import Workload

SHOWN_MAX = 5
"""Bad lines printed for people; --json has all of them."""
TRACE_OPTIONS = ("bad_lines", "speed", "session_gap", "merge")
WHERE_TRACES_ARE = (
    "kvdepot record FILE writes one; docs/simulator.md names public ones and where they are"
)
NOTHING_RETURNS = (
    "note: no block of this trace is asked for twice, so nothing can be hit: it has no prompt that "
    "returns, or no word of which prompts share a prefix (Azure's traces have lengths only)"
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    counts: HitCounts
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.case.policy,
            "capacity": self.case.capacity.text,
            "capacity_tokens": dict(self.case.capacity.tokens),
            "token_hit_ratio": self.counts.token_hit_ratio,
            "token_hit_ratio_by_tier": self.counts.by_tier,
            "tokens_asked": self.counts.tokens_asked,
            "tokens_hit": sum(self.counts.tokens_hit.values()),
            "prefill_saved_ratio": self.counts.prefill_saved_ratio,
            "blocks_asked": self.counts.blocks_asked,
            "blocks_entered": self.counts.blocks_entered,
            "blocks_evicted": self.counts.blocks_evicted,
            "elapsed_s": self.elapsed_s,
            "block_events_per_s": self.counts.events / self.elapsed_s,
        }


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "sim",
        description="Replay a trace, or users of a synthetic workload, with the store's own index "
        "and eviction code: against a fleet of GPUs and tiers under a simulated clock, or with "
        "--hits-only against tiers of given sizes, without times.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="what to replay")
    source.add_argument("--workload", choices=["multi-turn"], help="users who ask on and on")
    parser.add_argument("--hits-only", action="store_true", help="what is hit, without times")
    parser.add_argument(
        "--capacity",
        action="append",
        metavar="TIER=TOKENS",
        help="with --hits-only: dram=3Mtok[,ssd=50Mtok], or inf; may be given several times",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=[*POLICIES, "all"],
        help="which blocks leave first; with --hits-only also several times (default: default)",
    )
    parser.add_argument(
        "--bad-lines",
        choices=["stop", "skip"],
        default="stop",
        help="at a line that makes no sense",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --hits-only: write a page with curves here"
    )
    sim_fleet.add_arguments(parser)
    sessions = parser.add_argument_group("traces of sessions without start times")
    sessions.add_argument(
        "--session-gap", type=float, default=GAP_S, metavar="S", help="mean seconds between starts"
    )
    sessions.add_argument(
        "--seed", type=int, default=0, help="for the gaps, and for --route random"
    )
    sessions.add_argument(
        "--merge", type=int, default=1, metavar="N", help="make one block of N of the trace's"
    )
    output.add_json_flag(parser)
    remember_defaults(parser)


def run(args: argparse.Namespace) -> int:
    refuse_without_effect(args, rules(args))
    if not args.hits_only:
        return sim_fleet.run(args, load)
    if args.trace is None or not args.capacity:
        raise ConfigError("--hits-only", "needs a --trace and a --capacity")
    workload = load(args)
    outcomes = [watched_play(workload, case) for case in cases(args, workload.block_tokens)]
    if args.plot is not None:
        played = [(one.case, one.counts) for one in outcomes]
        page = hits_page(args.trace.name, workload, played, Origin.of(args.typed))
        write_page(args.plot, page)
    if args.json:
        output.document(report(args.trace, workload, outcomes))
    else:
        show(workload, outcomes)
    return 0


def rules(args: argparse.Namespace) -> list[EffectRule]:
    """Which options do nothing beside which others."""
    return [
        EffectRule(("capacity", "plot"), args.hits_only, "without --hits-only"),
        EffectRule(sim_fleet.OPTIONS, not args.hits_only, "with --hits-only"),
        EffectRule(sim_fleet.TALK_OPTIONS, args.trace is None, "with --trace"),
        EffectRule(TRACE_OPTIONS, args.trace is not None, "without --trace"),
        EffectRule(("report", "poisson"), args.sample is None, "with --sample"),
        EffectRule(("no_baseline",), bool(args.tiers), "without --tiers"),
        EffectRule(("no_baseline",), not args.recompute, "with --recompute"),
    ]


def load(args: argparse.Namespace) -> Workload:
    if not args.trace.exists():
        raise TraceError(str(args.trace), 0, "there is no such file", hint=WHERE_TRACES_ARE)
    if args.session_gap <= 0 or args.merge < 1:
        raise ConfigError("--session-gap, --merge", "should be above 0")
    replay = Replay(gap_s=args.session_gap, seed=args.seed, merge=args.merge)
    with output.Progress(f"reading {args.trace.name}"):
        workload = read_trace(args.trace, bad_lines=args.bad_lines, replay=replay)
    if workload.blocks_asked == workload.block_count:
        output.say(NOTHING_RETURNS)
    for complaint in workload.skipped[:SHOWN_MAX]:
        output.say(f"skipped {complaint}")
    if len(workload.skipped) > SHOWN_MAX:
        output.say(f"skipped {format_count(len(workload.skipped), 'line')} in all")
    return workload


def cases(args: argparse.Namespace, block_tokens: int) -> list[Case]:
    """Every policy at every capacity, checked before the first one starts."""
    chosen = args.policy or ["default"]
    policies = POLICIES if "all" in chosen else tuple(dict.fromkeys(chosen))
    capacities = [parse_capacity(text) for text in args.capacity]
    if "all" in chosen and any(len(capacity.tokens) > 1 for capacity in capacities):
        policies = tuple(policy for policy in policies if policy != "optimal")
    found = [Case(policy, capacity) for capacity in capacities for policy in policies]
    for case in found:
        check_case(case, block_tokens)
    return found


def watched_play(workload: Workload, case: Case) -> CaseResult:
    words = f"{case.policy} at {case.capacity.text}"
    started_s = time.perf_counter()
    with output.Progress(words, total=len(workload)) as line:
        counts = play(workload, case, lambda done: line.advance(done - line.done))
    return CaseResult(case, counts, time.perf_counter() - started_s)


def report(trace: Path, workload: Workload, outcomes: list[CaseResult]) -> dict[str, Any]:
    """The JSON document; with one case, its figures stand at the top as well."""
    facts = {
        "trace": str(trace),
        "requests": len(workload),
        "block_tokens": workload.block_tokens,
        "unique_blocks": workload.block_count,
        "skipped_lines": workload.skipped,
        "notes": [NOTHING_RETURNS] if workload.blocks_asked == workload.block_count else [],
    }
    if len(outcomes) == 1:
        return {**facts, **outcomes[0].as_dict()}
    return {**facts, "cases": [outcome.as_dict() for outcome in outcomes]}


def show(workload: Workload, outcomes: list[CaseResult]) -> None:
    output.say(
        f"{format_count(len(workload), 'request')}, "
        f"{format_count(workload.tokens_asked, 'token')}, "
        f"{format_count(workload.block_count, 'block')} of {workload.block_tokens} tokens"
    )
    tiers = list(dict.fromkeys(name for one in outcomes for name in one.counts.by_tier))
    shown = tiers if len(tiers) > 1 else []
    rows = [
        [
            one.case.capacity.text,
            one.case.policy,
            f"{one.counts.token_hit_ratio:.4f}",
            *(f"{one.counts.by_tier.get(name, 0.0):.4f}" for name in shown),
            f"{one.counts.prefill_saved_ratio:.4f}",
            f"{one.counts.blocks_evicted:,}",
            f"{one.counts.events / one.elapsed_s:,.0f}",
        ]
        for one in outcomes
    ]
    heads = ["capacity", "policy", "token hit ratio", *shown, "GPU time saved"]
    heads += ["evicted", "block events/s"]
    output.data(Table(heads, rows).text())
