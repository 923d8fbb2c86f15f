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
from kvdepot.config.loader import toml_value
from kvdepot.config.toml_edit import set_values
from kvdepot.core.depot import Depot
from kvdepot.core.private import replace_file
from kvdepot.core.units import exact_bytes, format_bytes, format_count, parse_bytes
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.policy.placing.write_mode import WriteMode

LOOK_S = 0.5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "tiers",
        description="See and change the tiers of a running daemon. Changes are for its own user "
        "and root, and last until it ends, unless --save puts them into its settings too.",
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
    if name != "list":
        parser.add_argument(
            "--save", action="store_true", help="also in the file that the daemon was started with"
        )
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
    with open_daemon(args) as store:
        return verbs[args.verb](store, args)


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
        store,
        args,
        {"tier": args.tier, "added": str(args.path.absolute())},
        f"{args.tier}: {args.path} takes its share from now on",
    )


def drain(store: Depot, args: argparse.Namespace) -> int:
    held = used_bytes(store, args)
    with waiting(f"draining {args.path}", held, lambda: held - used_bytes(store, args)):
        moved = store.drain_drive(args.tier, args.path)
    return changed(
        store,
        args,
        {"tier": args.tier, "drained": str(args.path.absolute()), "moved": moved},
        f"{args.tier}: {format_count(moved, 'block')} moved; {args.path} can be taken away",
    )


def resize(store: Depot, args: argparse.Namespace) -> int:
    with waiting(f"resizing {args.tier}"):
        store.resize(args.tier, args.capacity)
    room = store.stats()["tiers"][args.tier]["capacity_bytes"]
    return changed(
        store,
        args,
        {"tier": args.tier, "capacity_bytes": room},
        f"{args.tier}: has {format_bytes(room)} now",
    )


def set_mode(store: Depot, args: argparse.Namespace) -> int:
    store.set_write_mode(args.tier, args.mode)
    return changed(
        store,
        args,
        {"tier": args.tier, "write_mode": args.mode},
        f"{args.tier}: {args.mode} from now on",
    )


def settings_now(stats: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What the configuration must say for the next start to find the tier as it is.

    A configuration gives a tier's capacity to its paths in equal parts: with one path more and the
    capacity as it was, each of them would shrink.
    """
    if args.verb == "mode":
        return {f"{args.tier}.write_mode": args.mode}
    drives = [
        drive
        for drive in stats["tiers"][args.tier]["drives"]
        if not drive["drained"] and not drive["draining"]
    ]
    paths = [str(drive["path"]) for drive in drives]
    capacity = len(drives) * max(drive["capacity_bytes"] for drive in drives)
    return {
        f"{args.tier}.path": paths if len(paths) > 1 else paths[0],
        f"{args.tier}.capacity": exact_bytes(args.capacity if args.verb == "resize" else capacity),
    }


def changed(store: Depot, args: argparse.Namespace, facts: dict[str, Any], text: str) -> int:
    """Say what was changed; put it into the settings, which the next start reads, or say how."""
    stats = store.stats()
    settings = settings_now(stats, args)
    saved = save(stats["daemon"], args.tier, settings) if args.save else None
    if args.json:
        output.document({**facts, "settings": settings, "saved": saved and str(saved)})
        return 0
    output.data(text)
    if saved is not None:
        output.data(f"saved to {saved}")
    else:
        lines = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
        output.say(f"hint: for the next start set {lines}; --save does it")
    return 0


def save(daemon: dict[str, Any], tier: str, settings: dict[str, Any]) -> Path:
    """Write settings to the file that the daemon was started with, and return its path.

    ConfigError where there is none, or where the daemon has these settings from elsewhere.
    """
    done = f"{tier} is changed until the daemon ends, but not saved"
    if not daemon.get("settings_file"):
        raise ConfigError("--save", f"{done}: it was started without --config")
    for name in daemon["settings_elsewhere"]:
        if name == tier or name in settings:
            raise ConfigError("--save", f"{done}: {name} was given by --set or the environment")
    path = Path(daemon["settings_file"])
    try:
        replace_file(path, set_values(path.read_text("utf-8"), settings).encode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("--save", f"{done}: {path}: {reason}") from error
    return path


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
