"""The performance of a mix of tiers in a scenario, its cost, and its bottleneck. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.planner.parts import GPU, Device, Parts
from kvdepot.planner.scenario import Goal


@dataclass(frozen=True, slots=True)
class Mix:
    """Units of each tier of one node, in the order of the parts list."""

    units: tuple[int, ...]
    reuse: bool = True
    """False: nothing is ever reused, not even out of GPU memory."""


@dataclass(frozen=True, slots=True)
class TierUse:
    tier: str
    units: int
    capacity_bytes: float
    hit_share: float
    """Share of all prompt tokens that come from this tier."""
    horizon_s: float
    """A block that was used within this time is still in the tier."""
    useful: bool
    """True if fetching from this tier is faster than computing."""
    read_busy: float
    write_busy: float
    """Shares of its time, in the busy hours."""
    limited_by: str
    writes_bytes_per_day: float
    reads_bytes_per_day: float
    life_years: float | None
    """Years until it is worn out; None without a limit."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the whole fleet."""

    price: float
    """Everything that is bought once."""
    store_price: float
    """The part of `price` that is for tiers."""
    per_hour: float
    """The sum of the four below."""
    per_million_tokens: float
    power_w: float
    servers_per_hour: float = 0.0
    """Prices of GPUs and servers, written off."""
    store_per_hour: float = 0.0
    """Prices of memory and drives, written off."""
    power_per_hour: float = 0.0
    rent_per_hour: float = 0.0
    """Rent, with requests and traffic."""


@dataclass(frozen=True, slots=True)
class MixOutcome:
    """The performance of a mix. Times are None if the fleet is overloaded."""

    mix: Mix
    nodes: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    where: dict[str, float]
    """The parts of the mean time to the first token."""
    gpu_busy: float
    """Share of the GPUs' time that is needed; above 1 they are overloaded."""
    hit_share: float
    """Share of all prompt tokens that are not computed."""
    gpu_memory_hit_share: float
    retention_s: float
    """The time for which conversations are kept in a tier that is faster than computing."""
    tiers: tuple[TierUse, ...]
    cost: Cost

    def misses(self, goal: Goal) -> tuple[str, ...]:
        """The goals that are not reached, of `ttft_p95` and `retention`."""
        late = self.ttft_p95_s is None or self.ttft_p95_s > goal.ttft_p95
        short = self.retention_s < goal.retention
        return ("ttft_p95",) * late + ("retention",) * short


Evaluate = Callable[[Mix, int], MixOutcome]
"""Says what a mix does on a number of nodes."""


HOURS_A_YEAR: Final = 8760.0
HOURS_A_MONTH: Final = 730.0
ENDURANCE_YEARS: Final = 5.0
"""The years for which a drive's writes a day are guaranteed."""


@dataclass(frozen=True, slots=True)
class UsedTier:
    """Units of one tier on one node, the years until they are worn out, and the node's traffic."""

    device: Device
    units: float
    life_years: float | None
    read_bytes_per_hour: float = 0.0
    written_bytes_per_hour: float = 0.0


def life_years(device: Device, units: int, writes_bytes_per_day: float) -> float | None:
    """Years until `units` of `device` are worn out; None without a limit."""
    if not device.writes_per_day or not units or writes_bytes_per_day <= 0:
        return None
    total = device.writes_per_day * units * device.unit * ENDURANCE_YEARS * 365.0
    return total / writes_bytes_per_day / 365.0


@dataclass(frozen=True, slots=True)
class Servers:
    gpu: GPU
    gpus_per_node: int
    nodes: int
    gpu_power_w: float
    """Average of one GPU."""


def cost_of(parts: Parts, servers: Servers, tiers: list[UsedTier], tokens_per_hour: float) -> Cost:
    """Prices written off over the list's years, or a drive's life where that is shorter; power;
    rent; requests and traffic. `tokens_per_hour`: the fleet's average, prompts and answers."""
    server_price = parts.node.price + servers.gpus_per_node * servers.gpu.price
    store_price, rent, store_yearly = 0.0, 0.0, 0.0
    watts = parts.node.power_w + servers.gpus_per_node * servers.gpu_power_w
    for used in tiers:
        device, units = used.device, used.units
        price = units * (device.price + device.slot_price)
        store_price += price
        store_yearly += price / min(parts.years, used.life_years or parts.years)
        rent += units * device.unit / 1e12 * device.price_per_tb_month / HOURS_A_MONTH
        rent += device.traffic_price(used.read_bytes_per_hour, used.written_bytes_per_hour)
        watts += units * device.power_w
    power = watts / 1000.0 * parts.pue * parts.electricity_per_kwh
    servers_per_hour = server_price / parts.years / HOURS_A_YEAR * servers.nodes
    store_per_hour = store_yearly / HOURS_A_YEAR * servers.nodes
    power_per_hour, rent_per_hour = power * servers.nodes, rent * servers.nodes
    per_hour = servers_per_hour + store_per_hour + power_per_hour + rent_per_hour
    return Cost(
        price=(server_price + store_price) * servers.nodes,
        store_price=store_price * servers.nodes,
        per_hour=per_hour,
        per_million_tokens=per_hour / tokens_per_hour * 1e6,
        power_w=watts * parts.pue * servers.nodes,
        servers_per_hour=servers_per_hour,
        store_per_hour=store_per_hour,
        power_per_hour=power_per_hour,
        rent_per_hour=rent_per_hour,
    )


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The largest part of the mean time to first token."""

    name: str
    share: float
    reason: str


def bottleneck(outcome: MixOutcome) -> Bottleneck:
    if outcome.ttft_mean_s is None:
        reason = f"{outcome.gpu_busy:.0%} of their time is needed; only hits or more GPUs help"
        return Bottleneck("GPUs", 1.0, reason)
    name = max(outcome.where, key=lambda part: outcome.where[part])
    share = outcome.where[name] / outcome.ttft_mean_s
    return Bottleneck(name, share, _reason(name, outcome))


def _reason(name: str, outcome: MixOutcome) -> str:
    computed = f"{1 - outcome.hit_share:.0%} of the prompt tokens"
    match name:
        case "prefill":
            return f"{computed} are new or were evicted, and are computed"
        case "GPU queue":
            return f"the GPUs are busy {outcome.gpu_busy:.0%} of the time, with {computed}"
        case "first step":
            return "the GPU reads all weights once for a token; faster GPU memory helps"
    use = max(outcome.tiers, key=lambda one: (one.read_busy + one.write_busy, one.hit_share))
    what = {"units": f"its {use.units} units", "network": "the node's network"}
    limit = what.get(use.limited_by, "the links into the GPUs")
    return (
        f"{use.tier} reads {use.read_busy:.0%} and writes {use.write_busy:.0%} of the time; "
        f"{limit} set its speed"
    )
