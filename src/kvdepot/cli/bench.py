"""`kvdepot bench`: the speed of this machine, and how much of it the store reaches.

Speeds are ratios to a limit that is measured in the same run, in turn with the subject, so that
other work on the machine affects both. A missed bar is shown; only --strict makes it a failure.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvdepot.bench import daemon, io, object_store, store, ttft
from kvdepot.bench.rounds import BenchPart, BenchPlan, Figure, Latency, Result, SpeedRow
from kvdepot.cli import output
from kvdepot.cli.arguments import parse_settings
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.directories import choose_parent, models_folder, scratch_directory
from kvdepot.cli.machine import describe
from kvdepot.cli.tables import Column, Table
from kvdepot.core.units import format_bytes, parse_bytes

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
BLOCKS_BYTES: Final = (128 * KIB, 4 * MIB, 32 * MIB)
QUICK_BLOCKS_BYTES: Final = (128 * KIB, 4 * MIB)
QUICK_BYTES: Final = 64 * MIB
ROUNDS, QUICK_ROUNDS = 9, 3
TTFT_ROUNDS, QUICK_TTFT_ROUNDS = 5, 2


def parse_size(text: str) -> int:
    value = parse_bytes(text)
    if value < MIB:
        raise ValueError(f"{text} is too small (expected at least 1MiB)")
    return value


def parse_blocks(text: str) -> tuple[int, ...]:
    values = tuple(sorted(parse_bytes(part) for part in text.split(",")))
    if any(value <= 0 or value % 4096 for value in values):
        raise ValueError(f"{text!r} has a size that is not a multiple of 4KiB")
    return values


def run_io(args: argparse.Namespace) -> Answer:
    plan = plan_of(args, QUICK_BLOCKS_BYTES if args.quick else BLOCKS_BYTES, 512 * MIB)
    return measure(args, 3 * moved_bytes(plan), lambda directory: io.parts(plan, directory))


def run_store(args: argparse.Namespace) -> Answer:
    plan = plan_of(args, QUICK_BLOCKS_BYTES if args.quick else BLOCKS_BYTES, GIB)
    return measure(args, 8 * moved_bytes(plan), lambda directory: store.parts(plan, directory))


def run_daemon(args: argparse.Namespace) -> Answer:
    plan = plan_of(args, daemon.BLOCKS_BYTES, 0)
    return measure(args, 8 * GIB, lambda directory: daemon.parts(plan, directory))


def run_object(args: argparse.Namespace) -> Answer:
    plan = plan_of(args, (MIB, 32 * MIB), 256 * MIB)
    given = parse_settings(args.set, "object.endpoint=http://127.0.0.1:9000")
    section = {name.removeprefix("object."): value for name, value in given.items()}
    section["url"] = args.url
    return measure(args, 0, lambda _: object_store.parts(plan, section))


def run_ttft(args: argparse.Namespace) -> Answer:
    rounds = args.rounds or (QUICK_TTFT_ROUNDS if args.quick else TTFT_ROUNDS)
    tokens = args.prefix or (ttft.QUICK_PREFIX_TOKENS if args.quick else ttft.PREFIX_TOKENS)
    folder = args.model.resolve() if args.model else None
    cache = models_folder(args.env)

    def parts(directory: Path) -> Iterator[BenchPart]:
        run = partial(ttft.measure, directory, cache, folder, tokens, rounds)
        yield BenchPart(f"time to first token, {tokens} tokens", run)

    return measure(args, 4 * GIB, parts)


def plan_of(args: argparse.Namespace, blocks: Sequence[int], total_bytes: int) -> BenchPlan:
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    total = getattr(args, "size", None) or (QUICK_BYTES if args.quick else total_bytes)
    return BenchPlan(args.block or blocks, total, rounds, args.quick)


def moved_bytes(plan: BenchPlan) -> int:
    """The most bytes that one run moves."""
    return max(plan.total_bytes, store.BLOCKS_MIN * max(plan.blocks_bytes))


def measure(
    args: argparse.Namespace, needed_bytes: int, parts: Callable[[Path], Iterable[BenchPart]]
) -> Answer:
    """Run all parts in a scratch directory with this much free space."""
    facts = choose_parent(args.path, needed_bytes)
    parent = Path(facts.path).resolve()
    output.say(f"measuring in {parent} ({facts.filesystem}); its files are removed afterwards")
    results: list[Result] = []
    with scratch_directory(parent, "kvdepot-bench-") as directory:
        every = list(parts(directory))
        with output.Progress("measuring", len(every)) as progress:
            for part in every:
                progress.label = part.label
                progress.advance(0)
                results += part.run()
                progress.advance()
    document = {**as_json(results), "machine": describe(facts)}
    missed = args.strict and not all(result.ok for result in results)
    return Answer(document, as_text(results), status=1 if missed else 0)


def as_json(results: Iterable[Result]) -> dict[str, list[Any]]:
    kinds: dict[str, list[Any]] = {"rows": [], "latencies": [], "figures": []}
    names = {SpeedRow: "rows", Latency: "latencies", Figure: "figures"}
    for result in results:
        kinds[names[type(result)]].append({**output.plain(result), "ok": result.ok})
    return kinds


def as_text(results: Sequence[Result]) -> Iterator[str]:
    for kind, columns in ((SpeedRow, ROWS), (Latency, LATENCIES), (Figure, FIGURES)):
        some = [result for result in results if isinstance(result, kind)]
        if some:
            yield Table.of(some, columns).text() + "\n"
    missed = sum(not result.ok for result in results)
    judged = sum(bar_of(result) is not None for result in results)
    yield f"{judged - missed} of {judged} bars met; values are medians over the rounds"


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bar_text(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return f"{'≥' if figure.bar_is_least else '≤'} {figure.bar:g}"


def bar_of(result: Result) -> float | None:
    return result.bar_us if isinstance(result, Latency) else result.bar


def verdict(result: Result) -> str:
    if bar_of(result) is None:
        return ""
    return "ok" if result.ok else "MISSED"


ROWS: Final[Mapping[str, Column]] = {
    "tier": "tier",
    "what": "op",
    "block": lambda row: format_bytes(row.block_bytes),
    "speed": lambda row: output.rate(row.bytes_per_s),
    "limit": lambda row: output.rate(row.limit_bytes_per_s),
    "ratio": "ratio",
    "min": "ratio_min",
    "max": "ratio_max",
    "bar": lambda row: "" if row.bar is None else row.bar,
    "": verdict,
    "limited by": "limit_by",
}
LATENCIES: Final[Mapping[str, Column]] = {
    "what": "op",
    "blocks in index": "index_blocks",
    "p50 us": lambda row: f"{row.p50_us:.0f}",
    "p99 us": lambda row: f"{row.p99_us:.0f}",
    "bar us": lambda row: "" if row.bar_us is None else f"{row.bar_us:.0f}",
    "": verdict,
}
FIGURES: Final[Mapping[str, Column]] = {
    "what": "what",
    "median": lambda figure: digits(figure.value),
    "min": lambda figure: digits(figure.low),
    "max": lambda figure: digits(figure.high),
    "unit": "unit",
    "bar": bar_text,
    "": verdict,
}
OPTIONS: Final = """
--path DIR     where to write (default: a temporary directory)
--rounds N     measurements of each thing
--quick        small and imprecise, in seconds
--strict       exit with 1 when a bar is missed
"""
BLOCK: Final = "\n--block BLOCKS    sizes of blocks, such as 1MiB,32MiB"
SIZE: Final = "\n--size SIZE    bytes moved in each run, such as 1GiB"


def bench(text: str, run: Callable[[argparse.Namespace], Answer], options: str) -> Command:
    kinds = {"BLOCKS": parse_blocks, "--size": parse_size}
    return Command(text, options=OPTIONS + options, run=run, kinds=kinds)


COMMAND = Command(
    more="Takes minutes. Writes only to a temporary directory, which is removed.",
    verbs={
        "io": bench(
            "compare the native engine with the raw device and memcpy", run_io, BLOCK + SIZE
        ),
        "store": bench(
            "compare a store with the raw device and memcpy; measure lookups",
            run_store,
            BLOCK + SIZE,
        ),
        "daemon": bench(
            "compare the store of a daemon with one in the same process; measure lookups",
            run_daemon,
            BLOCK,
        ),
        "ttft": bench(
            "measure the time to first token of a model: computed, and from each tier",
            run_ttft,
            """
            --prefix N     tokens of the prompt (default: 4000)
            --model DIR    a model folder (default: SmolLM2-135M-Instruct)
            """,
        ),
        "object": bench(
            "compare stores that share a bucket with obstore alone",
            run_object,
            f"""
            --url URL           s3://bucket/prefix; its new objects are deleted [required]
            --set NAME=VALUE    a setting of the object tier, such as
                                object.endpoint=http://127.0.0.1:9000 [repeat]
            {BLOCK + SIZE}
            """,
        ),
    },
)
