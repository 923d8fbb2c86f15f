"""`kvdepot proxy llama-server`: an HTTP proxy that keeps the KV of an engine's prompts."""

import argparse
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvdepot
from kvdepot.adapters.llama_cpp.blocks import BLOCK_TOKENS
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.cli import output
from kvdepot.cli.arguments import add_store_settings, count, explained, parse_settings
from kvdepot.cli.directories import models_folder
from kvdepot.config import settings as config
from kvdepot.core.depot import Depot
from kvdepot.errors import ConfigError, ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.adapters.llama_cpp.http_relay import ProxyServer


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "proxy",
        description="Stand before an engine's HTTP server: prompts whose beginning is known are "
        "answered without computing it again. Runs in the foreground until SIGTERM or Ctrl-C.",
    )
    engines = parser.add_subparsers(title="engines", metavar="ENGINE", dest="engine", required=True)
    llama = engines.add_parser(
        "llama-server",
        help="llama.cpp's server",
        description="Pass everything on to an unmodified llama-server on this machine, restore the "
        "longest known prefix of a prompt to one of its slots first, and keep what is new.",
    )
    llama.add_argument(
        "--upstream",
        default="http://127.0.0.1:8080",
        metavar="URL",
        help="where llama-server listens (default: %(default)s)",
    )
    llama.add_argument(
        "--listen",
        type=explained(address),
        default=("127.0.0.1", 8081),
        metavar="HOST:PORT",
        help="where clients connect (default: 127.0.0.1:8081); port 0 takes a free one",
    )
    llama.add_argument(
        "--slots",
        type=Path,
        required=True,
        metavar="DIR",
        help="llama-server's --slot-save-path, best on a memory filesystem",
    )
    llama.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="use the store of a daemon (kvdepot serve), not one of this process",
    )
    add_store_settings(llama)
    add_blocks(llama)
    llama.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="llama-server's --api-key, in a file"
    )
    llama.add_argument(
        "--json", action="store_true", help="print one line of JSON when listening, one at the end"
    )


def add_blocks(llama: argparse.ArgumentParser) -> None:
    """How its KV is kept."""
    llama.add_argument(
        "--block-tokens",
        type=count,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of a block (default: %(default)s); the rest of a prompt is computed",
    )
    llama.add_argument(
        "--audit",
        type=explained(share),
        default=0.0,
        metavar="SHARE",
        help="compute this share of hits again, and compare, as 0.02 (default: none)",
    )
    llama.add_argument("--tenant", default="", metavar="NAME", help="whose blocks these are")


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[HOST]:PORT` or `:PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not of the form host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


def share(text: str) -> float:
    """0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not a share, from 0 to 1")
    return value


def run(args: argparse.Namespace) -> int:
    try:
        from kvdepot.adapters.llama_cpp.http_relay import ProxyServer
    except ImportError as error:
        raise ExtraMissingError("llama", str(error.name)) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = LinkSettings(
        args.upstream,
        args.slots.absolute(),
        args.block_tokens,
        args.tenant,
        args.api_key_file.read_text().strip() if args.api_key_file else "",
        models_folder(args.env).parent / "weights",
        config.AuditConfig(share=args.audit),
    )
    with open_depot(args) as depot:
        proxy = LlamaProxy(settings, depot)
        try:
            with ProxyServer(args.listen, proxy) as server:
                serve(server, args)
        finally:
            proxy.close()
        report = depot.close()
    status = proxy.counters.as_dict()
    if args.json:
        line({"stopped": True, "ok": report.complete, **status})
    else:
        kept = "" if report.complete else f"; {report.waiting + report.given_up} blocks not written"
        output.say(f"stopped: {status['restored']} of {status['completions']} restored{kept}")
    return 0 if report.complete else 1


def open_depot(args: argparse.Namespace) -> Depot:
    overrides = parse_settings(args.settings)
    if args.socket is None:
        return kvdepot.open(config.load(args.config, env=args.env, overrides=overrides))
    if args.config is not None or overrides:
        raise ConfigError("--socket", "excludes --config and --set: the daemon has the store")
    return kvdepot.open(f"unix:{args.socket}")


def serve(server: "ProxyServer", args: argparse.Namespace) -> None:
    """Answer clients until a signal comes; a second one ends the process at once."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # From another thread: `shutdown` waits for the loop that this signal has interrupted.
        threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = str(server.server_address[0]), server.server_address[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if args.json:
        line({"ready": True, "url": url, "upstream": args.upstream, "pid": os.getpid()})
    else:
        output.data(f"ready: {url}, before {args.upstream}, process {os.getpid()}")
        output.flush()
    server.serve_forever(poll_interval=0.1)


def line(value: dict[str, Any]) -> None:
    output.data(json.dumps(value))
    output.flush()
