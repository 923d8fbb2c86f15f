"""`kvdepot record`: writes the lookups of a running daemon to a trace that `kvdepot sim` reads."""

import argparse
import contextlib
import time

from kvdepot.cli import output
from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Answer, Command
from kvdepot.core.units import format_count
from kvdepot.depot import Depot

POLL_S = 0.5


def run(store: Depot, args: argparse.Namespace) -> Answer:
    store.admin.record(args.file)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            show_progress(store, args.for_)
    finally:
        requests = store.admin.stop_recording()
    return Answer(
        {"file": str(args.file), "requests": requests},
        f"{format_count(requests, 'request')} in {args.file}",
        notes=[f"hint: kvdepot sim --trace {args.file} --capacity dram=3Mtok --hits-only"],
    )


def show_progress(store: Depot, seconds: float | None) -> None:
    """Return after `seconds`; without a limit on Ctrl-C."""
    began_s = time.monotonic()
    with output.Progress("recording") as line:
        while seconds is None or time.monotonic() - began_s < seconds:
            left_s = POLL_S if seconds is None else began_s + seconds - time.monotonic()
            time.sleep(max(0.0, min(POLL_S, left_s)))
            recording = store.stats().get("recording") or {}
            line.label = f"recording, {format_count(recording.get('requests', 0), 'request')}"
            line.advance(0)


COMMAND = Command(
    more="The trace has keys of blocks, never text or tokens. Recording ends after --for, or on "
    "Ctrl-C. Only the daemon's own user and root may record.",
    options=f"""
    FILE          the trace to write; must not exist
    --for TIME    how long to record, such as 30s or 1h (default: until Ctrl-C)
    {DAEMON}
    """,
    run=on_daemon(run),
)
