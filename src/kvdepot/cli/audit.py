"""`kvdepot audit`: blocks that engines have computed again, and namespaces in quarantine."""

import argparse
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from kvdepot.cli.arguments import DAEMON, SETTINGS, open_depot
from kvdepot.cli.command import Answer, Command
from kvdepot.core.units import format_count

NAMESPACE = "NAMESPACE    as `kvdepot audit list` shows it"


def list_quarantined(args: argparse.Namespace) -> Answer:
    with open_depot(args) as store:
        known = store.audits.list()
    return Answer(known, lines(known), status=1 if known["quarantined"] else 0)


def lines(known: Mapping[str, Any]) -> Iterator[str]:
    compared, mismatched = known["compared"], known["mismatched"]
    yield f"{format_count(compared, 'block')} compared since the start, {mismatched:,} mismatched"
    if not compared:
        yield "engines compare if audit.share is set; vLLM's CPU tier and states have no audit"
    if not known["quarantined"]:
        yield "no namespace is in quarantine"
    for entry in known["quarantined"]:
        since = datetime.datetime.fromtimestamp(entry.get("since_s", 0.0))
        names = ("model", "tenant", "adapter")
        described = ", ".join(f"{name} {entry[name]}" for name in names if entry.get(name))
        yield f"{entry['namespace']}  {described}"
        yield f"  since     {since:%Y-%m-%d %H:%M}"
        yield (
            f"  found     layer {entry.get('layer')} is off by {entry.get('error'):.3g}, "
            f"tolerance {entry.get('tolerance'):.3g}"
        )
        yield f"  made by   {entry.get('made_by')}"
        yield f"  found by  {entry.get('found_by')}"
    if known["quarantined"]:
        yield "kvdepot audit purge NAMESPACE removes its blocks; lift serves them again"


def lift(args: argparse.Namespace) -> Answer:
    with open_depot(args) as store:
        lifted = store.audits.lift(args.namespace)
    text = f"{args.namespace}: {'is served again' if lifted else 'is not in quarantine'}"
    return Answer({"namespace": args.namespace, "lifted": lifted}, text, status=0 if lifted else 1)


def purge(args: argparse.Namespace) -> Answer:
    with open_depot(args) as store:
        removed = store.audits.purge(args.namespace)
    text = f"{args.namespace}: {format_count(removed, 'block')} removed"
    return Answer({"namespace": args.namespace, "removed": removed}, text)


COMMAND = Command(
    more="Engines compute some hits again and compare them with the stored blocks. After a "
    "mismatch the namespace is in quarantine: none of its blocks is served. See docs/audit.md.",
    verbs={
        "list": Command(
            "show what was compared, and the namespaces in quarantine",
            "Exits with 1 if a namespace is in quarantine.",
            DAEMON + SETTINGS,
            list_quarantined,
        ),
        "lift": Command(
            "end the quarantine of a namespace, and serve its blocks again",
            "Exits with 1 if the namespace is not in quarantine.",
            NAMESPACE + DAEMON + SETTINGS,
            lift,
        ),
        "purge": Command(
            "end the quarantine of a namespace, and remove its blocks",
            options=NAMESPACE + DAEMON + SETTINGS,
            run=purge,
        ),
    },
)
