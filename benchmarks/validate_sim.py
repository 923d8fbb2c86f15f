"""The simulator against the real store on this machine's disk: hits by tier, and fetch times.

    python benchmarks/validate_sim.py [--directory DIR] [--json]

The store's speed is measured first, on blocks of its own. Then three workloads are replayed against
an open store, one request after the other, and simulated with that speed. Writes are waited for
between requests, so that a fetch is alone on the disk, as it is in the simulation.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import kvdepot
from kvdepot.core.layout import KVLayout
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.arrivals import AsRecorded, MultiTurn
from kvdepot.sim.drives import DriveSpeed
from kvdepot.sim.fleet import FleetSetup, SimulatedFleet, TierSetup
from kvdepot.sim.gpu import GpuPace
from kvdepot.sim.results import Findings
from kvdepot.sim.traces import read_trace
from kvdepot.sim.worker import WorkerRules
from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 256 << 10
PAYLOAD_BYTES: Final = BLOCK_BYTES - 4096
KEY_TOKENS: Final = 8
TRACE: Final = Path("/work/shared/data/traces/mooncake_conversation.jsonl.xz")
SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
ROUNDS: Final = 15
OTHERS: Final = 32
REPLAYS: Final = 5
GAP_S: Final = 1000.0
"""Between simulated requests: nobody waits for another."""


class World:
    """A real store, and prompts in it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        layout = KVLayout.opaque(PAYLOAD_BYTES, KEY_TOKENS, 1)
        self.space = store.namespace(model="validate", layout=layout)
        self._payload = np.random.default_rng(1).bytes(self.space.block_bytes)
        self._targets = [bytearray(self.space.block_bytes) for _ in range(512)]

    def keys(self, blocks: Any) -> list[Any]:
        keys: list[Any] = self.space.keys(np.repeat(np.asarray(blocks) + 1, KEY_TOKENS).tolist())
        return keys

    def put(self, keys: list[Any]) -> None:
        if keys and not all(self.store.put_many(keys, [self._payload] * len(keys), timeout_s=60)):
            raise SystemExit("the store did not take the blocks")
        if not self.store.flush(60).complete:
            raise SystemExit("the store did not write the blocks down")

    def get(self, keys: list[Any]) -> tuple[float, list[str]]:
        """Seconds to fetch what matches, and the tiers that the blocks came from."""
        tiers = self.store.match(keys).tiers
        started = time.perf_counter()
        answers = self.store.get_many(keys[: len(tiers)], self._targets[: len(tiers)], timeout_s=60)
        seconds = time.perf_counter() - started
        if not all(answers):
            raise SystemExit("a matched block did not come")
        return seconds, [answer.tier for answer in answers]


@contextmanager
def opened(
    folder: Path, dram_blocks: int, ssd_blocks: int, *, keep: bool = False
) -> Iterator[World]:
    ssd = {"path": folder, "capacity": (ssd_blocks + 256) * BLOCK_BYTES, "segment": 32 * MIB}
    try:
        with kvdepot.open(dram=dram_blocks * BLOCK_BYTES, ssd=ssd) as store:
            yield World(store)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def calibrate(folder: Path) -> dict[str, DriveSpeed]:
    """Latency and rate of each tier, from fetches of 1 to 64 blocks of one prompt."""
    count = max(SIZES)
    chains = [list(range(at * count, (at + 1) * count)) for at in range(ROUNDS * len(SIZES))]
    times: dict[str, dict[int, list[float]]] = {"dram": {}, "ssd": {}}
    total = count * len(chains)
    with opened(folder, 256, total + 2 * OTHERS * len(chains), keep=True) as world:
        for chain in chains:
            world.put(world.keys(chain))
    with opened(folder, 256, total + 2 * OTHERS * len(chains)) as world:
        for at, chain in enumerate(chains):
            size = SIZES[at % len(SIZES)]
            keys = world.keys(chain[:size])
            for turn, tier in enumerate(("ssd", "dram")):
                # A request comes after another one's blocks were written, as in a replay.
                first = total + (2 * at + turn) * OTHERS
                world.put(world.keys(range(first, first + OTHERS)))
                seconds, found = world.get(keys)
                if set(found) != {tier}:
                    raise SystemExit(f"expected blocks from {tier}, got {set(found)}")
                times[tier].setdefault(size, []).append(seconds)
    return {tier: _line(found) for tier, found in times.items()}


