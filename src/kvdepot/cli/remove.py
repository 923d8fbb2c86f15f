"""`kvdepot remove`: delete the blocks of namespaces, for every engine that uses the depot."""

import argparse

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, add_store_settings
from kvdepot.cli.audit import opened
from kvdepot.core.block import TAG_BYTES
from kvdepot.core.units import format_count
from kvdepot.errors import ConfigError, DaemonError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "remove",
        description="Delete all blocks of namespaces from all tiers, for every engine that uses "
        "the depot, also after a restart. An engine's own reset does not: it only stops using "
        "them.",
    )
    parser.add_argument(
        "namespaces",
        nargs="+",
        metavar="NAMESPACE",
        help="16 hexadecimal digits, as an engine's log and kvdepot inspect have them",
    )
    add_daemon(parser)
    add_store_settings(parser)
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    tags = [_tag(name) for name in args.namespaces]
    removed: dict[str, int] = {}
    with opened(args) as store:
        for tag in tags:
            removed[tag.hex()] = store.remove_tag(tag)
        client = store.stats().get("client", {})
        if client.get("away"):
            raise DaemonError(str(args.socket or "socket"), "the daemon went away meanwhile")
    if args.json:
        output.document({"removed": removed})
    else:
        for name, count in removed.items():
            output.data(f"{name}: {format_count(count, 'block')} removed")
    return 0


def _tag(name: str) -> bytes:
    try:
        tag = bytes.fromhex(name)
    except ValueError:
        tag = b""
    if len(tag) != TAG_BYTES:
        raise ConfigError(
            "NAMESPACE", f"{name!r} is not one", hint=f"{2 * TAG_BYTES} hexadecimal digits"
        )
    return tag
