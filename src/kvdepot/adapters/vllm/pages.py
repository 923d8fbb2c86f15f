"""vLLM's KV cache as pages of plain bytes.

What lies inside a page is the backend's own affair: on the processor, for example, keys are kept
transposed. A page is therefore taken as it lies in memory, whatever the tensor says its axes are;
only the page axis, the first, is believed.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kvdepot.adapters.tensors import KVTensors
from kvdepot.errors import ModelError

AXES: Final = "page token head dim"
ORDER: Final = "token head dim"
_INNER_AXES: Final = 3
_PAIR: Final = 2


def page_tensors(
    caches: Mapping[str, object], layer_names: Sequence[str], page_count: int
) -> KVTensors:
    """The KV cache of these layers, one payload for each page; ModelError where it cannot be."""
    tensors = [_tensor(name, caches) for name in layer_names]
    for name, tensor in zip(layer_names, tensors, strict=True):
        if tensor.shape[0] != page_count:
            raise ModelError(
                f"layer {name}: its KV cache of shape {tuple(tensor.shape)} does not begin with "
                f"the {page_count} blocks that vLLM has"
            )
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        raise ModelError("the layers of this model have KV caches of different shapes")
    return KVTensors([as_bytes_lie(tensor) for tensor in tensors], AXES, order=ORDER)


def as_bytes_lie(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with the axes of a page in the order of their strides."""
    inner = sorted(
        ((step, size) for step, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)),
        reverse=True,
    )
    merged: list[tuple[int, int]] = []
    for step, size in inner:
        if size == 1:
            continue
        if merged and merged[-1][0] == step * size:
            merged[-1] = (step, merged[-1][1] * size)
        else:
            merged.append((step, size))
    if len(merged) > _INNER_AXES:
        raise ModelError(f"a KV cache with strides {tensor.stride()} has no pages of plain bytes")
    merged = [(0, 1)] * (_INNER_AXES - len(merged)) + merged
    sizes = [tensor.shape[0], *(size for _, size in merged)]
    steps = [tensor.stride(0), *(step or 1 for step, _ in merged)]
    return tensor.as_strided(sizes, steps)


def _tensor(name: str, caches: Mapping[str, object]) -> torch.Tensor:
    found = caches.get(name)
    if not isinstance(found, torch.Tensor):
        raise ModelError(f"layer {name}: vLLM registered {type(found).__name__}, not a tensor")
    if found.dim() < _PAIR:
        raise ModelError(f"layer {name}: a KV cache of shape {tuple(found.shape)} has no pages")
    return found
