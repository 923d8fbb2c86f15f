"""`kvdepot sim`: simulates a trace or a workload: hits, times, cost."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvdepot.cli import output
from kvdepot.cli.arguments import parse_settings
from kvdepot.cli.command import Answer, Command, positive
from kvdepot.cli.directories import write_page
from kvdepot.cli.report import (
    COLOURS,
    Bars,
    Curve,
    Curves,
    Point,
    Report,
    Section,
    Series,
    origin,
)
from kvdepot.cli.tables import Table
from kvdepot.config.loader import load_tree
from kvdepot.core.units import format_count, format_decimal_bytes
from kvdepot.errors import ConfigError, TraceError
from kvdepot.planner.parts import Parts, check_numbers, load_parts
from kvdepot.planner.simulation import Bill, Machines, bill_of, fleet_of, parse_tiers
from kvdepot.sim.arrivals import ArrivalTimes, AsRecorded, Conversations, MultiTurn
from kvdepot.sim.fleet import SimulatedFleet
from kvdepot.sim.hits_only import (
    OPTIMAL,
    POLICIES,
    Case,
    HitCounts,
    check_case,
    parse_capacity,
    play,
)
from kvdepot.sim.results import Findings
from kvdepot.sim.traces import GAP_S, Replay, read_trace
from kvdepot.sim.worker import HBM
from kvdepot.sim.workload import Workload

SHOWN_MAX: Final = 5
"""Bad lines printed as text; --json has all of them."""
BUSY: Final = 0.95
"""A GPU or a tier that is busy for a larger share of the time is overloaded."""
CLASSES: Final = 14
"""Bars of the chart of first tokens, up to the 99th percentile."""
WHERE_TRACES_ARE: Final = "kvdepot record FILE writes one; docs/simulator.md names public traces"
NOTHING_RETURNS: Final = "note: no block of this trace is requested twice, so there are no hits"
BASELINE_CAPTION: Final = (
    "The same requests at the same times on the same GPUs, without tiers: what GPU memory still "
    "has is reused, everything else is computed."
)
_MAY_BE_ZERO: Final = {
    "seed",
    "step_s",
    "token_s",
    "pair_s",
    "system_tokens",
    "history_tokens",
    "think_s",
}


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The settings for `--set`."""

    fleet: Machines = field(default_factory=Machines)
    traffic: MultiTurn = field(default_factory=MultiTurn)
    block_tokens: int = 256
    """Tokens of a block, without a trace."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run, and the same run without kvdepot."""

    machines: Machines
    findings: Findings
    bill: Bill
    elapsed_s: float
    baseline: "Simulation | None" = None


def run(args: argparse.Namespace) -> Answer:
    if not args.trace and not args.workload:
        raise ConfigError("sim", "needs requests", hint="add --trace FILE or --workload multi-turn")
    return run_hits(args) if args.hits_only else run_fleet(args)


def load(args: argparse.Namespace) -> Workload:
    if not args.trace.exists():
        raise TraceError(str(args.trace), 0, "does not exist", hint=WHERE_TRACES_ARE)
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


def run_hits(args: argparse.Namespace) -> Answer:
    """Every policy at every capacity; each request is served at once."""
    if not args.capacity:
        raise ConfigError("--hits-only", "needs a --capacity", hint="--capacity dram=3Mtok")
    workload = load(args)
    played = [(case, *timed_play(workload, case)) for case in cases(args, workload.block_tokens)]
    report = hits_report(args.trace.name, workload, played)
    if args.report is not None:
        write_page(args.report, report.html(origin(args.typed)))
    facts = {
        "trace": str(args.trace),
        "requests": len(workload),
        "block_tokens": workload.block_tokens,
        "unique_blocks": workload.block_count,
        "skipped_lines": workload.skipped,
        "notes": [NOTHING_RETURNS] if workload.blocks_asked == workload.block_count else [],
    }
    found = [case_document(*one) for one in played]
    return Answer({**facts, **(found[0] if len(found) == 1 else {"cases": found})}, report.text())


