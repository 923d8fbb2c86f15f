"""`kvdepot record`: what a running daemon is asked for, as a trace that `kvdepot sim` reads."""

import argparse
import contextlib
import time
from pathlib import Path

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, explained, open_daemon
from kvdepot.core.depot import Depot
from kvdepot.core.units import format_count, parse_duration

LOOK_S = 0.5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "record",
        description="Write down which prompts a running daemon is asked for, as keys and never as "
        "text; kvdepot sim --trace FILE plays them. Ends after --for, or with Ctrl-C. For the "
        "daemon's own user and root.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="to write; must not exist")
    add_daemon(parser)
    parser.add_argument(
        "--for",
        type=explained(parse_duration),
        metavar="TIME",
        dest="seconds",
        help="as 30s or 1h; else Ctrl-C",
    )
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with open_daemon(args) as store:
        store.record(args.file)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                watch(store, args.seconds)
        finally:
            requests = store.stop_recording()
    if args.json:
        output.document({"file": str(args.file), "requests": requests})
    else:
        output.data(f"{format_count(requests, 'request')} in {args.file}")
        output.say(f"hint: kvdepot sim --trace {args.file} --capacity dram=3Mtok --hits-only")
    return 0


def watch(store: Depot, seconds: float | None) -> None:
    began_s = time.monotonic()
    with output.Progress("recording") as line:
        while seconds is None or time.monotonic() - began_s < seconds:
            left_s = LOOK_S if seconds is None else began_s + seconds - time.monotonic()
            time.sleep(max(0.0, min(LOOK_S, left_s)))
            recording = store.stats().get("recording") or {}
            line.label = f"recording, {format_count(recording.get('requests', 0), 'request')}"
            line.advance(0)
