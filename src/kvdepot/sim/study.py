"""One workload under several policies and capacities."""

from dataclasses import dataclass
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.policy.eviction import ORDERS, order_named
from kvdepot.sim.capacity import Capacity
from kvdepot.sim.hits import HitCounts, HitsOnly, Progress
from kvdepot.sim.optimum import optimum
from kvdepot.sim.requests import Workload
from kvdepot.sim.tiers import Index, Tier

OPTIMAL: Final = "optimal"
POLICIES: Final = (*ORDERS, OPTIMAL)


@dataclass(frozen=True, slots=True)
class Case:
    """One policy, used in every tier, at one capacity."""

    policy: str
    capacity: Capacity


def check_case(case: Case, block_tokens: int) -> None:
    """Raises ConfigError for what cannot be simulated."""
    if case.policy == OPTIMAL and len(case.capacity.tokens) > 1:
        raise ConfigError("--policy", "the optimum is known for one tier", hint="one --capacity")
    for tier in case.capacity.tokens:
        if not case.capacity.blocks(tier, block_tokens, 1):
            raise ConfigError("--capacity", f"{tier} is less than a block of {block_tokens} tokens")


def play(workload: Workload, case: Case, progress: Progress) -> HitCounts:
    """What the workload hits."""
    size, unlimited = workload.block_tokens, workload.block_count
    names = list(case.capacity.tokens)
    if case.policy == OPTIMAL:
        blocks = case.capacity.blocks(names[0], size, unlimited)
        return optimum(workload, names[0], blocks, progress)
    index = Index.of(workload)
    tiers = [
        Tier(name, case.capacity.blocks(name, size, unlimited), index, order_named(case.policy))
        for name in names
    ]
    return HitsOnly(index, tiers, size).run(workload, progress)
