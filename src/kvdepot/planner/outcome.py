"""What a mix of tiers does for a scenario, and the interface of whoever finds that out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvdepot.planner.parts import Parts
from kvdepot.planner.scenario import Goal, Scenario


@dataclass(frozen=True, slots=True)
class Mix:
    """What one node has: units of each tier, in the order of the parts list."""

    units: tuple[int, ...]
    reuse: bool = True
    """False: nothing is ever reused, not even out of GPU memory."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """How one tier of a node is used."""

    tier: str
    units: int
    capacity_bytes: float
    hit_share: float
    """Of all prompt tokens, those that come from here."""

    horizon_s: float
    """What was used within this time is still here."""

    useful: bool
    """Whether anything comes sooner from here than it could be computed."""

    read_busy: float
    write_busy: float
    """Shares of its time, in the busy hours."""

    limited_by: str
    writes_bytes_per_day: float
    life_years: float | None
    """Until it is worn out; None without a limit."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the whole fleet."""

    price: float
    """Of everything that is bought once."""

    store_price: float
    """The part of it that is for tiers."""

    per_hour: float
    per_million_tokens: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found out. Times are None where more comes than can be served."""

    mix: Mix
    nodes: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    where: dict[str, float]
    """The mean time to the first token, by what it goes into."""

    gpu_busy: float
    """What is asked of the GPUs, as a share of their time; more than 1 is more than they have."""

    hit_share: float
    """Of all prompt tokens, those that are not computed."""

    gpu_memory_hit_share: float
    retention_s: float
    """How long a talk is kept where fetching it is still sooner than computing it."""

    tiers: tuple[TierUse, ...]
    cost: Cost

    def misses(self, goal: Goal) -> tuple[str, ...]:
        """The goals that are not reached: `ttft_p95`, `retention`, or neither."""
        late = self.ttft_p95_s is None or self.ttft_p95_s > goal.ttft_p95
        short = self.retention_s < goal.retention
        return ("ttft_p95",) * late + ("retention",) * short


class Evaluate(Protocol):
    """Says what a mix does on `nodes` nodes. The analytic model is one, a simulator another."""

    def __call__(self, mix: Mix, nodes: int) -> Outcome: ...


Evaluator = Callable[[Scenario, Parts], Evaluate]
