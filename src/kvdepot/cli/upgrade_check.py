"""`kvdepot upgrade-check`: whether this version can take over what another one has left.

Run by the new version, beside the old one and before it is replaced. Nothing is changed or locked.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import kvdepot
from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, open_daemon, socket_path
from kvdepot.cli.report.tables import Table
from kvdepot.config import settings as config
from kvdepot.config.settings import PAGE_BYTES
from kvdepot.core.units import format_count
from kvdepot.daemon.wire.versions import PROTOCOL, PROTOCOL_OLDEST
from kvdepot.errors import ConfigError, DaemonError, WireError
from kvdepot.format.segment import FORMAT, Superblock

Verdict = Literal["ok", "note", "stop"]
HEADS: Final = ("what", "", "found", "what to do")


@dataclass(frozen=True, slots=True)
class UpgradeFinding:
    what: str
    verdict: Verdict
    """`stop`: do not upgrade before something is done about it."""
    found: str
    todo: str = ""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "upgrade-check",
        description="Whether this version can take over from the one that runs: reads settings, "
        "stores on disk and the running daemon, and changes nothing. Run it with the new "
        "version, before the old one is replaced; to go back, run it with the old one. Exits with "
        "1 where something must be done first.",
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="directories or block devices of stores"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings; the stores they name are read too"
    )
    add_daemon(parser)
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    findings = list(look(args))
    ready = all(one.verdict != "stop" for one in findings)
    if args.json:
        facts = {"version": kvdepot.__version__, "format": FORMAT, "protocol": PROTOCOL}
        facts["protocol_oldest"] = PROTOCOL_OLDEST
        output.document({"ok": ready, **facts, "findings": findings})
        return 0 if ready else 1
    spoken = f"protocols {PROTOCOL_OLDEST} to {PROTOCOL}"
    output.say(f"kvdepot {kvdepot.__version__}: store format {FORMAT}, {spoken}")
    output.data(
        Table(HEADS, [(one.what, one.verdict, one.found, one.todo) for one in findings]).text()
    )
    output.data("ready to upgrade" if ready else "not ready: do what is said beside `stop` first")
    return 0 if ready else 1


def look(args: argparse.Namespace) -> Iterator[UpgradeFinding]:
    paths = list(args.paths)
    if args.config is not None:
        try:
            settings = config.load(args.config, env=args.env)
        except ConfigError as error:
            todo = error.hint or "change the file so that both versions read it"
            yield UpgradeFinding(f"settings {args.config}", "stop", str(error), todo)
        else:
            yield UpgradeFinding(f"settings {args.config}", "ok", "this version reads them")
            paths += [path for tier in settings.file_tiers for path in tier.path]
    for path in dict.fromkeys(paths):
        yield look_at_store(path)
    yield look_at_daemon(args)


def look_at_store(path: Path) -> UpgradeFinding:
    what = f"store {path}"
    try:
        page = first_page(path)
    except OSError as error:
        todo = "run this as the store's user, on the machine that has it"
        return UpgradeFinding(what, "stop", f"cannot be read: {error.strerror}", todo)
    if not any(page):
        return UpgradeFinding(what, "note", "no store here yet", "one is made at the first start")
    found = Superblock.parse(page)
    if found is None:
        return UpgradeFinding(what, "stop", "damaged superblock", f"kvdepot check --repair {path}")
    if isinstance(found, int):
        older = "an older" if found < FORMAT else "a newer"
        reason = f"format {found}, of {older} kvdepot; this one reads {FORMAT}"
        todo = "give this version an empty path, or keep the old version"
        return UpgradeFinding(what, "stop", reason, todo)
    maker = f", made by {found.made_by}" if found.made_by else ""
    return UpgradeFinding(what, "ok", f"format {found.format}{maker}")


def first_page(path: Path) -> bytes:
    """Of the superblock; zeros where there is none."""
    if path.is_dir():
        path /= "superblock"
        if not path.exists():
            return bytes(PAGE_BYTES)
    elif not path.exists():
        return bytes(PAGE_BYTES)
    with path.open("rb") as file:
        return file.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0")


def look_at_daemon(args: argparse.Namespace) -> UpgradeFinding:
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
        todo = "look at the daemon's log"
        return UpgradeFinding(what, "stop", f"does not answer as a daemon: {error}", todo)
    theirs = int(facts.get("protocol", PROTOCOL_OLDEST))
    engines = max(0, len(facts.get("sessions", ())) - 1)  # less this command
    reason = f"version {facts.get('version', '?')}, protocol {theirs}, "
    reason += f"{format_count(engines, 'client')} attached"
    todo = "restart it when it suits; clients attach again by themselves"
    if theirs != PROTOCOL:
        reason += f"; it and this version agree on protocol {min(theirs, PROTOCOL)}"
        todo += ". Either side may be first, and may go back"
    return UpgradeFinding(what, "ok", reason, todo)
