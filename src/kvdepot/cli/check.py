"""`kvdepot check PATH`: verifies a store on disk, and repairs it."""

import argparse
from collections.abc import Sequence

from kvdepot.cli import output
from kvdepot.cli.command import Answer, Command
from kvdepot.core.depot import Finding
from kvdepot.core.units import format_bytes, format_count
from kvdepot.store.check.offline import AuditReport, audit
from kvdepot.store.check.repair import repair

SHOWN_MAX = 20
"""Findings printed as text; --json has all of them."""


def run(args: argparse.Namespace) -> Answer:
    with output.Progress(f"checking {args.path}") as line:
        report = audit(args.path, progress=line.reach)
    if report.ok or not args.repair:
        return answer(report)
    with output.Progress(f"repairing {args.path}") as line:
        repaired = repair(args.path, progress=line.reach)
    with output.Progress(f"checking {args.path}") as line:
        left = answer(audit(args.path, progress=line.reach))
    assert isinstance(left.document, dict)
    findings = {"found": report.as_dict()["findings"], **repaired.as_dict()}
    lines = ["found", *shown(report.findings, "  "), "repaired", *shown(repaired.done, "  ")]
    if repaired.failed:
        lines += ["could not repair", *shown(repaired.failed, "  ")]
    document = {**left.document, "repair": findings}
    return Answer(document, [*lines, *left.text], left.notes, left.status)


def answer(report: AuditReport) -> Answer:
    intact = f"{format_count(report.blocks, 'intact block')}, {format_bytes(report.nbytes)}, "
    intact += f"in {format_count(report.segments, 'segment')}"
    if report.ok:
        return Answer(report.as_dict(), [f"{report.path}: ok, {intact}"])
    damaged = f"damaged in {format_count(len(report.findings), 'place')}"
    return Answer(
        report.as_dict(),
        [*shown(report.findings), f"{report.path}: {damaged}; {intact}"],
        notes=[f"hint: kvdepot check --repair {report.path}"],
        status=1,
    )


def shown(findings: Sequence[Finding], indent: str = "") -> list[str]:
    lines = [f"{indent}{finding}" for finding in findings[:SHOWN_MAX]]
    if len(findings) > SHOWN_MAX:
        more = f"{len(findings) - SHOWN_MAX:,} more; --json lists them all"
        lines.append(f"{indent}… and {more}")
    return lines


COMMAND = Command(
    more="Verifies every block. Changes nothing without --repair; the store may be in use "
    "meanwhile. Exits with 1 if the store is damaged.",
    options="""
    PATH        a directory or block device
    --repair    remove damaged blocks and records; no process may have the store open
    """,
    run=run,
)