def cases(args: argparse.Namespace, block_tokens: int) -> list[Case]:
    """Every policy at every capacity, checked before the first one starts."""
    chosen = args.policy or ["default"]
    policies = POLICIES if "all" in chosen else tuple(dict.fromkeys(chosen))
    capacities = [parse_capacity(text) for text in args.capacity]
    if "all" in chosen and any(len(capacity.tokens) > 1 for capacity in capacities):
        policies = tuple(policy for policy in policies if policy != OPTIMAL)
    found = [Case(policy, capacity) for capacity in capacities for policy in policies]
    for case in found:
        check_case(case, block_tokens)
    return found


def timed_play(workload: Workload, case: Case) -> tuple[HitCounts, float]:
    started_s = time.perf_counter()
    label = f"{case.policy} at {case.capacity.text}"
    with output.Progress(label, total=len(workload)) as line:
        counts = play(workload, case, line.reach)
    return counts, time.perf_counter() - started_s


def case_document(case: Case, counts: HitCounts, elapsed_s: float) -> dict[str, Any]:
    return {
        "policy": case.policy,
        "capacity": case.capacity.text,
        "capacity_tokens": dict(case.capacity.tokens),
        "token_hit_ratio": counts.token_hit_ratio,
        "token_hit_ratio_by_tier": counts.by_tier,
        "tokens_asked": counts.tokens_asked,
        "tokens_hit": sum(counts.tokens_hit.values()),
        "prefill_saved_ratio": counts.prefill_saved_ratio,
        "blocks_asked": counts.blocks_asked,
        "blocks_entered": counts.blocks_entered,
        "blocks_evicted": counts.blocks_evicted,
        "elapsed_s": elapsed_s,
        "block_events_per_s": counts.events / elapsed_s,
    }


def hits_report(
    name: str, workload: Workload, played: Sequence[tuple[Case, HitCounts, float]]
) -> Report:
    tiers = list(dict.fromkeys(tier for _, counts, _ in played for tier in counts.by_tier))
    shown = tiers if len(tiers) > 1 else []
    rows, curves = [], dict[str, list[Point]]()
    for case, counts, elapsed_s in played:
        ratio, tokens = counts.token_hit_ratio, case.capacity.total_tokens
        rows.append(
            [
                case.capacity.text,
                case.policy,
                f"{ratio:.4f}",
                *(f"{counts.by_tier.get(tier, 0.0):.4f}" for tier in shown),
                f"{counts.prefill_saved_ratio:.4f}",
                f"{counts.blocks_evicted:,}",
                f"{counts.events / elapsed_s:,.0f}",
            ]
        )
        size = float(tokens or workload.block_count * workload.block_tokens)
        tip = f"{case.policy}, {millions(size)} tokens: {ratio:.4f}"
        curves.setdefault(case.policy, []).append(Point(size, ratio, tip))
    heads = ["capacity", "policy", "token hit ratio", *shown, "GPU time saved", "evicted"]
    chart = Curves(
        title=f"token hit ratio of {name}",
        x_unit="capacity in tokens",
        y_unit="hit ratio",
        curves=[
            Curve(policy, f"c{number % COLOURS}", sorted(points, key=lambda point: point.x))
            for number, (policy, points) in enumerate(curves.items())
        ],
        x_label=millions,
    )
    lead = (
        f"{format_count(len(workload), 'request')}, "
        f"{format_count(workload.tokens_asked, 'token')}, "
        f"{format_count(workload.block_count, 'block')} of {workload.block_tokens} tokens"
    )
    caption = "Without a store nothing is kept, and the hit ratio is 0."
    table = Table([*heads, "block events/s"], rows)
    section = Section("Hits by capacity", [chart, table], caption)
    return Report(f"kvdepot sim: {name}", lead, [section])


def millions(tokens: float) -> str:
    return f"{tokens / 1e6:g}M"


