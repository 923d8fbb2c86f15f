"""`kvdepot serve`: owns a store, and shares it with other processes of this machine."""

import argparse
import logging
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdepot.cli import output
from kvdepot.cli.arguments import SETTINGS, load_settings, parse_settings, socket_path
from kvdepot.cli.command import Command
from kvdepot.config import settings as config
from kvdepot.core.private import make_private_folder
from kvdepot.core.units import format_bytes, format_count
from kvdepot.daemon.server.client_resources import ClientLimits
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.errors import ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.daemon.http.service import HttpService

STOPPING = (signal.SIGTERM, signal.SIGINT)
NOTIFY = "NOTIFY_SOCKET"


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


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = load_settings(args)
    path = socket_path(args)
    if args.socket is None and not args.env.get(config.SOCKET_ENV):
        make_private_folder(path.parent)
    listener = Listener(path, args.group or "")
    try:
        daemon = Daemon(settings, listener, ClientLimits(clients=args.clients))
    except BaseException:
        listener.close()
        raise
    daemon.settings_file = args.config and args.config.resolve()
    daemon.settings_elsewhere = config.names_outside_file(args.env, parse_settings(args.set))
    http = None
    if args.http is not None:
        try:
            http = http_service(daemon, args)
        except BaseException:
            daemon.close()
            raise
    for number in STOPPING:
        signal.signal(number, lambda *_: stop(daemon))
    signal.set_wakeup_fd(daemon.wake_fd, warn_on_full_buffer=False)
    listener.listen()
    if http is not None:
        http.start()
    announce(daemon, path, args, http.url if http is not None else "")
    daemon.run()
    signal.set_wakeup_fd(-1)
    output.say("stopping: writing blocks to drives")
    if http is not None:
        http.stop()
    report = daemon.close()
    if args.json:
        output.json_line({"stopped": True, "ok": report.complete, "waiting": report.waiting})
    else:
        left = format_count(report.waiting + report.given_up, "block")
        output.say("stopped" if report.complete else f"stopped; {left} not written")
    return 0 if report.complete else 1


def stop(daemon: Daemon) -> None:
    """The first signal ends the daemon in order; the second one ends the process at once."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    daemon.stop()


def announce(daemon: Daemon, path: Path, args: argparse.Namespace, http: str) -> None:
    """Announce on stdout and to systemd that clients can connect."""
    stats = daemon.store.stats()
    if args.json:
        facts = {"ready": True, "socket": str(path), "pid": os.getpid()}
        facts |= {"http": http} if http else {}
        facts |= {"events": events["endpoint"]} if (events := stats.get("events")) else {}
        output.json_line({**facts, "protocol": PROTOCOL, "blocks": stats["blocks"]})
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


def notify(address: str) -> None:
    """Notify systemd that a unit of Type=notify is ready."""
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.connect(name)
        sending.send(b"READY=1")


COMMAND = Command(
    more="Other processes open the store as unix:PATH. Runs in the foreground until SIGTERM or "
    "Ctrl-C, then writes all blocks to drives and exits: 0 if all were written, else 1. A second "
    "signal ends it at once.",
    options=f"""
    --socket PATH              where clients connect (default: KVDEPOT_SOCKET, else
                               kvdepot/depot.sock in your runtime directory)
    {SETTINGS}
    --group NAME               a group whose members may connect too
    --clients N                clients at the same time [default: {ClientLimits().clients}]
    --http HOST:PORT           also serve the dashboard, metrics and the HTTP API, such as on
                               127.0.0.1:9400
    --http-token-file FILE     a secret that clients must send; required if HOST is not local
                               [needs: --http]
    --http-cert FILE           a certificate, as PEM: serve HTTPS [needs: --http]
    --http-key FILE            the key of the certificate, as PEM [needs: --http]
    --http-archive-max SIZE    the largest session that may be imported over HTTP (default: 64GiB)
                               [needs: --http]
    """,
    run=run,
    json="print one line of JSON when ready, and one at the end",
)
