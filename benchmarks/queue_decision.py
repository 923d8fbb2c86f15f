"""What deciding for the queue gains, under the simulator: users who come back, 8 prompts in flight.

    python benchmarks/queue_decision.py            # figures; --json for a document

60 users, prompts of 10,000 tokens of which all share the first half, then the second turn of each
with 1,500 tokens more, in another order. The GPU computes some 31,000 tokens a second and has room
for 60,000; 24 GiB of memory hold half of the rest, a disk of 22,000 tokens a second holds all. The
decision is the store's own code. Times are of the second turns, as shares of plain vLLM's.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.drives import DriveSpeed
from kvdepot.sim.fleet import FleetSetup, SimulatedFleet, TierSetup
from kvdepot.sim.gpu import GpuPace
from kvdepot.sim.worker import WorkerRules
from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload

USERS, IN_FLIGHT = 60, 8
SHARED, OWN, MORE, ANSWER = 5_000, 5_000, 1_500, 16
TOKEN_BYTES, BLOCK = 131_072, 256
PACE = GpuPace(
    PrefillPace(0.012, 26.5e-6, 8.6e-10),
    weights_s=0.005,
    context_token_s=TOKEN_BYTES / 3.3e12,
    chunk_tokens=8192,
)
RULES = WorkerRules(PACE, BLOCK)
DRAM = TierSetup("dram", 24 << 30, DriveSpeed(1, 40e9, 40e9), memory=True)
DISK = DriveSpeed(1, 22_000 * TOKEN_BYTES, 2e9, latency_s=2e-4)
TIERS = (DRAM, TierSetup("ssd", 400 << 30, DISK))
ARMS = {
    "plain vLLM": (RULES, ()),
    "fetch all": (replace(RULES, decides=False), TIERS),
    "each for itself": (replace(RULES, considers=False), TIERS),
    "for the queue": (RULES, TIERS),
}


class InFlight:
    """`at_once` requests in flight, in the order of the workload."""

    def __init__(self, workload: Workload, at_once: int) -> None:
        self._count = len(workload)
        self._begun = min(at_once, self._count)

    def first(self) -> Iterator[tuple[float, int]]:
        for number in range(self._begun):
            yield 0.0, number

    def after(self, number: int, asked_s: float, answered_s: float) -> tuple[float, int] | None:
        if self._begun == self._count:
            return None
        self._begun += 1
        return answered_s, self._begun - 1


@dataclass(frozen=True, slots=True)
class Times:
    """Of one arm: wall time of the second turns, p95 of the first visits, TTFT of the second."""

    wall_s: float
    first_p95_s: float
    ttft_mean_s: float
    ttft_p95_s: float


def load(seed: int) -> Workload:
    workload = Workload(BLOCK)
    shared = workload.new_blocks(NO_PARENT, SHARED // BLOCK)
    own = (SHARED + OWN + MORE) // BLOCK - len(shared)
    chains = [
        np.concatenate((shared, workload.new_blocks(int(shared[-1]), own))) for _ in range(USERS)
    ]
    for chain in chains:
        first = chain[: (SHARED + OWN) // BLOCK]
        workload.add(PromptRequest(0.0, SHARED + OWN, ANSWER, first))
    for user in random.Random(seed).sample(range(USERS), USERS):
        workload.add(PromptRequest(0.0, SHARED + OWN + MORE, ANSWER, chains[user]))
    return workload


def play(rules: WorkerRules, tiers: tuple[TierSetup, ...], seed: int) -> Times:
    workload = load(seed)
    setup = FleetSetup(rules, BLOCK * TOKEN_BYTES, 60_000 // BLOCK, 50e9, 25e9, tiers)
    found = SimulatedFleet(setup, workload).run(InFlight(workload, IN_FLIGHT), lambda done: None)
    first = [one.ttft_s for one in found.served if one.number < USERS]
    second = [one for one in found.served if one.number >= USERS]
    waits = [one.ttft_s for one in second]
    return Times(
        max(one.last_s for one in second) - min(one.arrival_s for one in second),
        float(np.percentile(first, 95)),
        statistics.mean(waits),
        float(np.percentile(waits, 95)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = {name: [play(*arm, seed) for seed in range(args.seeds)] for name, arm in ARMS.items()}
    told = {}
    for name, times in runs.items():
        shares = {
            field: [
                getattr(a, field) / getattr(b, field) for a, b in zip(times, plain, strict=True)
            ]
            for plain in [runs["plain vLLM"]]
            for field in asdict(times[0])
        }
        told[name] = {
            field: {"mean": statistics.mean(all_), "min": min(all_), "max": max(all_)}
            for field, all_ in shares.items()
        }
    if args.json:
        sys.stdout.write(json.dumps({"simulated": True, "of_plain": told}, indent=1) + "\n")
        return 0
    sys.stdout.write("shares of plain vLLM, simulated: mean (min–max)\n")
    for name, fields in told.items():
        texts = [
            f"{field.removesuffix('_s')} {one['mean']:.2f} ({one['min']:.2f}–{one['max']:.2f})"
            for field, one in fields.items()
        ]
        sys.stdout.write(f"{name:16} {', '.join(texts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
