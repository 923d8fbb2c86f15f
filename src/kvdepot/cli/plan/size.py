"""`kvdepot size`: how large a model's KV is, and how long tiers keep it."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.cli import output
from kvdepot.cli.arguments import (
    EffectRule,
    count,
    counts,
    positive,
    refuse_without_effect,
    remember_defaults,
)
from kvdepot.cli.report.tables import Table
from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DTYPE_BYTES, KVLayout
from kvdepot.core.units import format_bytes, format_decimal_bytes, parse_bytes
from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import (
    CODEC_BITS,
    EXISTING_CODECS,
    RAW,
    Footprint,
    find_codec,
    footprint_of,
)
from kvdepot.planner.models import KNOWN_MODELS, Model, find_model
from kvdepot.planner.retention import DAY_S, SEED_TIERS, SEED_TOKENS_PER_S, Retention, retention

CONTEXTS = [1_000, 4_000, 10_000, 100_000, 128_000, 1_000_000]
USERS = [1, 10, 100, 1_000, 10_000]


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelSize:
    model: str
    source: str
    dtype: str
    tp: int
    block_tokens: int
    codec: str
    bytes_per_token: int
    growth_bytes_per_token: int
    stored_bytes_per_token: int
    gpu_bytes_per_token: int
    state_bytes: int
    block_bytes: int
    groups: list[Row]
    contexts: list[Row]
    users: list[Row]
    tokens_per_second: float
    bytes_per_second: int
    bytes_per_day: int
    retention: list[Retention]
    codecs: list[Row]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "size",
        description="How large a model's KV is by token, block, context and user, and how long "
        "each tier keeps it at a rate of tokens.",
        epilog="Counts take k, M, G (powers of 1000) and Ki, Mi (of 1024).",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="NAME|FILE", help="a well-known model or a config.json")
    which.add_argument("--models", action="store_true", help="list the well-known models")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), help="of the KV cache; the model's")
    parser.add_argument("--tp", type=count, default=1, metavar="N", help="tensor-parallel GPUs")
    parser.add_argument(
        "--block-tokens", type=count, default=DEFAULT_BLOCK_TOKENS, metavar="N", help="256"
    )
    parser.add_argument(
        "--codec",
        default=RAW,
        metavar="NAME|RATIO",
        help=f"as if tiers stored it so: {RAW}, {', '.join(CODEC_BITS)}, or a ratio such as 1.4",
    )
    parser.add_argument(
        "--context", type=counts, default=CONTEXTS, metavar="N,…", help="tokens of one user"
    )
    parser.add_argument("--users", type=counts, default=USERS, metavar="N,…")
    parser.add_argument(
        "--tokens-per-second",
        type=positive,
        default=SEED_TOKENS_PER_S,
        metavar="N",
        help="tokens whose KV is written; 1.1M/72, one GPU of the hybrid storage paper's example",
    )
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a tier and its size, such as ssd=15.36TB; may be repeated; replaces the defaults",
    )
    output.add_json_flag(parser)
    remember_defaults(parser)


def run(args: argparse.Namespace) -> int:
    others = tuple(name for name in args.defaults if name not in ("models", "json", "help"))
    rule = EffectRule(others, not args.models, "with --models")
    refuse_without_effect(args, [rule])
    if args.models:
        return run_models(args)
    found = measure(args)
    if args.json:
        output.document(found)
    else:
        show(found)
    return 0


def measure(args: argparse.Namespace) -> ModelSize:
    model = find_model(args.model)
    size = footprint_of(
        model, dtype=args.dtype, block_tokens=args.block_tokens, codec=args.codec, tp=args.tp
    )
    if not size.bytes_per_token:
        raise ConfigError(
            "model", f"{model.name} keeps states only, whatever the tokens: nothing grows"
        )
    stored = size.stored_bytes_per_token
    per_second = stored * args.tokens_per_second
    tiers = dict(map(tier_of, args.tier)) or SEED_TIERS
    return ModelSize(
        model=model.name,
        source=model.source,
        dtype=size.layout.groups[0].dtype,
        tp=args.tp,
        block_tokens=args.block_tokens,
        codec=size.codec.name,
        bytes_per_token=size.bytes_per_token,
        growth_bytes_per_token=size.growth_bytes_per_token,
        stored_bytes_per_token=round(stored),
        gpu_bytes_per_token=size.gpu_bytes_per_token,
        state_bytes=size.state_bytes,
        block_bytes=size.layout.block_bytes,
        groups=[group_row(group) for group in size.layout.groups],
        contexts=[context_row(size, tokens) for tokens in args.context],
        users=[users_row(size, users, n) for n in args.context for users in args.users],
        tokens_per_second=args.tokens_per_second,
        bytes_per_second=round(per_second),
        bytes_per_day=round(per_second * DAY_S),
        retention=[retention(t, n, stored, args.tokens_per_second) for t, n in tiers.items()],
        codecs=list(codec_rows(model, args)),
    )


def tier_of(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    try:
        return name.strip(), parse_bytes(size.strip())
    except ValueError as error:
        raise ConfigError(f"--tier {text}", str(error), hint="--tier ssd=15.36TB") from error


def group_row(group: KVLayout) -> Row:
    return {
        "kind": group.kind,
        "layers": group.layers,
        "window": group.window,
        "bytes_per_token": group.bytes_per_token,
        "block_bytes": group.block_bytes,
    }


def context_row(size: Footprint, tokens: int) -> Row:
    return {
        "tokens": tokens,
        "bytes": size.context_bytes(tokens),  # to go on: windows cut, one snapshot of states
        "all_layers_bytes": size.bytes_per_token * tokens,  # what prefill wrote
        "stored_bytes": round(size.stored_context_bytes(tokens)),
        "blocks": -(-tokens // size.layout.block_tokens),
    }


def users_row(size: Footprint, users: int, tokens: int) -> Row:
    stored = round(size.stored_context_bytes(tokens) * users)
    whole = size.context_bytes(tokens) * users
    return {"users": users, "tokens": tokens, "bytes": whole, "stored_bytes": stored}


def codec_rows(model: Model, args: argparse.Namespace) -> Iterator[Row]:
    layout = model.layout(dtype=args.dtype, block_tokens=args.block_tokens)
    whole = Footprint(layout).bytes_per_token
    for name in dict.fromkeys((RAW, *CODEC_BITS, args.codec)):
        stored = Footprint(layout, find_codec(name)).stored_bytes_per_token
        yield {"codec": name, "bytes_per_token": round(stored), "ratio": whole / stored}


def show(found: ModelSize) -> None:
    output.data(f"{found.model}, KV in {found.dtype}\n  from {found.source}")
    output.data("\n" + Table(("one", "bytes", "", ""), unit_rows(found)).text())
    if len(found.groups) > 1:
        output.data("\n" + groups_table(found))
    output.data("\n" + contexts_table(found))
    output.data("\n" + users_table(found.users))
    rate = f"{found.tokens_per_second:,.0f} tokens/s"
    daily = format_decimal_bytes(found.bytes_per_day)
    output.data(f"\nat {rate}: {format_decimal_bytes(found.bytes_per_second)}/s, {daily} a day")
    output.data("\n" + retention_table(found.retention))
    rows = [(r["codec"], f"{r['bytes_per_token']:,}", f"{r['ratio']:.2f}×") for r in found.codecs]
    output.data("\n" + Table(("if stored as", "bytes a token", "smaller"), rows).text())
    output.say(f"kvdepot stores {', '.join(EXISTING_CODECS)}; the others are there to compare with")


def unit_rows(found: ModelSize) -> list[tuple[str, str, str, str]]:
    units = {"token": found.bytes_per_token}
    if found.growth_bytes_per_token != found.bytes_per_token:
        units["token of a long context (windows)"] = found.growth_bytes_per_token
    if found.stored_bytes_per_token != found.bytes_per_token:
        units[f"token, stored as {found.codec}"] = found.stored_bytes_per_token
    if found.tp > 1:
        units[f"token on one of {found.tp} GPUs"] = found.gpu_bytes_per_token
    units[f"block of {found.block_tokens} tokens"] = found.block_bytes
    if found.state_bytes:
        units["snapshot of states"] = found.state_bytes
    return [(name, f"{n:,}", format_bytes(n), format_decimal_bytes(n)) for name, n in units.items()]


def groups_table(found: ModelSize) -> str:
    rows = [
        (g["kind"], g["layers"], g["window"] or "-", f"{g['bytes_per_token']:,}")
        for g in found.groups
    ]
    return Table(("layers of kind", "layers", "window", "bytes a token"), rows).text()


def contexts_table(found: ModelSize) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "context tokens": lambda row: f"{row['tokens']:,}",
        "to go on": lambda row: format_decimal_bytes(row["bytes"]),
        "the same": lambda row: format_bytes(row["bytes"]),
    }
    if found.growth_bytes_per_token != found.bytes_per_token:
        columns["all layers whole"] = lambda row: format_decimal_bytes(row["all_layers_bytes"])
    if found.codec != RAW:
        columns[f"as {found.codec}"] = lambda row: format_decimal_bytes(row["stored_bytes"])
    columns["blocks"] = lambda row: f"{row['blocks']:,}"
    rows = [[cell(row) for cell in columns.values()] for row in found.contexts]
    return Table(list(columns), rows).text()


def users_table(rows: Sequence[Row]) -> str:
    users = sorted({row["users"] for row in rows})
    cells: dict[int, list[str]] = {}
    for row in sorted(rows, key=lambda row: (row["tokens"], row["users"])):
        cells.setdefault(row["tokens"], []).append(format_decimal_bytes(row["stored_bytes"]))
    lines = [(f"{tokens:,}", *cells[tokens]) for tokens in cells]
    return Table(("stored, by users", *(f"{n:,}" for n in users)), lines).text()


def retention_table(rows: Sequence[Retention]) -> str:
    cells = [
        (
            row.tier,
            format_decimal_bytes(row.capacity_bytes),
            f"{row.tokens:,}",
            f"{row.minutes:,.1f}",
            f"{row.hours:,.2f}",
            f"{row.days:,.2f}",
        )
        for row in rows
    ]
    return Table(("tier", "size", "tokens", "minutes", "hours", "days"), cells).text()


def run_models(args: argparse.Namespace) -> int:
    rows = []
    for known in KNOWN_MODELS:
        model = find_model(known.repository)
        size = footprint_of(model)
        rows.append(
            {
                "model": model.name,
                "family": known.family,
                "bytes_per_token": size.bytes_per_token,
                "growth_bytes_per_token": size.growth_bytes_per_token,
                "parameters": known.parameters,
                "active_parameters": known.active_parameters,
                "source": model.source,
                "aliases": list(known.aliases),
            }
        )
    if args.json:
        output.document(rows)
    else:
        heads = ("model", "family", "bytes a token", "of a long context", "source")
        cells = [
            (
                row["model"],
                row["family"],
                f"{row['bytes_per_token']:,}",
                f"{row['growth_bytes_per_token']:,}",
                row["source"],
            )
            for row in rows
        ]
        output.data(Table(heads, cells).text())
    return 0
