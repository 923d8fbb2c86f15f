"""A scenario in tokens, bytes and seconds, computed once for all mixes."""

from dataclasses import dataclass
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.planner.footprint import Footprint, footprint_of
from kvdepot.planner.models import Model, find_model
from kvdepot.planner.parts import GPU, DataPath, Parts
from kvdepot.planner.retention import TurnGap
from kvdepot.planner.scenario import Scenario, Traffic
from kvdepot.policy.fetching.speed_models import PrefillPace, attention_work


@dataclass(frozen=True, slots=True)
class ModelOnGpus:
    pace: PrefillPace
    decode_token_s: float
    """GPU time of one more token of one more answer in a running batch."""
    free_bytes: float
    """GPU memory for KV."""

    def prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """Computing `new_tokens` after `context_tokens` that are present: linear, and quadratic."""
        work = attention_work(new_tokens, context_tokens)
        return self.pace.token_s * new_tokens + self.pace.pair_s * work


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: all, those at work on one token, and bytes of each."""

    parameters: float
    active: float
    bytes_each: float


MEMORY_SHARE = 0.9
"""Share of GPU memory that an engine uses; vLLM's default."""


def model_on_gpus(
    model: Model, weights: Weights, gpu: GPU, tp: int, context_bytes: float
) -> ModelOnGpus:
    """An engine on `tp` GPUs. `context_bytes`: KV that a token of an answer has to read.

    Layers with a window cost the same for each token, once the context is longer. Raises
    ConfigError if the weights do not fit.
    """
    flops = gpu.flops * gpu.efficiency * tp
    costs = model.attention_costs()
    windowed = sum(cost.pair_flops * cost.window for cost in costs if cost.window is not None)
    pair = sum(cost.pair_flops for cost in costs if cost.window is None)
    held = weights.parameters * weights.bytes_each
    free = gpu.memory * tp * MEMORY_SHARE - held
    if free <= 0:
        raise ConfigError(
            "fleet.tp",
            f"{held / 1e9:,.0f} GB of weights do not fit into {tp} GPUs of {gpu.memory / 1e9:g} GB",
            hint="increase the GPUs of a copy (fleet.tp) or reduce weight_bytes",
        )
    token_s = (2.0 * weights.active + windowed) / flops
    return ModelOnGpus(
        pace=PrefillPace(0.0, token_s, pair / flops),
        decode_token_s=token_s + context_bytes / (gpu.memory_bandwidth * tp),
        free_bytes=free,
    )


TURNS_MAX: Final = 8
"""Conversations with more turns are represented by this many."""


@dataclass(frozen=True, slots=True)
class TurnKind:
    share: float
    """Share of all requests."""
    first: bool
    context_tokens: int
    context_bytes: float
    """Stored bytes that a tier has to deliver."""
    compute_s: float
    """Prefill if only the shared head is present."""
    resume_s: float
    """Prefill if all of the context is present but half a block."""
    cold_s: float
    """Prefill without any hit."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    scenario: Scenario
    gpu: GPU
    engine: ModelOnGpus
    first_token_s: float
    """One step of decoding: all weights once through the GPU."""
    path: DataPath
    turns: tuple[TurnKind, ...]
    gaps: tuple[TurnGap, ...]
    new_bytes: float
    """Stored KV that one request adds, on average."""
    live_bytes: float
    final_bytes: float
    prompt_tokens: float


def work_out(scenario: Scenario, parts: Parts) -> PlannedLoad:
    """Raises ConfigError if scenario and parts contradict each other."""
    traffic, fleet = scenario.traffic, scenario.fleet
    model, gpu = find_model(scenario.model), parts.gpu(fleet.gpu)
    size = footprint_of(
        model, dtype=scenario.dtype, block_tokens=scenario.block_tokens, tp=fleet.tp
    )
    weights = _weights(scenario, model)
    longest = traffic.context_tokens(traffic.turns + 1)
    middle = traffic.context_tokens(1 + traffic.turns // 2)
    engine = model_on_gpus(model, weights, gpu, fleet.tp, size.context_bytes(middle))
    head = size.stored_context_bytes(traffic.system_tokens)
    return PlannedLoad(
        scenario=scenario,
        gpu=gpu,
        engine=engine,
        first_token_s=weights.active * weights.bytes_each / (gpu.memory_bandwidth * fleet.tp),
        path=DataPath(
            contiguous_bytes=size.stored_bytes_per_token * scenario.block_tokens,
            links=float(gpu.link * fleet.gpus_per_node),
            link=float(gpu.link * fleet.tp),
            network=float(parts.node.network),
        ),
        turns=tuple(_turns(traffic, size, engine)),
        gaps=_gaps(traffic),
        new_bytes=(size.stored_context_bytes(longest) - head) / traffic.turns,
        live_bytes=size.stored_context_bytes(middle) - head,
        final_bytes=size.stored_context_bytes(longest) - head,
        prompt_tokens=traffic.prompt_tokens,
    )


def _weights(scenario: Scenario, model: Model) -> Weights:
    parameters = scenario.parameters or model.parameters
    if parameters is None:
        raise ConfigError(
            "parameters",
            f"{scenario.model} does not have the number of weights",
            hint="add --set parameters=8e9, and active_parameters for a mixture of experts",
        )
    active = scenario.active_parameters or (
        model.active_parameters if scenario.parameters is None else parameters
    )
    return Weights(parameters, active or parameters, scenario.weight_bytes)


def _turns(traffic: Traffic, size: Footprint, engine: ModelOnGpus) -> list[TurnKind]:
    """The first turn, and up to TURNS_MAX that represent the others in equal parts."""
    later = traffic.turns - 1
    count = min(later, TURNS_MAX)
    numbers = [1] + [2 + int((index + 0.5) * later / count) for index in range(count)]
    shares = [1.0 / traffic.turns] + [later / traffic.turns / max(1, count)] * count
    half_block = size.layout.block_tokens / 2
    turns = []
    for number, share in zip(numbers, shares, strict=True):
        context, new = traffic.context_tokens(number), traffic.question_tokens
        lost = min(half_block, context)
        head = traffic.system_tokens
        turns.append(
            TurnKind(
                share=share,
                first=number == 1,
                context_tokens=context,
                context_bytes=size.stored_context_bytes(context),
                compute_s=engine.prefill_s(context - head + new, head),
                resume_s=engine.prefill_s(new + lost, context - lost),
                cold_s=engine.prefill_s(context + new, 0),
            )
        )
    return turns


def _gaps(traffic: Traffic) -> tuple[TurnGap, ...]:
    short = TurnGap(1.0 - traffic.return_share, traffic.turn_gap_s, traffic.gap_spread)
    if not traffic.return_share:
        return (short,)
    return (short, TurnGap(traffic.return_share, traffic.return_gap, traffic.gap_spread))
