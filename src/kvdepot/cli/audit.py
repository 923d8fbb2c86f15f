"""`kvdepot audit`: blocks that engines have computed again, and namespaces in quarantine."""

import argparse
import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import kvdepot
from kvdepot.cli import output
from kvdepot.cli.arguments import (
    add_daemon,
    add_store_settings,
    open_daemon,
    parse_settings,
)
from kvdepot.config import settings as config
from kvdepot.core.depot import Depot
from kvdepot.core.units import format_count

_VERBS: Final = {
    "list": "what was compared, the namespaces in quarantine, and what has made their blocks",
    "lift": "serve a namespace again, as it is",
    "purge": "remove all blocks of a namespace in quarantine, and end it",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "audit",
        description="An engine computes some hits again and compares. Where they differ nothing of "
        "the namespace is served any more. docs/audit.md",
    )
    verbs = parser.add_subparsers(title="what to do", metavar="VERB", dest="verb", required=True)
    for verb, text in _VERBS.items():
        one = verbs.add_parser(verb, help=text, description=text)
        if verb != "list":
            one.add_argument("namespace", metavar="NAMESPACE", help="as kvdepot audit list has it")
        add_daemon(one)
        add_store_settings(one)
        output.add_json_flag(one)


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Depot]:
    """The daemon's store; or, with settings, one that no process has open."""
    if args.config is None and not args.settings:
        with open_daemon(args) as daemon:
            yield daemon
        return
    overrides = parse_settings(args.settings)
    with kvdepot.open(config.load(args.config, env=args.env, overrides=overrides)) as store:
        yield store


def run(args: argparse.Namespace) -> int:
    """1: there are namespaces in quarantine, or there is no such one to be lifted."""
    with opened(args) as store:
        if args.verb == "list":
            return show(store, args)
        facts: dict[str, Any]
        if args.verb == "lift":
            lifted = store.audits.lift(args.namespace)
            facts, status = {"lifted": lifted}, 0 if lifted else 1
            text = "is served again" if lifted else "is not in quarantine"
        else:
            removed = store.audits.purge(args.namespace)
            facts, status = {"removed": removed}, 0
            text = f"{format_count(removed, 'block')} removed"
    if args.json:
        output.document({"namespace": args.namespace, **facts})
    else:
        output.data(f"{args.namespace}: {text}")
    return status


def show(store: Depot, args: argparse.Namespace) -> int:
    known = store.audits.known()
    if args.json:
        output.document(known)
    else:
        for line in lines(known):
            output.data(line)
    return 1 if known["quarantined"] else 0


def lines(known: Mapping[str, Any]) -> Iterator[str]:
    compared, mismatched = known["compared"], known["mismatched"]
    yield f"{format_count(compared, 'block')} compared since the start, {mismatched:,} mismatched"
    if not compared:
        yield "engines compare where audit.share is set; vLLM's CPU tier and states have no audit"
    if not known["quarantined"]:
        yield "no namespace is in quarantine"
    for one in known["quarantined"]:
        since = datetime.datetime.fromtimestamp(one.get("since_s", 0.0))
        names = (("model", "model"), ("tenant", "tenant"), ("adapter", "adapter"))
        told = ", ".join(f"{text} {one[name]}" for name, text in names if one.get(name))
        yield f"{one['namespace']}  {told}"
        yield f"  since     {since:%Y-%m-%d %H:%M}"
        yield (
            f"  found     layer {one.get('layer')} is off by {one.get('error'):.3g}, "
            f"tolerance {one.get('tolerance'):.3g}"
        )
        yield f"  made by   {one.get('made_by')}"
        yield f"  found by  {one.get('found_by')}"
    if known["quarantined"]:
        yield "kvdepot audit purge NAMESPACE removes its blocks; lift serves them again"
