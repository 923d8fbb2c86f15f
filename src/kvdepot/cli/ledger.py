"""`kvdepot ledger`: what tenants have saved, and what keeping their blocks costs."""

import argparse
from collections.abc import Mapping
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import add_daemon, open_daemon
from kvdepot.cli.report.tables import Table
from kvdepot.cli.stats import duration
from kvdepot.core.units import format_bytes


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "ledger",
        description="What each tenant has saved in GPU time, and what its blocks took on the "
        "tiers, since the store was made. `kvdepot session list --order saved` has sessions. "
        "docs/ledger.md",
    )
    add_daemon(parser)
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with open_daemon(args) as store:
        found = store.sessions.ledger()
    if args.json:
        output.document(found)
        return 0
    headings = ("tenant", "tokens given back", "GPU time saved", "worth", "held for hours", "cost")
    rows = [(one["tenant"] or "-", *cells(one)) for one in found["tenants"]]
    if len(rows) > 1:
        rows.append(("all", *cells(found["total"])))
    output.data(Table(headings, rows).text() if rows else "nothing was held or given back yet")
    for line in assumptions(found):
        output.say(line)
    return 0


def cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{one['tokens']:,.0f}",
        saved(one),
        money(one["saved"]),
        held(one),
        money(one["cost"]),
    )


def saved(one: Mapping[str, Any]) -> str:
    """GPU time, for people."""
    if one["tokens"] and one["untimed_tokens"] >= one["tokens"]:
        return "speed unknown"
    return duration(one["gpu_s"]) if one["gpu_s"] >= 10 else f"{one['gpu_s']:.2f} s"


def held(one: Mapping[str, Any]) -> str:
    parts = (f"{tier} {format_bytes(int(each))}" for tier, each in one["byte_hours"].items())
    return ", ".join(parts) or "-"


def money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


def assumptions(found: Mapping[str, Any]) -> list[str]:
    """What the figures are computed with."""
    assumed, total = found["assumed"], found["total"]
    lines = [
        f"prefill of {tag}: {one['tokens_per_s']:,.0f} tokens/s, measured by its engine"
        for tag, one in assumed["measured"].items()
    ]
    if "prefill_tokens_per_s" in assumed:
        speed = assumed["prefill_tokens_per_s"]
        lines.append(f"prefill of others: {speed:,.0f} tokens/s, assumed (ledger)")
    if total["untimed_tokens"]:
        lines.append(
            f"{total['untimed_tokens']:,.0f} tokens count for no time: no speed was known; "
            "set ledger.prefill_tokens_per_s"
        )
    prices = ", ".join(f"{tier} {price:g}" for tier, price in assumed["price_per_tb_month"].items())
    hour = assumed["gpu_price_per_hour"]
    return [*lines, f"prices (ledger): {hour:g} a GPU hour; a TB for a month: {prices}"]
