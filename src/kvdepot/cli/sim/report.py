"""A simulation for people: tables for the terminal, and pages with charts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.cli.report.charts import COLOURS, Bars, Curve, Curves, Point, Series
from kvdepot.cli.report.page import Origin, page, paragraph, section, tiles
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_decimal_bytes
from kvdepot.planner.simulation import Bill, Machines
from kvdepot.sim.hits_only import Case, HitCounts
from kvdepot.sim.results import BINS, Findings
from kvdepot.sim.worker import HBM
from kvdepot.sim.workload import Workload

_CLASSES: Final = 14
"""Of the chart of first tokens; times in equal steps up to the 99th percentile."""
_PARTS: Final = 12
"""Of the charts over time."""
BASELINE_CAPTION: Final = (
    "The same requests at the same times on the same GPUs, without any tier: what GPU memory still "
    "has is reused, everything else is computed."
)
NOTHING_KEPT: Final = "Without a store nothing is kept, and the hit ratio is 0."


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run, and the one that it is compared with."""

    machines: Machines
    findings: Findings
    bill: Bill
    elapsed_s: float
    baseline: "Simulation | None" = None
    """The same without kvdepot: no tiers, what GPU memory still has is reused."""


def times_table(found: Findings) -> Table:
    spreads = {"time to first token": found.ttft, "end to end": found.end_to_end}
    rows = [
        (name, *(f"{value:.4f}" for value in (spread.mean, spread.p50, spread.p95, spread.p99)))
        for name, spread in {**spreads, "fetch": found.fetch}.items()
        if spread is not None
    ]
    return Table(("seconds", "mean", "p50", "p95", "p99"), rows)


def tiers_table(found: Findings, bill: Bill) -> Table:
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
                format_decimal_bytes(bill.writes_bytes_per_day[flow.tier]),
            ]
        )
    heads = ("tier", "token hits", "read", "written", "reads busy", "writes busy", "written a day")
    return Table(heads, rows)


def baseline_table(done: Simulation, baseline: Simulation) -> Table:
    """The run beside the one without kvdepot."""

    def cells(one: Simulation) -> list[float | None]:
        ttft = one.findings.ttft
        return [
            ttft.mean if ttft is not None else None,
            ttft.p95 if ttft is not None else None,
            one.findings.hit_ratio(),
            one.findings.gpu_busy,
            one.bill.gpu_energy_kwh,
            one.bill.cost.per_million_tokens,
        ]

    with_depot, without = cells(done), cells(baseline)
    saved = [
        1 - mine / its if mine is not None and its else None
        for mine, its in zip(with_depot, without, strict=True)
    ]
    saved[2] = None  # a hit ratio is not saved
    raw = [["without kvdepot", *without], ["with", *with_depot], ["saved", *saved]]
    shown = [
        [name, *("-" if one is None else f"{one:.4g}" for one in row)]
        for name, row in (("without kvdepot", without), ("with", with_depot))
    ]
    shown.append(["saved", *("-" if one is None else f"{one:.1%}" for one in saved)])
    heads = ("", "first token, mean s", "p95 s", "token hits", "GPUs busy", "kWh")
    return Table((*heads, "USD a million tokens"), shown, raw=raw)


def fleet_page(name: str, done: Simulation, notes: Sequence[str], origin: Origin) -> str:
    found, bill, machines = done.findings, done.bill, done.machines
    lead = (
        f"{machines.model}, {machines.nodes} nodes with {machines.workers_per_node} copies on "
        f"{machines.tp} {machines.gpu} each; {len(found.served):,} requests in "
        f"{found.duration_s:,.0f} simulated seconds."
    )
    parts = [_tiles(found, bill), *(paragraph(note) for note in notes)]
    if done.baseline is not None:
        compared = baseline_table(done, done.baseline)
        parts.append(section("Beside no kvdepot", compared, caption=BASELINE_CAPTION))
    parts += [
        section("Times", times_table(found)),
        section("Tiers", tiers_table(found, bill)),
    ]
    if found.served:
        came = "Tokens of prompts over time of arrival."
        parts += [
            section("Time to the first token", _ttft_chart(found), caption="Requests by time."),
            section("Where prompts came from", _hits_chart(found), caption=came),
        ]
    rates = "Bytes a second over time, all nodes together."
    parts += [section(words, chart, caption=rates) for words, chart in _flow_charts(found)]
    return page(f"kvdepot sim: {name}", lead, parts, origin=origin)


