"""`kvdepot hint`: tell a node of a site which prompt it will be asked for, ahead of the request."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import add_store_settings, explained, parse_settings
from kvdepot.cluster.link import publish_once
from kvdepot.cluster.messages import HintMessage, MalformedMessageError, subject
from kvdepot.config import settings as config
from kvdepot.core.block import BlockKey
from kvdepot.core.units import parse_duration
from kvdepot.errors import ConfigError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "hint",
        description="Publish on NATS that a prompt will be wanted on a node: it brings the blocks "
        "to its memory before the request comes. Needs the extra nats, and the settings "
        "nats.servers and nats.site. Returns when the server has the message; whether a node "
        "follows it, that node's stats tell.",
    )
    add_store_settings(parser)
    parser.add_argument(
        "--node", default="", metavar="NAME", help="where (nats.node there); left out, every node"
    )
    parser.add_argument(
        "--within",
        type=explained(parse_duration),
        default=10.0,
        metavar="TIME",
        help="how soon, as 2s (default: 10s)",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--session", metavar="NAME", help="the prompt of a session")
    prompt.add_argument(
        "--tokens", type=Path, metavar="FILE", help="its token ids, as a JSON list; - reads stdin"
    )
    prompt.add_argument(
        "--keys", type=Path, metavar="FILE", help="its keys in hexadecimal, as a JSON list"
    )
    parser.add_argument("--tenant", default="", metavar="NAME", help="whose session it is")
    parser.add_argument("--model", default="", metavar="NAME", help="of the tokens; else any")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.tenant and args.session is None:
        raise ConfigError("--tenant", "is for --session")
    if args.model and args.tokens is None:
        raise ConfigError("--model", "is for --tokens")
    overrides = parse_settings(args.settings, "nats.servers=nats://broker:4222")
    settings = config.load(args.config, env=args.env, overrides=overrides)
    if settings.nats is None:
        raise ConfigError(
            "nats.servers", "is not set", hint="--set nats.servers=nats://broker:4222, or --config"
        )
    try:
        message = HintMessage(
            args.node,
            args.within,
            session=args.session or "",
            tenant=args.tenant,
            keys=tuple(_key(one) for one in read_list("--keys", args.keys)),
            tokens=tuple(_token(one) for one in read_list("--tokens", args.tokens)),
            model=args.model,
        )
        raw = message.pack()
        HintMessage.parse(raw)
    except MalformedMessageError as error:
        raise ConfigError("hint", f"it {error}") from None
    publish_once(settings.nats, subject(settings.nats.site, "hint"), raw)
    where = {"site": settings.nats.site, "node": args.node, "within_s": args.within}
    if args.json:
        output.document({"sent": True, **where, "bytes": len(raw)})
    else:
        output.data(f"sent to {args.node or 'every node'} of {settings.nats.site}")
    return 0


def read_list(option: str, path: Path | None) -> list[Any]:
    """What a file lists; nothing without one."""
    if path is None:
        return []
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(option, f"{path} is not JSON") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(option, f"{path} is not a list")
    return found


def _key(value: Any) -> BlockKey:
    try:
        return BlockKey(bytes.fromhex(value))
    except (TypeError, ValueError) as error:
        raise ConfigError("--keys", "has a key that is not hexadecimal") from error


def _token(value: Any) -> int:
    if type(value) is not int:
        raise ConfigError("--tokens", "has a token that is not a whole number")
    return value
