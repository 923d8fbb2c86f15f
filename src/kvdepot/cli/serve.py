"""`kvdepot serve`: own a store, and share it with all processes of this machine."""

import argparse
import json
import logging
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdepot.cli import output
from kvdepot.cli.arguments import (
    add_socket,
    add_store_settings,
    count,
    explained,
    parse_settings,
    positive,
    socket_path,
)
from kvdepot.config import settings as config
from kvdepot.core.private import make_private_folder
from kvdepot.core.units import format_bytes, format_count, parse_bytes
from kvdepot.daemon.server.client_resources import ClientLimits
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.errors import ConfigError, ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.daemon.http.service import HttpService

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
    add_http(parser)
    parser.add_argument(
        "--events",
        metavar="ADDRESS",
        help="tell routers what is here, for example on tcp://127.0.0.1:5557: events.endpoint",
    )
    parser.add_argument(
        "--events-replay",
        metavar="ADDRESS",
        help="where routers ask for what they have missed: events.replay",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON when ready, one at the end"
    )


def add_http(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=explained(parse_address),
        help="serve the dashboard, metrics and an API too, for example on 127.0.0.1:9400",
    )
    for option, text in (
        ("--http-token-file", "who sends its content may read and change; needed for other hosts"),
        ("--http-cert", "a certificate, as PEM: serve HTTPS"),
        ("--http-key", "the certificate's key, as PEM"),
    ):
        parser.add_argument(option, type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--http-archive-max",
        type=explained(parse_bytes),
        metavar="SIZE",
        help="the largest archive of a session that is imported over HTTP (64GiB)",
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=positive,
        metavar="N",
        help="what the GPUs compute without kvdepot, for engines that do not report it: "
        "ledger.prefill_tokens_per_s",
    )
    parser.add_argument(
        "--gpu-watts",
        type=positive,
        metavar="N",
        help="of these GPUs, for the joules saved: ledger.gpu_watts",
    )


def parse_address(text: str) -> tuple[str, int]:
    """`127.0.0.1:9400` or `[::1]:9400`; ValueError for anything else."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not an address and a port, as 127.0.0.1:9400")
    return host, int(port)


def http_service(daemon: Daemon, args: argparse.Namespace) -> "HttpService":
    """The HTTP server that the options ask for."""
    try:
        from kvdepot.daemon.http.service import HttpService, HttpSettings
    except ImportError as error:
        raise ExtraMissingError("http", str(error.name)) from error
    host, port = args.http
    files = (args.http_token_file, args.http_cert, args.http_key)
    settings = HttpSettings(host, port, *files)
    if args.http_archive_max is not None:
        settings = replace(settings, archive_bytes_max=args.http_archive_max)
    return HttpService(daemon, settings)


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    for option in ("http_token_file", "http_cert", "http_key", "http_archive_max"):
        if getattr(args, option) is not None and args.http is None:
            name = "--" + option.replace("_", "-")
            raise ConfigError(name, "is for --http", hint="give --http 127.0.0.1:9400 too")
    if args.events_replay is not None and args.events is None:
        hint = "give --events tcp://127.0.0.1:5557 too"
        raise ConfigError("--events-replay", "is for --events", hint=hint)


def run(args: argparse.Namespace) -> int:
    check_options(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    overrides = parse_settings(args.settings)
    for name, value in (("endpoint", args.events), ("replay", args.events_replay)):
        overrides |= {f"events.{name}": value} if value is not None else {}
    for name in ("prefill_tokens_per_s", "gpu_watts"):
        overrides |= {f"ledger.{name}": value} if (value := getattr(args, name)) is not None else {}
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
    http = None
    if args.http is not None:
        try:
            http = http_service(daemon, args)
        except BaseException:
            daemon.close()
            raise
    for number in STOPPING:
        signal.signal(number, lambda *_: stop(daemon))
    listener.listen()
    if http is not None:
        http.start()
    announce(daemon, path, args, http.url if http is not None else "")
    daemon.run()
    output.say("stopping: writing down what waits")
    if http is not None:
        http.stop()
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


def announce(daemon: Daemon, path: Path, args: argparse.Namespace, http: str) -> None:
    """Say that clients can connect: to people, scripts and systemd."""
    stats = daemon.store.stats()
    if args.json:
        facts = {"ready": True, "socket": str(path), "pid": os.getpid()}
        facts |= {"http": http} if http else {}
        facts |= {"events": events["endpoint"]} if (events := stats.get("events")) else {}
        line({**facts, "protocol": PROTOCOL, "blocks": stats["blocks"]})
    else:
        memory = format_bytes(stats["tiers"]["dram"]["capacity_bytes"])
        if slower := stats["tiers"].get("cxl"):
            memory += f" and {format_bytes(slower['capacity_bytes'])} of {slower['source']} as cxl"
        output.data(
            f"ready: unix:{path}, {format_count(stats['blocks'], 'block')}, {memory} of memory, "
            f"process {os.getpid()}" + (f", {http}" if http else "")
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
