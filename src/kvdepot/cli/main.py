"""The `kvdepot` command: finds the subcommand, runs it, and turns its failures into messages.

Each subcommand is one module, `cli/<name>.py`, with two functions:

    add_parser(subparsers) -> None     adds its parser, with --json on everything that can be run
    run(args) -> int                   does it and returns the exit status

`args.env` is the process environment; this file alone reads it. `args.typed` is the command as
typed. A module is imported only when its command is the one asked for, so `kvdepot --help` stays
fast.

Exit status: 0 done, 1 looked and found something wrong, 2 could not be done as asked,
130 interrupted, 141 the reader of our output went away.
"""

import argparse
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from kvdepot.cli import output
from kvdepot.cli.completion import SHELLS, script
from kvdepot.errors import KVDepotError, StateError

EXIT_FAILED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str


COMMANDS = {
    "doctor": Command(
        "kvdepot.cli.doctor.command", "what this machine offers, and what to do about it"
    ),
    "serve": Command("kvdepot.cli.serve", "share one store with all processes of this machine"),
    "proxy": Command("kvdepot.cli.proxy", "keep the KV of an unmodified llama-server"),
    "tiers": Command("kvdepot.cli.tiers", "see and change the tiers of a running daemon"),
    "session": Command(
        "kvdepot.cli.session", "see, keep, park, export and import a daemon's sessions"
    ),
    "audit": Command("kvdepot.cli.audit", "blocks computed again, and namespaces in quarantine"),
    "remove": Command("kvdepot.cli.remove", "delete the blocks of namespaces, for all engines"),
    "ledger": Command("kvdepot.cli.ledger", "GPU time saved, and what it is worth"),
    "stats": Command("kvdepot.cli.stats", "what a daemon has done so far, and how it is"),
    "top": Command("kvdepot.cli.top", "watch a daemon: tiers, flow, hits, sessions, drives"),
    "hint": Command("kvdepot.cli.hint", "tell a node of a site which prompt it will be asked for"),
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
    "upgrade-check": Command(
        "kvdepot.cli.upgrade_check", "whether this version can take over from another one"
    ),
    "config": Command("kvdepot.cli.config", "show or check a configuration"),
}


class CommandModule(Protocol):
    """What every module named in COMMANDS provides."""

    def add_parser(self, subparsers: "argparse._SubParsersAction[Parser]") -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class UsageError(KVDepotError):
    """Words that make no command."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints look like all our others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


class ShowVersion(argparse.Action):
    """Prints the installed version; looked up only when it is asked for."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        from importlib.metadata import version  # imports much that no other command needs

        output.data(f"kvdepot {version('kvdepot')}")
        raise SystemExit(0)


class ShowCompletion(argparse.Action):
    """Prints the completion of a shell; every command's module is loaded for it."""

    def __call__(
        self, parser: object, namespace: object, values: object, *_: object, **__: object
    ) -> NoReturn:
        output.data(script(str(values), build_parser(COMMANDS)[0]))
        raise SystemExit(0)


def main(argv: Sequence[str] | None = None, *, on_interrupt: Any = None) -> int:
    """Run one command and return its exit status. Never raises for a user's mistake.

    `on_interrupt` is what SIGINT does while the command runs; None leaves it as it is.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)
        return dispatch(arguments)

    return exit_status(work, as_json="--json" in arguments)


def exit_status(work: Callable[[], int], *, as_json: bool = False) -> int:
    """The status that `work` returns; a failure of it becomes a message and a status."""
    try:
        try:
            status = work()
        except UsageError as error:
            output.error(str(error), hint=error.hint, as_json=as_json)
            raise SystemExit(EXIT_FAILED) from None
        finally:
            output.flush()
    except StateError:
        raise  # a bug of ours: the trace is what the reporter needs
    except KVDepotError as error:
        output.error(str(error), hint=error.hint, as_json=as_json)
        return EXIT_FAILED
    except BrokenPipeError:
        output.discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return failed_by_system(error, as_json=as_json)
    except KeyboardInterrupt:
        output.say("interrupted")
        return EXIT_INTERRUPTED
    return status


def failed_by_system(error: OSError, *, as_json: bool) -> int:
    """Tell of an error of the system; it may be stdout that cannot be written to."""
    try:
        output.error(describe(error), as_json=as_json)
        output.flush()
    except OSError:
        output.discard_stdout()
    return EXIT_FAILED


def dispatch(arguments: Sequence[str]) -> int:
    output.respect(os.environ)
    chosen = arguments[0] if arguments else ""
    parser, loaded = build_parser({chosen})
    args = parser.parse_args(arguments)
    if chosen not in loaded:
        parser.print_help(output.talk_stream())
        return EXIT_FAILED
    args.env = dict(os.environ)
    args.typed = shlex.join(["kvdepot", *arguments])
    return loaded[chosen].run(args)


def build_parser(wanted: Container[str]) -> tuple[Parser, dict[str, CommandModule]]:
    """The parser of all commands. Those wanted know their words, and their modules are loaded."""
    parser = Parser(
        prog="kvdepot",
        description="A tiered store for the KV cache of LLM inference.",
        epilog="kvdepot COMMAND --help tells more about one command.",
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    parser.add_argument(
        "--completion",
        action=ShowCompletion,
        choices=SHELLS,
        help="print a script that completes our words in your shell",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    loaded: dict[str, CommandModule] = {}
    for name, command in COMMANDS.items():
        if name in wanted:
            loaded[name] = cast(CommandModule, importlib.import_module(command.module))
            loaded[name].add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser, loaded


def describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason
