"""The analytic evaluator: retention gives hits, hits give load, load gives waiting. Pure.

Every tier holds what the faster tiers hold, so its size alone says how far back it reaches. The KV
of a turn comes from the fastest tier that reaches back to the turn before; it is computed if that
takes less time, or if the tier has no time left. A request waits for the reads of its tier, is
fetched, waits for the GPUs, and is prefilled; each copy of the model has its own M/G/1 queue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.planner.outcome import (
    Cost,
    Mix,
    MixOutcome,
    Servers,
    TierUse,
    UsedTier,
    cost_of,
    life_years,
)
from kvdepot.planner.parts import Parts, TierSpeed, tier_speed
from kvdepot.planner.retention import DAY_S, ReuseModel
from kvdepot.planner.scenario import Scenario
from kvdepot.planner.traffic import PlannedLoad, TurnKind, work_out

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wait:
    """No wait with chance 1 - busy; else an exponential one. `mean_s` is over all."""

    busy: float
    mean_s: float

    @property
    def rate(self) -> float:
        """The rate of the exponential part."""
        return self.busy / self.mean_s if self.mean_s > 0 else np.inf


NO_WAIT = Wait(0.0, 0.0)


def wait_for(rate: float, mean_s: float, square_s: float) -> Wait | None:
    """The M/G/1 queue: arrivals a second, mean and mean square of the service time.

    The mean is exact (Pollaczek-Khinchine), the exponential tail is the usual approximation. None
    if the queue is overloaded.
    """
    busy = rate * mean_s
    if busy >= 1.0:
        return None
    return Wait(busy, rate * square_s / (2.0 * (1.0 - busy))) if busy > 0 else NO_WAIT


def waits_longer(first: Wait, second: Wait, times: Times) -> Times:
    """The chance that both waits together take longer than each of `times`."""
    times_s = np.maximum(times, 0.0)
    one, two = _tail(first.rate, times_s), _tail(second.rate, times_s)
    both = _both(first.rate, second.rate, times_s)
    chance = (
        first.busy * (1.0 - second.busy) * one
        + second.busy * (1.0 - first.busy) * two
        + first.busy * second.busy * both
    )
    return np.where(times < 0.0, 1.0, chance)


def _tail(rate: float, times_s: Times) -> Times:
    return np.exp(-rate * times_s) if np.isfinite(rate) else np.zeros_like(times_s)


def _both(first: float, second: float, times_s: Times) -> Times:
    """The tail of the sum of two exponential times with these rates."""
    if not (np.isfinite(first) and np.isfinite(second)):
        return _tail(min(first, second), times_s)
    if abs(first - second) < 1e-6 * first:
        return (1.0 + first * times_s) * np.exp(-first * times_s)
    slow = second * np.exp(-first * times_s) - first * np.exp(-second * times_s)
    return slow / (second - first)


BUSY_MAX: Final = 0.9
"""A tier reads up to this share of its time; the rest is computed."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests that get their KV the same way."""

    share: float
    prefill_s: float
    hit_tokens: float
    tier: int | None = None
    """Number of the tier that delivers the context; None for GPU memory or computing."""
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TierLoad:
    speed: TierSpeed
    horizon_s: float
    hit_share: float
    """Share of continued turns that reach back to this tier, and not to a faster one."""
    kept: float
    """Share of the wanted reads that the tier has time for."""
    writes_bytes_per_s: float
    useful: bool
    """True if fetching the context of a turn is faster than computing it."""

    @property
    def write_busy(self) -> float:
        return self.writes_bytes_per_s / self.speed.write_bytes_per_s


def tier_loads(
    load: PlannedLoad,
    reuse: ReuseModel,
    speeds: Sequence[TierSpeed],
    horizon_s: Callable[[float], float],
    memory_s: float,
) -> tuple[TierLoad, ...]:
    """The node's tiers, the fastest first. `memory_s`: how far back GPU memory reaches."""
    ages = [horizon_s(speed.capacity_bytes) for speed in speeds]
    reached = [memory_s]
    for age in ages:
        reached.append(max(reached[-1], age))
    shares = [reuse.hit_share(age_s) for age_s in reached]
    flows: list[TierLoad] = []
    promoted = 0.0
    for number in reversed(range(len(speeds))):
        hit_share = shares[number + 1] - shares[number]
        writes = reuse.requests_per_s * load.new_bytes + promoted
        wanted = _wanted_bytes(load.turns, speeds[number])
        reads = reuse.requests_per_s * hit_share * wanted
        room = _room(speeds[number], writes)
        kept = min(1.0, room / reads) if reads > 0.0 else 1.0
        useful = wanted > 0.0 and room > 0.0
        flows.append(TierLoad(speeds[number], ages[number], hit_share, kept, writes, useful))
        promoted += reads * kept
    return tuple(reversed(flows))


def request_classes(
    load: PlannedLoad, reuse: ReuseModel, flows: Sequence[TierLoad], memory_s: float
) -> list[RequestClass]:
    """The classes of every turn; shares add up to 1."""
    head = load.scenario.traffic.system_tokens
    in_memory = reuse.hit_share(memory_s)
    classes = []
    for turn in load.turns:
        rest = turn.share
        if not turn.first:
            classes.append(RequestClass(turn.share * in_memory, turn.resume_s, turn.context_tokens))
            rest -= turn.share * in_memory
            for number, flow in enumerate(flows):
                if worth_fetching(turn, flow.speed):
                    share = turn.share * flow.hit_share * flow.kept
                    rest -= share
                    context, nbytes = turn.context_tokens, turn.context_bytes
                    classes.append(RequestClass(share, turn.resume_s, context, number, nbytes))
        classes.append(RequestClass(rest, turn.compute_s, head))
    return [kind for kind in classes if kind.share > 0.0]


def cold_classes(load: PlannedLoad) -> list[RequestClass]:
    return [RequestClass(turn.share, turn.cold_s, 0.0) for turn in load.turns]


def worth_fetching(turn: TurnKind, speed: TierSpeed) -> bool:
    """True if an idle tier delivers the context faster than an idle GPU computes it."""
    return speed.fetch_s(turn.context_bytes) + turn.resume_s < turn.compute_s


def _wanted_bytes(turns: Sequence[TurnKind], speed: TierSpeed) -> float:
    """Average bytes that a tier with all blocks would read for a request."""
    return sum(
        turn.share * turn.context_bytes
        for turn in turns
        if not turn.first and worth_fetching(turn, speed)
    )


def _room(speed: TierSpeed, writes: float) -> float:
    """Bytes a second that a tier can read while it writes."""
    return max(0.0, BUSY_MAX - writes / speed.write_bytes_per_s) * speed.read_bytes_per_s


CURVE_POINTS: Final = 120
REFINEMENTS: Final = 2
REFINED_POINTS: Final = 17
QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class LoadedNode:
    nodes: int
    rate: float
    """Requests a second."""
    memory_s: float
    flows: tuple[TierLoad, ...]
    waits: tuple[Wait, ...]
    classes: list[RequestClass]
    gpu: Wait | None
    """None if the GPUs are overloaded."""


class AnalyticEvaluator:
    """Evaluates about a thousand mixes a second for one scenario and parts list."""

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        """Raises ConfigError if scenario and parts contradict each other."""
        self.load = work_out(scenario, parts)
        self.parts = parts
        self._horizons: dict[tuple[float, float], float] = {}

    def __call__(self, mix: Mix, nodes: int) -> MixOutcome:
        node = self.node(mix, nodes)
        load, traffic = self.load, self.load.scenario.traffic
        times = self._times(node)
        hits = sum(kind.share * kind.hit_tokens for kind in node.classes)
        in_memory = sum(kind.share * kind.hit_tokens for kind in node.classes if kind.tier is None)
        uses = tuple(self._use(node, number) for number in range(len(node.flows)))
        return MixOutcome(
            mix=mix,
            nodes=nodes,
            ttft_mean_s=sum(times.values()) if node.gpu else None,
            **self._quantiles(node),
            where=times if node.gpu else {},
            gpu_busy=self._gpu_busy(node),
            hit_share=hits / load.prompt_tokens,
            gpu_memory_hit_share=in_memory / load.prompt_tokens,
            retention_s=max(
                [node.memory_s, *(flow.horizon_s for flow in node.flows if flow.useful)]
            ),
            tiers=uses,
            cost=self._cost(node, uses, (load.prompt_tokens + traffic.answer_tokens)),
        )

    def node(self, mix: Mix, nodes: int) -> LoadedNode:
        """One of `nodes` nodes with this mix: its requests by source, and their waits."""
        load, fleet = self.load, self.load.scenario.fleet
        rate = load.scenario.traffic.requests_per_s / nodes
        if not mix.reuse:
            classes = cold_classes(load)
            return LoadedNode(nodes, rate, 0.0, (), (), classes, self._gpu_wait(classes, rate))
        reuse = ReuseModel(
            requests_per_s=rate,
            turns=load.scenario.traffic.turns,
            gaps=load.gaps,
            live_bytes=load.live_bytes,
            final_bytes=load.final_bytes,
            busy_share=load.scenario.traffic.busy_share,
        )
        memory_s = self._horizon_s(reuse, load.engine.free_bytes * fleet.replicas)
        speeds = [
            tier_speed(name, device, units, load.path)
            for (name, device), units in zip(self.parts.tiers.items(), mix.units, strict=True)
            if units
        ]
        flows = tier_loads(load, reuse, speeds, lambda size: self._horizon_s(reuse, size), memory_s)
        classes = request_classes(load, reuse, flows, memory_s)
        waits = tuple(_tier_wait(flow, number, classes, rate) for number, flow in enumerate(flows))
        return LoadedNode(
            nodes, rate, memory_s, flows, waits, classes, self._gpu_wait(classes, rate)
        )

    def _horizon_s(self, reuse: ReuseModel, capacity_bytes: float) -> float:
        key = (reuse.requests_per_s, capacity_bytes)
        if key not in self._horizons:
            self._horizons[key] = reuse.horizon_s(capacity_bytes)
        return self._horizons[key]

    def _gpu_wait(self, classes: Sequence[RequestClass], rate: float) -> Wait | None:
        """The wait for one copy of the model; None if it is overloaded."""
        load = self.load
        decode_s = load.scenario.traffic.answer_tokens * load.engine.decode_token_s
        square = sum(kind.share * (kind.prefill_s + decode_s) ** 2 for kind in classes)
        return wait_for(rate / load.scenario.fleet.replicas, self._gpu_s(classes), square)

    def _gpu_busy(self, node: LoadedNode) -> float:
        """Share of the GPUs' time that is needed; may be above 1."""
        return node.rate / self.load.scenario.fleet.replicas * self._gpu_s(node.classes)

    def _gpu_s(self, classes: Sequence[RequestClass]) -> float:
        traffic, engine = self.load.scenario.traffic, self.load.engine
        decode_s = traffic.answer_tokens * engine.decode_token_s
        return sum(kind.share * kind.prefill_s for kind in classes) + decode_s

    def _times(self, node: LoadedNode) -> dict[str, float]:
        times = dict.fromkeys(("tier queue", "fetch", "GPU queue", "prefill", "first step"), 0.0)
        times["GPU queue"] = node.gpu.mean_s if node.gpu else 0.0
        times["first step"] = self.load.first_token_s
        for kind in node.classes:
            times["prefill"] += kind.share * kind.prefill_s
            if kind.tier is not None:
                times["tier queue"] += kind.share * node.waits[kind.tier].mean_s
                times["fetch"] += kind.share * node.flows[kind.tier].speed.fetch_s(kind.nbytes)
        return times

    def _quantiles(self, node: LoadedNode) -> dict[str, float | None]:
        names = [f"ttft_p{round(100 * quantile)}_s" for quantile in QUANTILES]
        if node.gpu is None:
            return dict.fromkeys(names)
        alone = np.array([self.alone_s(node, kind) for kind in node.classes])
        longest = node.gpu.mean_s / max(node.gpu.busy, 1e-9)
        longest += max((w.mean_s / max(w.busy, 1e-9) for w in node.waits), default=0.0)
        times = np.geomspace(alone.min() * 0.999, alone.max() + 12.0 * longest, CURVE_POINTS)
        later = self._later(node, alone, times)
        found = [self._crossing(node, alone, times, later, 1.0 - q) for q in QUANTILES]
        return dict(zip(names, found, strict=True))

    def _crossing(
        self, node: LoadedNode, alone: Times, times: Times, later: Times, share: float
    ) -> float:
        """The time after which `share` of the first tokens come; `later` falls along `times`."""
        for _ in range(REFINEMENTS):
            after = (
                min(int(np.argmax(later <= share)), len(times) - 1) if later[-1] <= share else -1
            )
            if after <= 0:
                return float(times[after])
            times = np.linspace(times[after - 1], times[after], REFINED_POINTS)
            later = self._later(node, alone, times)
        return float(times[int(np.argmax(later <= share))])

    def alone_s(self, node: LoadedNode, kind: RequestClass) -> float:
        fetch_s = 0.0
        if kind.tier is not None:
            fetch_s = node.flows[kind.tier].speed.fetch_s(kind.nbytes)
        return fetch_s + kind.prefill_s + self.load.first_token_s

    def _later(self, node: LoadedNode, alone: Times, times: Times) -> Times:
        """The share of requests whose first token comes later than each of `times`."""
        assert node.gpu is not None
        later = np.zeros_like(times)
        for tier in (None, *range(len(node.flows))):
            rows = [number for number, kind in enumerate(node.classes) if kind.tier == tier]
            if rows:
                wait = NO_WAIT if tier is None else node.waits[tier]
                chance = waits_longer(node.gpu, wait, times[:, None] - alone[rows][None, :])
                later += chance @ np.array([node.classes[number].share for number in rows])
        return later

    def _use(self, node: LoadedNode, number: int) -> TierUse:
        flow, classes = node.flows[number], [kind for kind in node.classes if kind.tier == number]
        device = self.parts.tiers[flow.speed.name]
        units = round(flow.speed.capacity_bytes / device.unit)
        daily = flow.writes_bytes_per_s * DAY_S * self.load.scenario.traffic.busy_share
        read = node.rate * sum(kind.share * flow.speed.busy_s(kind.nbytes) for kind in classes)
        hits = sum(kind.share * kind.hit_tokens for kind in classes)
        return TierUse(
            tier=flow.speed.name,
            units=units,
            capacity_bytes=flow.speed.capacity_bytes,
            hit_share=hits / self.load.prompt_tokens,
            horizon_s=flow.horizon_s,
            useful=flow.useful,
            read_busy=read,
            write_busy=flow.write_busy,
            limited_by=flow.speed.limited_by,
            writes_bytes_per_day=daily,
            reads_bytes_per_day=node.rate
            * sum(kind.share * kind.nbytes for kind in classes)
            * DAY_S
            * self.load.scenario.traffic.busy_share,
            life_years=life_years(device, units, daily),
        )

    def _cost(self, node: LoadedNode, uses: Sequence[TierUse], request_tokens: float) -> Cost:
        gpu, traffic = self.load.gpu, self.load.scenario.traffic
        busy = min(1.0, self._gpu_busy(node)) * traffic.busy_share
        per_node = self.load.scenario.fleet.gpus_per_node
        servers = Servers(gpu, per_node, node.nodes, gpu.average_power_w(busy))
        used = [
            UsedTier(
                self.parts.tiers[use.tier],
                use.units,
                use.life_years,
                use.reads_bytes_per_day / 24,
                use.writes_bytes_per_day / 24,
            )
            for use in uses
        ]
        tokens = request_tokens * traffic.requests_per_s * traffic.busy_share * 3600.0
        return cost_of(self.parts, servers, used, tokens)


def _tier_wait(flow: TierLoad, number: int, classes: Sequence[RequestClass], rate: float) -> Wait:
    """The wait of reads for each other; writes take their share of the tier's time."""
    reading = [kind for kind in classes if kind.tier == number]
    share = sum(kind.share for kind in reading)
    if share <= 0.0:
        return NO_WAIT
    idle = 1.0 - flow.write_busy
    times = [flow.speed.busy_s(kind.nbytes) / idle for kind in reading]
    mean_s = sum(kind.share * s for kind, s in zip(reading, times, strict=True)) / share
    square = sum(kind.share * s * s for kind, s in zip(reading, times, strict=True)) / share
    return wait_for(rate * share, mean_s, square) or NO_WAIT
