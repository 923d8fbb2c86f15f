"""The measurements of `vllm_connector.py decisions` as a page with plots."""

import shlex
import sys
from typing import Any

from kvdepot.cli.report import Curve, Curves, Point, Report, Section, origin

ARMS = {"fetched": "fetch all", "recomputed": "recompute", "decided": "decide"}


def decision_page(seen: dict[str, Any]) -> str:
    """Time to the first token by the speed of the disk."""
    nbytes, tokens = seen["bytes"], seen["tokens"]
    lead = (
        f"A prompt of {tokens:,} tokens, {nbytes / 1e6:.0f} MB of KV, asked of a real vLLM. The "
        "disk is the machine's own, slowed down to what the axis says. The best of three; what "
        "lies above the frame is drawn at its edge."
    )
    sections = [
        Section("All of it on disk", [_chart(seen["sweep"])]),
        Section("Two thirds of it in memory, the rest on disk", [_chart(seen["mixed"])]),
    ]
    report = Report("Fetch or recompute, decided for each prompt", lead, sections)
    return report.html(origin(shlex.join(sys.argv)))


def _chart(steps: list[dict[str, Any]]) -> Curves:
    edge = 2.0 * max(step["seconds"]["recomputed"] for step in steps)
    curves = [
        Curve(name, f"c{number}", [_point(step, arm, name, edge) for step in _by_speed(steps)])
        for number, (arm, name) in enumerate(ARMS.items())
    ]
    return Curves(
        title="seconds to the first token",
        x_unit="what the disk gives, MB/s",
        y_unit="seconds",
        curves=curves,
        x_label=lambda speed: f"{speed:g}",
    )


def _by_speed(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(steps, key=lambda step: step["speed_MB_s"])


def _point(step: dict[str, Any], arm: str, name: str, edge: float) -> Point:
    speed, seconds = step["speed_MB_s"], step["seconds"][arm]
    return Point(speed, min(seconds, edge), f"{name}, {speed:g} MB/s: {seconds:.4f} s")
