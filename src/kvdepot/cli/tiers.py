"""`kvdepot tiers`: shows and changes the tiers of a running daemon."""

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.tables import Table
from kvdepot.config.loader import toml_value
from kvdepot.config.toml_edit import set_values
from kvdepot.core.private import replace_file
from kvdepot.core.units import exact_bytes, format_bytes, format_count
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.policy.placing.write_mode import WriteMode

POLL_S = 0.5
MODES = [mode.value for mode in WriteMode]


def list_tiers(store: Depot, args: argparse.Namespace) -> Answer:
    tiers = store.stats().get("tiers", {})
    heads = ("tier", "drive", "state", "used", "capacity", "mode")
    rows = [row for name, tier in tiers.items() for row in drive_rows(name, tier)]
    return Answer({"tiers": tiers}, Table(heads, rows).text())


def drive_rows(name: str, tier: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each drive of a tier; a tier without drives is memory."""
    for drive in tier.get("drives", ()):
        used, capacity = format_bytes(drive["used_bytes"]), format_bytes(drive["capacity_bytes"])
        yield name, str(drive["path"]), state_of(drive), used, capacity, str(tier["write_mode"])
    if "drives" not in tier:
        used, capacity = format_bytes(tier["used_bytes"]), format_bytes(tier["capacity_bytes"])
        yield name, "memory", "ok", used, capacity, "-"


def state_of(drive: dict[str, Any]) -> str:
    if drive["drained"]:
        return "drained"
    if drive["draining"]:
        return "draining"
    state = "ok" if drive["healthy"] else f"down: {drive['reason']}"
    return f"{state} (emulated)" if drive["emulated"] else state


def add(store: Depot, args: argparse.Namespace) -> Answer:
    with waiting(f"preparing {args.drive}"):
        store.volumes.add(args.tier, args.drive)
    facts = {"tier": args.tier, "added": str(args.drive.absolute())}
    text = f"{args.tier}: {args.drive} is in use"
    return changed(store, args, facts, text, drive_settings(store, args.tier))


def drain(store: Depot, args: argparse.Namespace) -> Answer:
    held = used_bytes(store, args)
    with waiting(f"draining {args.drive}", held, lambda: held - used_bytes(store, args)):
        moved = store.volumes.drain(args.tier, args.drive)
    facts = {"tier": args.tier, "drained": str(args.drive.absolute()), "moved": moved}
    text = f"{args.tier}: {format_count(moved, 'block')} moved; {args.drive} can be removed"
    return changed(store, args, facts, text, drive_settings(store, args.tier))


def resize(store: Depot, args: argparse.Namespace) -> Answer:
    with waiting(f"resizing {args.tier}"):
        store.volumes.resize(args.tier, args.size)
    capacity = store.stats()["tiers"][args.tier]["capacity_bytes"]
    facts = {"tier": args.tier, "capacity_bytes": capacity}
    text = f"{args.tier}: the capacity is {format_bytes(capacity)}"
    settings = drive_settings(store, args.tier)
    return changed(
        store, args, facts, text, {**settings, f"{args.tier}.capacity": exact_bytes(args.size)}
    )


def parse_mode(text: str) -> str:
    if text not in MODES:
        raise ValueError(f"{text!r} is not one of {', '.join(MODES)}")
    return text


def set_mode(store: Depot, args: argparse.Namespace) -> Answer:
    store.volumes.set_write_mode(args.tier, args.mode)
    facts = {"tier": args.tier, "write_mode": args.mode}
    text = f"{args.tier}: the write mode is {args.mode}"
    return changed(store, args, facts, text, {f"{args.tier}.write_mode": args.mode})


def drive_settings(store: Depot, tier: str) -> dict[str, Any]:
    """The settings with which the next start finds the tier unchanged.

    A tier's capacity is divided among its paths in equal parts. With one path more and the same
    capacity each drive would shrink.
    """
    drives = [
        drive
        for drive in store.stats()["tiers"][tier]["drives"]
        if not drive["drained"] and not drive["draining"]
    ]
    paths = [str(drive["path"]) for drive in drives]
    capacity = len(drives) * max(drive["capacity_bytes"] for drive in drives)
    return {
        f"{tier}.path": paths if len(paths) > 1 else paths[0],
        f"{tier}.capacity": exact_bytes(capacity),
    }


def changed(
    store: Depot,
    args: argparse.Namespace,
    facts: dict[str, Any],
    text: str,
    settings: dict[str, Any],
) -> Answer:
    """The answer after a change. With --save the settings are written to the daemon's file."""
    saved = save(store.stats()["daemon"], args.tier, settings) if args.save else None
    document = {**facts, "settings": settings, "saved": saved and str(saved)}
    if saved is not None:
        return Answer(document, [text, f"saved to {saved}"])
    lines = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
    return Answer(document, text, notes=[f"hint: for the next start set {lines}; --save does it"])


def save(daemon: dict[str, Any], tier: str, settings: dict[str, Any]) -> Path:
    """Write settings to the file that the daemon was started with, and return its path.

    ConfigError if there is no file, or if the daemon has these settings from elsewhere.
    """
    done = f"{tier} is changed until the daemon ends, but not saved"
    if not daemon.get("settings_file"):
        raise ConfigError("--save", f"{done}: the daemon was started without --config")
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
    """Bytes in use on a drive; 0 if the drive is not known."""
    drives = store.stats().get("tiers", {}).get(args.tier, {}).get("drives", ())
    wanted = args.drive.resolve()
    return sum(drive["used_bytes"] for drive in drives if Path(drive["path"]).resolve() == wanted)


@contextmanager
def waiting(label: str, total: int = 0, done: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """A line of progress while the body runs. A thread calls `done` twice a second."""
    ended = threading.Event()
    with output.Progress(label, total) as line:

        def show_line() -> None:
            while not ended.wait(POLL_S):
                try:
                    line.reach(done())
                except (KVDepotError, OSError):
                    return  # the body fails too, and reports it

        thread = threading.Thread(target=show_line, name="kvdepot-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


TIER = "TIER    ssd or hdd"
DRIVE = "\nDRIVE    a directory or block device"
SAVE = "\n--save    also write the change to the settings file of the daemon"
COMMAND = Command(
    more="A change is for the daemon's own user and root. It lasts until the daemon ends; --save "
    "also writes it to the settings file of the daemon.",
    verbs={
        "list": Command(
            "show the capacity, use and state of each tier and drive",
            options=DAEMON,
            run=on_daemon(list_tiers),
        ),
        "add": Command(
            "add an empty drive to a tier",
            options=TIER + DRIVE + SAVE + DAEMON,
            run=on_daemon(add),
        ),
        "drain": Command(
            "move the blocks of a drive to the other drives, and stop using it",
            options=TIER + DRIVE + SAVE + DAEMON,
            run=on_daemon(drain),
        ),
        "resize": Command(
            "change the capacity of a tier",
            "With less capacity the coldest blocks are removed.",
            TIER + "\nSIZE    of all drives of the tier, such as 100TiB" + SAVE + DAEMON,
            on_daemon(resize),
        ),
        "mode": Command(
            "set when blocks are written to a tier",
            options=f"{TIER}\nMODE    {', '.join(MODES)}" + SAVE + DAEMON,
            run=on_daemon(set_mode),
            kinds={"MODE": parse_mode},
        ),
    },
)
