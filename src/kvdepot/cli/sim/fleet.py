"""`kvdepot sim` with times: a fleet under a simulated clock."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.directories import write_page
from kvdepot.cli.report.page import Origin
from kvdepot.cli.report.tables import Table
from kvdepot.cli.sim.report import Simulation, baseline_table, fleet_page, tiers_table, times_table
from kvdepot.core.units import format_count
from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import existing_codec
from kvdepot.planner.parts import Parts, load_parts
from kvdepot.planner.simulation import SHARED, Machines, bill_of, fleet_of, parse_tiers
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.arrivals import ArrivalTimes, AsRecorded, Conversations, MultiTurn
from kvdepot.sim.fleet import ROUTES, SAMPLES, Interval, SimulatedFleet, interval_of, part_of
from kvdepot.sim.hits_only import OPTIMAL
from kvdepot.sim.worker import HBM
from kvdepot.sim.workload import Workload

_TALKS: Final = MultiTurn()
Load = Callable[[argparse.Namespace], Workload]
OPTIONS: Final = (
    "report",
    "model",
    "gpu",
    "tp",
    "nodes",
    "copies",
    "tiers",
    "parts",
    "codec",
    "write",
    "backlog",
    "route",
    "prefill",
    "chunk",
    "recompute",
    "fetch_all",
    "no_hbm_reuse",
    "no_baseline",
    "speed",
)
"""Of a fleet: without effect where hits only are counted."""
TALK_OPTIONS: Final = (
    "users",
    "turns",
    "system_tokens",
    "history_tokens",
    "question_tokens",
    "answer_tokens",
    "qps",
    "think",
    "poisson",
    "block_tokens",
    "sample",
)
"""Of --workload multi-turn."""
BUSY: Final = 0.95
"""A part that is busy for more of the time than this is what the others wait for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with plots here")
    fleet = parser.add_argument_group("the fleet (not with --hits-only)")
    machines = Machines()
    fleet.add_argument("--model", default=machines.model, metavar="NAME|FILE")
    fleet.add_argument("--gpu", default=machines.gpu, metavar="NAME", help="of the parts list")
    fleet.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs for one copy")
    fleet.add_argument("--nodes", type=int, default=1, metavar="N")
    fleet.add_argument(
        "--copies", type=int, default=1, metavar="N", help="copies of the model on a node"
    )
    fleet.add_argument(
        "--tiers",
        metavar="TIER=AMOUNT",
        help="dram=512GB,ssd=4,hdd=12: a size, or units of the parts list; hdd and object are "
        "shared by all nodes",
    )
    fleet.add_argument("--parts", type=Path, metavar="FILE", help="what the tiers and GPUs can do")
    fleet.add_argument("--codec", default="raw", metavar="NAME|RATIO", help="see kvdepot size")
    fleet.add_argument("--write", choices=["through", "back"], default="through")
    fleet.add_argument(
        "--backlog", type=float, default=inf, metavar="S", help="drop writes that wait for longer"
    )
    fleet.add_argument("--route", choices=ROUTES, default="prefix", help="which copy gets what")
    fleet.add_argument(
        "--prefill",
        metavar="STEP,TOKEN,PAIR",
        help="measured seconds of a step, of a token and of a pair of tokens that attend",
    )
    fleet.add_argument("--chunk", type=int, default=2048, metavar="N", help="tokens of a step")
    fleet.add_argument("--recompute", action="store_true", help="nothing is kept or reused")
    fleet.add_argument(
        "--fetch-all", action="store_true", help="fetch also what is computed sooner"
    )
    fleet.add_argument(
        "--no-hbm-reuse", action="store_true", help="GPU memory keeps running requests only"
    )
    fleet.add_argument(
        "--no-baseline", action="store_true", help="do not simulate it without kvdepot as well"
    )
    fleet.add_argument("--speed", type=float, default=1.0, metavar="N", help="of a trace's clock")
    _add_talks(parser)


def _add_talks(parser: argparse.ArgumentParser) -> None:
    talks = parser.add_argument_group("--workload multi-turn")
    talks.add_argument("--users", type=int, default=_TALKS.users, metavar="N")
    talks.add_argument("--turns", type=int, default=_TALKS.turns, metavar="N")
    for name in ("system", "history", "question", "answer"):
        tokens = getattr(_TALKS, f"{name}_tokens")
        talks.add_argument(f"--{name}-tokens", type=int, default=tokens, metavar="N")
    talks.add_argument(
        "--qps", type=float, default=_TALKS.qps, metavar="N", help="questions a second, of all"
    )
    talks.add_argument("--think", type=float, default=0.0, metavar="S", help="least pause")
    talks.add_argument("--poisson", action="store_true", help="exponential gaps")
    talks.add_argument("--block-tokens", type=int, default=256, metavar="N")
    talks.add_argument(
        "--sample",
        type=float,
        metavar="SHARE",
        help=f"simulate this share of users and nodes, {SAMPLES} times, and say how sure that is",
    )


