"""`kvdepot top`: watch a running daemon in a terminal."""

import argparse
import time
from collections.abc import Mapping
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, open_daemon, positive
from kvdepot.cli.stats import answered, document, lines, width
from kvdepot.core.depot import Depot

CLEAR: Final = "\x1b[H\x1b[2J"
"""Cursor to the top, and an empty screen: ANSI, as every terminal has it."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "top",
        description="Watch a running daemon: its tiers and what they give a second, hits, "
        "sessions, drives, and what is wrong. Ends with Ctrl-C. Written to a file or a pipe, one "
        "screen follows the other.",
    )
    add_daemon(parser)
    parser.add_argument(
        "--interval", type=positive, default=2.0, metavar="S", help="seconds between looks (2)"
    )
    parser.add_argument("--once", action="store_true", help="look for one interval, then end")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with open_daemon(args) as store:
        try:
            watch(store, args)
        except KeyboardInterrupt:
            output.say("")  # the shell's prompt begins a line
    return 0


def watch(store: Depot, args: argparse.Namespace) -> None:
    before, at_s = answered(store.stats()), time.monotonic()
    while True:
        time.sleep(args.interval)
        now, now_s = answered(store.stats()), time.monotonic()
        flows = flow(before, now, now_s - at_s)
        if args.json:
            output.document({**document(now), "flow_bytes_per_s": flows})
        else:
            screen = "\n".join(lines(now, flows, width()))
            output.data((CLEAR if output.is_terminal() else "") + screen)
        output.flush()
        if args.once:
            return
        before, at_s = now, now_s


def flow(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Bytes a second that each tier has given between two looks; none after a restart."""
    # A daemon of an older version may not count it.
    old, new = (stats.get("traffic", {}).get("served_bytes", {}) for stats in (before, now))
    restarted = now["daemon"]["uptime_s"] < before["daemon"]["uptime_s"]
    return {
        tier: max(0, new.get(tier, 0) - (0 if restarted else old.get(tier, 0))) / seconds
        for tier in now["tiers"]
    }