def run_fleet(args: argparse.Namespace) -> Answer:
    """Requests with times, against a fleet."""
    parts = load_parts(args.parts)
    settings = sim_settings(args, parts)
    machines, traffic = settings.fleet, settings.traffic
    workload = load(args) if args.trace else traffic.workload(settings.block_tokens)

    def arrivals() -> ArrivalTimes:
        return AsRecorded(workload) if args.trace else Conversations(traffic, args.seed)

    done = simulate(machines, parts, workload, arrivals())
    if machines.tiers and machines.reuse and not args.no_baseline:
        alone = replace(machines, tiers={})
        baseline = simulate(alone, parts, workload, arrivals(), "simulating without kvdepot")
        done = replace(done, baseline=baseline)
    name = args.trace.name if args.trace else f"{args.workload}, {traffic.users} users"
    notes = list(overloads(done))
    report = fleet_report(name, done, notes)
    if args.report is not None:
        write_page(args.report, report.html(origin(args.typed)))
    speed = f"{done.findings.block_events / done.elapsed_s:,.0f} block events a second"
    return Answer(fleet_document(done, notes), report.text(), notes=[*notes, speed])


def sim_settings(args: argparse.Namespace, parts: Parts) -> SimSettings:
    policies = args.policy or ["default"]
    if len(policies) > 1 or policies[0] in ("all", OPTIMAL):
        raise ConfigError("--policy", "one real policy, unless --hits-only is given")
    overrides: dict[str, Any] = dict(parse_settings(args.set, "fleet.gpu=h200"))
    if args.trace and any(name.partition(".")[0] == "traffic" for name in overrides):
        raise ConfigError("--set traffic", "has no effect with --trace", hint="leave it out")
    given = {
        "fleet.model": args.model,
        "fleet.nodes": args.nodes,
        "fleet.copies": args.copies,
        "traffic.users": args.users,
        "traffic.turns": args.turns,
        "traffic.qps": args.qps,
        "fleet.tiers": parse_tiers(args.tiers, parts) if args.tiers else None,
        "fleet.policy": policies[0],
        "fleet.seed": args.seed,
    }
    overrides |= {name: value for name, value in given.items() if value is not None}
    settings = load_tree(SimSettings, prefix="", env={}, overrides=overrides)
    check_numbers(settings, may_be_zero=_MAY_BE_ZERO)
    return settings


def simulate(
    machines: Machines,
    parts: Parts,
    workload: Workload,
    arrivals: ArrivalTimes,
    label: str = "simulating",
) -> Simulation:
    started_s = time.perf_counter()
    with output.Progress(label, total=len(workload)) as line:
        fleet = SimulatedFleet(fleet_of(machines, parts, workload.block_tokens), workload)
        findings = fleet.run(arrivals, line.reach)
    if findings.refused and not findings.served:
        raise ConfigError(
            "GPU memory",
            f"none of the {findings.refused:,} requests fits: prompts and answers are longer than "
            "the space that the weights leave",
            hint="use more GPUs for a copy (--set fleet.tp=N), or GPUs with more memory",
        )
    elapsed_s = time.perf_counter() - started_s
    return Simulation(machines, findings, bill_of(findings, machines, parts), elapsed_s)


def fleet_document(done: Simulation, notes: list[str]) -> dict[str, Any]:
    """Depends on the input and the seed alone, except for the last two fields."""
    findings, bill = done.findings, done.bill
    names = [HBM, *(flow.tier for flow in findings.tiers)]
    return {
        **compared_figures(done),
        "refused": findings.refused,
        "fetch_s": findings.fetch,
        "tokens_asked": findings.tokens_asked,
        "tokens_answered": findings.tokens_answered,
        "token_hit_ratio_by_tier": {name: findings.hit_ratio(name) for name in names},
        "tiers": findings.tiers,
        "gpu_prefill_busy": findings.gpu_prefill_busy,
        "gpu_power_w": bill.gpu_power_w,
        "writes_bytes_per_day": bill.writes_bytes_per_day,
        "price": bill.cost.price,
        "power_w": bill.cost.power_w,
        "baseline": compared_figures(done.baseline) if done.baseline else None,
        "notes": notes,
        "block_events": findings.block_events,
        "elapsed_s": done.elapsed_s,
        "block_events_per_s": findings.block_events / done.elapsed_s,
    }


