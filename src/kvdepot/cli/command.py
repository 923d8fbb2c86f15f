"""Commands as data: what each command takes and answers, and the table of all of them.

`main` makes a parser of it, `completion` a shell script, and a test the page
docs/reference/cli.md. The module of a command is imported when the command is run.
"""

import argparse
import importlib
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvdepot.core.units import parse_bytes, parse_duration
from kvdepot.errors import ConfigError

Kind = Callable[[str], Any]
"""Parses a value; ValueError says why it cannot."""

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "doctor": ("doctor", "check what this machine offers a store, and what to improve"),
    "serve": ("serve", "share one store with other processes of this machine"),
    "proxy": ("proxy", "keep the KV of an unmodified llama-server"),
    "tiers": ("tiers", "show and change the tiers of a running daemon"),
    "session": ("session", "list, keep, move, export and import sessions of a running daemon"),
    "audit": ("audit", "show audited blocks, and namespaces in quarantine"),
    "remove": ("remove", "delete the blocks of namespaces, for all engines"),
    "ledger": ("ledger", "show the GPU time saved, and its worth"),
    "stats": ("stats", "show counters and health of a running daemon, once"),
    "top": ("top", "show counters and health of a running daemon, live"),
    "hint": ("hint", "announce to the nodes of a cluster a prompt that will be requested"),
    "record": ("record", "write the lookups of a running daemon to a trace for `kvdepot sim`"),
    "check": ("check", "verify a store on disk, and repair it"),
    "torture": ("torture", "test stores with power cuts, kills and damage"),
    "inspect": ("inspect", "show the content of a store on disk"),
    "bench": ("bench", "measure the store against the raw device and memcpy"),
    "size": ("size", "compute the size of a model's KV, and how long tiers keep it"),
    "plan": ("plan", "choose memory and drives for a model, its traffic and a goal"),
    "sim": ("sim", "simulate a trace or a workload: hits, times, cost"),
    "upgrade-check": ("upgrade_check", "check whether this version can replace another one"),
    "config": ("config", "show or check a configuration"),
    "completion": ("completion", "print a completion script for a shell"),
}
"""The module of each command, below `kvdepot.cli`, and what the command does."""


_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20}


def positive(text: str) -> float:
    """A number above 0: `0.5`, `128k`, `1M`. k, M, G are powers of 1000; Ki, Mi of 1024."""
    digits = text.strip().rstrip("kKmMgGiI")
    unit = text.strip()[len(digits) :].lower()
    try:
        number = float(digits) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{text!r} is not a number such as 0.5, 4000 or 1M") from error
    if not 0 < number < 1e18:
        raise ValueError(f"{text!r} is not above 0, or is too large")
    return number


def count(text: str) -> int:
    """A whole number above 0."""
    number = positive(text)
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not a share from 0 to 1")
    return value


