"""`kvdepot check PATH`: verify a store on disk, and repair it."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvdepot.cli import output
from kvdepot.core.depot import Finding
from kvdepot.core.units import format_bytes, format_count
from kvdepot.store.check.offline import AuditReport, audit
from kvdepot.store.check.repair import RepairReport, repair

SHOWN_MAX = 20
"""Findings printed for people; --json has all of them."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "check",
        description="Verify every block of a store on disk. Changes nothing unless asked to "
        "repair, and may run while the store is in use. Exits with 1 if something is damaged.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory or block device")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop what is damaged and keep the rest; no process may have the store open",
    )
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    found = watched_audit(args.path)
    if found.ok or not args.repair:
        show(found, as_json=args.json)
        return 0 if found.ok else 1
    with output.Progress(f"repairing {args.path}") as line:
        done = repair(args.path, progress=partial(follow, line))
    left = watched_audit(args.path)
    if args.json:
        before = found.as_dict()["findings"]
        output.document({**left.as_dict(), "repair": {"found": before, **done.as_dict()}})
    else:
        show_repair(found, done)
        show(left, as_json=False)
    return 0 if left.ok else 1


def follow(line: output.Progress, done: int, total: int) -> None:
    line.total = total
    line.advance(done - line.done)


def watched_audit(path: Path) -> AuditReport:
    with output.Progress(f"checking {path}") as line:
        return audit(path, progress=partial(follow, line))


def show(report: AuditReport, *, as_json: bool) -> None:
    if as_json:
        output.document(report.as_dict())
        return
    show_list(report.findings)
    held = f"{format_count(report.blocks, 'intact block')}, {format_bytes(report.nbytes)}, "
    held += f"in {format_count(report.segments, 'segment')}"
    if report.ok:
        output.data(f"{report.path}: ok, {held}")
        return
    output.data(f"{report.path}: damaged in {format_count(len(report.findings), 'place')}; {held}")
    output.say(f"hint: kvdepot check --repair {report.path}")


def show_repair(found: AuditReport, done: RepairReport) -> None:
    output.data("found")
    show_list(found.findings, indent="  ")
    output.data("repaired")
    show_list(done.done, indent="  ")
    if done.failed:
        output.data("could not repair")
        show_list(done.failed, indent="  ")


def show_list(findings: Sequence[Finding], *, indent: str = "") -> None:
    for finding in findings[:SHOWN_MAX]:
        output.data(f"{indent}{finding}")
    if len(findings) > SHOWN_MAX:
        output.data(f"{indent}… and {len(findings) - SHOWN_MAX:,} more; --json lists them all")
