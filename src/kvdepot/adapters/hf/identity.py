"""The identity of a model, which names its KV, and signs that the model has changed.

Signs are taken at every call and before every save. They contain a checksum of every byte of every
weight, because torch does not count writes through `.data` and numpy, nor those of its fused
optimizers. On a CPU this takes less time than the model's next token, which reads the same bytes.

The identity covers the config and all weights with adapters. It does not cover the attention
implementation (eager, sdpa, flash), which changes rounding but not the meaning of KV: KV computed
with one is used with another.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from kvdepot.core.keys import encode
from kvdepot.core.namespace import fingerprint
from kvdepot.errors import ModelError
from kvdepot.native import chunk_checksums

_WHOLE_BYTES: Final = 4096
"""Tensors up to this size enter the digest unreduced."""
_WORD: Final = 8
_STEP_WORDS: Final = 1 << 22
_FACTORS: Final = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Odd: an odd number times a number that is not 0 is not 0 in 64 bits."""
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
"""Fields of the config that do not change K and V, or that the weights show better."""
_ADAPTER_FIELDS: Final = (
    "active_adapter",
    "active_adapters",
    "disable_adapters",
    "merged_adapters",
    "scaling",
)
_CHUNK_BYTES: Final = 1 << 20
_COLUMNS: Final = 1024
_THREADS_MAX: Final = 8
"""More threads read memory no faster."""
Signs = tuple[str, str]
"""A digest of the weights' types, shapes and bytes, and the adapters that are active."""


def model_fingerprint(model: PreTrainedModel, revision: str | None) -> str:
    """The identity: a digest of the config and of the weights' content or their `revision`."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {name: value for name, value in config.items() if name not in _NOT_KV}
    weights = f"revision {revision}" if revision is not None else weights_digest(model)
    adapters = _adapter_state(tuner_layers(model))
    return fingerprint(kept, encode((str(model.dtype), weights, adapters)).hex())


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of the names, shapes, types and content of all weights.

    The content enters as two sums over all words of a tensor, each word times a number of its own
    place, computed on the tensor's device. Every change of one weight shows, and of several unless
    it was made to go unnoticed.
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
            hint="pass name= and revision= to identify the weights",
        ) from error
    for device in sorted({str(piece.device) for piece in pieces}):
        there = [piece for piece in pieces if str(piece.device) == device]
        digest.update(torch.cat(there).cpu().numpy().tobytes())
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The content of a small tensor, or the sums of a large one, as bytes on its device."""
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
    """The layers that contain an adapter (PEFT's tuner layers)."""
    return [module for module in model.modules() if hasattr(type(module), "active_adapter")]


def signs_of(model: PreTrainedModel, tuners: Sequence[torch.nn.Module]) -> Signs:
    """The signs of a model. Equal signs mean equal weights, in the same process."""
    # Parameters, and buffers that are saved with them. Other buffers, such as rotary frequencies,
    # follow from the config, and some models replace them from call to call.
    weights: list[torch.Tensor] = [*model.parameters()]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                weights.append(buffer)
    with ThreadPoolExecutor(min(torch.get_num_threads(), _THREADS_MAX)) as threads:
        contents = list(threads.map(_checksum, weights))
    digest = hashlib.blake2b(digest_size=32)
    for weight in weights:
        digest.update(encode((str(weight.dtype), tuple(weight.shape), str(weight.device))))
    for device in sorted({str(content.device) for content in contents}):
        there = [content for content in contents if str(content.device) == device]
        digest.update(torch.cat(there).cpu().numpy().tobytes())
    return digest.hexdigest(), _adapter_state(tuners)


@torch.no_grad()
def _checksum(weight: torch.Tensor) -> torch.Tensor:
    """A checksum of every byte, on the weight's device. For a type that cannot be read as bytes:
    where the weight is, and torch's count of writes, which not every write increments."""
    try:
        raw = weight.detach().reshape(-1).view(torch.uint8)
    except (NotImplementedError, RuntimeError):
        writes = 0 if weight.is_inference() else weight._version
        return torch.tensor([weight.data_ptr(), writes], dtype=torch.int64).view(torch.uint8)
    if raw.device.type != "cpu":
        return _sums(raw)
    sums = np.empty(-(-raw.numel() // _CHUNK_BYTES), np.uint64)
    if len(sums):
        chunk_checksums(raw.numpy(), _CHUNK_BYTES, sums)
    return torch.from_numpy(sums.view(np.uint8))


def _sums(raw: torch.Tensor) -> torch.Tensor:
    """The sums of the rows and of the columns of all words, and the rest as it is. A word that
    changes shows in two sums, and so do words that change places."""
    raw = raw if raw.storage_offset() % _WORD == 0 else raw.clone()
    whole = raw.numel() // (_COLUMNS * _WORD) * _COLUMNS * _WORD
    words = raw[:whole].view(torch.int64).view(-1, _COLUMNS)
    sums = [words.sum(0), words.sum(1)]
    return torch.cat([*(each.view(torch.uint8) for each in sums), raw[whole:]])


def _adapter_state(tuners: Sequence[torch.nn.Module]) -> str:
    """The active adapters with their scales; empty without adapters."""
    return "; ".join(
        ", ".join(f"{name}={getattr(tuner, name, None)}" for name in _ADAPTER_FIELDS)
        for tuner in tuners
    )
