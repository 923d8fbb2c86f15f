"""`kvdepot bench`: how fast this machine is, and how much of that the store gives you.

Speeds are ratios to a limit measured in the same run, in turn with the subject: on a busy machine
the two suffer together. Missed bars are shown; only `--strict` makes them a failure.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvdepot.bench.daemon import BLOCKS_BYTES as DAEMON_BLOCKS_BYTES
from kvdepot.bench.daemon import DaemonPlan
from kvdepot.bench.disk import BLOCKS_MIN
from kvdepot.bench.engines import IoPlan
from kvdepot.bench.object import ObjectPlan
from kvdepot.bench.rounds import BenchPart, Figure, Latency, Result, SpeedRow
from kvdepot.bench.stores import INDEXES, StorePlan
from kvdepot.bench.ttft import PREFIX_TOKENS, TtftPlan
from kvdepot.cli import output
from kvdepot.cli.arguments import count
from kvdepot.cli.directories import choose_parent, models_folder, scratch_directory
from kvdepot.cli.doctor import machine
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_bytes, parse_bytes

BLOCKS_BYTES = (128 << 10, 4 << 20, 32 << 20)
QUICK_BLOCKS_BYTES = (128 << 10, 4 << 20)
OBJECT_BLOCKS_BYTES = (1 << 20, 32 << 20)
TOTAL_BYTES = {"io": 512 << 20, "store": 1 << 30, "object": 256 << 20}
QUICK_TOTAL_BYTES = 64 << 20
ROUNDS, QUICK_ROUNDS = 9, 3
QUICK_INDEXES = (10**3, 10**5)
QUICK_PREFIX_TOKENS = 1000
TTFT_ROUNDS, QUICK_TTFT_ROUNDS = 5, 2
TTFT_NEEDED_BYTES = 4 << 30
DAEMON_NEEDED_BYTES = 8 << 30
SPACE = {"io": 3, "store": 8}
"""Free space asked for, in units of what one run moves."""
ROW_HEADS = ("tier", "what", "block", "speed", "limit", "ratio", "min", "max", "bar", "", "")
LATENCY_HEADS = ("what", "blocks in index", "p50 us", "p99 us", "bar us", "")
FIGURE_HEADS = ("what", "median", "min", "max", "unit", "bar", "")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Measure the store beside what the hardware can do. Takes minutes; writes "
        "only to a temporary directory, which is removed.",
    )
    kinds = parser.add_subparsers(title="what to measure", dest="what", required=True)
    add_kind(kinds, "io", "the native engine beside the raw device and memcpy")
    add_kind(kinds, "store", "a whole store beside the raw device and memcpy; lookups")
    daemon = add_kind(kinds, "daemon", "a daemon's store beside one in the same process; lookups")
    daemon.add_argument(
        "--block", type=sizes, metavar="BYTES,…", help="block sizes (default: 1MiB,4MiB,32MiB)"
    )
    ttft = add_kind(kinds, "ttft", "a model's time to first token, computed and from each tier")
    ttft.add_argument("--prefix", type=count, metavar="TOKENS", help="prompt (default: 4000)")
    ttft.add_argument(
        "--model", type=Path, metavar="DIR", help="a model folder (default: SmolLM2-135M-Instruct)"
    )
    bucket = add_kind(kinds, "object", "stores over one bucket beside obstore alone")
    bucket.add_argument(
        "--url", required=True, metavar="URL", help="s3://bucket/prefix; what is written is deleted"
    )
    bucket.add_argument("--endpoint", default="", metavar="URL", help="the server's address")
    bucket.add_argument("--region", default="", metavar="NAME", help="the bucket's region")
    bucket.add_argument("--profile", default="", metavar="NAME", help="whose credentials to use")
    bucket.add_argument("--credentials-file", type=Path, metavar="FILE", help="where profiles are")
    for name in ("io", "store", "object"):
        kind = kinds.choices[name]
        kind.add_argument(
            "--size", type=size, metavar="BYTES", help="bytes moved in each run, e.g. 1GiB"
        )
        kind.add_argument(
            "--block",
            type=sizes,
            metavar="BYTES,…",
            help="block sizes (default: "
            + ("1MiB,32MiB)" if name == "object" else "128KiB,4MiB,32MiB)"),
        )


def add_kind(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=text, description=f"Measure {text}.")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark; `measure_and_report` reads them."""
    parser.add_argument(
        "--path", type=Path, metavar="DIR", help="where to write (default: a temporary directory)"
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="measurements of each thing")
    parser.add_argument("--quick", action="store_true", help="small and imprecise, in seconds")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    output.add_json_flag(parser)


def size(text: str) -> int:
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is too little; at least 1MiB")
    return value


