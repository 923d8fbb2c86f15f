"""`kvdepot session`: lists, keeps, moves, exports and imports the sessions of a daemon's store."""

import argparse
import datetime
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.stats import blocks_by_tier
from kvdepot.cli.tables import Column, Table
from kvdepot.cli.tiers import waiting
from kvdepot.core.sessions import KEEP_S
from kvdepot.core.units import format_bytes, format_count, format_duration
from kvdepot.depot import Depot
from kvdepot.store.sessions.session_table import SESSION_ORDERS

_FORMS: Final = "2026-11-20, 2026-11-20T18:00 or a weekday"
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_NAME_WIDTH: Final = 40
Work = Callable[[Depot, argparse.Namespace], Answer]


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
                raise ValueError(f"{text!r} is not a time such as {_FORMS}") from error
    end = datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time())
    return end.astimezone().timestamp()


def list_sessions(store: Depot, args: argparse.Namespace) -> Answer:
    found = store.sessions.list(args.order, args.limit)
    return Answer({"sessions": found}, Table.of(found, LIST).text() if found else "no sessions")


def end_of(pin: Mapping[str, Any] | None) -> str:
    """The end of a pin, in local time."""
    if not pin:
        return "-"
    return datetime.datetime.fromtimestamp(pin["until_s"]).strftime("%Y-%m-%d %H:%M")


LIST: Final[Mapping[str, Column]] = {
    "session": lambda row: row["name"][:_NAME_WIDTH],
    "tenant": lambda row: row["tenant"] or "-",
    "state": "state",
    "turns": "turns",
    "blocks": "blocks",
    "bytes": lambda row: format_bytes(max(row["bytes"].values(), default=0)),
    "tiers": blocks_by_tier,
    "idle": lambda row: format_duration(row["idle_s"]),
    "pinned until": lambda row: end_of(row["pin"]),
}


def show(store: Depot, args: argparse.Namespace) -> Answer:
    found = store.sessions.show(args.session, namespace=args.namespace or "")
    return Answer({"sessions": found}, [line for row in found for line in lines_of(row)])


def lines_of(row: Mapping[str, Any]) -> list[str]:
    tenant = f", tenant {row['tenant']}" if row["tenant"] else ""
    sizes = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in row["bytes"].items())
    pinned, pin = "no", row["pin"]
    if pin:
        pinned = f"until {end_of(pin)}: {format_count(pin['blocks'], 'block')}"
        pinned += f", {pin['missing']} MISSING" if pin["missing"] else ""
    return [
        row["name"],
        f"  model     {row['model'] or '?'}, namespace {row['namespace']}{tenant}",
        f"  state     {row['state']}, {format_count(row['turns'], 'turn')}, last use "
        f"{format_duration(row['idle_s'])} ago",
        f"  blocks    {row['blocks']:,}: {blocks_by_tier(row)}",
        f"  bytes     {sizes or 'none'}",
        f"  pinned    {pinned}",
    ]


def pin(store: Depot, args: argparse.Namespace) -> Answer:
    ends = {"for_s": KEEP_S if args.for_ is None else args.for_}
    ends = {"until_s": args.until} if args.until is not None else ends
    receipt = store.sessions.pin(args.session, namespace=args.namespace or "", **ends)
    if not receipt:
        if not args.json:
            output.error(f"{args.session}: cannot be pinned: {receipt.reason}", hint=receipt.hint)
        return Answer(receipt.as_dict(), status=2)
    until = end_of(receipt.as_dict())
    return Answer(
        receipt.as_dict(),
        f"{args.session}: {format_count(receipt.blocks, 'block')}, "
        f"{format_bytes(receipt.nbytes)}, durable and pinned until {until} "
        f"(pin {', '.join(map(str, receipt.numbers))})",
    )


def unpin(store: Depot, args: argparse.Namespace) -> Answer:
    ended = store.sessions.unpin(args.session, namespace=args.namespace or "")
    text = f"{args.session}: {format_count(ended, 'pin')} ended"
    return Answer({"session": args.session, "pins_ended": ended}, text)


