"""`kvdepot torture [PATH]`: tests stores with power cuts, kills and damage.

Works in a new folder of its own on the disk under test, and removes it.
"""

import argparse
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from kvdepot.cli import output
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.directories import scratch_directory
from kvdepot.cli.tables import Table
from kvdepot.core.units import format_duration
from kvdepot.errors import ConfigError
from kvdepot.testing.torture.ledger import FAULTS
from kvdepot.testing.torture.rounds import KINDS, ON_REQUEST, Kind, RoundOutcome, torture
from kvdepot.testing.torture.seaweedfs import weed_binary

SHOWN_MAX = 5
"""Faults of one round that are printed as text; --json has all of them."""
Totals = dict[Kind, Counter[str]]
"""Rounds, what was done in them, pins and faults of each kind."""
HEADS = ["", "rounds", "number", "pins"]
HEADS += ["wrong", "foreign", "lost", "back", "broken", "late", "leaked", "unclean", "errors"]


def parse_kinds(text: str) -> tuple[Kind, ...]:
    known = (*KINDS, *ON_REQUEST)
    kinds = tuple(kind for kind in known if kind in text.split(","))
    if len(kinds) != len(set(text.split(","))):
        raise ValueError(f"invalid kinds {text!r} (expected some of {', '.join(known)})")
    return kinds


def possible(kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds that can run here. Says which cannot."""
    found = list(kinds)
    if "seaweedfs" in found and (weed_binary() is None or find_spec("obstore") is None):
        output.say("seaweedfs is left out: the program `weed` or the package obstore is missing")
        found.remove("seaweedfs")
    return found


def run(args: argparse.Namespace) -> Answer:
    seed = args.seed if args.seed is not None else secrets.randbelow(10**9)
    kinds, jobs = possible(args.only or KINDS), args.jobs or len(os.sched_getaffinity(0))
    totals: Totals = {kind: Counter() for kind in (*KINDS, *ON_REQUEST)}
    failed: list[RoundOutcome] = []
    started = time.monotonic()

    def more(begun: int) -> bool:
        within = bool(kinds) and (args.rounds is None or begun < args.rounds)
        return within and (begun == 0 or time.monotonic() - started < args.for_)

    with place(args.path, keep=args.keep) as folder:
        rounds = torture(folder, seed, kinds, keep=args.keep, jobs=jobs, more=more)
        label = f"torture from seed {seed}"
        with closing(rounds), output.Progress(label, total=round(args.for_)) as line:
            for outcome in rounds:
                totals[outcome.kind].update(outcome.faults)
                totals[outcome.kind].update(rounds=1, done=outcome.done, pins=outcome.pins)
                if not outcome.ok:
                    failed.append(outcome)
                    if not args.json:
                        report_failure(outcome, args.path)
                line.label = f"{label}: {summary(totals)}"
                line.reach(int(time.monotonic() - started))
        if args.keep and failed:
            output.say(f"kept: {folder}")
    took_s = time.monotonic() - started
    columns = ("rounds", "done", "pins", *FAULTS)
    rows = [[kind, *(f"{totals[kind][name]:,}" for name in columns)] for kind in kinds]
    verdict = "ok" if not failed else f"{len(failed):,} rounds failed"
    return Answer(
        {
            "jobs": jobs,
            "seed": seed,
            "seconds": round(took_s, 1),
            **document(totals, failed, args.path),
        },
        [Table(HEADS, rows).text(), f"{verdict}, in {format_duration(took_s)} from seed {seed}"],
        status=1 if failed else 0,
    )


@contextmanager
def place(path: Path | None, *, keep: bool) -> Iterator[Path]:
    """A new private folder in `path`, which must be empty, or for temporary files."""
    if path is None:
        with scratch_directory(Path(tempfile.gettempdir()), "kvdepot-torture-", keep=keep) as made:
            yield made
        return
    ours = not path.exists()
    if ours:
        path.mkdir(mode=0o700)
    elif not path.is_dir() or any(path.iterdir()):
        raise ConfigError(
            "path", f"{path} is not an empty folder", hint="give a new folder on that disk"
        )
    try:
        with scratch_directory(path, "torture-", keep=keep) as made:
            yield made
    finally:
        if ours and not any(path.iterdir()):
            path.rmdir()


def summary(totals: Totals) -> str:
    parts = [f"{found['done']:,} {kind}" for kind, found in totals.items() if found["rounds"]]
    faults = sum(found[name] for found in totals.values() for name in FAULTS)
    return ", ".join([*parts, f"{faults:,} faults"])


def repeat_command(outcome: RoundOutcome, path: Path | None) -> str:
    where = f" {path}" if path is not None else ""
    return f"kvdepot torture{where} --seed {outcome.seed} --rounds 1 --only {outcome.kind} --keep"


def report_failure(outcome: RoundOutcome, path: Path | None) -> None:
    output.say(f"round {outcome.seed} of {outcome.kind}: {outcome.words}")
    for text in outcome.texts[:SHOWN_MAX]:
        output.say(f"  {text}")
    if len(outcome.texts) > SHOWN_MAX:
        output.say(f"  … and {len(outcome.texts) - SHOWN_MAX:,} more")
    output.say(f"  to repeat it: {repeat_command(outcome, path)}")


def document(
    totals: Totals, failed: Sequence[RoundOutcome], path: Path | None
) -> dict[str, object]:
    whole = sum(totals.values(), Counter[str]())
    return {
        "rounds": whole["rounds"],
        "failed": [
            {
                "seed": outcome.seed,
                "kind": outcome.kind,
                "tiers": outcome.words,
                "faults": outcome.texts,
                "again": repeat_command(outcome, path),
            }
            for outcome in failed
        ],
        "errors": whole["error"],
        "unclean": whole["unclean"],
        "pins": whole["pins"],
        "pins_broken": whole["broken"],
        "ok": not failed,
        **{kind: found["done"] for kind, found in totals.items()},
        "wrong": whole["wrong"],
        "foreign": whole["foreign"],
        "lost": whole["lost"],
        "back": whole["back"],
        "late_calls": whole["late"],
        "leaked_fds": whole["leaked"],
    }


COMMAND = Command(
    more="Works on small stores of all tier combinations, cuts their power (simulated), kills "
    "their process (kill -9) or damages their files, opens them again and verifies every promise. "
    "Runs several nodes over a bucket that goes away, and a daemon whose clients are stopped. "
    "Exits with 1 if a promise was broken.",
    options=f"""
    [PATH]         an empty folder on the disk to use (default: a new one for temporary files)
    --seed SEED    of the first round; the next has SEED + 1 (default: random)
    --for TIME     how long [default: 60s]
    --rounds N     the largest number of rounds
    --only KINDS    {",".join(KINDS)} or some of them (default: all), or
                   {",".join(ON_REQUEST)}, which needs the program `weed`
    --jobs N       rounds at the same time (default: number of processors)
    --keep         keep the files of failed rounds
    """,
    run=run,
    kinds={"SEED": int, "KINDS": parse_kinds},
)
