"""`kvdepot torture [PATH]`: cut the power of stores, kill them, damage them; and see what holds.

Works in a new folder of its own on the disk under test, and takes it away again.
"""

import argparse
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvdepot.cli import output
from kvdepot.cli.arguments import count, explained
from kvdepot.cli.directories import scratch_directory
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_duration, parse_duration
from kvdepot.errors import ConfigError
from kvdepot.testing.torture.ledger import FAULTS
from kvdepot.testing.torture.rounds import KINDS, Kind, RoundOutcome, torture

FOR_S = 60.0
SHOWN_MAX = 5
"""Faults of one round that are printed for people; --json has all of them."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "torture",
        description="Work small stores of all tier combinations hard, cut their power (simulated), "
        "kill their process (kill -9) or damage their files, open them again and verify what they "
        "promise. Exits with 1 if a promise was broken.",
    )
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="PATH",
        help="an empty folder on the disk to use (default: a new one for temporary files)",
    )
    parser.add_argument(
        "--seed", type=whole, metavar="N", help="of the first round; the next has N + 1"
    )
    parser.add_argument(
        "--for",
        dest="for_s",
        type=explained(parse_duration),
        default=FOR_S,
        metavar="TIME",
        help="how long, for example 60s or 10min (default: 60s)",
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="so many rounds at most")
    parser.add_argument(
        "--only",
        type=explained(parse_kinds),
        default=KINDS,
        metavar="KIND,…",
        help="of cuts, kills and damages (default: all)",
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="rounds at the same time (default: as many as processors)",
    )
    parser.add_argument("--keep", action="store_true", help="keep what failed, with a ledger")
    output.add_json_flag(parser)


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error


def parse_kinds(text: str) -> tuple[Kind, ...]:
    kinds = tuple(kind for kind in KINDS if kind in text.split(","))
    if len(kinds) != len(set(text.split(","))):
        raise ValueError(f"{text!r} is not made of {', '.join(KINDS)}")
    return kinds


@dataclass(slots=True)
class Totals:
    """All rounds so far."""

    seed: int
    rounds: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    contracts: Counter[str] = field(default_factory=Counter)
    faults: dict[Kind, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in KINDS}
    )
    failed: list[RoundOutcome] = field(default_factory=list)

    def add(self, outcome: RoundOutcome) -> None:
        self.rounds[outcome.kind] += 1
        self.done[outcome.kind] += outcome.done
        self.contracts[outcome.kind] += outcome.contracts
        self.faults[outcome.kind].update(outcome.faults)
        if not outcome.ok:
            self.failed.append(outcome)

    @property
    def words(self) -> str:
        parts = [f"{self.done[kind]:,} {kind}" for kind in KINDS if self.rounds[kind]]
        faults = sum(sum(one.values()) for one in self.faults.values())
        return ", ".join([*parts, f"{faults:,} faults"])


def run(args: argparse.Namespace) -> int:
    seed = args.seed if args.seed is not None else secrets.randbelow(10**9)
    totals = Totals(seed)
    started = time.monotonic()

    def more(begun: int) -> bool:
        within = args.rounds is None or begun < args.rounds
        return within and (begun == 0 or time.monotonic() - started < args.for_s)

    with place(args.path, keep=args.keep) as folder:
        rounds = torture(folder, seed, args.only, keep=args.keep, jobs=args.jobs, more=more)
        label = f"torture from seed {seed}"
        with closing(rounds), output.Progress(label, total=round(args.for_s)) as line:
            for outcome in rounds:
                totals.add(outcome)
                if not outcome.ok and not args.json:
                    show_failure(outcome, args.path)
                line.label = f"{label}: {totals.words}"
                line.advance(int(time.monotonic() - started) - line.done)
        if args.keep and totals.failed:
            output.say(f"kept: {folder}")
    show(totals, time.monotonic() - started, args)
    return 0 if not totals.failed else 1


@contextmanager
def place(path: Path | None, *, keep: bool) -> Iterator[Path]:
    """A new private folder in the folder given, which must be empty, or for temporary files."""
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


def again(outcome: RoundOutcome, path: Path | None) -> str:
    """The command that repeats a round."""
    where = f" {path}" if path is not None else ""
    return f"kvdepot torture{where} --seed {outcome.seed} --rounds 1 --only {outcome.kind} --keep"


def show_failure(outcome: RoundOutcome, path: Path | None) -> None:
    output.say(f"round {outcome.seed} of {outcome.kind}: {outcome.words}")
    for text in outcome.texts[:SHOWN_MAX]:
        output.say(f"  {text}")
    if len(outcome.texts) > SHOWN_MAX:
        output.say(f"  … and {len(outcome.texts) - SHOWN_MAX:,} more")
    output.say(f"  again: {again(outcome, path)}")


def show(totals: Totals, took_s: float, args: argparse.Namespace) -> None:
    if args.json:
        output.document({"jobs": args.jobs, **as_dict(totals, took_s, args.path)})
        return
    names = ("wrong", "lost", "back", "broken", "late", "leaked", "unclean", "errors")
    heads = ("", "rounds", "number", "contracts", *names)
    rows = [row(kind, totals) for kind in args.only]
    output.data(Table(heads, rows).text())
    verdict = "ok" if not totals.failed else f"{len(totals.failed):,} rounds failed"
    output.data(f"{verdict}, in {format_duration(took_s)} from seed {totals.seed}")


def row(kind: Kind, totals: Totals) -> Sequence[object]:
    faults = totals.faults[kind]
    done = (totals.rounds[kind], totals.done[kind], totals.contracts[kind])
    counts = [*done, *(faults[name] for name in FAULTS)]
    return (kind, *(f"{number:,}" for number in counts))


def as_dict(totals: Totals, took_s: float, path: Path | None) -> dict[str, object]:
    faults = sum(totals.faults.values(), Counter[str]())
    failed = [
        {
            "seed": one.seed,
            "kind": one.kind,
            "tiers": one.words,
            "faults": one.texts,
            "again": again(one, path),
        }
        for one in totals.failed
    ]
    return {
        "seed": totals.seed,
        "seconds": round(took_s, 1),
        "rounds": sum(totals.rounds.values()),
        "failed": failed,
        "errors": faults["error"],
        "unclean": faults["unclean"],
        "contracts": totals.contracts.total(),
        "contracts_broken": faults["broken"],
        "ok": not totals.failed,
        "cuts": totals.done["cuts"],
        "kills": totals.done["kills"],
        "damages": totals.done["damages"],
        "wrong": faults["wrong"],
        "lost": faults["lost"],
        "back": faults["back"],
        "late_calls": faults["late"],
        "leaked_fds": faults["leaked"],
    }
