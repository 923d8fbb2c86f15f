"""Options and values that several commands take: counts, sizes, times, settings of a store."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

import kvdepot
from kvdepot.config.settings import DAEMON_USER_ENV, SOCKET_ENV
from kvdepot.core.depot import Depot
from kvdepot.core.private import runtime_folder
from kvdepot.errors import ConfigError

Value = TypeVar("Value")
SYSTEM_SOCKET: Final = Path("/run/kvdepot/depot.sock")
"""Where the daemon of a whole machine listens, as deploy/ starts it."""
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20}


@dataclass(frozen=True, slots=True)
class EffectRule:
    """Options that do something only where `holds`."""

    options: tuple[str, ...]
    holds: bool
    words: str
    """After "has no effect"."""


def positive(text: str) -> float:
    """A number above 0: `0.5`, `128k`, `1M`. k, M, G are powers of 1000; Ki, Mi of 1024."""
    digits = text.strip().rstrip("kKmMgGiI")
    unit = text.strip()[len(digits) :].lower()
    try:
        number = float(digits) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number like 0.5, 4000 or 1M"
        ) from error
    if not 0 < number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0, or is too much")
    return number


def count(text: str) -> int:
    """A whole number above 0."""
    number = positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def explained(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """`parse` as a `type=` of argparse: what its ValueError says is shown to people."""

    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_daemon(parser: argparse.ArgumentParser) -> None:
    """Which daemon a command is for; `open_daemon` opens its store."""
    add_socket(parser, "of the daemon: kvdepot serve")
    parser.add_argument(
        "--daemon-user",
        default="",
        metavar="USER",
        help="trust a daemon of this user, not only your own and root's "
        f"(default: {DAEMON_USER_ENV})",
    )


def add_socket(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help=f"{text} (default: KVDEPOT_SOCKET, else kvdepot/depot.sock in your runtime directory)",
    )


def socket_path(args: argparse.Namespace) -> Path:
    """Where a daemon listens: as named, by an option or the environment, else this user's place."""
    if args.socket is not None:
        return cast(Path, args.socket)
    if args.env.get(SOCKET_ENV):
        return Path(args.env[SOCKET_ENV])
    return runtime_folder(args.env) / SYSTEM_SOCKET.name


@contextmanager
def open_daemon(args: argparse.Namespace) -> Iterator[Depot]:
    """The store of the daemon that `add_daemon`'s options name; unnamed, this user's daemon or,
    where there is none, the machine's. Closed without waiting for what others have put.
    """
    path = socket_path(args)
    named = args.socket is not None or args.env.get(SOCKET_ENV)
    if not named and not path.exists() and SYSTEM_SOCKET.exists():
        path = SYSTEM_SOCKET
    user = args.daemon_user or args.env.get(DAEMON_USER_ENV, "")
    store = kvdepot.open(f"unix:{path}", daemon_user=user)
    try:
        yield store
    finally:
        store.close(timeout_s=0.0)


def add_store_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
    add_set(parser, "one setting, for example ssd.capacity=20GiB; may be repeated")


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="A.B=VALUE", help=text
    )


def parse_settings(settings: Sequence[str], example: str = "ssd.capacity=20GiB") -> dict[str, str]:
    """`a.b=c` texts as a mapping. Raises ConfigError for one without a name or a value."""
    overrides = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(
                setting, "not of the form a.b=value", hint=f"--set {example}, for example"
            )
        overrides[name.strip()] = value.strip()
    return overrides


def remember_defaults(parser: argparse.ArgumentParser) -> None:
    """Let `given` tell what was asked for. Call it when all options are added."""
    parser.set_defaults(
        defaults={
            action.dest: action.default for action in parser._actions if action.option_strings
        }
    )


def given(args: argparse.Namespace) -> dict[str, str]:
    """The options that were set to another value than their default, by name."""
    changed = [
        name for name, default in args.defaults.items() if getattr(args, name, default) != default
    ]
    return {name: "--" + name.replace("_", "-") for name in changed}


def refuse_without_effect(args: argparse.Namespace, rules: Sequence[EffectRule]) -> None:
    """ConfigError for the first option that was given and would do nothing."""
    asked = given(args)
    for rule in rules:
        for name in rule.options:
            if not rule.holds and name in asked:
                raise ConfigError(
                    asked[name], f"has no effect {rule.words}", hint=f"leave {asked[name]} out"
                )
