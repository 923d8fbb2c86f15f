"""Options and values that several commands take: counts, sizes, times, settings of a store."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import kvdepot
from kvdepot.core.depot import Depot
from kvdepot.core.private import runtime_folder
from kvdepot.errors import ConfigError

Value = TypeVar("Value")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20}


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
        help="trust a daemon of this user, not only your own and root's",
    )


def add_socket(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help=f"{text} (default: kvdepot/depot.sock in your runtime directory)",
    )


def socket_path(args: argparse.Namespace) -> Path:
    path: Path | None = args.socket
    return path or runtime_folder(args.env) / "depot.sock"


def open_daemon(args: argparse.Namespace) -> Depot:
    """The store of the daemon that `add_daemon`'s options name."""
    return kvdepot.open(f"unix:{socket_path(args)}", daemon_user=args.daemon_user)


def add_store_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
    add_set(parser, "one setting, for example ssd.capacity=20GiB; may be repeated")


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="A.B=VALUE", help=text
    )


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """`a.b=c` texts as a mapping. Raises ConfigError for one without a name or a value."""
    overrides = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(
                setting, "not of the form a.b=value", hint="--set ssd.capacity=20GiB, for example"
            )
        overrides[name.strip()] = value.strip()
    return overrides
