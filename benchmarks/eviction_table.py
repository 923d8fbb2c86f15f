"""Every eviction order on the given traces and on made-up loads, beside the offline optimum.

    python benchmarks/eviction_table.py [--traces DIR] [--only NAME]... [--files] [--json]

Hits only, with the production index and orders (`kvdepot sim --hits-only` for one trace). `--files`
has the rules of file tiers instead: a drive of 32 segments, hits, and blocks written for each read.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from log_drive import play_log
from synthetic_loads import LOADS

from kvdepot.cli.tables import Table
from kvdepot.policy.eviction import ORDERS
from kvdepot.policy.placing.reclaim import RULES
from kvdepot.sim.hits_only import OPTIMAL, Capacity, Case, play
from kvdepot.sim.traces import Replay, read_trace
from kvdepot.sim.workload import Workload

TRACES: Final = Path("/work/shared/data/traces")
MILLIONS: Final = (1, 3, 10, 50)
SHARES: Final = (0.02, 0.08, 0.25)
FILE_SHARES: Final = (0.06, 0.15)
FILE_LOADS: Final = ("conversation trace", "zipf users", "zipf documents", "agents", "mixture")
"""Segments take longer to simulate than single blocks."""
OTHERS: Final = tuple(name for name in ORDERS if name not in ("default", "value"))
"""`value` counts GPU time, not hits: benchmarks/value_eviction.py."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A workload and the sizes to try it at, in blocks."""

    name: str
    held_out: bool
    make: Callable[[], Workload]
    sizes: Callable[[Workload], dict[str, int]]


def subjects(traces: Path, shares: tuple[float, ...]) -> Iterator[Subject]:
    def millions(workload: Workload) -> dict[str, int]:
        return {f"{m}M": m * 10**6 // workload.block_tokens for m in MILLIONS}

    def parts(workload: Workload) -> dict[str, int]:
        return {f"{share:.0%}": int(share * workload.block_count) for share in shares}

    chat, agents = "mooncake_conversation.jsonl.xz", "claude_code_sessions_a.rle.jsonl.gz"
    yield Subject("conversation trace", False, lambda: read_trace(traces / chat), millions)
    yield Subject(
        "coding-agent trace",
        False,
        lambda: read_trace(traces / agents, replay=Replay(merge=8)),
        millions,
    )
    for name, load in LOADS.items():
        yield Subject(name, load.held_out, load.workload, parts)


def orders_row(workload: Workload, blocks: int) -> dict[str, Any]:
    """Token hit ratios of every order, and how fast the default was."""
    capacity = Capacity({"dram": blocks * workload.block_tokens}, "")
    ratios, events_per_s = {}, 0.0
    for policy in (*OTHERS, "default", OPTIMAL):
        started_s = time.perf_counter()
        counts = play(workload, Case(policy, capacity), lambda _: None)
        ratios[policy] = round(counts.token_hit_ratio, 5)
        if policy == "default":
            events_per_s = counts.events / (time.perf_counter() - started_s)
    return {"ratios": ratios, "block_events_per_s": round(events_per_s)}


def files_row(workload: Workload, blocks: int) -> dict[str, Any]:
    """Block hit ratios of every rule, and blocks written for each read."""
    found = {name: play_log(workload, blocks, rule, lambda _: None) for name, rule in RULES.items()}
    return {
        "ratios": {name: round(counts.hit_ratio, 5) for name, counts in found.items()},
        "written_per_read": {name: round(c.written_per_read, 3) for name, c in found.items()},
        "written_again": {name: c.blocks_again for name, c in found.items()},
    }


def compared(row: dict[str, Any]) -> dict[str, float]:
    """The default over the best of the others and over LRU."""
    ratios = row["ratios"]
    best = max(ratios[name] for name in OTHERS)
    own = ratios["default"]
    return {
        "to_best": round(own / best, 4) if best else 1.0,
        "to_lru": round(own / ratios["lru"], 4) if ratios["lru"] else 1.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="may be given several times"
    )
    parser.add_argument("--files", action="store_true", help="the rules of file tiers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for subject in subjects(args.traces, FILE_SHARES if args.files else SHARES):
        chosen = args.only or (FILE_LOADS if args.files else ())
        if chosen and subject.name not in chosen:
            continue
        workload = subject.make()
        for label, blocks in subject.sizes(workload).items():
            if args.files and blocks > workload.block_count // 4:
                continue
            row = (files_row if args.files else orders_row)(workload, blocks)
            print(f"{subject.name} at {label}: {row['ratios']}", file=sys.stderr, flush=True)
            facts = {"load": subject.name, "size": label, "held_out": subject.held_out}
            rows.append({**facts, **row, **compared(row)})
    print(json.dumps({"rows": rows}, indent=1) if args.json else table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["ratios"]) if rows else []
    heads = ["load", "size", *names, "to best", "to lru"]
    lines = []
    for row in rows:
        written = row.get("written_per_read", {})
        cells = [
            f"{row['ratios'][name]:.4f}" + (f" ({written[name]:.2f})" if written else "")
            for name in names
        ]
        title = row["load"] + (" *" if row["held_out"] else "")
        lines.append([title, row["size"], *cells, f"{row['to_best']:.3f}", f"{row['to_lru']:.3f}"])
    note = "* held out" + ("; in brackets blocks written for each read" if rows and written else "")
    return Table(heads, lines).text() + "\n" + note


if __name__ == "__main__":
    sys.exit(main())
