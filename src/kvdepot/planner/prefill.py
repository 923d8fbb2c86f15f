"""How long a GPU prefills and how much of it decoding takes, from a model's and a GPU's numbers."""

from dataclasses import dataclass

from kvdepot.errors import ConfigError
from kvdepot.planner.model import Model
from kvdepot.planner.parts import GPU
from kvdepot.policy.fetching.speed_models import PrefillPace, attention_work


@dataclass(frozen=True, slots=True)
class Engine:
    """One copy of a model on its GPUs."""

    pace: PrefillPace
    decode_token_s: float
    """GPU time that one more token of one more answer takes, beside a batch that runs anyway."""

    free_bytes: float
    """GPU memory that is left for KV."""

    def prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """Computing `new_tokens` after `context_tokens` that are there: linear, and quadratic."""
        work = attention_work(new_tokens, context_tokens)
        return self.pace.token_s * new_tokens + self.pace.pair_s * work


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: all, those at work on one token, and bytes of each."""

    parameters: float
    active: float
    bytes_each: float


MEMORY_SHARE = 0.9
"""Of GPU memory, what an engine uses; vLLM's default."""


def engine_of(model: Model, weights: Weights, gpu: GPU, tp: int, context_bytes: float) -> Engine:
    """An engine on `tp` GPUs. `context_bytes`: KV that a token of an answer has to read.

    Layers with a window cost the same for each token, once the context is longer. Raises
    ConfigError where the weights do not fit.
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
            hint="more GPUs for each copy (fleet.tp), or fewer bytes a weight (weight_bytes)",
        )
    token_s = (2.0 * weights.active + windowed) / flops
    return Engine(
        pace=PrefillPace(0.0, token_s, pair / flops),
        decode_token_s=token_s + context_bytes / (gpu.memory_bandwidth * tp),
        free_bytes=free,
    )
