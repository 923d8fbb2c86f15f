"""`kvdepot remove`: delete the blocks of namespaces, for all engines."""

import argparse

from kvdepot.cli.arguments import DAEMON, SETTINGS, open_depot
from kvdepot.cli.command import Answer, Command
from kvdepot.core.block import TAG_BYTES
from kvdepot.core.units import format_count
from kvdepot.errors import ConfigError, DaemonError


def run(args: argparse.Namespace) -> Answer:
    tags = [parse_tag(name) for name in args.namespace]
    with open_depot(args) as store:
        removed = {tag.hex(): store.remove(namespace=tag) for tag in tags}
        if store.stats().get("client", {}).get("away"):
            raise DaemonError(str(args.socket or "socket"), "the connection to the daemon was lost")
    lines = [f"{name}: {format_count(count, 'block')} removed" for name, count in removed.items()]
    return Answer({"removed": removed}, lines)


def parse_tag(name: str) -> bytes:
    try:
        tag = bytes.fromhex(name)
    except ValueError:
        tag = b""
    if len(tag) != TAG_BYTES:
        raise ConfigError("NAMESPACE", f"{name!r} is not {2 * TAG_BYTES} hexadecimal digits")
    return tag


COMMAND = Command(
    more="The blocks are removed from all tiers, also after a restart. The reset of an engine "
    "does not remove blocks: the engine only stops using them.",
    options=f"""
    NAMESPACE...    16 hexadecimal digits, as the engine's log and `kvdepot inspect` show them
    {DAEMON + SETTINGS}
    """,
    run=run,
)
