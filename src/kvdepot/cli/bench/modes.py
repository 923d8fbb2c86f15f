"""`kvdepot bench modes`: write modes and eviction orders, emulated: a table, JSON and a page."""

import argparse
import datetime
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kvdepot.bench import hybrid, modes
from kvdepot.bench.bars import MODES_OF_BEST, MODES_OF_LRU
from kvdepot.bench.modes import Cell, ModesPlan, Size
from kvdepot.bench.returns import HABITS
from kvdepot.bench.rounds import Figure
from kvdepot.cli import output
from kvdepot.cli.report.page import section, table, whole
from kvdepot.cli.report.svg import Bars, Series

QUICK: Final = Size(users=80, requests=40, habits=HABITS[:1])
NEEDED_BYTES: Final = 1 << 30
HEADS: Final = (
    "users", "write mode", "eviction", "dram", "ssd", "hdd", "hits",
    "SSD written MB", "per byte read", "TTFT ms", "thrashed",
)  # fmt: skip
_ABOUT: Final = (
    "Emulated drives as fast as {ssds} SSDs and {hdds} hard drives, sizes a {scale}th, time "
    "{haste} times faster. {users} users, {requests} requests, of which the first half is not "
    "counted. The SSDs hold a tenth of their blocks, memory a quarter of that, the hard drives "
    "{hdd:.0%}. TTFT: fetching as measured, times {haste}, and computing what was missed or is "
    "new at {prefill_us:.1f} us a token, which was not run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(args: argparse.Namespace, directory: Path) -> tuple[list[Cell], Size]:
    """Play every cell of the table in `directory`."""
    size = QUICK if args.quick else Size()
    plan = ModesPlan(directory, size)
    cells = []
    with output.Progress("measuring", len(plan.cells())) as progress:
        for habit, way, order in plan.cells():
            progress.label = f"{habit.name} users, {way.name}, {order}"
            progress.advance(0)
            cells.append(plan.play(habit, way, order))
            progress.advance()
    return cells, size


def about(size: Size) -> str:
    """How the figures came about."""
    return _ABOUT.format(
        ssds=hybrid.SSDS,
        hdds=hybrid.HDDS,
        scale=modes.SCALE,
        haste=modes.HASTE,
        users=size.users,
        requests=size.users + size.requests,
        hdd=modes.HDD_SHARE,
        prefill_us=modes.PREFILL_S_PER_TOKEN * 1e6,
    )


def document(cells: Sequence[Cell], size: Size) -> dict[str, Any]:
    """What `--json` prints, besides the machine."""
    return {
        "emulated": True,
        "about": about(size),
        "modes": [output.plain(way) for way in modes.MODES],
        "users": [output.plain(habit) for habit in size.habits],
        "cells": [
            {
                **output.plain(cell),
                "hit_ratio": cell.hit_ratio,
                "fast_ratio": cell.fast_ratio,
                "ssd_written_per_read": cell.written_per_read,
            }
            for cell in cells
        ],
        "figures": [{**output.plain(figure), "ok": figure.ok} for figure in figures(cells)],
    }


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """The default order beside the best one and beside LRU."""
    found: list[Figure] = []
    measures: dict[str, Callable[[Cell], float]] = {
        "hits": lambda cell: cell.hit_ratio,
        "hits in memory and SSDs": lambda cell: cell.fast_ratio,
    }
    for (habit, mode), group in groupby(cells, lambda cell: (cell.habit, cell.mode)):
        by_order = {cell.order: cell for cell in group}
        for what, measure in measures.items():
            ours = measure(by_order["default"])
            best = max(by_order.values(), key=measure)
            for name, other, bar in (
                (f"the best, {best.order}", best, MODES_OF_BEST),
                ("lru", by_order["lru"], MODES_OF_LRU),
            ):
                ratio = ours / measure(other) if measure(other) else 1.0
                label = f"{habit} users, {mode}: {what}, of {name}"
                found.append(Figure(label, ratio, "×", ratio, ratio, bar, bar_is_least=True))
    return found


def words(cells: Sequence[Cell]) -> str:
    """The table, for a terminal."""
    return output.table(HEADS, [_row(cell) for cell in cells])


def _row(cell: Cell) -> list[str]:
    per_read = cell.written_per_read
    return [
        cell.habit,
        cell.mode,
        cell.order,
        *(f"{cell.hits[tier]:.3f}" for tier in ("dram", "ssd", "hdd")),
        f"{cell.hit_ratio:.3f}",
        f"{cell.ssd_written_bytes / 1e6:.0f}",
        "" if per_read is None else f"{per_read:.2f}",
        f"{cell.ttft_s * 1e3:.0f}",
        "yes" if cell.thrashed else "",
    ]


def page(cells: Sequence[Cell], size: Size) -> str:
    """A plot of hits and one of wear for each mode, and the table."""
    title = "kvdepot: write modes and eviction orders (emulated drives)"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [f"<h1>{escape(title)}</h1>"]
    parts.append(f'<p class="lead">{escape(about(size))} {date}, kvdepot bench modes --html.</p>')
    for habit, group in groupby(cells, lambda cell: cell.habit):
        some = list(group)
        parts += section(f"{habit} users", "Where their blocks came from.", _hits_plot(some))
        parts += section("Their wear", "Written to the SSDs.", _wear_plot(some))
    parts.append(table(HEADS, [_row(cell) for cell in cells]))
    return whole(title, "\n".join(parts))


def _hits_plot(cells: Sequence[Cell]) -> str:
    styles = {"dram": "with", "ssd": "ssd", "hdd": "without"}
    series = [
        Series(tier, style, [cell.hits[tier] for cell in cells], lambda value: f"{value:.1%}")
        for tier, style in styles.items()
    ]
    return Bars("Hits by tier", "", _names(cells), series, stacked=True).draw()


def _wear_plot(cells: Sequence[Cell]) -> str:
    megabytes = [cell.ssd_written_bytes / 1e6 for cell in cells]
    series = [Series("written to SSDs", "ssd", megabytes, lambda value: f"{value:.0f} MB")]
    return Bars("SSD writes", "MB", _names(cells), series).draw()


def _names(cells: Sequence[Cell]) -> list[str]:
    return [f"{cell.order}\n{cell.mode}" for cell in cells]