def _line(times: dict[int, list[float]]) -> DriveSpeed:
    """Seconds = latency + blocks · each, through the medians, by least relative squares."""
    sizes = np.array(sorted(times), dtype=float)
    middle = np.array([median(times[int(size)]) for size in sizes])
    rows = np.stack((np.ones_like(sizes), sizes), axis=1) / middle[:, None]
    (latency_s, block_s), *_ = np.linalg.lstsq(rows, np.ones_like(sizes), rcond=None)
    rate = BLOCK_BYTES / block_s
    return DriveSpeed(1, rate, rate, latency_s=max(0.0, float(latency_s)))


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and the memory it is given."""

    name: str
    workload: Workload
    dram_blocks: int


def spaced(requests: list[Any], parents: list[int], block_tokens: int) -> Workload:
    """The same requests, far from each other."""
    workload = Workload(block_tokens, parents=parents)
    for number, request in enumerate(requests):
        workload.add(replace(request, arrival_s=number * GAP_S, output_tokens=1))
    return workload


def cases() -> list[Case]:
    trace = read_trace(TRACE)
    slice_of = [trace.request(number) for number in range(500)]
    slice_of = [one for one in slice_of if len(one.blocks) <= 256]
    return [
        Case("conversation trace, 500 requests", spaced(slice_of, trace.parents, 512), 1500),
        Case("returning users, zipf", zipf(users=80, blocks=24, requests=500), 600),
        Case("multi-turn, 20 users, 12 turns", multi_turn(), 400),
    ]


def zipf(users: int, blocks: int, requests: int) -> Workload:
    """Users of whom a few come back often; each has a prompt of its own."""
    draw, workload = random.Random(5), Workload(512)
    chains = [workload.new_blocks(NO_PARENT, blocks) for _ in range(users)]
    weights = [1.0 / (rank + 1) for rank in range(users)]
    asked = [
        PromptRequest(0.0, 512 * blocks, 1, chains[draw.choices(range(users), weights)[0]])
        for _ in range(requests)
    ]
    return spaced(asked, workload.parents, 512)


def multi_turn() -> Workload:
    """Users ask in a random order, each turn four blocks longer than the one before."""
    talks = MultiTurn(
        users=20,
        turns=12,
        system_tokens=2048,
        history_tokens=6144,
        question_tokens=1024,
        answer_tokens=1024,
    )
    workload, draw = talks.workload(512), random.Random(6)
    turns = [0] * talks.users
    asked = []
    while left := [user for user in range(talks.users) if turns[user] < talks.turns]:
        user = draw.choice(left)
        asked.append(workload.request(user * talks.turns + turns[user]))
        turns[user] += 1
    return spaced(asked, workload.parents, 512)


def measure(case: Case, folder: Path) -> tuple[dict[str, float], list[float]]:
    """Shares of tokens by tier, and the times of fetches, of the real store."""
    tokens = {"dram": 0, "ssd": 0}
    asked, times = 0, []
    size = case.workload.block_tokens
    with opened(folder, case.dram_blocks, case.workload.block_count) as world:
        for request in case.workload:
            keys = world.keys(request.blocks)
            seconds, tiers = world.get(keys)
            if tiers:
                times.append(seconds)
            for at, tier in enumerate(tiers):
                tokens[tier] += max(0, min((at + 1) * size, request.input_tokens - 1) - at * size)
            asked += request.input_tokens
            world.put(keys[len(tiers) :])
    return {tier: count / asked for tier, count in tokens.items()}, times


def simulate(case: Case, media: dict[str, DriveSpeed]) -> Findings:
    pace = GpuPace(PrefillPace(0.0, 1e-9, 0.0), 1e-9, 0.0)
    sizes = {"dram": case.dram_blocks, "ssd": case.workload.block_count}
    setup = FleetSetup(
        rules=WorkerRules(pace, case.workload.block_tokens, keeps_memory=False, decides=False),
        block_bytes=BLOCK_BYTES,
        memory_blocks=10**6,
        link_bytes_per_s=1e15,
        network_bytes_per_s=1e15,
        tiers=tuple(
            TierSetup(name, sizes[name] * BLOCK_BYTES, media[name], memory=name == "dram")
            for name in ("dram", "ssd")
        ),
    )
    return SimulatedFleet(setup, case.workload).run(AsRecorded(case.workload), lambda done: None)


def compare(case: Case, media: dict[str, DriveSpeed], folder: Path) -> dict[str, Any]:
    replays = [measure(case, folder) for _ in range(REPLAYS)]
    ratios = replays[0][0]
    # Others use this machine too: of each request the median of its times.
    times = np.median([times for _, times in replays], axis=0)
    found = simulate(case, media)
    every = np.concatenate([times for _, times in replays])
    fetch = found.fetch
    assert fetch is not None
    mean_s, p95_s = float(np.mean(times)), float(np.percentile(times, 95))
    all_mean_s, all_p95_s = float(np.mean(every)), float(np.percentile(every, 95))
    return {
        "workload": case.name,
        "hits_measured": ratios,
        "hits_simulated": {tier: found.hit_ratio(tier) for tier in ratios},
        "points_off": max(abs(found.hit_ratio(tier) - ratios[tier]) for tier in ratios) * 100,
        "mean_ms": (mean_s * 1e3, fetch.mean * 1e3, fetch.mean / mean_s - 1.0),
        "p95_ms": (p95_s * 1e3, fetch.p95 * 1e3, fetch.p95 / p95_s - 1.0),
        "unfiltered_mean_ms": (all_mean_s * 1e3, fetch.mean * 1e3, fetch.mean / all_mean_s - 1.0),
        "unfiltered_p95_ms": (all_p95_s * 1e3, fetch.p95 * 1e3, fetch.p95 / all_p95_s - 1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvdepot-validate-", dir=args.directory))
    try:
        media = calibrate(folder / "calibrate")
        rows = [compare(case, media, folder / "store") for case in cases()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps({"media": {k: asdict(v) for k, v in media.items()}, "rows": rows}))
        return
    for tier, medium in media.items():
        rate = medium.read_bytes_per_s / 1e6
        print(f"{tier}: {medium.latency_s * 1e3:.2f} ms and {rate:,.0f} MB/s")
    for row in rows:
        print(f"\n{row['workload']}: tier hits off by {row['points_off']:.2f} points")
        print(f"  measured {row['hits_measured']}\n  simulated {row['hits_simulated']}")
        for name in ("mean_ms", "p95_ms", "unfiltered_mean_ms", "unfiltered_p95_ms"):
            real, model, off = row[name]
            print(f"  {name}: measured {real:.2f}, simulated {model:.2f}, {off:+.1%}")


if __name__ == "__main__":
    main()
