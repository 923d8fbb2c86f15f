"""`kvdepot serve`: own a store, and share it with all processes of this machine."""

import argparse
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import (
    add_socket,
    add_store_settings,
    count,
    parse_settings,
    socket_path,
)
from kvdepot.core import config
from kvdepot.core.private import make_private_folder
from kvdepot.core.units import format_bytes, format_count
from kvdepot.server.client_holdings import ClientLimits
from kvdepot.server.daemon import Daemon
from kvdepot.server.listener import Listener
from kvdepot.wire.frames import PROTOCOL

STOPPING = (signal.SIGTERM, signal.SIGINT)
NOTIFY = "NOTIFY_SOCKET"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve",
        description="Own a store and share it with other processes of this machine, which open it "
        "as unix:PATH. Runs in the foreground until SIGTERM or Ctrl-C, then writes everything down "
        "and exits: 0 if all of it is on disk, else 1. A second signal ends it at once.",
    )
    add_socket(parser, "where clients connect")
    add_store_settings(parser)
    parser.add_argument(
        "--group", default="", metavar="NAME", help="let this group connect too, not only the owner"
    )
    parser.add_argument(
        "--clients",
        type=count,
        default=ClientLimits().clients,
        metavar="N",
        help="processes at once",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON when ready, one at the end"
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    overrides = parse_settings(args.settings)
    settings = config.load(args.config, env=args.env, overrides=overrides)
    path = socket_path(args)
    if args.socket is None and not args.env.get(config.SOCKET_ENV):
        make_private_folder(path.parent)
    listener = Listener(path, args.group)
    try:
        daemon = Daemon(settings, listener, ClientLimits(clients=args.clients))
    except BaseException:
        listener.close()
        raise
    daemon.settings_file = args.config and args.config.resolve()
    daemon.settings_elsewhere = config.names_outside_file(args.env, overrides)
    for number in STOPPING:
        signal.signal(number, lambda *_: stop(daemon))
    listener.listen()
    announce(daemon, path, args)
    daemon.run()
    output.say("stopping: writing down what waits")
    report = daemon.close()
    if args.json:
        line({"stopped": True, "ok": report.complete, "waiting": report.waiting})
    else:
        left = report.waiting + report.given_up
        output.say(
            "stopped" if report.complete else f"stopped; {format_count(left, 'block')} not written"
        )
    return 0 if report.complete else 1


def stop(daemon: Daemon) -> None:
    """The first signal ends the daemon in order, the second one at once."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    daemon.stop()


def announce(daemon: Daemon, path: Path, args: argparse.Namespace) -> None:
    """Say that clients can connect: to people, scripts and systemd."""
    stats = daemon.store.stats()
    if args.json:
        facts = {"ready": True, "socket": str(path), "pid": os.getpid()}
        line({**facts, "protocol": PROTOCOL, "blocks": stats["blocks"]})
    else:
        memory = format_bytes(stats["tiers"]["dram"]["capacity_bytes"])
        if slower := stats["tiers"].get("cxl"):
            memory += f" and {format_bytes(slower['capacity_bytes'])} of {slower['source']} as cxl"
        output.data(
            f"ready: unix:{path}, {format_count(stats['blocks'], 'block')}, {memory} of memory, "
            f"process {os.getpid()}"
        )
    output.flush()
    if args.env.get(NOTIFY):
        notify(args.env[NOTIFY])


def line(value: dict[str, Any]) -> None:
    output.data(json.dumps(value))
    output.flush()


def notify(address: str) -> None:
    """Tell systemd, for units of Type=notify."""
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.connect(name)
        sending.send(b"READY=1")
