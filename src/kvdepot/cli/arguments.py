"""Options that several commands take: which daemon, which settings."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import kvdepot
from kvdepot.cli.command import Answer, Run
from kvdepot.config import settings as config
from kvdepot.config.settings import DAEMON_USER_ENV, SOCKET_ENV
from kvdepot.core.private import runtime_folder
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError

SYSTEM_SOCKET: Final = Path("/run/kvdepot/depot.sock")
"""The socket of a machine's daemon, as deploy/ starts it."""
DAEMON: Final = f"""
--socket PATH         the daemon's socket (default: {SOCKET_ENV}, else kvdepot/depot.sock in your
                      runtime directory, else {SYSTEM_SOCKET})
--daemon-user USER    also trust a daemon of this user, not only yours and root's (default:
                      {DAEMON_USER_ENV})
"""
"""Options of a command that uses a running daemon; `open_daemon` reads them."""
SETTINGS: Final = """
--config FILE       settings, as TOML
--set NAME=VALUE    one setting, such as ssd.capacity=20GiB [repeat]
"""
"""Options of a command that reads settings; `load_settings` reads them."""


def parse_settings(settings: Sequence[str], example: str = "ssd.capacity=20GiB") -> dict[str, str]:
    """`a.b=c` texts as a mapping. Raises ConfigError for one without a name or a value."""
    overrides = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(setting, "is not NAME=VALUE", hint=f"write --set {example}")
        overrides[name.strip()] = value.strip()
    return overrides


def load_settings(args: argparse.Namespace) -> config.Config:
    """The effective settings: defaults, --config, the environment, --set; the last one counts."""
    return config.load(args.config, env=args.env, overrides=parse_settings(args.set))


def socket_path(args: argparse.Namespace) -> Path:
    """The socket of this user's daemon: --socket, KVDEPOT_SOCKET, or in the runtime folder."""
    named = args.socket or args.env.get(SOCKET_ENV)
    return Path(named) if named else runtime_folder(args.env) / SYSTEM_SOCKET.name


@contextmanager
def open_daemon(args: argparse.Namespace) -> Iterator[Depot]:
    """The store of the daemon that DAEMON's options name; without them, of this user's daemon or,
    if there is none, of the machine's. It is closed without a flush.
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


@contextmanager
def open_depot(args: argparse.Namespace) -> Iterator[Depot]:
    """The daemon's store; with --config or --set the store of these settings, which no other
    process may have open.
    """
    if args.config is None and not args.set:
        with open_daemon(args) as daemon:
            yield daemon
    else:
        with kvdepot.open(load_settings(args)) as store:
            yield store


def on_daemon(work: Callable[[Depot, argparse.Namespace], Answer | int]) -> Run:
    """`work` as the `run` of a command with DAEMON's options."""

    def run(args: argparse.Namespace) -> Answer | int:
        with open_daemon(args) as store:
            return work(store, args)

    return run
