"""`kvdepot bench hybrid`: hard drives behind SSDs, emulated: as a table, JSON and a page."""

import argparse
import datetime
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from kvdepot.bench import hybrid
from kvdepot.bench.bars import HYBRID_GAP, HYBRID_RETAINED, HYBRID_SCALING, HYBRID_SEQUENTIAL
from kvdepot.bench.hybrid import Hybrid, HybridPlan, Size
from kvdepot.bench.rounds import Figure
from kvdepot.cli import output
from kvdepot.cli.report.page import whole
from kvdepot.cli.report.svg import Bars, Series

QUICK: Final = Size(users=3, turns=5, retained_sessions=24)
NEEDED_BYTES: Final = 8 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(args: argparse.Namespace, directory: Path) -> tuple[Hybrid, Size]:
    """Play the experiment in `directory`."""
    size = QUICK if args.quick else Size()
    plan = HybridPlan(directory, size)
    steps = plan.steps()
    with output.Progress("measuring", len(steps)) as progress:
        for name, step in steps:
            progress.label = name
            progress.advance(0)
            step()
            progress.advance()
    if args.html is not None:
        args.html.write_text(page(plan.result, size), encoding="utf-8")
        output.say(f"wrote {args.html}")
    return plan.result, size


def document(result: Hybrid, size: Size) -> dict[str, Any]:
    """What `--json` prints, besides the machine."""
    return {
        "emulated": True,
        "gap_by_turns": result.gap_by_turns,
        "drive_scaling": result.drive_scaling,
        "sequential_ratio": result.sequential_ratio,
        "arrival_order_ratio": result.arrival_order_ratio,
        "retained_ratio": result.retained_ratio,
        "ttft_s_by_turn": result.ttft_by_turn,
        "setting": {
            "scale": hybrid.SCALE,
            "users": size.users,
            "turns": size.turns,
            "context_tokens": hybrid.TOKENS,
            "ssds": hybrid.SSDS,
            "hdds": hybrid.HDDS,
            "ssd_read_bytes_per_s": hybrid.SSD_BYTES_PER_S[0],
            "hdd_read_bytes_per_s": hybrid.HDD_BYTES_PER_S[0],
            "hdd_seek_s": hybrid.HDD_SEEK_S,
            "recompute": f"not run: {hybrid.PREFILL_S} s a prompt, one after the other",
        },
        "figures": [{**output.plain(figure), "ok": figure.ok} for figure in figures(result, size)],
    }


def figures(result: Hybrid, size: Size) -> list[Figure]:
    """The results beside what we want of them."""
    first, last = min(result.gap_by_turns), max(result.gap_by_turns)
    gap = result.gap_by_turns[last] / result.gap_by_turns[first]
    found = [
        _figure(f"gap to SSDs alone, {turns} turns", seconds, "s")
        for turns, seconds in result.gap_by_turns.items()
    ]
    judged = size.turns >= max(hybrid.TURNS)
    found.append(_figure(f"gap after {last} turns, of the first", gap, "×", HYBRID_GAP * judged))
    found += [
        _figure(f"first turn, {drives} hard drives", ratio, "×", HYBRID_SCALING[drives], least=True)
        for drives, ratio in result.drive_scaling.items()
    ]
    sequential = "returning session, of the drives' bandwidth"
    return [
        *found,
        _figure(sequential, result.sequential_ratio, "×", HYBRID_SEQUENTIAL, least=True),
        _figure("the same, placed as it arrived", result.arrival_order_ratio, "×"),
        _figure("sessions kept", result.retained_ratio, "×", HYBRID_RETAINED, least=True),
    ]


def _figure(what: str, value: float, unit: str, bar: float = 0.0, *, least: bool = False) -> Figure:
    return Figure(what, value, unit, value, value, bar or None, least)


def page(result: Hybrid, size: Size) -> str:
    """Two plots and how they were made."""
    title = "kvdepot: hard drives behind SSDs (emulated drives)"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    caption = (
        f"Emulated drives at 1/{hybrid.SCALE} of size and bandwidth, real seek times: "
        f"{hybrid.SSDS} SSDs, {hybrid.HDDS} hard drives, {size.users} users with "
        f"{hybrid.TOKENS:,} tokens each. "
        f"Recomputing was not run: {hybrid.PREFILL_S} s a prompt, one after the other. {date}, "
        "kvdepot bench hybrid --html."
    )
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(caption)}</p>',
            "<h2>Time to first token, by turn</h2>",
            f'<div class="plot">{ttft_plot(result)}</div>',
            "<h2>Average gap between hybrid and SSDs alone, by number of turns</h2>",
            f'<div class="plot">{gap_plot(result)}</div>',
        ]
    )
    return whole(title, body)


def ttft_plot(result: Hybrid) -> str:
    turns = _some(len(result.ttft_by_turn["hybrid"]))
    ways = {"recompute": "without", "ssd": "ssd", "hybrid": "with"}
    series = [
        Series(way, style, [result.ttft_by_turn[way][turn - 1] for turn in turns], _seconds)
        for way, style in ways.items()
    ]
    return Bars("Time to first token", "s", [f"turn {turn}" for turn in turns], series).draw()


def gap_plot(result: Hybrid) -> str:
    gaps = result.gap_by_turns
    names = [f"{turns} turns" if turns > 1 else "1 turn" for turns in gaps]
    series = [Series("hybrid less SSDs alone", "with", list(gaps.values()), _seconds)]
    notes = [_seconds(gap) for gap in gaps.values()]
    return Bars("Gap", "s", names, series, notes=notes).draw()


def _some(turns: int) -> Sequence[int]:
    return [turn for turn in (1, 2, 3, 4, 5, 10, 20, 30, 40, 50) if turn <= turns]


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
