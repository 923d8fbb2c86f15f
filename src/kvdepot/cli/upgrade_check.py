"""`kvdepot upgrade-check`: whether this version can replace another one.

The new version runs it, before the old one is replaced. Nothing is changed or locked.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import kvdepot
from kvdepot.cli.arguments import DAEMON, open_daemon, socket_path
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.tables import Table
from kvdepot.config import settings as config
from kvdepot.config.settings import PAGE_BYTES
from kvdepot.core.units import format_count
from kvdepot.daemon.wire.versions import PROTOCOL, PROTOCOL_OLDEST
from kvdepot.errors import ConfigError, DaemonError, WireError
from kvdepot.format.metadata import VolumeHeader
from kvdepot.format.segment import FORMAT

COLUMNS: Final = {"what": "what", "": "verdict", "found": "found", "what to do": "todo"}


@dataclass(frozen=True, slots=True)
class UpgradeFinding:
    what: str
    verdict: Literal["ok", "note", "stop"]
    """`stop`: do not upgrade before `todo` is done."""
    found: str
    todo: str = ""


def run(args: argparse.Namespace) -> Answer:
    findings = list(find(args))
    ready = all(finding.verdict != "stop" for finding in findings)
    versions = {"version": kvdepot.__version__, "format": FORMAT, "protocol": PROTOCOL}
    spoken = f"protocols {PROTOCOL_OLDEST} to {PROTOCOL}"
    verdict = "ready to upgrade" if ready else "not ready: do the steps listed for `stop` first"
    return Answer(
        {"ok": ready, **versions, "protocol_oldest": PROTOCOL_OLDEST, "findings": findings},
        [Table.of(findings, COLUMNS).text(), verdict],
        notes=[f"kvdepot {kvdepot.__version__}: store format {FORMAT}, {spoken}"],
        status=0 if ready else 1,
    )


def find(args: argparse.Namespace) -> Iterator[UpgradeFinding]:
    paths = list(args.path)
    if args.config is not None:
        what = f"settings {args.config}"
        try:
            settings = config.load(args.config, env=args.env)
        except ConfigError as error:
            todo = error.hint or "change the file so that both versions read it"
            yield UpgradeFinding(what, "stop", str(error), todo)
        else:
            yield UpgradeFinding(what, "ok", "this version reads them")
            paths += [path for tier in settings.file_tiers for path in tier.path]
    for path in dict.fromkeys(paths):
        yield check_store(path)
    yield check_daemon(args)


def check_store(path: Path) -> UpgradeFinding:
    what = f"store {path}"
    try:
        page = read_superblock(path)
    except OSError as error:
        todo = "run this as the store's user, on the machine that has it"
        return UpgradeFinding(what, "stop", f"cannot be read: {error.strerror}", todo)
    if not any(page):
        return UpgradeFinding(what, "note", "no store yet", "the first start creates it")
    header = VolumeHeader.parse(page)
    if header is None:
        return UpgradeFinding(what, "stop", "damaged superblock", f"kvdepot check --repair {path}")
    if isinstance(header, int):
        older = "an older" if header < FORMAT else "a newer"
        reason = f"format {header}, of {older} kvdepot; this version reads {FORMAT}"
        todo = "give this version an empty path, or keep the old version"
        return UpgradeFinding(what, "stop", reason, todo)
    return UpgradeFinding(what, "ok", f"format {FORMAT}")


def read_superblock(path: Path) -> bytes:
    """The first page of the superblock; zeros if there is no store."""
    if path.is_dir():
        path /= "superblock"
    if not path.exists():
        return bytes(PAGE_BYTES)
    with path.open("rb") as file:
        return file.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0")


def check_daemon(args: argparse.Namespace) -> UpgradeFinding:
    what = f"daemon at {socket_path(args)}"
    try:
        with open_daemon(args) as store:
            facts = store.stats().get("daemon", {})
    except DaemonError as error:
        if "speaks" in str(error):
            todo = "stop engines and daemon, upgrade both, start the daemon first"
            return UpgradeFinding(what, "stop", str(error), todo)
        return UpgradeFinding(what, "note", "none answers", "nothing to do, if none should run")
    except (WireError, OSError) as error:
        todo = "see the daemon's log"
        return UpgradeFinding(what, "stop", f"does not answer as a daemon: {error}", todo)
    theirs = int(facts.get("protocol", PROTOCOL_OLDEST))
    clients = max(0, len(facts.get("sessions", ())) - 1)  # without this command
    reason = f"version {facts.get('version', '?')}, protocol {theirs}, "
    reason += f"{format_count(clients, 'client')} attached"
    todo = "restart it at any time; clients attach again by themselves"
    if theirs != PROTOCOL:
        reason += f"; it and this version agree on protocol {min(theirs, PROTOCOL)}"
        todo += ". Either side may be upgraded first, and may go back"
    return UpgradeFinding(what, "ok", reason, todo)


COMMAND = Command(
    more="Reads settings, stores on disk and the running daemon, and changes nothing. Run it with "
    "the new version, before the old one is replaced; to go back, run it with the old one. Exits "
    "with 1 if something must be done first.",
    options=f"""
    [PATH...]        directories or block devices of stores
    --config FILE    settings, as TOML; the stores in them are checked too
    {DAEMON}
    """,
    run=run,
)
