"""A serving fleet under a simulated clock: nodes, their workers and tiers, and routing."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.policy.eviction import order_named
from kvdepot.sim.arrivals import ArrivalTimes
from kvdepot.sim.drives import DriveSpeed, Pipe, SimulatedDrives
from kvdepot.sim.event_queue import EventQueue
from kvdepot.sim.gpu import SimulatedGpu
from kvdepot.sim.results import Findings, ServedRequest, TierFlow
from kvdepot.sim.tiers import BlockIndex, SimulatedTier, TimedTier, WriteMode
from kvdepot.sim.worker import HBM, ModelWorker, WorkerRules
from kvdepot.sim.workload import PromptRequest, Workload

RouteName = Literal["prefix", "random"]
Route = Callable[[PromptRequest, Sequence[ModelWorker]], ModelWorker]
"""Chooses a worker for a request."""


def by_prefix(request: PromptRequest, workers: Sequence[ModelWorker]) -> ModelWorker:
    """The worker with the fewest tokens left to compute, of this and of waiting prompts."""

    def left(worker: ModelWorker) -> int:
        missing = len(request.blocks) - worker.matched(request.blocks)
        return missing * worker.rules.block_tokens + worker.load_tokens

    return workers[0] if len(workers) == 1 else min(workers, key=left)


def route_named(name: RouteName, seed: int) -> Route:
    if name == "prefix":
        return by_prefix
    draw = random.Random(seed)
    return lambda request, workers: workers[draw.randrange(len(workers))]


@dataclass(frozen=True, slots=True)
class TierSetup:
    """One tier of a node, or one that all nodes share."""

    name: str
    capacity_bytes: float
    medium: DriveSpeed
    remote: bool = False
    """Behind the network."""
    shared: bool = False
    memory: bool = False
    """Memory is copied before drives are read, as in the store."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    rules: WorkerRules
    block_bytes: float
    """Bytes of a stored block."""
    memory_blocks: int
    """Capacity of one worker's GPU memory."""
    link_bytes_per_s: float
    network_bytes_per_s: float
    """Network of a node; shared tiers together have the same."""
    tiers: tuple[TierSetup, ...] = ()
    nodes: int = 1
    copies: int = 1
    policy: str = "default"
    write_mode: WriteMode = "through"
    route: RouteName = "prefix"
    seed: int = 0
    preload: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that are in a tier before the first request."""


class SimulatedFleet:
    """Runs one workload, once."""

    def __init__(self, setup: FleetSetup, workload: Workload) -> None:
        """Raises ConfigError for an invalid setup."""
        _check(setup)
        self._setup, self._workload = setup, workload
        self._events = EventQueue()
        self._shared_index = BlockIndex.of(workload)
        shared_pipe = Pipe(setup.network_bytes_per_s)
        shared = [
            self._tier(tier, self._shared_index, (shared_pipe,))
            for tier in setup.tiers
            if tier.shared
        ]
        self._tiers = list(shared)
        self._workers: list[ModelWorker] = []
        for _ in range(setup.nodes):
            self._add_node(shared)
        self._route = route_named(setup.route, setup.seed)
        self._served: list[ServedRequest] = []
        for name, blocks in setup.preload.items():
            for tier in self._tiers:
                if tier.name == name:
                    tier.insert(np.array(blocks, dtype=np.int64))

    def run(self, arrivals: ArrivalTimes, progress: Callable[[int], None]) -> Findings:
        """Serve all requests. `progress` is called from time to time with the number of answers."""
        for time_s, number in arrivals.first():
            self._schedule(time_s, number, arrivals)
        steps = 0
        while self._events.next():
            steps += 1
            if steps % 1024 == 0:
                progress(len(self._served))
        return self._findings()

    def _schedule(self, time_s: float, number: int, arrivals: ArrivalTimes) -> None:
        def done(served: ServedRequest) -> None:
            self._served.append(served)
            following = arrivals.after(served.number, served.arrival_s, self._events.now_s)
            if following is not None:
                self._schedule(*following, arrivals)

        def come() -> None:
            request = self._workload.request(number)
            served = ServedRequest(number, time_s, request.input_tokens, request.output_tokens)
            self._route(request, self._workers).arrive(request, served, done)

        self._events.at(time_s, come)

    def _add_node(self, shared: Sequence[TimedTier]) -> None:
        setup = self._setup
        index = BlockIndex.of(self._workload)
        network = Pipe(setup.network_bytes_per_s)
        local = [
            self._tier(tier, index, (network,) if tier.remote else ())
            for tier in setup.tiers
            if not tier.shared
        ]
        self._tiers += local
        indexes = [index, self._shared_index] if shared else [index]
        for _ in range(setup.copies):
            worker = ModelWorker(
                events=self._events,
                rules=setup.rules,
                gpu=SimulatedGpu(self._events, setup.rules.pace),
                memory=SimulatedTier(HBM, setup.memory_blocks, index, order_named("lru")),
                tiers=[*local, *shared],
                write_mode=setup.write_mode,
                indexes=indexes,
                link=Pipe(setup.link_bytes_per_s),
            )
            self._workers.append(worker)

    def _tier(self, tier: TierSetup, index: BlockIndex, pipes: tuple[Pipe, ...]) -> TimedTier:
        setup = self._setup
        blocks = min(int(tier.capacity_bytes // setup.block_bytes), self._workload.block_count)
        order = order_named(setup.policy, self._workload.block_tokens)
        drives = SimulatedDrives(tier.medium, pipes)
        return TimedTier(
            tier.name, blocks, index, order, drives, setup.block_bytes, memory=tier.memory
        )

    def _findings(self) -> Findings:
        start_s = min((one.arrival_s for one in self._served), default=0.0)
        duration_s = self._events.now_s - start_s
        whole_s = max(duration_s, 1e-12) * len(self._workers)
        events = sum(worker.blocks_asked for worker in self._workers)
        for tier in (*(worker.memory for worker in self._workers), *self._tiers):
            events += tier.entered + tier.evicted
        return Findings(
            served=self._served,
            refused=sum(worker.refused for worker in self._workers),
            duration_s=duration_s,
            tiers=[self._flow(one.name, duration_s) for one in self._setup.tiers],
            gpu_busy=sum(worker.gpu.busy_s for worker in self._workers) / whole_s,
            gpu_prefill_busy=sum(worker.gpu.prefill_s for worker in self._workers) / whole_s,
            block_events=events,
        )

    def _flow(self, name: str, duration_s: float) -> TierFlow:
        tiers = [tier for tier in self._tiers if tier.name == name]
        for tier in tiers:
            tier.drives.backlog_s(self._events.now_s)
        units = sum(tier.drives.medium.units for tier in tiers)
        whole_s = max(units * duration_s, 1e-12)
        return TierFlow(
            tier=name,
            tokens_hit=sum(one.hits.get(name, 0) for one in self._served),
            bytes_read=sum(tier.bytes_read for tier in tiers),
            bytes_written=sum(tier.bytes_written for tier in tiers),
            blocks_dropped=sum(tier.blocks_dropped for tier in tiers),
            read_busy=sum(tier.drives.read_busy_s for tier in tiers) / whole_s,
            write_busy=sum(tier.drives.write_busy_s for tier in tiers) / whole_s,
        )


def _check(setup: FleetSetup) -> None:
    names = [tier.name for tier in setup.tiers]
    if len(set(names)) < len(names) or HBM in names:
        raise ConfigError("tiers", f"names must differ, got {', '.join(names)}")
    if any(
        earlier.shared and not later.shared
        for earlier, later in zip(setup.tiers, setup.tiers[1:], strict=False)
    ):
        raise ConfigError("tiers", "a shared tier cannot be faster than a tier of a node")
    if min(setup.nodes, setup.copies, setup.memory_blocks) < 1:
        raise ConfigError("nodes", "nodes, copies and blocks in GPU memory must be above 0")
    for tier in setup.tiers:
        if tier.capacity_bytes < setup.block_bytes:
            raise ConfigError("tiers", f"{tier.name} is smaller than one block")