def compared_figures(done: Simulation) -> dict[str, Any]:
    """The figures that are compared with the run without kvdepot."""
    findings = done.findings
    return {
        "requests": len(findings.served),
        "duration_s": findings.duration_s,
        "ttft_s": findings.ttft,
        "end_to_end_s": findings.end_to_end,
        "token_hit_ratio": findings.hit_ratio(),
        "gpu_busy": findings.gpu_busy,
        "gpu_energy_kwh": done.bill.gpu_energy_kwh,
        "cost_per_million_tokens": done.bill.cost.per_million_tokens,
    }


def overloads(done: Simulation) -> Iterator[str]:
    """GPUs and tiers that cannot keep up: the times are then those of a queue."""
    findings = done.findings
    if done.baseline is not None and done.baseline.findings.gpu_busy > BUSY:
        busy = done.baseline.findings.gpu_busy
        yield (
            f"overloaded: without kvdepot the GPUs are busy {busy:.0%} of the time, so the times "
            "are those of a queue, which grow with the length of the run"
        )
    if findings.gpu_busy > BUSY:
        yield (
            f"overloaded: the GPUs are busy {findings.gpu_busy:.0%} of the time, so the times are "
            "those of a queue; use fewer requests a second, or more GPUs"
        )
    for flow in findings.tiers:
        if flow.write_busy + flow.read_busy > BUSY:
            yield (
                f"overloaded: {flow.tier} reads {flow.read_busy:.0%} and writes "
                f"{flow.write_busy:.0%} of the time; blocks that wait to be written count as "
                "written; use more units, or fleet.write_backlog"
            )


def fleet_report(name: str, done: Simulation, notes: Sequence[str]) -> Report:
    findings, machines = done.findings, done.machines
    lead = (
        f"{machines.model}, {format_count(machines.nodes, 'node')} with {machines.copies} × "
        f"{machines.tp} {machines.gpu}; {format_count(len(findings.served), 'request')} in "
        f"{findings.duration_s:,.0f} simulated seconds"
    )
    lead += f"; {findings.refused:,} refused, too long for GPU memory" if findings.refused else ""
    sections = [
        Section("Times", [times_table(findings)]),
        Section("Tiers", [tiers_table(done)]),
        Section("In all", [compared_table(done)], BASELINE_CAPTION),
    ]
    if notes:
        sections.insert(0, Section("Notes", notes, page_only=True))
    if findings.served:
        sections.append(Section("Time to first token", [ttft_chart(findings)], page_only=True))
    return Report(f"kvdepot sim: {name}", lead, sections)


def times_table(findings: Findings) -> Table:
    spreads = {
        "time to first token": findings.ttft,
        "end to end": findings.end_to_end,
        "fetch": findings.fetch,
    }
    rows = [
        (name, *(f"{value:.4f}" for value in (spread.mean, spread.p50, spread.p95, spread.p99)))
        for name, spread in spreads.items()
        if spread is not None
    ]
    return Table(("seconds", "mean", "p50", "p95", "p99"), rows)


def tiers_table(done: Simulation) -> Table:
    found = done.findings
    rows = [[HBM, f"{found.hit_ratio(HBM):.4f}", "", "", "", "", ""]]
    for flow in found.tiers:
        rows.append(
            [
                flow.tier,
                f"{found.hit_ratio(flow.tier):.4f}",
                format_decimal_bytes(flow.bytes_read),
                format_decimal_bytes(flow.bytes_written),
                f"{flow.read_busy:.1%}",
                f"{flow.write_busy:.1%}",
                format_decimal_bytes(done.bill.writes_bytes_per_day[flow.tier]),
            ]
        )
    heads = ("tier", "token hits", "read", "written", "reads busy", "writes busy", "written a day")
    return Table(heads, rows)


