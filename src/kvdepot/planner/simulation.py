"""A fleet for the simulator, made of a model and parts, and the cost of a run."""

from dataclasses import dataclass, field
from math import ceil
from typing import Final

from kvdepot.core.units import parse_bytes
from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import footprint_of
from kvdepot.planner.models import find_model
from kvdepot.planner.outcome import Cost, Servers, UsedTier, cost_of, life_years
from kvdepot.planner.parts import Device, Parts
from kvdepot.planner.retention import DAY_S
from kvdepot.planner.scenario import Seconds
from kvdepot.planner.traffic import Weights, model_on_gpus
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.drives import DriveSpeed
from kvdepot.sim.fleet import FleetSetup, RouteName, TierSetup
from kvdepot.sim.gpu import GpuPace
from kvdepot.sim.results import Findings
from kvdepot.sim.tiers import WriteMode
from kvdepot.sim.worker import WorkerRules

SHARED: Final = ("hdd", "object", "shared")
"""Tiers that the nodes of a fleet have together; `shared` is a mounted folder."""
MEMORY: Final = ("dram", "cxl")
_HINT: Final = "--tiers dram=512GB,ssd=4,hdd=12: a size, or a number of units of the parts list"


@dataclass(frozen=True, slots=True)
class Machines:
    """The settings of a simulated fleet."""

    model: str = "llama-3.1-8b"
    """A well-known model or a config.json."""
    gpu: str = "h100"
    """A GPU of the parts list."""
    tp: int = 1
    """GPUs of one copy of the model."""
    nodes: int = 1
    copies: int = 1
    """Copies of the model on a node."""
    tiers: dict[str, int] = field(default_factory=dict)
    """Units of each tier: of a node, or of all nodes together for a shared tier."""
    policy: str = "default"
    """The eviction order."""
    write_mode: WriteMode = "through"
    """`through`: to all tiers at once. `back`: to the next tier on eviction."""
    route: RouteName = "prefix"
    """The choice of the copy for a request: `prefix` or `random`."""
    reuse: bool = True
    """False: nothing is kept or reused."""
    keeps_memory: bool = True
    """False: GPU memory keeps the blocks of running requests only."""
    decides: bool = True
    """False: blocks are also fetched if computing them is faster."""
    chunk_tokens: int = 2048
    """Tokens of one step of the engine."""
    write_backlog: Seconds = 1e18
    """Writes that would wait longer than this are dropped."""
    prefill: PrefillPace | None = None
    """Measured seconds of a step, of a token, and of a pair of tokens that attend; without it
    they follow from the parts list."""
    seed: int = 0


def parse_tiers(text: str, parts: Parts) -> dict[str, int]:
    """Units of each tier, the fastest first. ConfigError names the invalid value."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        if name not in parts.tiers or name in found:
            known = ", ".join(parts.tiers)
            reason = "named twice" if name in found else f"not in the parts list: {known}"
            raise ConfigError("--tiers", f"{name!r} is {reason}", hint=_HINT)
        found[name] = _units(amount, parts.tiers[name])
    return {name: found[name] for name in parts.tiers if name in found}


def _units(amount: str, device: Device) -> int:
    try:
        units = int(amount) if amount.isdecimal() else ceil(parse_bytes(amount) / device.unit)
    except ValueError as error:
        reason = f"{amount!r} is neither a size nor a number of units"
        raise ConfigError("--tiers", reason, hint=_HINT) from error
    if not 0 < units <= 1_000_000:
        raise ConfigError("--tiers", f"{amount!r} is not a number of units", hint=_HINT)
    return units


def fleet_of(machines: Machines, parts: Parts, block_tokens: int) -> FleetSetup:
    """Raises ConfigError if model, GPUs and tiers contradict each other."""
    gpu, tp = parts.gpu(machines.gpu), machines.tp
    model = find_model(machines.model)
    if model.parameters is None:
        raise ConfigError("--model", f"{machines.model} does not have the number of weights")
    size = footprint_of(model, block_tokens=block_tokens, tp=tp)
    weights = Weights(model.parameters, model.active_parameters or model.parameters, 2.0)
    engine = model_on_gpus(model, weights, gpu, tp, 0.0)
    bandwidth = float(gpu.memory_bandwidth * tp)
    pace = GpuPace(
        prefill=machines.prefill or engine.pace,
        weights_s=weights.active * weights.bytes_each / bandwidth,
        context_token_s=size.growth_bytes_per_token / bandwidth,
        chunk_tokens=machines.chunk_tokens,
    )
    return FleetSetup(
        rules=WorkerRules(
            pace,
            block_tokens,
            reuse=machines.reuse,
            keeps_memory=machines.keeps_memory,
            decides=machines.decides,
        ),
        block_bytes=size.stored_bytes_per_token * block_tokens,
        memory_blocks=int(engine.free_bytes // (size.bytes_per_token * block_tokens)),
        link_bytes_per_s=float(gpu.link * tp),
        network_bytes_per_s=float(parts.node.network),
        tiers=tuple(
            _tier(name, units, parts.tiers[name], machines)
            for name, units in machines.tiers.items()
        ),
        nodes=machines.nodes,
        copies=machines.copies,
        policy=machines.policy,
        write_mode=machines.write_mode,
        route=machines.route,
        seed=machines.seed,
    )


def _tier(name: str, units: int, device: Device, machines: Machines) -> TierSetup:
    medium = DriveSpeed(
        units=units,
        read_bytes_per_s=float(device.read),
        write_bytes_per_s=float(device.write),
        latency_s=device.latency,
        seek_s=device.seek,
        backlog_s=machines.write_backlog,
    )
    capacity = float(units * device.unit)
    return TierSetup(
        name, capacity, medium, remote=device.remote, shared=name in SHARED, memory=name in MEMORY
    )


@dataclass(frozen=True, slots=True)
class Bill:
    """Power, writes and cost of a run, if all days are like it."""

    gpu_power_w: float
    """Average of one GPU."""
    gpu_energy_kwh: float
    """All GPUs, for the run."""
    writes_bytes_per_day: dict[str, float]
    """Bytes written per day, by tier, of all nodes."""
    cost: Cost


def bill_of(findings: Findings, machines: Machines, parts: Parts) -> Bill:
    gpu, seconds = parts.gpu(machines.gpu), max(findings.duration_s, 1e-9)
    watts = gpu.average_power_w(findings.gpu_busy)
    gpus = machines.nodes * machines.copies * machines.tp
    writes = {flow.tier: flow.bytes_written / seconds * DAY_S for flow in findings.tiers}
    used = []
    flows = {flow.tier: flow for flow in findings.tiers}
    for name, units in machines.tiers.items():
        device = parts.tiers[name]
        owners = 1 if name in SHARED else machines.nodes
        life = life_years(device, units * owners, writes[name])
        # What is shared is bought once: each node bears its part.
        flow, hours = flows[name], seconds / 3600.0 * machines.nodes
        read, written = flow.bytes_read / hours, flow.bytes_written / hours
        used.append(UsedTier(device, units * owners / machines.nodes, life, read, written))
    tokens = (findings.tokens_asked + findings.tokens_answered) / seconds * 3600.0
    per_node = machines.copies * machines.tp
    servers = Servers(gpu, per_node, machines.nodes, watts)
    cost = cost_of(parts, servers, used, tokens)
    return Bill(watts, watts * gpus * seconds / 3.6e6, writes, cost)
