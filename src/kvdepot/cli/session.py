"""`kvdepot session`: what a daemon's store remembers of sessions, and what becomes of them."""

import argparse
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, count, explained, open_daemon
from kvdepot.cli.report.tables import Table
from kvdepot.cli.stats import duration
from kvdepot.cli.tiers import waiting
from kvdepot.core.depot import Depot
from kvdepot.core.sessions import KEEP_S
from kvdepot.core.units import format_bytes, format_count, parse_duration
from kvdepot.store.sessions.session_table import SESSION_ORDERS

_FORMS: Final = "2026-11-20, 2026-11-20T18:00 or a weekday"
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_NAME_WIDTH: Final = 40


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "session",
        description="See the sessions of a running daemon; keep them, move them out of memory and "
        "back, and take them to another machine. docs/sessions.md",
    )
    verbs = parser.add_subparsers(title="what to do", metavar="VERB", dest="verb", required=True)
    one = add_verb(verbs, "list", "the sessions that are remembered")
    one.add_argument(
        "--order", choices=sorted(SESSION_ORDERS), default="recent", help="which come first"
    )
    one.add_argument("--limit", type=count, default=100, metavar="N", help="how many (100)")
    add_name(add_verb(verbs, "show", "all that is known of one session"))
    one = add_name(add_verb(verbs, "pin", "keep a session's blocks until a moment"))
    ends = one.add_mutually_exclusive_group()
    ends.add_argument(
        "--until",
        type=explained(parse_moment),
        metavar="TIME",
        help=f"{_FORMS} (its end), by this machine's time",
    )
    ends.add_argument(
        "--for",
        dest="seconds",
        type=explained(parse_duration),
        default=KEEP_S,
        metavar="TIME",
        help="as 10min or 3d (default 7d)",
    )
    one.add_argument(
        "--through-tool-call",
        action="store_true",
        help="only until the session's next turn, if that comes before",
    )
    add_name(add_verb(verbs, "unpin", "keep it no longer than others"))
    add_name(add_verb(verbs, "park", "it pauses: write its blocks to drives, free their memory"))
    one = add_name(add_verb(verbs, "warm", "it comes back soon: bring its blocks to memory"))
    one.add_argument(
        "--in",
        dest="seconds",
        type=explained(parse_duration),
        default=10.0,
        metavar="TIME",
        help="when it is expected (10s)",
    )
    add_name(add_verb(verbs, "expire", "it is over: forget it; its blocks make room first"))
    one = add_name(add_verb(verbs, "export", "write it to a file, for another depot"))
    one.add_argument("file", type=Path, metavar="FILE", help="to write; must not exist")
    one = add_verb(verbs, "import", "take in a session from such a file")
    one.add_argument("file", type=Path, metavar="FILE", help="that `session export` wrote")


def add_verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    add_daemon(parser)
    output.add_json_flag(parser)
    return parser


def add_name(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("name", metavar="SESSION", help="its name, as kvdepot session list has it")
    parser.add_argument(
        "--namespace",
        default="",
        metavar="TAG",
        help="of several sessions of this name, the one in this namespace",
    )
    return parser


def parse_moment(text: str) -> float:
    """Seconds since 1970 of the end of a day or weekday, or of a moment, in local time."""
    now = datetime.datetime.now().astimezone()
    if text.lower() in _DAYS:
        ahead = (_DAYS.index(text.lower()) - now.weekday()) % 7
        day = now.date() + datetime.timedelta(days=ahead)
    else:
        try:
            day = datetime.date.fromisoformat(text)
        except ValueError:
            try:
                return datetime.datetime.fromisoformat(text).astimezone().timestamp()
            except ValueError as error:
                raise ValueError(f"{text!r} is no time like {_FORMS}") from error
    end = datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time())
    return end.astimezone().timestamp()


def run(args: argparse.Namespace) -> int:
    verbs: dict[str, Callable[[Depot, argparse.Namespace], int]] = {
        "list": show_all,
        "show": show,
        "pin": pin,
        "unpin": unpin,
        "park": park,
        "warm": warm,
        "expire": expire,
        "export": export,
        "import": insert_recovered,
    }
    with open_daemon(args) as store:
        return verbs[args.verb](store, args)


def show_all(store: Depot, args: argparse.Namespace) -> int:
    found = store.sessions.known(args.order, args.limit)
    if args.json:
        output.document({"sessions": found})
        return 0
    headings = ("session", "tenant", "state", "turns", "blocks", "bytes", "where", "idle", "kept")
    rows = [
        (
            one["name"][:_NAME_WIDTH],
            one["tenant"] or "-",
            one["state"],
            f"{one['turns']:,}",
            f"{one['blocks']:,}",
            format_bytes(max(one["bytes"].values(), default=0)),
            where(one),
            duration(one["idle_s"]),
            moment(one["contract"]),
        )
        for one in found
    ]
    output.data(Table(headings, rows).text() if rows else "no session is known")
    return 0


