"""What e2e.py's `decisions` has measured, as a page with plots."""

from html import escape
from typing import Any

from kvdepot.cli.report.curves import Curve, Curves
from kvdepot.cli.report.page import whole

ARMS = {"fetched": "fetch all", "recomputed": "recompute", "decided": "decide"}


def decision_page(seen: dict[str, Any]) -> str:
    """Time to the first token by the speed of the disk."""
    nbytes, tokens = seen["bytes"], seen["tokens"]
    lead = (
        f"A prompt of {tokens:,} tokens, {nbytes / 1e6:.0f} MB of KV, asked of a real vLLM. The "
        "disk is the machine's own, slowed down to what the axis says. The best of three; what "
        "lies above the frame is drawn at its edge."
    )
    body = [
        "<h1>Fetch or recompute, decided for each prompt</h1>",
        f'<p class="lead">{escape(lead)}</p>',
        "<h2>All of it on disk</h2>",
        _plot(seen["sweep"]),
        "<h2>Two thirds of it in memory, the rest on disk</h2>",
        _plot(seen["mixed"]),
    ]
    return whole("kvdepot: fetch or recompute", "\n".join(body))


def _plot(steps: list[dict[str, Any]]) -> str:
    edge = 2.0 * max(step["seconds"]["recomputed"] for step in steps)
    curves = [
        Curve(
            name,
            sorted((step["speed_MB_s"] * 1e6, min(step["seconds"][arm], edge)) for step in steps),
        )
        for arm, name in ARMS.items()
    ]
    title = "seconds to the first token"
    drawn = Curves(title, f"{title}, by what the disk gives (MB/s)", curves, unit="B/s").draw()
    return f'<div class="plot">{drawn}</div>'
