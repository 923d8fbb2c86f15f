"""The `kvdepot` command: finds the subcommand, runs it, and turns its failures into messages.

Each subcommand is one module, `cli/<name>.py`, with two functions:

    add_parser(subparsers) -> None     adds its parser, with --json on everything that can be run
    run(args) -> int                   does it and returns the exit status

`args.env` is the process environment; this file alone reads it. A module is imported only when
its command is the one asked for, so `kvdepot --help` stays fast.

Exit status: 0 done, 1 looked and found something wrong, 2 could not be done as asked,
130 interrupted, 141 the reader of our output went away.
"""

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from kvdepot.cli import output
from kvdepot.errors import KVDepotError, StateError

EXIT_FAILED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str


COMMANDS = {
    "demo": Command(
        "kvdepot.cli.demo.command", "see it work: a real model with and without, kills between"
    ),
    "doctor": Command(
        "kvdepot.cli.doctor.command", "what this machine offers, and what to do about it"
    ),
    "serve": Command("kvdepot.cli.serve", "share one store with all processes of this machine"),
    "tiers": Command("kvdepot.cli.tiers", "see and change the tiers of a running daemon"),
    "record": Command("kvdepot.cli.record", "write down what a daemon is asked for, for `sim`"),
    "check": Command("kvdepot.cli.check", "verify a store on disk, and repair it"),
    "torture": Command("kvdepot.cli.torture", "kill and damage stores of its own; what holds"),
    "inspect": Command("kvdepot.cli.inspect", "what is inside a store on disk"),
    "bench": Command("kvdepot.cli.bench.command", "measure the store against the raw device"),
    "size": Command("kvdepot.cli.plan.size", "how large a model's KV is, how long tiers keep it"),
    "plan": Command(
        "kvdepot.cli.plan.command", "which memory and drives to buy for a model and traffic"
    ),
    "sim": Command(
        "kvdepot.cli.sim.command", "what a trace would hit, by eviction policy and capacity"
    ),
    "config": Command("kvdepot.cli.config", "show or check a configuration"),
}


class CommandModule(Protocol):
    """What every module named in COMMANDS provides."""

    def add_parser(self, subparsers: "argparse._SubParsersAction[Parser]") -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints look like all our others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        output.error(message, hint=f"{self.prog} --help")
        raise SystemExit(EXIT_FAILED)


class ShowVersion(argparse.Action):
    """Prints the installed version; looked up only when it is asked for."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        output.data(f"kvdepot {importlib.metadata.version('kvdepot')}")
        raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never raises for a user's mistake."""
    return exit_status(lambda: dispatch(argv))


def exit_status(work: Callable[[], int]) -> int:
    """The status that `work` returns; a failure of it becomes a message and a status."""
    try:
        status = work()
        output.flush()
    except StateError:
        raise  # a bug of ours: the trace is what the reporter needs
    except KVDepotError as error:
        output.error(str(error), hint=error.hint)
        return EXIT_FAILED
    except BrokenPipeError:
        output.discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        output.error(describe(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        output.say("interrupted")
        return EXIT_INTERRUPTED
    return status


def dispatch(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = arguments[0] if arguments else ""
    parser = Parser(
        prog="kvdepot",
        description="A tiered store for the KV cache of LLM inference.",
        epilog="kvdepot COMMAND --help tells more about one command.",
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    module: CommandModule | None = None
    for name, command in COMMANDS.items():
        if name == chosen:
            module = cast(CommandModule, importlib.import_module(command.module))
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    args = parser.parse_args(arguments)
    if module is None:
        parser.print_help(output.talk_stream())
        return EXIT_FAILED
    args.env = dict(os.environ)
    return module.run(args)


def describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason
