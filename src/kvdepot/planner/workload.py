"""A scenario worked out once, before any mix is tried: its turns in tokens, bytes and seconds."""

from dataclasses import dataclass
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.planner.device import Path
from kvdepot.planner.footprint import Footprint, footprint_of
from kvdepot.planner.model import Model, find_model
from kvdepot.planner.parts import GPU, Parts
from kvdepot.planner.prefill import Engine, Weights, engine_of
from kvdepot.planner.reuse import Gap
from kvdepot.planner.scenario import Scenario, Traffic

TURNS_MAX: Final = 8
"""Talks of more turns are represented by this many."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A kind of request."""

    share: float
    """Of all requests."""

    first: bool
    context_tokens: int
    context_bytes: float
    """As stored: what a tier has to deliver."""

    compute_s: float
    """Prefill when only the shared head is there."""

    resume_s: float
    """Prefill when all of the context is there but half a block."""

    cold_s: float
    """Prefill when nothing is there."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What every mix is tried against."""

    scenario: Scenario
    gpu: GPU
    engine: Engine
    first_token_s: float
    """One step of decoding: all weights once through the GPU."""

    path: Path
    turns: tuple[Turn, ...]
    gaps: tuple[Gap, ...]
    new_bytes: float
    """Stored KV that one request adds, on average."""

    live_bytes: float
    final_bytes: float
    prompt_tokens: float


def work_out(scenario: Scenario, parts: Parts) -> Workload:
    """Raises ConfigError for what does not fit together."""
    traffic, fleet = scenario.traffic, scenario.fleet
    model, gpu = find_model(scenario.model), parts.gpu(fleet.gpu)
    size = footprint_of(
        model,
        dtype=scenario.dtype,
        block_tokens=scenario.block_tokens,
        codec=scenario.codec,
        tp=fleet.tp,
    )
    weights = _weights(scenario, model)
    longest = traffic.context_tokens(traffic.turns + 1)
    middle = traffic.context_tokens(1 + traffic.turns // 2)
    engine = engine_of(model, weights, gpu, fleet.tp, size.context_bytes(middle))
    head = size.stored_context_bytes(traffic.system_tokens)
    return Workload(
        scenario=scenario,
        gpu=gpu,
        engine=engine,
        first_token_s=weights.active * weights.bytes_each / (gpu.memory_bandwidth * fleet.tp),
        path=Path(
            run_bytes=size.stored_bytes_per_token * scenario.block_tokens,
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
            f"{scenario.model} does not say how many weights the model has",
            hint="--set parameters=8e9, and active_parameters for a mixture of experts",
        )
    active = scenario.active_parameters or (
        model.active_parameters if scenario.parameters is None else parameters
    )
    return Weights(parameters, active or parameters, scenario.weight_bytes)


def _turns(traffic: Traffic, size: Footprint, engine: Engine) -> list[Turn]:
    """The first turn, and the others by up to TURNS_MAX that stand for as many each."""
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
            Turn(
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


def _gaps(traffic: Traffic) -> tuple[Gap, ...]:
    short = Gap(1.0 - traffic.return_share, traffic.turn_gap_s, traffic.gap_spread)
    if not traffic.return_share:
        return (short,)
    return (short, Gap(traffic.return_share, traffic.return_gap, traffic.gap_spread))
