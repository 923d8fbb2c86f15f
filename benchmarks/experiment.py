"""What `hybrid.py` and `modes.py` share: options, a scratch directory, the answer, bars."""

import argparse
import datetime
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdepot.bench.rounds import Figure
from kvdepot.cli import output
from kvdepot.cli.bench import as_text
from kvdepot.cli.directories import choose_parent, scratch_directory
from kvdepot.cli.machine import describe
from kvdepot.cli.main import Parser, exit_status
from kvdepot.cli.report import Report, origin


@dataclass(frozen=True, slots=True)
class Answer:
    """What an experiment found: for `--json`, for people, and for `--html`."""

    document: dict[str, Any]
    figures: Sequence[Figure]
    text: str
    report: Report


def main(about: str, needed_bytes: int, play: Callable[[Path, bool], Answer]) -> None:
    """Read the command line, `play(directory, quick)`, show the answer, and exit."""
    parser = Parser(description=about.splitlines()[0])
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where to write (default: a temporary directory)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--quick", action="store_true", help="small and imprecise")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    sys.exit(exit_status(lambda: _run(args, needed_bytes, play)))


def _run(args: argparse.Namespace, needed_bytes: int, play: Callable[[Path, bool], Answer]) -> int:
    facts = choose_parent(args.path, needed_bytes)
    parent = Path(facts.path).resolve()
    output.say(f"measuring in {parent} ({facts.filesystem}); what is written there is removed")
    with scratch_directory(parent, "kvdepot-bench-") as directory:
        answer = play(directory, args.quick)
    if args.html is not None:
        page = answer.report.html(origin(shlex.join(sys.argv)))
        args.html.write_text(page, encoding="utf-8")
        output.say(f"wrote {args.html}")
    if args.json:
        figures = [{**output.plain(figure), "ok": figure.ok} for figure in answer.figures]
        more = {"figures": figures, "machine": describe(facts)}
        output.document({"emulated": True, **answer.document, **more})
    else:
        output.data("on emulated drives:\n" + answer.text)
        for line in as_text(answer.figures):
            output.data(line)
    return 1 if args.strict and not all(figure.ok for figure in answer.figures) else 0


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
