"""`kvdepot tiers`: see and change the tiers of a store that `kvdepot serve` owns, while it runs."""

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, explained, open_daemon
from kvdepot.cli.report.tables import Table
from kvdepot.core.depot import Depot
from kvdepot.core.units import exact_bytes, format_bytes, parse_bytes
from kvdepot.errors import KVDepotError
from kvdepot.policy.placing.write_mode import WriteMode

LOOK_S = 0.5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "tiers",
        description="See and change the tiers of a running daemon. Changes are for its own user "
        "and root, and last until it ends: put them into its settings too.",
    )
    verbs = parser.add_subparsers(title="what to do", metavar="VERB", dest="verb", required=True)
    add_verb(verbs, "list", "what each tier and drive holds, and how it is")
    one = add_verb(verbs, "add", "use one more drive, which must be empty")
    add_drive(one)
    one = add_verb(verbs, "drain", "move a drive's blocks to the others and use it no more")
    add_drive(one)
    one = add_verb(verbs, "resize", "give a tier more or less room; where it is less, blocks go")
    one.add_argument("tier", metavar="TIER", help="ssd or hdd")
    one.add_argument(
        "capacity", type=explained(parse_bytes), metavar="SIZE", help="of all its drives, as 100TiB"
    )
    one = add_verb(verbs, "mode", "when blocks come to a tier from the one above")
    one.add_argument("tier", metavar="TIER", help="ssd or hdd")
    one.add_argument("mode", choices=[mode.value for mode in WriteMode], metavar="MODE")


def add_verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    add_daemon(parser)
    output.add_json_flag(parser)
    return parser


def add_drive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tier", metavar="TIER", help="ssd or hdd")
    parser.add_argument("path", type=Path, metavar="DRIVE", help="a directory or block device")


def run(args: argparse.Namespace) -> int:
    verbs: dict[str, Callable[[Depot, argparse.Namespace], int]] = {
        "list": show,
        "add": add,
        "drain": drain,
        "resize": resize,
        "mode": set_mode,
    }
    store = open_daemon(args)
    try:
        return verbs[args.verb](store, args)
    finally:
        store.close(timeout_s=0.0)  # what others have put need not be on disk for us


def show(store: Depot, args: argparse.Namespace) -> int:
    tiers = store.stats().get("tiers", {})
    if args.json:
        output.document({"tiers": tiers})
        return 0
    headings = ("tier", "drive", "state", "used", "room", "mode")
    rows = [row for name, tier in tiers.items() for row in rows_of(name, tier)]
    output.data(Table(headings, rows).text())
    return 0


def rows_of(name: str, tier: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One line for each drive; a tier without drives is memory."""
    for drive in tier.get("drives", ()):
        used, room = format_bytes(drive["used_bytes"]), format_bytes(drive["capacity_bytes"])
        yield name, str(drive["path"]), state_of(drive), used, room, str(tier["write_mode"])
    if "drives" not in tier:
        used, room = format_bytes(tier["used_bytes"]), format_bytes(tier["capacity_bytes"])
        yield name, "memory", "ok", used, room, "-"


def state_of(drive: dict[str, Any]) -> str:
    if drive["drained"]:
        return "drained"
    if drive["draining"]:
        return "draining"
    state = "ok" if drive["healthy"] else f"down: {drive['reason']}"
    return f"{state} (emulated)" if drive["emulated"] else state


def add(store: Depot, args: argparse.Namespace) -> int:
    with waiting(f"making {args.path} ready"):
        store.add_drive(args.tier, args.path)
    return changed(
        args,
        {"tier": args.tier, "added": str(args.path.absolute())},
        f"{args.tier}: {args.path} takes its share from now on",
        f"add {args.path.absolute()} to {args.tier}.path",
    )


def drain(store: Depot, args: argparse.Namespace) -> int:
    held = used_bytes(store, args)
    with waiting(f"draining {args.path}", held, lambda: held - used_bytes(store, args)):
        moved = store.drain_drive(args.tier, args.path)
    return changed(
        args,
        {"tier": args.tier, "drained": str(args.path.absolute()), "moved": moved},
        f"{args.tier}: {moved:,} blocks moved; {args.path} can be taken away",
        f"take {args.path.absolute()} out of {args.tier}.path",
    )


def resize(store: Depot, args: argparse.Namespace) -> int:
    with waiting(f"resizing {args.tier}"):
        store.resize(args.tier, args.capacity)
    room = store.stats()["tiers"][args.tier]["capacity_bytes"]
    return changed(
        args,
        {"tier": args.tier, "capacity_bytes": room},
        f"{args.tier}: has {format_bytes(room)} now",
        f'set {args.tier}.capacity = "{exact_bytes(args.capacity)}"',
    )


def set_mode(store: Depot, args: argparse.Namespace) -> int:
    store.set_write_mode(args.tier, args.mode)
    return changed(
        args,
        {"tier": args.tier, "write_mode": args.mode},
        f"{args.tier}: {args.mode} from now on",
        f'set {args.tier}.write_mode = "{args.mode}"',
    )


def changed(args: argparse.Namespace, facts: dict[str, Any], text: str, setting: str) -> int:
    """Say what was changed; and that it is not in the settings, which the next start reads."""
    if args.json:
        output.document(facts)
    else:
        output.data(text)
        output.say(f"hint: for the next start, {setting}")
    return 0


def used_bytes(store: Depot, args: argparse.Namespace) -> int:
    """What a drive holds; 0 if it is not found."""
    drives = store.stats().get("tiers", {}).get(args.tier, {}).get("drives", ())
    wanted = args.path.resolve()
    return sum(drive["used_bytes"] for drive in drives if Path(drive["path"]).resolve() == wanted)


@contextmanager
def waiting(label: str, total: int = 0, done: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """A line of progress while the body runs; `done` says, twice a second, how far it is."""
    ended = threading.Event()
    with output.Progress(label, total) as line:

        def show_line() -> None:
            while not ended.wait(LOOK_S):
                try:
                    line.advance(done() - line.done)
                except (KVDepotError, OSError):
                    return  # the body fails too, and says why

        thread = threading.Thread(target=show_line, name="kvdepot-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
