"""`kvdepot ledger`: the GPU time that tenants and sessions have saved, and its worth."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvdepot.cli.arguments import DAEMON, on_daemon
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.tables import Table
from kvdepot.core.units import format_duration
from kvdepot.depot import Depot

_SESSIONS_SHOWN: Final = 10
_NAME_WIDTH: Final = 40


def run(store: Depot, args: argparse.Namespace) -> Answer:
    ledger = store.admin.ledger()
    return Answer(ledger, lines(ledger), notes=list(assumptions(ledger)))


def lines(ledger: Mapping[str, Any]) -> Iterator[str]:
    tenants = [(row["tenant"] or "-", *cells(row)) for row in ledger["tenants"]]
    if len(tenants) > 1:
        tenants.append(("all", *cells(ledger["total"])))
    sessions = [(row["name"][:_NAME_WIDTH], *cells(row)) for row in ledger["sessions"]]
    for heading, rows in (("tenant", tenants), ("session", sessions[:_SESSIONS_SHOWN])):
        if rows:
            heads = (heading, "tokens given back", "from", "GPU time saved", "worth")
            yield Table(heads, rows).text()
    if not tenants:
        yield "no block was given back yet"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    tiers = (f"{tier} {tokens / row['tokens']:.0%}" for tier, tokens in row["tiers"].items())
    saved = format_duration(row["gpu_s"])
    return (
        f"{row['tokens']:,.0f}",
        ", ".join(tiers),
        saved if row["tokens"] > row["untimed_tokens"] else "speed unknown",
        f"{row['saved']:,.2f}" if row["saved"] >= 1 else f"{row['saved']:.3g}",
    )


def assumptions(ledger: Mapping[str, Any]) -> Iterator[str]:
    """The speeds and the price that the figures are computed with."""
    assumed, untimed = ledger["assumed"], ledger["total"]["untimed_tokens"]
    for tag, measured in assumed["measured"].items():
        yield f"prefill of {tag}: {measured['tokens_per_s']:,.0f} tokens/s, measured by its engine"
    if "prefill_tokens_per_s" in assumed:
        speed = assumed["prefill_tokens_per_s"]
        yield f"prefill of others: {speed:,.0f} tokens/s (ledger.prefill_tokens_per_s)"
    if untimed:
        yield (
            f"{untimed:,.0f} tokens have no GPU time, because no prefill speed is known; "
            "set ledger.prefill_tokens_per_s"
        )
    price = assumed["gpu_price_per_hour"]
    yield f"price of a GPU hour: {price:g} (ledger.gpu_price_per_hour)"


COMMAND = Command(
    more="Counts since the start of the daemon. See docs/ledger.md.",
    options=DAEMON,
    run=on_daemon(run),
)
