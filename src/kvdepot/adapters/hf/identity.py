"""Who a model is: what makes its KV its own, and cheap signs that it has become another.

Signs are taken at every call and before every save. torch counts most writes to a weight; it does
not count those through `.data` and numpy, nor those of its fused optimizers, so signs also hold
some of each weight's content. A write that is not counted and misses that content is not seen.

The identity covers the config and all weights, adapters included. It does not cover the attention
implementation (eager, sdpa, flash), which changes rounding but not what the KV means: KV computed
with one is used with another.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from kvdepot.core.keys import encode
from kvdepot.core.namespace import fingerprint
from kvdepot.errors import ModelError

_WHOLE_BYTES: Final = 4096
"""Tensors up to this size are hashed as they are."""
_WORD: Final = 8
_STEP_WORDS: Final = 1 << 22
_FACTORS: Final = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Odd: an odd number times what is not 0 is not 0 in 64 bits."""
_NOT_KV: Final = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
    }
)
"""Of the config, what does not change K and V, or is told better by the weights."""
_PLACES: Final = 16
_RUN: Final = 16
"""Of a weight, the places that signs look at, and the numbers at each: one line of a cache."""
_ADAPTER_FIELDS: Final = (
    "active_adapter",
    "active_adapters",
    "disable_adapters",
    "merged_adapters",
    "scaling",
)


@dataclass(frozen=True, slots=True)
class Signs:
    """Where the weights are and how often they were written to; which adapters are on."""

    weights: int
    adapters: str


def model_fingerprint(model: PreTrainedModel, revision: str | None) -> str:
    """The model's identity: its config, and its weights' content or their `revision`."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {name: value for name, value in config.items() if name not in _NOT_KV}
    weights = f"revision {revision}" if revision is not None else weights_digest(model)
    adapters = adapter_state(tuner_layers(model))
    return fingerprint(kept, encode((str(model.dtype), weights, adapters)).hex())


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of the names, shapes, types and content of all weights.

    The content enters as two sums over all words of a tensor, each word times a number of its own
    place, taken on the tensor's device: every change of one weight shows, and of several unless it
    was made to go unnoticed.
    """
    tensors = {
        name: tensor.detach()
        for name, tensor in sorted(model.state_dict().items())
        if isinstance(tensor, torch.Tensor)
    }
    digest = hashlib.blake2b(digest_size=32, person=b"kvdepot-weights")
    for name, tensor in tensors.items():
        digest.update(encode((name, tuple(tensor.shape), str(tensor.dtype))))
    try:
        pieces = [piece for tensor in tensors.values() for piece in _content(tensor)]
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"the model's weights cannot be read as bytes: {error}",
            hint="say who they are: attach(…, name=…, revision=…)",
        ) from error
    for device in sorted({str(piece.device) for piece in pieces}):
        there = [piece for piece in pieces if str(piece.device) == device]
        digest.update(torch.cat(there).cpu().numpy().tobytes())
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What stands for a tensor's content, as bytes on its device."""
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    count = raw.numel()
    if count <= _WHOLE_BYTES:
        yield raw
        return
    whole = count // _WORD * _WORD
    words = raw[:whole] if raw.storage_offset() % _WORD == 0 else raw[:whole].clone()
    yield raw[whole:]
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for start in range(0, whole // _WORD, _STEP_WORDS):
        part = words.view(torch.int64)[start : start + _STEP_WORDS]
        place = torch.arange(start, start + part.numel(), device=raw.device) * 2 + 1
        sums[0] += (part * (place * _FACTORS[0])).sum()
        mixed = (part ^ (part >> 29)) * _FACTORS[2]
        sums[1] += ((mixed ^ (mixed >> 32)) * (place * _FACTORS[1])).sum()
    yield sums.view(torch.uint8)


def tuner_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that an adapter was put into, PEFT's tuner layers."""
    return [module for module in model.modules() if hasattr(type(module), "active_adapter")]


def signs_of(model: PreTrainedModel, tuners: Sequence[torch.nn.Module]) -> Signs:
    """Cheap: taken at every call. Equal signs, equal KV, but for what the module's text names."""
    weights = _kept_tensors(model)
    # How often torch wrote to each in place; weights made in inference mode do not say.
    places = tuple(
        (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
        for weight in weights
    )
    return Signs(hash((places, _some_content(weights))), adapter_state(tuners))


def _kept_tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    """The tensors that `weights_digest` covers: parameters, and buffers that are saved with them.

    Buffers that are not saved, such as rotary frequencies, come from the config, and some models
    replace them from call to call.
    """
    buffers = (
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
    return [*model.parameters(), *buffers]


def _some_content(weights: Sequence[torch.Tensor]) -> bytes:
    """Bytes from places all over every weight. Empty for types that cannot be read as bytes."""
    try:
        pieces = [_some_of(weight.detach()) for weight in weights if weight.numel()]
        return torch.cat(pieces).cpu().numpy().tobytes() if pieces else b""
    except (NotImplementedError, RuntimeError):
        return b""


def _some_of(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.reshape(-1)  # a copy only where a weight does not lie in one piece
    count = flat.numel()
    if count > _PLACES * _RUN:
        step = (count - _RUN) // (_PLACES - 1)
        flat = flat.as_strided((_PLACES, _RUN), (step, 1), flat.storage_offset())
    return flat.contiguous().view(-1).view(torch.uint8)


def adapter_state(tuners: Sequence[torch.nn.Module]) -> str:
    """Which adapters are on, and how strong; empty for a model without any."""
    return "; ".join(
        ", ".join(f"{name}={getattr(tuner, name, None)}" for name in _ADAPTER_FIELDS)
        for tuner in tuners
    )