def address(text: str) -> tuple[str, int]:
    """`127.0.0.1:9400` or `[::1]:9400`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9400")
    return host, int(port)


KINDS: Final[Mapping[str, Kind]] = {
    "N": count,
    "N,…": counts,
    "S": positive,
    "SHARE": share,
    "SIZE": parse_bytes,
    "TIME": parse_duration,
    "HOST:PORT": address,
    **dict.fromkeys(("DIR", "DRIVE", "FILE", "PATH"), Path),
}
"""Parsers of values by the metavar of an option; without an entry the value is a text."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option (`--name`) or positional argument of a command."""

    name: str
    metavar: str
    """Empty for an option without a value."""
    help: str
    kind: Kind | None = None
    """Parses the value; None for text."""
    default: Any = None
    choices: tuple[str, ...] = ()
    many: str = ""
    """`nargs` of argparse: `?`, `*` or `+`; for an option that may be repeated, `append`."""
    required: bool = False
    needs: tuple[str, ...] = ()
    """Options without which this one has no effect, and is refused."""
    not_with: tuple[str, ...] = ()
    """Options with which this one has no effect, and is refused."""
    alone: bool = False
    """True if all other options have no effect with this one, and are refused."""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments: `for_` for `--for`, a word of the language."""
        name = self.name.lstrip("-").replace("-", "_").lower()
        return f"{name}_" if keyword.iskeyword(name) else name

    def is_given(self, args: argparse.Namespace) -> bool:
        """True if the option has another value than its default."""
        return bool(getattr(args, self.dest, self.default) != self.default)


def parse_options(text: str, kinds: Mapping[str, Kind]) -> Iterator[Option]:
    """The options that a text describes, one in each line, with deeper lines that continue it.

        FILE                an argument; [FILE] may be left out; FILE... and [FILE...] are several
        --force             an option without a value
        --seed N            an option with a value; its metavar says how the value is parsed
        --order old|new     one of several words
        --within TIME       with a default [default: 10s]
        --key FILE          refused without --http, or with --plain [needs: --http]
                            [not with: --plain]
        --set NAME=VALUE    may be given several times [repeat]; also [required] and [alone]

    A value is parsed by `kinds` (by name of the option or by metavar), else by `KINDS`.
    """
    found: list[list[str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if _OPTION.match(line):
            found.append(list(re.split(r"\s{2,}", line, maxsplit=1)))
        else:
            found[-1][1] += f" {line}"
    for head, words in found:
        name, _, metavar = head.partition(" ")
        marks = dict(_MARK.findall(words))
        if not name.startswith("--"):
            optional = name.startswith("[")
            several = "*" if optional else "+"
            many = several if "..." in name else "?" if optional else ""
            name = metavar = name.strip("[].")
        else:
            many = "append" if "repeat" in marks else ""
        choices = tuple(metavar.split("|")) if metavar.islower() else ()
        kind = kinds.get(name) or kinds.get(metavar) or KINDS.get(metavar)
        default: Any = [] if many in ("append", "*") else None if metavar else False
        if value := marks.get("default"):
            default = kind(value) if kind else value
        yield Option(
            name=name,
            metavar=metavar,
            help=" ".join(_MARK.sub(_shown, words).split()),
            kind=kind,
            default=default,
            choices=choices,
            many=many,
            required="required" in marks,
            needs=tuple(filter(None, marks.get("needs", "").split(", "))),
            not_with=tuple(filter(None, marks.get("not with", "").split(", "))),
            alone="alone" in marks,
        )


_OPTION: Final = re.compile(r"(--[a-z][a-z0-9-]*|\[?[A-Z]+)\S*( \S+)?\s{2,}")
_MARK: Final = re.compile(r"\[(default|needs|not with|repeat|required|alone)(?:: ([^\]]*))?\]")


def _shown(mark: re.Match[str]) -> str:
    """The text of a mark in the help."""
    if mark[1] == "default":
        return f"(default: {mark[2]})"
    return "(may be repeated)" if mark[1] == "repeat" else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command, as JSON (`--json`) and as text."""

    document: object
    text: str | Iterable[str] = ()
    """Lines for stdout."""
    notes: Sequence[str] = ()
    """Lines for stderr, without `--json`."""
    status: int = 0


Run = Callable[[argparse.Namespace], Answer | int]


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a group of commands (`verbs`)."""

    help: str = ""
    """One phrase that begins with a verb."""
    more: str = ""
    """Further sentences of its description."""
    options: str = ""
    """See `parse_options`."""
    run: Run | None = None
    verbs: Mapping[str, "Command"] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    json: str = "print one JSON document instead of text"
    """Help of `--json`, which every command has."""

    @property
    def description(self) -> str:
        return " ".join(f"{self.help[:1].upper()}{self.help[1:]}. {self.more}".split())

    def parsed_options(self) -> list[Option]:
        """All options, with `--json` for a command that can be run."""
        text = f"{self.options}\n--json  {self.json}" if self.run else self.options
        return list(parse_options(text, self.kinds))


def load_command(name: str) -> Command:
    """The command of COMMANDS with this name; imports its module."""
    module, text = COMMANDS[name]
    command: Command = importlib.import_module(f"kvdepot.cli.{module}").COMMAND
    return replace(command, help=text)


def command_tree() -> list[tuple[str, Command]]:
    """All commands by full name, such as `kvdepot session pin`; imports all modules."""

    def walk(name: str, command: Command) -> Iterator[tuple[str, Command]]:
        yield name, command
        for verb, below in command.verbs.items():
            yield from walk(f"{name} {verb}", below)

    every = {name: load_command(name) for name in COMMANDS}
    root = Command("a tiered store for the KV cache of LLM inference", verbs=every)
    return list(walk("kvdepot", root))


def refuse_without_effect(command: Command, args: argparse.Namespace) -> None:
    """ConfigError for the first option that was given and would have no effect."""
    options = command.parsed_options()
    given = {one.name for one in options if one.is_given(args)} - {"--json"}
    alone = {one.name for one in options if one.alone} & given
    for one in options:
        if one.name not in given:
            continue
        for other in one.needs:
            if other not in given:
                hint = f"add {other}, or leave {one.name} out"
                raise ConfigError(one.name, f"has no effect without {other}", hint=hint)
        for other in (*one.not_with, *alone - {one.name}):
            if other in given:
                hint = f"leave {one.name} out"
                raise ConfigError(one.name, f"has no effect with {other}", hint=hint)
