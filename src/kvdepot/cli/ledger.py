"""`kvdepot ledger`: the GPU time that tenants and sessions have saved, and what it is worth."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, open_daemon
from kvdepot.cli.report.tables import Table
from kvdepot.cli.stats import duration

_SESSIONS_SHOWN: Final = 10
_NAME_WIDTH: Final = 40


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "ledger",
        description="The GPU time that tenants and sessions have saved since the daemon started, "
        "and what it is worth. docs/ledger.md",
    )
    add_daemon(parser)
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with open_daemon(args) as store:
        found = store.sessions.ledger()
    if args.json:
        output.document(found)
        return 0
    tenants = [(one["tenant"] or "-", *cells(one)) for one in found["tenants"]]
    if len(tenants) > 1:
        tenants.append(("all", *cells(found["total"])))
    sessions = [(one["name"][:_NAME_WIDTH], *cells(one)) for one in found["sessions"]]
    for heading, rows in (("tenant", tenants), ("session", sessions[:_SESSIONS_SHOWN])):
        if rows:
            headings = (heading, "tokens given back", "from", "GPU time saved", "worth")
            output.data(Table(headings, rows).text())
    if not tenants:
        output.data("no block was given back yet")
    for line in assumptions(found):
        output.say(line)
    return 0


def cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    timed = one["tokens"] > one["untimed_tokens"]
    gpu_s = one["gpu_s"]
    return (
        f"{one['tokens']:,.0f}",
        ", ".join(f"{tier} {tokens / one['tokens']:.0%}" for tier, tokens in one["tiers"].items()),
        (duration(gpu_s) if gpu_s >= 10 else f"{gpu_s:.2f} s") if timed else "speed unknown",
        f"{one['saved']:,.2f}" if one["saved"] >= 1 else f"{one['saved']:.3g}",
    )


def assumptions(found: Mapping[str, Any]) -> list[str]:
    """The speeds and prices that the figures are computed with."""
    assumed, untimed = found["assumed"], found["total"]["untimed_tokens"]
    lines = [
        f"prefill of {tag}: {one['tokens_per_s']:,.0f} tokens/s, measured by its engine"
        for tag, one in assumed["measured"].items()
    ]
    if "prefill_tokens_per_s" in assumed:
        speed = assumed["prefill_tokens_per_s"]
        lines.append(f"prefill of others: {speed:,.0f} tokens/s (ledger.prefill_tokens_per_s)")
    if untimed:
        lines.append(
            f"{untimed:,.0f} tokens count for no time: no prefill speed was known; "
            "set ledger.prefill_tokens_per_s"
        )
    price = assumed["gpu_price_per_hour"]
    return [*lines, f"price of a GPU hour: {price:g} (ledger.gpu_price_per_hour)"]
