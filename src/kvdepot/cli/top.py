"""`kvdepot top`: counters and health of a running daemon, live."""

import argparse
import time
from collections.abc import Mapping
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Command
from kvdepot.cli.stats import document, read_stats, screen
from kvdepot.depot import Depot

CLEAR: Final = "\x1b[H\x1b[2J"
"""ANSI: cursor to the top, and an empty screen."""


def run(store: Depot, args: argparse.Namespace) -> int:
    try:
        watch(store, args)
    except KeyboardInterrupt:
        output.say("")  # the shell's prompt begins a new line
    return 0


def watch(store: Depot, args: argparse.Namespace) -> None:
    before, before_s = read_stats(store), time.monotonic()
    while True:
        time.sleep(args.interval)
        now, now_s = read_stats(store), time.monotonic()
        flows = served_rates(before, now, now_s - before_s)
        if args.json:
            output.document({**document(now), "flow_bytes_per_s": flows})
        else:
            output.data((CLEAR if output.is_terminal() else "") + screen(now, flows))
        output.flush()
        if args.once:
            return
        before, before_s = now, now_s


def served_rates(
    before: Mapping[str, Any], now: Mapping[str, Any], seconds: float
) -> dict[str, float]:
    """Bytes a second that each tier has served between two answers; from 0 after a restart."""
    # A daemon of another version may not count them.
    old, new = (stats.get("traffic", {}).get("served_bytes", {}) for stats in (before, now))
    restarted = now["daemon"]["uptime_s"] < before["daemon"]["uptime_s"]
    return {
        tier: max(0, new.get(tier, 0) - (0 if restarted else old.get(tier, 0))) / seconds
        for tier in now["tiers"]
    }


COMMAND = Command(
    more="Ends on Ctrl-C. Without a terminal the screens are printed one after the other.",
    options=f"""
    --interval S    seconds between screens [default: 2]
    --once          print one screen, after one interval
    {DAEMON}
    """,
    run=on_daemon(run),
)