def run(args: argparse.Namespace, load: Load) -> int:
    parts = load_parts(args.parts)
    machines = machines_of(args, parts)
    if args.sample is not None:
        return _sampled(args, machines, parts)
    if args.trace is not None:
        workload = load(args)
        if not 0 < args.speed < inf:
            raise ConfigError("--speed", "should be above 0")

        def arrivals() -> ArrivalTimes:
            return AsRecorded(workload, args.speed)
    else:
        talks = talks_of(args)
        workload = talks.workload(args.block_tokens)

        def arrivals() -> ArrivalTimes:
            return Conversations(talks, args.seed)

    done = simulate(machines, parts, workload, arrivals())
    if machines.tiers and machines.reuse and not args.no_baseline:
        alone = replace(machines, tiers={})
        baseline = simulate(alone, parts, workload, arrivals(), "simulating without kvdepot")
        done = replace(done, baseline=baseline)
    if args.report is not None:
        title = args.trace.name if args.trace else f"{args.workload}, {args.users} users"
        origin = Origin.of(args.typed)
        page = fleet_page(title, done, notes(done), origin)
        write_page(args.report, page)
    if args.json:
        output.document(as_dict(done))
    else:
        show(done)
    return 0


def machines_of(args: argparse.Namespace, parts: Parts) -> Machines:
    policies = args.policy or ["default"]
    if len(policies) > 1 or policies[0] in ("all", OPTIMAL):
        raise ConfigError("--policy", "one real order, where times are simulated")
    if min(args.tp, args.nodes, args.copies, args.chunk, args.block_tokens) < 1:
        raise ConfigError("--tp, --nodes, --copies, --chunk, --block-tokens", "should be above 0")
    if not args.backlog > 0:
        raise ConfigError("--backlog", "should be above 0")
    return Machines(
        model=args.model,
        gpu=args.gpu,
        tp=args.tp,
        nodes=args.nodes,
        workers_per_node=args.copies,
        tiers=parse_tiers(args.tiers, parts) if args.tiers else {},
        codec=existing_codec(args.codec),
        policy=policies[0],
        write_mode=args.write,
        route=args.route,
        reuse=not args.recompute,
        keeps_memory=not args.no_hbm_reuse,
        decides=not args.fetch_all,
        chunk_tokens=args.chunk,
        write_backlog_s=args.backlog,
        prefill=_pace(args.prefill),
        seed=args.seed,
    )


def _pace(text: str | None) -> PrefillPace | None:
    if text is None:
        return None
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if len(times) != 3 or not all(0 <= value < inf for value in times):
        hint = "--prefill 0.005,3.6e-5,1.2e-9"
        raise ConfigError("--prefill", f"{text!r} is not three times", hint=hint)
    return PrefillPace(*times)


def talks_of(args: argparse.Namespace) -> MultiTurn:
    return MultiTurn(
        users=args.users,
        turns=args.turns,
        system_tokens=args.system_tokens,
        history_tokens=args.history_tokens,
        question_tokens=args.question_tokens,
        answer_tokens=args.answer_tokens,
        qps=args.qps,
        think_s=args.think,
        poisson=args.poisson,
    )


def simulate(
    machines: Machines,
    parts: Parts,
    workload: Workload,
    arrivals: ArrivalTimes,
    words: str = "simulating",
) -> Simulation:
    started_s = time.perf_counter()
    with output.Progress(words, total=len(workload)) as line:
        fleet = SimulatedFleet(fleet_of(machines, parts, workload.block_tokens), workload)
        findings = fleet.run(arrivals, lambda done: line.advance(done - line.done))
    if findings.refused and not findings.served:
        raise ConfigError(
            "GPU memory",
            f"none of the {findings.refused:,} requests fits into it: the prompts and answers are "
            "longer than what it holds beside the weights",
            hint="more GPUs for a copy (--tp), another --gpu, or shorter prompts",
        )
    elapsed_s = time.perf_counter() - started_s
    return Simulation(machines, findings, bill_of(findings, machines, parts), elapsed_s)


def as_dict(done: Simulation) -> dict[str, Any]:
    """The JSON document; but for the last fields it depends on the input and the seed alone."""
    found, bill = done.findings, done.bill
    names = [HBM, *(flow.tier for flow in found.tiers)]
    return {
        "requests": len(found.served),
        "refused": found.refused,
        "duration_s": found.duration_s,
        "ttft_s": found.ttft,
        "end_to_end_s": found.end_to_end,
        "fetch_s": found.fetch,
        "tokens_asked": found.tokens_asked,
        "tokens_answered": found.tokens_answered,
        "token_hit_ratio": found.hit_ratio(),
        "token_hit_ratio_by_tier": {name: found.hit_ratio(name) for name in names},
        "tiers": found.tiers,
        "gpu_busy": found.gpu_busy,
        "gpu_prefill_busy": found.gpu_prefill_busy,
        "gpu_power_w": bill.gpu_power_w,
        "gpu_energy_kwh": bill.gpu_energy_kwh,
        "writes_bytes_per_day": bill.writes_bytes_per_day,
        "cost_per_million_tokens": bill.cost.per_million_tokens,
        "price": bill.cost.price,
        "power_w": bill.cost.power_w,
        "baseline": None if done.baseline is None else _baseline(done.baseline),
        "notes": notes(done),
        "block_events": found.block_events,
        "elapsed_s": done.elapsed_s,
        "block_events_per_s": found.block_events / done.elapsed_s,
    }