def hits_page(
    name: str, workload: Workload, played: list[tuple[Case, HitCounts]], origin: Origin
) -> str:
    curves: dict[str, list[Point]] = {}
    for case, counts in played:
        tokens = case.capacity.total_tokens
        size = float(tokens or workload.block_count * workload.block_tokens)
        tip = f"{case.policy}, {_millions(size)} tokens: {counts.token_hit_ratio:.4f}"
        curves.setdefault(case.policy, []).append(Point(size, counts.token_hit_ratio, tip))
    chart = Curves(
        title=f"token hit ratio of {name}",
        x_unit="capacity in tokens",
        y_unit="hit ratio",
        curves=[
            Curve(policy, f"c{number % COLOURS}", sorted(points, key=lambda point: point.x))
            for number, (policy, points) in enumerate(curves.items())
        ],
        x_label=_millions,
    )
    lead = (
        f"Tokens found over tokens asked for, {len(workload):,} requests, blocks of "
        f"{workload.block_tokens} tokens."
    )
    parts = [section("Hit ratio by capacity", chart, caption=NOTHING_KEPT)]
    return page(f"kvdepot sim: {name}", lead, parts, origin=origin)


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:g}M"


def _tiles(found: Findings, bill: Bill) -> str:
    numbers = [
        (f"{found.hit_ratio():.1%}", "of prompt tokens were not computed"),
        (f"{found.gpu_busy:.1%}", f"of GPU time busy, {bill.gpu_power_w:.0f} W a GPU"),
        (f"{bill.cost.per_million_tokens:.3g} USD", "for a million tokens"),
    ]
    if found.ttft is not None:
        numbers.insert(0, (f"{found.ttft.p95:.3g} s", "95 of 100 first tokens come within"))
    for tier, nbytes in bill.writes_bytes_per_day.items():
        numbers.append((format_decimal_bytes(nbytes), f"a day written to {tier}"))
    return tiles(numbers)


def _ttft_chart(found: Findings) -> Bars:
    times = np.array([one.ttft_s for one in found.served])
    most = max(float(np.percentile(times, 99)), 1e-9)
    counts, edges = np.histogram(np.minimum(times, most), bins=_CLASSES, range=(0.0, most))
    names = [f"{edge:.3g} s" for edge in edges[1:].tolist()]
    names[-1] = "later"
    series = Series("requests", "with", [float(count) for count in counts.tolist()])
    return Bars("requests by time to first token", "requests", names, [series])


def _hits_chart(found: Findings) -> Bars:
    end_s = max(one.arrival_s for one in found.served) or 1.0
    names = [HBM, *(flow.tier for flow in found.tiers), "computed"]
    sums = np.zeros((len(names), _PARTS))
    for one in found.served:
        at = min(_PARTS - 1, int(one.arrival_s / end_s * _PARTS))
        for number, name in enumerate(names[:-1]):
            sums[number, at] += one.hits.get(name, 0)
        sums[-1, at] += one.computed_tokens
    series = [
        Series(name, "memory" if name == HBM else name, row)
        for name, row in zip(names, sums.tolist(), strict=True)
    ]
    title = "tokens by where they came from"
    return Bars(title, "tokens", _part_ends(end_s), series, stacked=True)


def _flow_charts(found: Findings) -> Iterator[tuple[str, Bars]]:
    for flow in found.tiers:
        read, written = (
            np.array(rates).reshape(_PARTS, BINS // _PARTS).mean(axis=1).tolist()
            for rates in (flow.read_bytes_per_s, flow.written_bytes_per_s)
        )
        series = [
            Series("read", flow.tier, [rate / 1e9 for rate in read], _gigabytes),
            Series("written", "without", [rate / 1e9 for rate in written], _gigabytes),
        ]
        chart = Bars(f"{flow.tier} over time", "GB/s", _part_ends(found.duration_s), series)
        yield f"Tier {flow.tier}", chart


def _gigabytes(rate: float) -> str:
    return f"{rate:.3g}"


def _part_ends(end_s: float) -> list[str]:
    return [f"{(part + 1) * end_s / _PARTS:,.0f} s" for part in range(_PARTS)]
