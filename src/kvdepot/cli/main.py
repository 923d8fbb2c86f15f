"""The `kvdepot` command: parses the arguments, runs the command, and prints its answer or error.

Each command is one module, `cli/<name>.py`, with a `COMMAND` (see command.py). `args.env` is the
process environment; this file alone reads it. `args.typed` is the command line.

Exit status: 0 done; 1 a problem was found; 2 the command failed; 130 interrupted; 141 the reader
of stdout is gone.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

from kvdepot.cli import output
from kvdepot.cli.command import (
    COMMANDS,
    Answer,
    Command,
    Kind,
    Option,
    load_command,
    refuse_without_effect,
)
from kvdepot.errors import KVDepotError, StateError

EXIT_FAILED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class UsageError(KVDepotError):
    """The arguments cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


class ShowVersion(argparse.Action):
    """Prints the installed version."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        from importlib.metadata import version  # imports much that no other command needs

        output.data(f"kvdepot {version('kvdepot')}")
        raise SystemExit(0)


def main(argv: Sequence[str] | None = None, *, on_interrupt: Any = None) -> int:
    """Run one command and return its exit status. Never raises for a user's mistake.

    `on_interrupt` is the handler of SIGINT while the command runs; None does not change it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        if on_interrupt is not None:
            signal.signal(signal.SIGINT, on_interrupt)
        return dispatch(arguments)

    return exit_status(work, as_json="--json" in arguments)


def exit_status(work: Callable[[], int], *, as_json: bool = False) -> int:
    """The status that `work` returns; its failure is printed and becomes a status."""
    try:
        try:
            status = work()
        finally:
            output.flush()
    except StateError:
        raise  # a bug in kvdepot: the report needs the trace
    except KVDepotError as error:
        output.error(str(error), hint=error.hint, as_json=as_json)
        return EXIT_FAILED
    except BrokenPipeError:
        output.discard_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return report_os_error(error, as_json=as_json)
    except KeyboardInterrupt:
        output.say("interrupted")
        return EXIT_INTERRUPTED
    return status


def report_os_error(error: OSError, *, as_json: bool) -> int:
    """Print an error of the system. Stdout itself may have failed."""
    reason = error.strerror or str(error)
    try:
        message = reason if error.filename is None else f"{error.filename}: {reason}"
        output.error(message, as_json=as_json)
        output.flush()
    except OSError:
        output.discard_stdout()
    return EXIT_FAILED


def dispatch(arguments: Sequence[str]) -> int:
    output.use_terminal_settings(os.environ)
    parser = build_parser({arguments[0] if arguments else ""})
    args = parser.parse_args(arguments)
    command: Command | None = getattr(args, "command", None)
    if command is None or command.run is None:
        parser.print_help(output.talk_stream())
        return EXIT_FAILED
    refuse_without_effect(command, args)
    args.env = dict(os.environ)
    args.typed = shlex.join(["kvdepot", *arguments])
    answer = command.run(args)
    return answer if isinstance(answer, int) else show(answer, as_json=args.json)


def show(answer: Answer, *, as_json: bool) -> int:
    if as_json:
        output.document(answer.document)
        return answer.status
    for line in [answer.text] if isinstance(answer.text, str) else answer.text:
        output.data(line)
    for note in answer.notes:
        output.say(note)
    return answer.status


def build_parser(wanted: Container[str]) -> Parser:
    """The parser of all commands. Only the modules of the commands in `wanted` are loaded."""
    parser = Parser(
        prog="kvdepot",
        description="A tiered store for the KV cache of LLM inference.",
        epilog="kvdepot COMMAND --help describes one command.",
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    below = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        if name in wanted:
            add_command(below, name, load_command(name))
        else:
            below.add_parser(name, help=text)
    return parser


def add_command(below: "argparse._SubParsersAction[Parser]", name: str, command: Command) -> None:
    """The parser of a command, with those of its verbs."""
    parser = below.add_parser(name, help=command.help, description=command.description)
    for option in command.parsed_options():
        name = option.name if option.name.startswith("--") else option.dest
        parser.add_argument(name, **argparse_settings(option))
    if command.run is not None:
        parser.set_defaults(command=command)
    if command.verbs:
        verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
        for verb, found in command.verbs.items():
            add_command(verbs, verb, found)


def argparse_settings(option: Option) -> dict[str, Any]:
    """The arguments of `add_argument` after the name."""
    help_text = option.help.replace("%", "%%")
    if not option.metavar:
        return {"action": "store_true", "help": help_text}
    settings = {"help": help_text, "default": option.default, "metavar": option.metavar}
    if option.choices:
        settings |= {"choices": option.choices}
    if option.kind is not None:
        settings |= {"type": explained(option.kind)}
    if option.many == "append":
        settings |= {"action": "append"}
    elif option.many:
        settings |= {"nargs": option.many}
    if option.name.startswith("--"):
        settings |= {"dest": option.dest, "required": option.required}
    return settings


def explained(parse: Kind) -> Kind:
    """`parse` as a type of argparse, which shows the text of its ValueError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
