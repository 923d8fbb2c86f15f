"""KV that is not what its name says: what producers with a fault would have put into a depot.

Each fault takes a transformers model with rotary positions and a prompt, and gives the K and V of
all layers, [1, heads, tokens, dim], as a wrong adapter, engine or model would have computed them.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvdepot.core.depot import NamespaceHandle
from kvdepot.depot import Depot

KV = list[tuple[torch.Tensor, torch.Tensor]]
SCALE = 0.37
"""Of fp8 KV, lost on the way."""


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor, shift: int = 0) -> KV:
    """What the model computes, at positions from `shift` on."""
    cache: Any = DynamicCache()
    positions = torch.arange(shift, shift + ids.shape[1])[None]
    model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def right(model: Any, ids: torch.Tensor) -> KV:
    return computed(model, ids)


def swapped(model: Any, ids: torch.Tensor) -> KV:
    return [(values, keys) for keys, values in computed(model, ids)]


def head_order(model: Any, ids: torch.Tensor) -> KV:
    return [(keys.flip(1), values.flip(1)) for keys, values in computed(model, ids)]


def positions_shifted(model: Any, ids: torch.Tensor) -> KV:
    return computed(model, ids, shift=1)


def other_weights(model: Any, ids: torch.Tensor) -> KV:
    """Another training of the same architecture: each matrix has the same size, other content."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), model.parameters(), strict=True):
            order = torch.randperm(its.numel(), generator=generator)
            mine.copy_(its.flatten()[order].view_as(its))
    return computed(other, ids)


def stale_lora(model: Any, ids: torch.Tensor) -> KV:
    """A LoRA of rank 4 that has been taken off since."""
    tuned = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "q_proj" in name or "v_proj" in name or "k_proj" in name:
                rows, columns = weight.shape
                up = torch.randn(rows, 4, generator=generator)
                down = torch.randn(4, columns, generator=generator)
                delta = (up @ down).to(weight.dtype)
                weight += 0.3 * delta * weight.norm() / delta.norm()
    return computed(tuned, ids)


def scales_lost(model: Any, ids: torch.Tensor) -> KV:
    """Kept as fp8 with a scale, given back without it."""

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.abs().max() / 448 / SCALE
        return (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(tensor.dtype)

    return [(kept(keys), kept(values)) for keys, values in computed(model, ids)]


FAULTS: dict[str, Callable[[Any, torch.Tensor], KV]] = {
    "K and V swapped": swapped,
    "head order changed": head_order,
    "positions shifted": positions_shifted,
    "other weights under the same name": other_weights,
    "stale LoRA": stale_lora,
    "fp8 scales lost": scales_lost,
}


def put(store: Depot, space: NamespaceHandle, ids: torch.Tensor, kv: KV) -> int:
    """Store the whole blocks of a prompt as the transformers adapter lays them out."""
    keys, size = space.keys(ids[0].numpy()), space.layout.block_tokens
    for at, key in enumerate(keys):
        span = slice(at * size, (at + 1) * size)
        parts = [tensor[0, :, span].contiguous() for pair in kv for tensor in pair]
        raw = b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
        assert store.put_many([key], [np.frombuffer(raw, np.uint8)])[0]
    return len(keys)