def sizes(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted(parse_bytes(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if any(value <= 0 or value % 4096 for value in values):
        raise argparse.ArgumentTypeError("block sizes must be multiples of 4KiB")
    return values


def run(args: argparse.Namespace) -> int:
    return measure_and_report(args, needed_bytes(args), partial(make_parts, args))


def measure_and_report(
    args: argparse.Namespace, needed_bytes: int, parts: Callable[[Path], Iterable[BenchPart]]
) -> int:
    """Measure in a scratch directory with this much room, and show all results. Exit status."""
    facts = choose_parent(args.path, needed_bytes)
    parent = Path(facts.path).resolve()
    output.say(f"measuring in {parent} ({facts.filesystem}); what is written there is removed")
    with scratch_directory(parent, "kvdepot-bench-") as directory:
        results = measure(list(parts(directory)))
    if args.json:
        output.document(document(results, facts))
    else:
        report(results)
    return 1 if args.strict and not all(result.ok for result in results) else 0


def total_bytes(args: argparse.Namespace) -> int:
    chosen: int | None = args.size
    return chosen or (QUICK_TOTAL_BYTES if args.quick else TOTAL_BYTES[args.what])


def block_sizes(args: argparse.Namespace) -> tuple[int, ...]:
    chosen: tuple[int, ...] | None = args.block
    return chosen or (QUICK_BLOCKS_BYTES if args.quick else BLOCKS_BYTES)


def ttft_plan(args: argparse.Namespace, directory: Path) -> TtftPlan:
    return TtftPlan(
        directory,
        models_folder(args.env),
        args.model.resolve() if args.model else None,
        args.prefix or (QUICK_PREFIX_TOKENS if args.quick else PREFIX_TOKENS),
        args.rounds or (QUICK_TTFT_ROUNDS if args.quick else TTFT_ROUNDS),
    )


def object_plan(args: argparse.Namespace, rounds: int) -> ObjectPlan:
    names = ("url", "endpoint", "region", "profile", "credentials_file")
    section = {name: getattr(args, name) for name in names if getattr(args, name)}
    blocks = args.block or OBJECT_BLOCKS_BYTES
    return ObjectPlan(section, blocks, total_bytes(args), rounds)


def needed_bytes(args: argparse.Namespace) -> int:
    if args.what == "ttft":
        return TTFT_NEEDED_BYTES
    if args.what == "daemon":
        return DAEMON_NEEDED_BYTES
    if args.what == "object":
        return 0
    largest = BLOCKS_MIN * max(block_sizes(args))
    return SPACE[args.what] * max(total_bytes(args), largest)


def make_parts(args: argparse.Namespace, directory: Path) -> Iterator[BenchPart]:
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if args.what == "ttft":
        return ttft_plan(args, directory).parts()
    if args.what == "daemon":
        chosen = args.block or DAEMON_BLOCKS_BYTES
        return DaemonPlan(directory, chosen, args.quick, rounds).parts()
    if args.what == "object":
        return object_plan(args, rounds).parts()
    blocks = block_sizes(args)
    if args.what == "io":
        return IoPlan(directory, blocks, total_bytes(args), rounds).parts()
    indexes = QUICK_INDEXES if args.quick else INDEXES
    return StorePlan(directory, blocks, total_bytes(args), rounds, indexes).parts()


def measure(parts: Sequence[BenchPart]) -> list[Result]:
    results: list[Result] = []
    with output.Progress("measuring", len(parts)) as progress:
        for part in parts:
            progress.label = part.label
            progress.advance(0)
            results += part.run()
            progress.advance()
    return results


def document(results: Iterable[Result], facts: machine.PathFacts) -> dict[str, Any]:
    kinds: dict[str, list[dict[str, Any]]] = {"rows": [], "latencies": [], "figures": []}
    names = {SpeedRow: "rows", Latency: "latencies", Figure: "figures"}
    for result in results:
        kinds[names[type(result)]].append({**output.plain(result), "ok": result.ok})
    return {**kinds, "machine": machine.describe(facts)}


def report(results: Sequence[Result]) -> None:
    rows = [result for result in results if isinstance(result, SpeedRow)]
    latencies = [result for result in results if isinstance(result, Latency)]
    figures = [result for result in results if isinstance(result, Figure)]
    if rows:
        output.data(Table(ROW_HEADS, map(row_cells, rows)).text() + "\n")
    if latencies:
        output.data(Table(LATENCY_HEADS, map(latency_cells, latencies)).text() + "\n")
    if figures:
        output.data(Table(FIGURE_HEADS, map(figure_cells, figures)).text() + "\n")
    missed = sum(not result.ok for result in results)
    judged = sum(bar_of(result) is not None for result in results)
    output.data(f"{judged - missed} of {judged} bars met; values are medians over the rounds")


def row_cells(row: SpeedRow) -> list[object]:
    return [
        row.tier,
        row.op,
        format_bytes(row.block_bytes),
        output.rate(row.bytes_per_s),
        output.rate(row.limit_bytes_per_s),
        row.ratio,
        row.ratio_min,
        row.ratio_max,
        "" if row.bar is None else f"{row.bar:.2f}",
        verdict(row),
        f"limit: {row.limit_by}",
    ]


def latency_cells(latency: Latency) -> list[object]:
    bar = "" if latency.bar_us is None else f"{latency.bar_us:.0f}"
    times = (f"{latency.p50_us:.0f}", f"{latency.p99_us:.0f}")
    return [latency.op, latency.index_blocks, *times, bar, verdict(latency)]


def figure_cells(figure: Figure) -> list[object]:
    bar = "" if figure.bar is None else f"{'≥' if figure.bar_is_least else '≤'} {figure.bar:g}"
    values = (digits(value) for value in (figure.value, figure.low, figure.high))
    return [figure.what, *values, figure.unit, bar, verdict(figure)]


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bar_of(result: Result) -> float | None:
    return result.bar_us if isinstance(result, Latency) else result.bar


def verdict(result: Result) -> str:
    if bar_of(result) is None:
        return ""
    return "ok" if result.ok else "MISSED"
