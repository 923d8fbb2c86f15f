"""`kvdepot proxy llama-server`: an HTTP proxy that keeps the KV of an engine's prompts."""

import argparse
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import kvdepot
from kvdepot.adapters.llama_cpp.blocks import BLOCK_TOKENS
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.cli import output
from kvdepot.cli.arguments import SETTINGS, load_settings
from kvdepot.cli.command import Command
from kvdepot.cli.directories import models_folder
from kvdepot.config import settings as config
from kvdepot.depot import Depot
from kvdepot.errors import ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.adapters.llama_cpp.http_front import ProxyServer


def run(args: argparse.Namespace) -> int:
    try:
        from kvdepot.adapters.llama_cpp.http_front import ProxyServer
    except ImportError as error:
        raise ExtraMissingError("llama", str(error.name)) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = LinkSettings(
        args.upstream,
        args.slots.absolute(),
        args.block_tokens,
        args.tenant or "",
        args.api_key_file.read_text().strip() if args.api_key_file else "",
        models_folder(args.env).parent / "weights",
        config.AuditConfig(share=args.audit),
    )
    with open_store(args) as depot:
        proxy = LlamaProxy(settings, depot)
        try:
            with ProxyServer(args.listen, proxy) as server:
                serve(server, args)
        finally:
            proxy.close()
        report = depot.close()
    status = proxy.counters.as_dict()
    if args.json:
        output.json_line({"stopped": True, "ok": report.complete, **status})
    else:
        kept = "" if report.complete else f"; {report.waiting + report.given_up} blocks not written"
        output.say(f"stopped: {status['restored']} of {status['completions']} restored{kept}")
    return 0 if report.complete else 1


def open_store(args: argparse.Namespace) -> Depot:
    if args.socket is not None:
        return kvdepot.open(f"unix:{args.socket}")
    return kvdepot.open(load_settings(args))


def serve(server: "ProxyServer", args: argparse.Namespace) -> None:
    """Serve clients until a signal; a second signal ends the process at once."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # In another thread: `shutdown` waits for the loop that this signal has interrupted.
        threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = str(server.server_address[0]), server.server_address[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if args.json:
        facts = {"ready": True, "url": url, "upstream": args.upstream, "pid": os.getpid()}
        output.json_line(facts)
    else:
        output.data(f"ready: {url}, before {args.upstream}, process {os.getpid()}")
        output.flush()
    server.serve_forever(poll_interval=0.1)


COMMAND = Command(
    more="A prompt whose beginning is known is served without computing it again.",
    verbs={
        "llama-server": Command(
            "forward requests to an unmodified llama-server of this machine",
            "Before a request the longest known prefix of its prompt is restored to a slot of the "
            "server; after it the new KV is kept. Runs in the foreground until SIGTERM or Ctrl-C.",
            f"""
            --upstream URL         where llama-server listens [default: http://127.0.0.1:8080]
            --listen HOST:PORT     where clients connect; port 0 takes a free one
                                   [default: 127.0.0.1:8081]
            --slots DIR            llama-server's --slot-save-path, best on a memory filesystem
                                   [required]
            --socket PATH          use the store of a daemon (kvdepot serve), not one of this
                                   process [not with: --config, --set]
            {SETTINGS}
            --block-tokens N       tokens of a block; the rest of a prompt is computed
                                   [default: {BLOCK_TOKENS}]
            --audit SHARE          share of hits that are computed again and compared, such as
                                   0.02 [default: 0]
            --tenant NAME          the tenant of the blocks
            --api-key-file FILE    llama-server's --api-key, in a file
            """,
            run,
            json="print one line of JSON when listening, and one at the end",
        )
    },
)
