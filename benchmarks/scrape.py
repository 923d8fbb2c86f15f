"""A scrape of the metrics with very many blocks in the index, and what it does to a match.

    python benchmarks/scrape.py [--blocks N] [--scrapes N] [--json]

The index is filled directly, without bytes: a scrape and a match look at nothing else. Matches of
512 blocks are timed alone and while another thread scrapes ten times a second, by turns. The bars:
a scrape takes 50 ms at most (median), and a match beside scrapes takes 1.1 times as long at most
(median of the rounds' ratios of medians).
"""

import argparse
import json
import sys
import threading
import time
from statistics import median
from typing import Any, Final

import numpy as np

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.daemon.http.exposition import render
from kvdepot.store.store import Store

SCRAPE_MS: Final = 50.0
MATCH_RATIO: Final = 1.1
PROMPT_BLOCKS: Final = 512
_ROUNDS: Final = 7
_ROUND_S: Final = 2.0
_EVERY_S: Final = 0.1
_LAYOUT: Final = KVLayout(
    kind="gqa",
    layers=1,
    dtype="float16",
    block_tokens=16,
    kv_heads=1,
    head_dim=8,
    value_head_dim=8,
)


def fill(store: Store, blocks: int) -> list[BlockKey]:
    """Rows for prompts of 512 blocks in the index, as if in memory. Returns the keys of one."""
    catalog = store.inspect().catalog
    numbers = np.arange(blocks, dtype=np.uint64)
    words = np.empty((blocks, 4), np.uint64)
    space = store.namespace(model="scrape", layout=_LAYOUT)
    words[:, 0] = np.frombuffer(space.tag, np.uint64)[0]
    words[:, 2] = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words[:, 3] = numbers
    words[:, 1] = np.where(numbers % PROMPT_BLOCKS == 0, 0, np.roll(words[:, 2], 1))
    with store.inspect().state.lock:
        rows = catalog.table.add_many(words)
        catalog.tree.attach_many(rows)
        catalog.nbytes.array[rows] = 4096
        catalog.residency.array[rows] = 1
        return catalog.table.keys(rows[:PROMPT_BLOCKS])


def matches_ms(store: Store, keys: list[BlockKey], seconds: float) -> float:
    """The median of matches for so long."""
    times, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        found = len(store.match(keys))
        times.append((time.perf_counter() - began_s) * 1e3)
        assert found == len(keys)
    return median(times)


def scrapes_ms(store: Store, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        render(store.stats())
        times.append((time.perf_counter() - began_s) * 1e3)
    return times


def beside_scrapes_ms(store: Store, keys: list[BlockKey], seconds: float) -> float:
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(_EVERY_S):
            render(store.stats())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        return matches_ms(store, keys, seconds)
    finally:
        over.set()
        thread.join()


def measure(blocks: int, scrapes: int) -> dict[str, Any]:
    with kvdepot.open(dram={"capacity": "64MiB", "prefault": False}) as store:
        assert isinstance(store, Store)
        keys = fill(store, blocks)
        times = scrapes_ms(store, scrapes)
        ratios, alone = [], []
        for _ in range(_ROUNDS):
            alone.append(matches_ms(store, keys, _ROUND_S))
            ratios.append(beside_scrapes_ms(store, keys, _ROUND_S) / alone[-1])
    return {
        "blocks": blocks,
        "scrape_ms": {"median": median(times), "min": min(times), "max": max(times)},
        "scrape_bar_ms": SCRAPE_MS,
        "match_ms_alone": median(alone),
        "match_ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "match_ratio_bar": MATCH_RATIO,
        "met": median(times) <= SCRAPE_MS and median(ratios) <= MATCH_RATIO,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10**6, metavar="N")
    parser.add_argument("--scrapes", type=int, default=100, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.blocks, args.scrapes)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