def _baseline(done: Simulation) -> dict[str, Any]:
    """The figures of the run without kvdepot that are compared."""
    found = done.findings
    return {
        "requests": len(found.served),
        "ttft_s": found.ttft,
        "end_to_end_s": found.end_to_end,
        "token_hit_ratio": found.hit_ratio(),
        "gpu_busy": found.gpu_busy,
        "gpu_energy_kwh": done.bill.gpu_energy_kwh,
        "cost_per_million_tokens": done.bill.cost.per_million_tokens,
        "duration_s": found.duration_s,
    }


def notes(done: Simulation) -> list[str]:
    """What a reader of the times should know: parts that cannot keep up."""
    told, found = [], done.findings
    if done.baseline is not None and done.baseline.findings.gpu_busy > BUSY:
        told.append(
            f"without kvdepot the GPUs are overloaded (busy {done.baseline.findings.gpu_busy:.0%}):"
            " its times are those of a queue, and grow with the length of the run"
        )
    if found.gpu_busy > BUSY:
        told.append(
            f"overloaded: the GPUs are busy {found.gpu_busy:.0%} of the time, so the times are "
            "those of a queue; fewer requests a second, or more GPUs"
        )
    for flow in found.tiers:
        if flow.write_busy + flow.read_busy > BUSY:
            told.append(
                f"overloaded: {flow.tier} reads {flow.read_busy:.0%} and writes "
                f"{flow.write_busy:.0%} of the time; what waits to be written counts as there; "
                "more units, or a --backlog"
            )
    return told


def show(done: Simulation) -> None:
    found, bill = done.findings, done.bill
    output.say(
        f"{format_count(len(found.served), 'request')} in {found.duration_s:,.0f} simulated seconds"
        + (f"; {found.refused:,} refused, too long for GPU memory" if found.refused else "")
    )
    output.data(f"{times_table(found).text()}\n\n{tiers_table(found, bill).text()}\n")
    if done.baseline is not None:
        output.data(f"{baseline_table(done, done.baseline).text()}\n")
    output.data(
        f"token hit ratio {found.hit_ratio():.4f}; GPUs busy {found.gpu_busy:.1%}, "
        f"{bill.gpu_power_w:.0f} W each, {bill.gpu_energy_kwh:.3g} kWh; "
        f"{bill.cost.per_million_tokens:.4g} USD for a million tokens"
    )
    for note in notes(done):
        output.say(note)
    speed = found.block_events / done.elapsed_s
    output.say(f"{found.block_events:,} block events in {done.elapsed_s:.1f} s, {speed:,.0f} a s")


def _sampled(args: argparse.Namespace, machines: Machines, parts: Parts) -> int:
    """Several samples of users and nodes, and how far they lie apart."""
    if args.workload is None:
        raise ConfigError("--sample", "needs --workload multi-turn")
    talks, part = part_of(talks_of(args), machines.nodes, args.sample, machines.route)
    shared = dict.fromkeys(SHARED, args.sample)
    tiers = {
        name: max(1, round(units * shared.get(name, 1.0)))
        for name, units in (machines.tiers or {}).items()
    }
    drawn = replace(talks, poisson=True)
    sides = [tiers] if args.no_baseline or not (tiers and machines.reuse) else [tiers, {}]
    found = []
    for held in sides:
        runs = []
        for number in range(SAMPLES):
            seed = args.seed + number
            sampled = replace(machines, nodes=part, tiers=held, seed=seed)
            workload = drawn.workload(args.block_tokens)
            runs.append(simulate(sampled, parts, workload, Conversations(drawn, seed)))
        found.append({name: interval_of(each) for name, each in _sampled_values(runs).items()})
    estimates, baseline = found[0], found[1] if len(found) > 1 else None
    facts = {"samples": SAMPLES, "users": talks.users, "nodes": part}
    if args.json:
        output.document({**facts, "estimates": estimates, "baseline": baseline})
        return 0
    output.say(f"{SAMPLES} samples of {talks.users:,} users on {part:,} nodes")
    heads = ["", "estimate", "95 % of the time within"]
    if baseline is not None:
        heads += ["without kvdepot", "within"]
    rows = [[name, *(cell for side in found for cell in _cells(side[name]))] for name in estimates]
    output.data(Table(heads, rows).text())
    return 0


def _cells(one: Interval) -> tuple[str, str]:
    return f"{one.mean:.4g}", f"± {one.error:.2g}"


def _sampled_values(runs: list[Simulation]) -> dict[str, list[float]]:
    spreads = [run.findings.ttft for run in runs]
    known = [spread for spread in spreads if spread is not None]
    return {
        "TTFT mean, s": [spread.mean for spread in known],
        "TTFT p95, s": [spread.p95 for spread in known],
        "token hit ratio": [run.findings.hit_ratio() for run in runs],
        "GPU busy": [run.findings.gpu_busy for run in runs],
        "USD for a million tokens": [run.bill.cost.per_million_tokens for run in runs],
    }