def compared_table(done: Simulation) -> Table:
    """The figures of the run, and of the run without kvdepot."""

    def values(one: Simulation) -> list[float | None]:
        ttft = one.findings.ttft
        return [
            ttft.mean if ttft is not None else None,
            ttft.p95 if ttft is not None else None,
            one.findings.hit_ratio(),
            one.findings.gpu_busy,
            one.bill.gpu_power_w,
            one.bill.gpu_energy_kwh,
            one.bill.cost.per_million_tokens,
        ]

    def cells(name: str, row: Sequence[float | None], form: str) -> list[str]:
        return [name, *("-" if value is None else format(value, form) for value in row)]

    with_depot = values(done)
    rows = [cells("with", with_depot, ".4g")]
    if done.baseline is not None:
        without = values(done.baseline)
        saved = [
            1 - value / base if value is not None and base else None
            for value, base in zip(with_depot, without, strict=True)
        ]
        saved[2] = None  # more hits are no saving by themselves
        rows = [cells("without kvdepot", without, ".4g"), *rows, cells("saved", saved, ".1%")]
    heads = ("", "first token, mean s", "p95 s", "token hits", "GPUs busy", "W a GPU", "kWh")
    return Table((*heads, "USD a million tokens"), rows)


def ttft_chart(findings: Findings) -> Bars:
    times = np.array([one.ttft_s for one in findings.served])
    most = max(float(np.percentile(times, 99)), 1e-9)
    counted, edges = np.histogram(np.minimum(times, most), bins=CLASSES, range=(0.0, most))
    names = [*(f"{edge:.3g} s" for edge in edges[1:-1].tolist()), "later"]
    series = [Series("requests", "with", [float(number) for number in counted.tolist()])]
    return Bars("requests by time to first token", "requests", names, series)


COMMAND = Command(
    more="Runs the index and eviction code of the store against a fleet of GPUs and tiers under a "
    "simulated clock, or with --hits-only against tiers of given sizes, without times. See "
    "docs/simulator.md.",
    options=f"""
    --trace FILE              the requests of a trace [not with: --workload]
    --workload multi-turn     users who each ask several questions
    --report FILE             also write an HTML page
    --hits-only               count hits, without times [needs: --trace]
    --capacity TIER=TOKENS    dram=3Mtok[,ssd=50Mtok], or inf [repeat] [needs: --hits-only]
    --policy {"|".join(POLICIES)}|all    which blocks are evicted first (default: default); with
                              --hits-only also all, and several [repeat]
    --model NAME|FILE         a well-known model or a config.json (default: {Machines().model})
                              [not with: --hits-only]
    --nodes N                 nodes of the fleet (default: 1) [not with: --hits-only]
    --copies N                copies of the model on a node (default: 1) [not with: --hits-only]
    --tiers TIER=AMOUNT,…     sizes, or units of the parts list: dram=512GB,ssd=4,hdd=12; hdd and
                              object are shared by all nodes [not with: --hits-only]
    --parts FILE              a parts list to use instead of the shipped one
                              [not with: --hits-only]
    --no-baseline             do not simulate the same without kvdepot [needs: --tiers]
    --set NAME=VALUE          another setting of the fleet or its traffic, such as fleet.gpu=h200
                              or traffic.answer_tokens=500 [repeat] [not with: --hits-only]
    --users N                 users at the same time (default: {MultiTurn().users})
                              [needs: --workload]
    --turns N                 questions of a user (default: {MultiTurn().turns})
                              [needs: --workload]
    --qps RATE                questions a second, of all users (default: {MultiTurn().qps:g})
                              [needs: --workload]
    --bad-lines stop|skip     at a line of the trace that cannot be used [default: stop]
                              [needs: --trace]
    --session-gap TIME        mean time between starts of sessions, for traces without start
                              times [default: {GAP_S:g}s] [needs: --trace]
    --merge N                 make one block of N blocks, for traces of sessions [default: 1]
                              [needs: --trace]
    --seed SEED               for random gaps and routes [default: 0]
    """,
    run=run,
    kinds={"RATE": positive, "SEED": int},
)