def where(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{tier} {blocks:,}" for tier, blocks in one["tiers"].items()) or "gone"


def moment(contract: Mapping[str, Any] | None) -> str:
    """Until when, for people; by this machine's time."""
    if not contract:
        return "-"
    at = datetime.datetime.fromtimestamp(contract["until_s"])
    return at.strftime("%Y-%m-%d %H:%M") + (" or next turn" if contract["through_turn"] else "")


def show(store: Depot, args: argparse.Namespace) -> int:
    found = store.sessions.show(args.name, namespace=args.namespace)
    if args.json:
        output.document({"sessions": found})
        return 0
    for one in found:
        for line in lines_of(one):
            output.data(line)
    return 0


def lines_of(one: Mapping[str, Any]) -> list[str]:
    tenant = f", tenant {one['tenant']}" if one["tenant"] else ""
    held = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in one["bytes"].items())
    kept, contract = "no contract", one["contract"]
    if contract:
        kept = f"kept until {moment(contract)}: {format_count(contract['blocks'], 'block')}"
        kept += f", {contract['missing']} MISSING" if contract["missing"] else ""
    return [
        one["name"],
        f"  model     {one['model'] or '?'}, namespace {one['namespace']}{tenant}",
        f"  state     {one['state']}, {format_count(one['turns'], 'turn')}, last use "
        f"{duration(one['idle_s'])} ago",
        f"  blocks    {one['blocks']:,}: {where(one)}",
        f"  bytes     {held or 'none'}",
        f"  contract  {kept}",
    ]


def pin(store: Depot, args: argparse.Namespace) -> int:
    """2: it cannot be promised."""
    ends = {"until_s": args.until} if args.until is not None else {"for_s": args.seconds}
    receipt = store.sessions.pin(
        args.name, through_turn=args.through_tool_call, namespace=args.namespace, **ends
    )
    if args.json:
        output.document(receipt.as_dict())
    elif receipt:
        until = moment({"until_s": receipt.until_s, "through_turn": receipt.through_turn})
        numbers = ", ".join(map(str, receipt.numbers))
        output.data(
            f"{args.name}: {format_count(receipt.blocks, 'block')}, "
            f"{format_bytes(receipt.nbytes)}, durable and kept until {until} (contract {numbers})"
        )
    else:
        output.error(f"{args.name}: cannot be promised: {receipt.reason}", hint=receipt.hint)
    return 0 if receipt else 2


def unpin(store: Depot, args: argparse.Namespace) -> int:
    ended = store.sessions.unpin(args.name, namespace=args.namespace)
    return said(
        args,
        {"session": args.name, "contracts_ended": ended},
        f"{args.name}: {format_count(ended, 'contract')} ended",
    )


def park(store: Depot, args: argparse.Namespace) -> int:
    facts = store.sessions.park(args.name, namespace=args.namespace)
    text = f"{facts['durable']:,} of {format_count(facts['blocks'], 'block')} on drives"
    return said(args, facts, f"{args.name}: {text}, {facts['freed']:,} left memory")


def warm(store: Depot, args: argparse.Namespace) -> int:
    facts = store.sessions.warm(args.name, args.seconds, namespace=args.namespace)
    return said(args, facts, f"{args.name}: {format_count(facts['wanted'], 'block')} on the way")


def expire(store: Depot, args: argparse.Namespace) -> int:
    facts = store.sessions.expire(args.name, namespace=args.namespace)
    blocks = format_count(facts["blocks"], "block")
    return said(args, facts, f"{args.name}: forgotten; its {blocks} make room first")


def export(store: Depot, args: argparse.Namespace) -> int:
    with moving(store, f"writing {args.file}"):
        facts = store.sessions.export(args.name, args.file, namespace=args.namespace)
    text = f"{format_count(facts['blocks'], 'block')}, {format_bytes(facts['bytes'])}"
    return said(args, facts, f"{args.name}: {text} in {args.file}")


def insert_recovered(store: Depot, args: argparse.Namespace) -> int:
    """2: only a part of the archive is intact, or found room."""
    with moving(store, f"reading {args.file}"):
        facts = store.sessions.import_file(args.file)
    text = f"{facts['blocks']:,} of {format_count(facts['of_blocks'], 'block')} taken in"
    said(args, facts, f"{facts['session']}: {text}")
    if facts["damage"] and not args.json:
        output.say(f"warning: {facts['damage']}; what lies behind is left out")
    return 0 if facts["complete"] else 2


def moving(store: Depot, label: str) -> Any:
    """A line of progress, by what the daemon says of the file."""

    def done() -> int:
        transfer = store.stats().get("sessions", {}).get("transfer", {})
        total = max(1, transfer.get("total_bytes", 1))
        return int(100 * transfer.get("done_bytes", 0) / total)

    return waiting(label, 100, done)


def said(args: argparse.Namespace, facts: Mapping[str, Any], text: str) -> int:
    if args.json:
        output.document(dict(facts))
    else:
        output.data(text)
    return 0
