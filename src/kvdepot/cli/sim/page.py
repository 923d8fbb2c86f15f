"""A page about a simulation: one file that needs nothing else."""

from html import escape
from typing import Final

import numpy as np

from kvdepot.cli.report.page import section, table, tile, whole
from kvdepot.cli.report.svg import Bars, Series
from kvdepot.core.units import format_decimal_bytes
from kvdepot.planner.simulation import Bill, Machines
from kvdepot.sim.results import BINS, Findings, Spread
from kvdepot.sim.worker import HBM

_CLASSES: Final = 14
"""Of the plot of first tokens; times in equal steps up to the 99th percentile."""
_PARTS: Final = 12
"""Of the plots over time."""


def render(name: str, found: Findings, bill: Bill, machines: Machines) -> str:
    """What a simulation found out, with plots."""
    title = f"kvdepot sim: {name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(machines.model)}, {machines.nodes} nodes with '
        f"{machines.workers_per_node} copies on {machines.tp} {escape(machines.gpu)} each; "
        f"{len(found.served):,} requests in {found.duration_s:,.0f} simulated seconds.</p>",
        _tiles(found, bill),
        table(["seconds", "mean", "p50", "p95", "p99"], _times(found)),
    ]
    if found.served:
        parts += section("Time to the first token", "Requests by their time.", _ttft_plot(found))
        parts += section(
            "Where prompts came from", "Tokens of prompts over time of arrival.", _hits_plot(found)
        )
    for words, rates in _flows(found):
        parts += section(words, "Bytes a second over time, all nodes together.", rates)
    return whole(title, "\n".join(parts))


def _tiles(found: Findings, bill: Bill) -> str:
    tiles = [
        tile(f"{found.hit_ratio():.1%}", "of prompt tokens were not computed"),
        tile(f"{found.gpu_busy:.1%}", f"of GPU time busy, {bill.gpu_power_w:.0f} W a GPU"),
        tile(f"{bill.cost.per_million_tokens:.3g} USD", "for a million tokens"),
    ]
    if found.ttft is not None:
        tiles.insert(0, tile(f"{found.ttft.p95:.3g} s", "95 of 100 first tokens come within"))
    for tier, nbytes in bill.writes_bytes_per_day.items():
        tiles.append(tile(format_decimal_bytes(nbytes), f"a day written to {tier}"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _times(found: Findings) -> list[list[str]]:
    rows = [("time to first token", found.ttft), ("end to end", found.end_to_end)]
    rows.append(("fetch", found.fetch))
    return [[words, *_cells(spread)] for words, spread in rows if spread is not None]


def _cells(spread: Spread) -> list[str]:
    return [f"{value:.3f}" for value in (spread.mean, spread.p50, spread.p95, spread.p99)]


def _ttft_plot(found: Findings) -> str:
    times = np.array([one.ttft_s for one in found.served])
    most = max(float(np.percentile(times, 99)), 1e-9)
    counts, edges = np.histogram(np.minimum(times, most), bins=_CLASSES, range=(0.0, most))
    names = [f"{edge:.3g} s" for edge in edges[1:].tolist()]
    names[-1] = "later"
    series = Series("requests", "with", [float(count) for count in counts.tolist()])
    return Bars("requests by time to first token", "requests", names, [series]).draw()


def _hits_plot(found: Findings) -> str:
    end_s = max(one.arrival_s for one in found.served) or 1.0
    names = [HBM, *(flow.tier for flow in found.tiers), "computed"]
    sums = np.zeros((len(names), _PARTS))
    for one in found.served:
        at = min(_PARTS - 1, int(one.arrival_s / end_s * _PARTS))
        for number, name in enumerate(names[:-1]):
            sums[number, at] += one.hits.get(name, 0)
        sums[-1, at] += one.computed_tokens
    styles = {HBM: "memory"}
    series = [
        Series(name, styles.get(name, name), row)
        for name, row in zip(names, sums.tolist(), strict=True)
    ]
    labels = [f"{(part + 1) * end_s / _PARTS:,.0f} s" for part in range(_PARTS)]
    return Bars("tokens by where they came from", "tokens", labels, series, stacked=True).draw()


def _flows(found: Findings) -> list[tuple[str, str]]:
    plots = []
    fold = BINS // _PARTS
    labels = [f"{(part + 1) * found.duration_s / _PARTS:,.0f} s" for part in range(_PARTS)]
    for flow in found.tiers:
        read, written = (
            np.array(rates).reshape(_PARTS, fold).mean(axis=1).tolist()
            for rates in (flow.read_bytes_per_s, flow.written_bytes_per_s)
        )
        series = [
            Series("read", flow.tier, [rate / 1e9 for rate in read]),
            Series("written", "without", [rate / 1e9 for rate in written]),
        ]
        plot = Bars(f"{flow.tier} over time", "GB/s", labels, series).draw()
        plots.append((f"Tier {flow.tier}", plot))
    return plots