def evict_to_disk(store: Depot, args: argparse.Namespace) -> Answer:
    facts = store.sessions.evict_to_disk(args.session, namespace=args.namespace or "")
    written = f"{facts['durable']:,} of {format_count(facts['blocks'], 'block')} on drives"
    return Answer(facts, f"{args.session}: {written}, {facts['freed']:,} left memory")


def prefetch(store: Depot, args: argparse.Namespace) -> Answer:
    hint = store.sessions.prefetch(args.session, args.in_, namespace=args.namespace or "")
    with waiting(f"reading {args.session}", max(1, hint.wanted), lambda: hint.brought):
        hint.wait(args.in_)
    facts = {"session": args.session, "wanted": hint.wanted, "brought": hint.brought}
    text = f"{hint.brought:,} of {format_count(hint.wanted, 'block')} read to memory"
    return Answer(facts, f"{args.session}: {text}")


def export(store: Depot, args: argparse.Namespace) -> Answer:
    with waiting(f"writing {args.file}", 100, lambda: transferred(store)):
        facts = store.sessions.export(args.session, args.file, namespace=args.namespace or "")
    text = f"{format_count(facts['blocks'], 'block')}, {format_bytes(facts['bytes'])}"
    return Answer(facts, f"{args.session}: {text} in {args.file}")


def import_file(store: Depot, args: argparse.Namespace) -> Answer:
    with waiting(f"reading {args.file}", 100, lambda: transferred(store)):
        facts = store.sessions.import_file(args.file)
    text = f"{facts['blocks']:,} of {format_count(facts['of_blocks'], 'block')} imported"
    damage = f"warning: {facts['damage']}; the blocks after the damage are not imported"
    newer = "warning: the store has a newer version of this session, which is kept"
    notes = [damage] * bool(facts["damage"]) + [newer] * bool(facts.get("kept_newer"))
    return Answer(
        facts,
        f"{facts['session']}: {text}",
        notes=notes,
        status=0 if facts["complete"] else 2,
    )


def transferred(store: Depot) -> int:
    """Percent of the file that the daemon has written or read."""
    transfer = store.stats().get("sessions", {}).get("transfer", {})
    return int(100 * transfer.get("done_bytes", 0) / max(1, transfer.get("total_bytes", 1)))


NAME = """
SESSION            its name, as `kvdepot session list` shows it
--namespace TAG    the namespace, if sessions of several namespaces have this name
"""
PIN = f"""
--until TIME           {_FORMS} (its end), in local time [not with: --for]
--for TIME             such as 10min or 3d (default: 7d)
"""
ORDERS = "|".join(sorted(SESSION_ORDERS))


def verb(text: str, work: Work, options: str = "", more: str = "", name: str = NAME) -> Command:
    kinds = {"--until": parse_moment}
    return Command(text, more, name + options + DAEMON, on_daemon(work), kinds=kinds)


COMMAND = Command(
    more="A session is a conversation that has a name. See docs/sessions.md.",
    verbs={
        "list": verb(
            "list the sessions",
            list_sessions,
            f"--order {ORDERS}    which come first [default: recent]\n"
            "--limit N    how many [default: 100]",
            name="",
        ),
        "show": verb("show one session", show),
        "pin": verb(
            "keep the blocks of a session until a time",
            pin,
            PIN,
            "Exits with 2 if they cannot be kept.",
        ),
        "unpin": verb("end the pin of a session", unpin),
        "evict-to-disk": verb(
            "write the blocks of a session to drives, and free their memory", evict_to_disk
        ),
        "prefetch": verb(
            "read the blocks of a session to memory",
            prefetch,
            "--in TIME    how long this may take [default: 10s]",
        ),
        "export": verb(
            "write a session to a file, for another depot",
            export,
            "FILE    the file to write; must not exist",
        ),
        "import": verb(
            "read a session from such a file",
            import_file,
            "FILE    a file that `kvdepot session export` wrote",
            "Exits with 2 if some of its blocks are damaged or found no space.",
            name="",
        ),
    },
)
