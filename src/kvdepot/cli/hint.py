"""`kvdepot hint`: announces to the nodes of a cluster a prompt that will be requested."""

import argparse
import json
import sys
from pathlib import Path

from kvdepot.cli.arguments import SETTINGS, load_settings
from kvdepot.cli.command import Answer, Command
from kvdepot.cluster.link import publish_once
from kvdepot.cluster.messages import HintMessage, MalformedMessageError, subject
from kvdepot.errors import ConfigError


def run(args: argparse.Namespace) -> Answer:
    if args.session is None and args.tokens is None:
        raise ConfigError("hint", "needs a prompt", hint="give --session or --tokens")
    settings = load_settings(args)
    if settings.nats is None:
        raise ConfigError(
            "nats.servers", "is not set", hint="add --set nats.servers=nats://HOST:4222"
        )
    try:
        message = HintMessage(
            args.node or "",
            args.within,
            session=args.session or "",
            tenant=args.tenant or "",
            tokens=read_tokens(args.tokens) if args.tokens else (),
            model=args.model or "",
        )
        raw = message.pack()
        HintMessage.parse(raw)
    except MalformedMessageError as error:
        raise ConfigError("hint", f"the message {error}") from None
    publish_once(settings.nats, subject(settings.nats.site, "hint"), raw)
    where = {"site": settings.nats.site, "node": args.node or "", "within_s": args.within}
    return Answer(
        {"sent": True, **where, "bytes": len(raw)},
        f"sent to {args.node or 'every node'} of {settings.nats.site}",
    )


def read_tokens(path: Path) -> tuple[int, ...]:
    """The token ids of a JSON list in a file; `-` is stdin."""
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise ConfigError("--tokens", f"{path} is not JSON") from error
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError("--tokens", f"{path} is not a list with items")
    for token in tokens:
        if type(token) is not int:
            raise ConfigError("--tokens", f"{token!r} is not a whole number")
    return tuple(tokens)


COMMAND = Command(
    more="The nodes read the blocks of the prompt to their memory before the request comes. "
    "Publishes one message on NATS and returns when the NATS server has it; the stats of each "
    "node count the hints that it followed. Needs the extra nats, and the settings nats.servers "
    "and nats.site.",
    options=f"""
    --session NAME    the prompt of a session [not with: --tokens]
    --tokens FILE     the prompt, as a JSON list of token ids; - reads stdin
    --node NAME       the node (nats.node there) that follows the hint (default: all)
    --within TIME     time until the request [default: 10s]
    --tenant NAME     the tenant of the session [needs: --session]
    --model NAME      the model of the tokens (default: any) [needs: --tokens]
    {SETTINGS}
    """,
    run=run,
)
