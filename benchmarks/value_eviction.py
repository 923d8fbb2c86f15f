"""GPU time that eviction orders save on the traces, at the same number of bytes.

    python benchmarks/value_eviction.py [--traces DIR] [--only NAME]... [--size MTOK]... [--json]

Hits only, with the production index and orders, one tier of memory. GPU time is that of prefill,
which grows with context (`sim/hits_only.py: prefill_work`), as a share of computing every prompt
whole. Deterministic: the figures do not depend on the machine. A row is met where `value` saves
more than LRU, S3-FIFO and the default.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvdepot.cli.tables import Table
from kvdepot.sim.hits_only import Capacity, Case, play
from kvdepot.sim.traces import Replay, read_trace
from kvdepot.sim.workload import Workload

TRACES: Final = Path("/work/shared/data/traces")
MILLIONS: Final = (1.0, 3.0, 10.0)
ORDERS: Final = ("lru", "s3fifo", "default", "value")
READ: Final[dict[str, Callable[[Path], Workload]]] = {
    "conversation": lambda folder: read_trace(folder / "mooncake_conversation.jsonl.xz"),
    "coding-agent": lambda folder: read_trace(
        folder / "claude_code_sessions_a.rle.jsonl.gz", replay=Replay(merge=8)
    ),
}


def row(name: str, workload: Workload, millions: float) -> dict[str, Any]:
    """What each order saves, and by how much `value` is ahead of the best other."""
    capacity = Capacity({"dram": int(millions * 1e6)}, "")
    saved = {}
    for order in ORDERS:
        counts = play(workload, Case(order, capacity), lambda _: None)
        saved[order] = round(counts.prefill_saved_ratio, 5)
        print(f"{name} {millions:g}M {order}: {saved[order]}", file=sys.stderr, flush=True)
    best = max(value for order, value in saved.items() if order != "value")
    ahead = saved["value"] / best if best else 1.0
    return {
        "trace": name,
        "million_tokens": millions,
        "gpu_time_saved": saved,
        "value_to_best_other": round(ahead, 4),
        "met": saved["value"] > best,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    parser.add_argument("--only", action="append", choices=list(READ), help="a trace")
    parser.add_argument("--size", action="append", type=float, metavar="MTOK", help="1, 3 and 10")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.only or READ:
        workload = READ[name](args.traces)
        rows += [row(name, workload, size) for size in args.size or MILLIONS]
    answer = {"rows": rows, "met": all(one["met"] for one in rows)}
    print(json.dumps(answer, indent=1) if args.json else table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["trace", "million tokens", *ORDERS, "value to best other"]
    lines = [
        [
            one["trace"],
            f"{one['million_tokens']:g}",
            *(f"{one['gpu_time_saved'][order]:.4f}" for order in ORDERS),
            f"{one['value_to_best_other']:.3f}",
        ]
        for one in rows
    ]
    return Table(heads, lines).text()


if __name__ == "__main__":
    sys.exit(main())
