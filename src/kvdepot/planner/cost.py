"""What a mix costs and draws. Pure."""

from dataclasses import dataclass
from typing import Final

from kvdepot.planner.outcome import Cost
from kvdepot.planner.parts import GPU, Device, Parts

HOURS_A_YEAR: Final = 8760.0
HOURS_A_MONTH: Final = 730.0
ENDURANCE_YEARS: Final = 5.0
"""What a drive's writes a day are promised for."""


@dataclass(frozen=True, slots=True)
class Used:
    """Units of one tier on one node, and the years until they are worn out."""

    device: Device
    units: float
    life_years: float | None


def life_years(device: Device, units: int, writes_bytes_per_day: float) -> float | None:
    """Years until `units` of `device` are worn out; None without a limit."""
    if not device.writes_per_day or not units or writes_bytes_per_day <= 0:
        return None
    total = device.writes_per_day * units * device.unit * ENDURANCE_YEARS * 365.0
    return total / writes_bytes_per_day / 365.0


@dataclass(frozen=True, slots=True)
class Servers:
    """The nodes that the tiers belong to."""

    gpu: GPU
    gpus_per_node: int
    nodes: int
    gpu_power_w: float
    """One GPU's, on average."""


def cost_of(parts: Parts, servers: Servers, tiers: list[Used], tokens_per_hour: float) -> Cost:
    """Prices written off over the list's years, or a drive's life where that is shorter; power;
    rent. `tokens_per_hour` is the average of the fleet, prompts and answers."""
    server_price = parts.node.price + servers.gpus_per_node * servers.gpu.price
    store_price, rent, yearly = 0.0, 0.0, server_price / parts.years
    watts = parts.node.power_w + servers.gpus_per_node * servers.gpu_power_w
    for used in tiers:
        device, units = used.device, used.units
        price = units * (device.price + device.slot_price)
        store_price += price
        yearly += price / min(parts.years, used.life_years or parts.years)
        rent += units * device.unit / 1e12 * device.price_per_tb_month / HOURS_A_MONTH
        watts += units * device.power_w
    power = watts / 1000.0 * parts.pue * parts.electricity_per_kwh
    per_hour = (yearly / HOURS_A_YEAR + rent + power) * servers.nodes
    return Cost(
        price=(server_price + store_price) * servers.nodes,
        store_price=store_price * servers.nodes,
        per_hour=per_hour,
        per_million_tokens=per_hour / tokens_per_hour * 1e6,
        power_w=watts * parts.pue * servers.nodes,
    )
