"""`kvdepot size`: the size of a model's KV, and how long tiers keep it."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvdepot.cli.command import Answer, Command, positive
from kvdepot.cli.tables import Column, Table
from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DTYPE_BYTES
from kvdepot.core.units import format_bytes, format_decimal_bytes, parse_bytes
from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import CODEC_BITS, RAW, Footprint, find_codec, footprint_of
from kvdepot.planner.models import KNOWN_MODELS, find_model
from kvdepot.planner.retention import DAY_S, SEED_TIERS, SEED_TOKENS_PER_S, retention

Facts = dict[str, Any]
GROUP_FACTS: Final = ("kind", "layers", "window", "bytes_per_token", "block_bytes")


def run(args: argparse.Namespace) -> Answer:
    if args.models:
        return list_models()
    if args.model is None:
        raise ConfigError(
            "--model", "is missing", hint="add --model NAME; --models lists the names"
        )
    facts = measure(args)
    note = f"kvdepot stores {RAW} blocks; the other codecs are for comparison"
    return Answer(facts, lines(facts), notes=[note])


def measure(args: argparse.Namespace) -> Facts:
    model = find_model(args.model)
    size = footprint_of(
        model, dtype=args.dtype, block_tokens=args.block_tokens, codec=args.codec, tp=args.tp
    )
    if not size.bytes_per_token:
        raise ConfigError("model", f"{model.name} has states only, which do not grow with tokens")
    stored, layout = size.stored_bytes_per_token, size.layout
    rate = args.tokens_per_second or SEED_TOKENS_PER_S
    tiers = dict(map(parse_tier, args.tier)) or SEED_TIERS
    codecs = {name: Footprint(layout, find_codec(name)) for name in (RAW, *CODEC_BITS, args.codec)}
    return {
        "model": model.name,
        "source": model.source,
        "dtype": layout.groups[0].dtype,
        "tp": args.tp,
        "block_tokens": args.block_tokens,
        "codec": size.codec.name,
        "bytes_per_token": size.bytes_per_token,
        "growth_bytes_per_token": size.growth_bytes_per_token,
        "stored_bytes_per_token": round(stored),
        "gpu_bytes_per_token": size.gpu_bytes_per_token,
        "state_bytes": size.state_bytes,
        "block_bytes": layout.block_bytes,
        "groups": [{name: getattr(group, name) for name in GROUP_FACTS} for group in layout.groups],
        "contexts": [
            {
                "tokens": tokens,
                "bytes": size.context_bytes(tokens),  # to continue: windows cut, one state
                "all_layers_bytes": size.bytes_per_token * tokens,  # written by prefill
                "stored_bytes": round(size.stored_context_bytes(tokens)),
                "blocks": -(-tokens // layout.block_tokens),
            }
            for tokens in args.context
        ],
        "users": [
            {
                "users": users,
                "tokens": tokens,
                "bytes": size.context_bytes(tokens) * users,
                "stored_bytes": round(size.stored_context_bytes(tokens) * users),
            }
            for tokens in args.context
            for users in args.users
        ],
        "tokens_per_second": rate,
        "bytes_per_second": round(stored * rate),
        "bytes_per_day": round(stored * rate * DAY_S),
        "retention": [retention(tier, room, stored, rate) for tier, room in tiers.items()],
        "codecs": [
            {
                "codec": name,
                "bytes_per_token": round(other.stored_bytes_per_token),
                "ratio": size.bytes_per_token / other.stored_bytes_per_token,
            }
            for name, other in codecs.items()
        ],
    }


def parse_tier(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    try:
        return name.strip(), parse_bytes(size.strip())
    except ValueError as error:
        raise ConfigError(f"--tier {text}", str(error), hint="--tier ssd=15.36TB") from error


def lines(facts: Facts) -> Iterator[str]:
    yield f"{facts['model']}, KV in {facts['dtype']}\n  from {facts['source']}"
    yield "\n" + unit_table(facts).text()
    if len(facts["groups"]) > 1:
        yield "\n" + Table.of(facts["groups"], GROUPS).text()
    yield "\n" + context_table(facts).text()
    yield "\n" + user_table(facts).text()
    rate = f"{facts['tokens_per_second']:,.0f} tokens/s"
    daily = format_decimal_bytes(facts["bytes_per_day"])
    yield f"\nat {rate}: {format_decimal_bytes(facts['bytes_per_second'])}/s, {daily} a day"
    yield "\n" + Table.of(facts["retention"], RETENTION).text()
    yield "\n" + Table.of(facts["codecs"], CODECS).text()


GROUPS: Final[Mapping[str, Column]] = {
    "layers of kind": "kind",
    "layers": "layers",
    "window": "window",
    "bytes a token": "bytes_per_token",
}
RETENTION: Final[Mapping[str, Column]] = {
    "tier": "tier",
    "size": lambda row: format_decimal_bytes(row["capacity_bytes"]),
    "tokens": "tokens",
    "minutes": lambda row: f"{row['minutes']:,.1f}",
    "hours": lambda row: f"{row['hours']:,.2f}",
    "days": lambda row: f"{row['days']:,.2f}",
}
CODECS: Final[Mapping[str, Column]] = {
    "if stored as": "codec",
    "bytes a token": "bytes_per_token",
    "smaller": lambda row: f"{row['ratio']:.2f}×",
}
MODELS: Final[Mapping[str, Column]] = {
    "model": "model",
    "family": "family",
    "bytes a token": "bytes_per_token",
    "of a long context": "growth_bytes_per_token",
    "source": "source",
}


def unit_table(facts: Facts) -> Table:
    units = {"token": facts["bytes_per_token"]}
    if facts["growth_bytes_per_token"] != facts["bytes_per_token"]:
        units["token of a long context (windows)"] = facts["growth_bytes_per_token"]
    if facts["stored_bytes_per_token"] != facts["bytes_per_token"]:
        units[f"token, stored as {facts['codec']}"] = facts["stored_bytes_per_token"]
    if facts["tp"] > 1:
        units[f"token on one of {facts['tp']} GPUs"] = facts["gpu_bytes_per_token"]
    units[f"block of {facts['block_tokens']} tokens"] = facts["block_bytes"]
    if facts["state_bytes"]:
        units["snapshot of states"] = facts["state_bytes"]
    rows = [(name, n, format_bytes(n), format_decimal_bytes(n)) for name, n in units.items()]
    return Table(("one", "bytes", "", ""), rows)


def context_table(facts: Facts) -> Table:
    """Columns that would repeat another one are left out."""
    columns = {"to continue": "bytes"}
    if facts["growth_bytes_per_token"] != facts["bytes_per_token"]:
        columns["all layers whole"] = "all_layers_bytes"
    if facts["codec"] != RAW:
        columns[f"as {facts['codec']}"] = "stored_bytes"
    rows = [
        (
            row["tokens"],
            *(format_decimal_bytes(row[name]) for name in columns.values()),
            format_bytes(row["bytes"]),
            row["blocks"],
        )
        for row in facts["contexts"]
    ]
    return Table(("context tokens", *columns, "in binary units", "blocks"), rows)


def user_table(facts: Facts) -> Table:
    users = sorted({row["users"] for row in facts["users"]})
    stored = {(row["tokens"], row["users"]): row["stored_bytes"] for row in facts["users"]}
    rows = [
        (tokens, *(format_decimal_bytes(stored[tokens, number]) for number in users))
        for tokens in sorted({row["tokens"] for row in facts["users"]})
    ]
    return Table(("stored, by users", *(f"{number:,}" for number in users)), rows)


def list_models() -> Answer:
    rows = [
        {
            "model": model.name,
            "family": model.family,
            "bytes_per_token": size.bytes_per_token,
            "growth_bytes_per_token": size.growth_bytes_per_token,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "source": model.source,
            "aliases": model.aliases,
        }
        for model, size in ((model, footprint_of(model)) for model in KNOWN_MODELS)
    ]
    return Answer(rows, Table.of(rows, MODELS).text())


COMMAND = Command(
    more="By token, block, context and user; and how long each tier keeps KV at a rate of tokens. "
    "Counts take k, M, G (powers of 1000) and Ki, Mi (of 1024). See docs/planning.md.",
    options=f"""
    --model NAME|FILE         a well-known model or a config.json
    --models                  list the well-known models [alone]
    --dtype {"|".join(DTYPE_BYTES)}    of the KV cache (default: the model's)
    --tp N                    tensor-parallel GPUs [default: 1]
    --block-tokens N          tokens of a block [default: {DEFAULT_BLOCK_TOKENS}]
    --codec NAME              how tiers would store it: {", ".join((RAW, *CODEC_BITS))}, or a ratio
                              such as 1.4 [default: {RAW}]
    --context N,…             tokens of one user [default: 1k,4k,10k,100k,128k,1M]
    --users N,…               numbers of users [default: 1,10,100,1k,10k]
    --tokens-per-second RATE  tokens whose KV is written (default: 1.1M/72, one GPU in the hybrid
                              storage paper)
    --tier NAME=SIZE          a tier and its size, such as ssd=15.36TB; replaces the default tiers
                              [repeat]
    """,
    run=run,
    kinds={"RATE": positive},
)
