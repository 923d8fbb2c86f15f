"""Reads a call of the model, and decides whether the depot can serve it.

Served are prompts of plain text, padded on the left if at all, with an empty cache. Any other call
is left to the model, and the reason is counted. A cache that holds tokens already is an error: the
depot cannot serve the call, and the model alone would not do what the caller wants.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from kvdepot.adapters.hf.binding import Binding
from kvdepot.adapters.hf.caches import DepotCache, DepotLayer, DepotSlidingLayer
from kvdepot.errors import ModelError

_INPUTS: Final = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values"})
_FORWARD: Final = _INPUTS | {"use_cache", "logits_to_keep", "return_dict"}
_SETTLED: Final = ("prefill_chunk_size", "cache_implementation")
_MODES: Final = frozenset(
    {
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    }
)
Tokens = npt.NDArray[np.int64]


class UnservedCall(Exception):
    """The call is left to the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row: `pad` columns of padding, then the tokens."""

    tokens: Tokens
    pad: int

    @property
    def columns(self) -> int:
        return self.pad + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ServableCall:
    arguments: dict[str, Any]
    """The caller's, by name."""
    ids: torch.Tensor
    prompts: list[PromptRow]
    mask: torch.Tensor | None
    """The caller's. For generate without a mask: the one that generate would derive."""
    cache: Cache | None
    """The caller's, which is empty."""
    beams: int = 1
    rows_per_prompt: int = 1
    """Rows of the cache for each prompt."""
    chunk: int | None = None
    """Tokens of a step of the prefill."""
    static_columns: int | None = None
    """The size of the static cache that the call asks for."""
    ends: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    settled: tuple[str, ...] = ()
    """Settings that the adapter applies itself; generate must not see them."""


def read_forward(
    model: Any, binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ServableCall:
    """A forward. Raises UnservedCall, and ModelError for a filled cache."""
    arguments = _bound(model.forward, args, kwargs)
    used = arguments.pop("use_cache", None)
    if not (model.config.use_cache if used is None else used):
        raise UnservedCall("no cache")
    unknown = {
        name
        for name, value in arguments.items()
        if value is not None and not (name.startswith("output_") and value is False)
    } - _FORWARD
    if unknown:
        raise UnservedCall("labels" if "labels" in unknown else "arguments")
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        raise UnservedCall("gradients")
    cache = arguments.get("past_key_values")
    layers = cache.layers if isinstance(cache, Cache) else []
    if layers and isinstance(layers[-1], DepotLayer | DepotSlidingLayer) and _columns_of(cache):
        raise UnservedCall("continued")
    call = _read(model, binding, arguments, arguments.get("attention_mask"))
    padded = any(prompt.pad for prompt in call.prompts)
    if padded and not binding.relative and arguments.get("position_ids") is None:
        raise UnservedCall("padding")  # the model would count positions from the padding's start
    return call


def read_generate(
    model: Any, binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ServableCall:
    """A call of generate. Raises UnservedCall, and ModelError for a filled cache."""
    arguments = _bound(model.generate, args, kwargs)
    named = set(inspect.signature(model.generate).parameters)
    free = {name: value for name, value in arguments.items() if name not in named}
    if arguments.get("custom_generate") is not None or free.get("cache_implementation") == "paged":
        raise UnservedCall("custom generate")
    config = arguments.get("generation_config")
    settings, inputs = model._prepare_generation_config(config, **free)
    if settings.use_cache is False:
        raise UnservedCall("no cache")
    mode = settings.get_generation_mode(arguments.get("assistant_model"))
    if mode not in _MODES or settings.token_healing or getattr(settings, "is_assistant", False):
        raise UnservedCall("assisted decoding")
    if settings.cache_implementation not in (None, "dynamic", "static"):
        raise UnservedCall("kind of cache")
    if {name for name, value in inputs.items() if value is not None} - _INPUTS:
        raise UnservedCall("arguments")
    if arguments.get("inputs") is not None:
        if "input_ids" in arguments:
            raise UnservedCall("arguments")  # generate refuses both
        arguments["input_ids"] = arguments.pop("inputs")
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if mask is None and isinstance(ids, torch.Tensor):
        mask = _derived_mask(ids, settings)
    call = _read(model, binding, arguments, mask)
    static_columns = None
    if settings.cache_implementation == "static":
        given = free.get("max_length"), getattr(config, "max_length", None)
        is_default = all(value is None for value in (*given, model.generation_config.max_length))
        static_columns = _static_columns(settings, call.ids.shape[1], is_default=is_default)
    ends, beams = settings.eos_token_id, settings.num_beams or 1
    return replace(
        call,
        beams=beams,
        rows_per_prompt=max(beams, settings.num_return_sequences or 1),
        chunk=settings.prefill_chunk_size,
        static_columns=static_columns,
        ends=tuple(ends)
        if isinstance(ends, list | tuple)
        else ()
        if ends is None
        else (int(ends),),
        settled=tuple(name for name in _SETTLED if getattr(settings, name, None) is not None),
    )


def _bound(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name. UnservedCall if they do not fit: the model raises the best error."""
    signature = inspect.signature(function)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        raise UnservedCall("arguments") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(name, ()):
            raise UnservedCall("arguments")
    return arguments


def _read(model: Any, binding: Binding, arguments: dict[str, Any], mask: Any) -> ServableCall:
    ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
    if model.training:
        raise UnservedCall("training")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise UnservedCall("input_ids")
    if not ids.numel() or bool((ids < 0).any()):
        raise UnservedCall("input_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        _check_empty(cache)
        raise UnservedCall("mask")
    prompts = _read_prompts(ids, mask)
    if binding.tokens_max and max(len(prompt.tokens) for prompt in prompts) > binding.tokens_max:
        raise UnservedCall("long rope")
    positions = arguments.get("position_ids")
    if positions is not None and not _are_default(positions, prompts):
        raise UnservedCall("positions")
    _check_empty(cache)
    kinds = (DynamicCache, DepotCache, StaticCache)
    if cache is not None and (type(cache) not in kinds or cache.offloading):
        raise UnservedCall("kind of cache")
    return ServableCall(arguments, ids, prompts, mask, cache)


def _read_prompts(ids: torch.Tensor, mask: torch.Tensor | None) -> list[PromptRow]:
    """The rows of [batch, column] token ids. UnservedCall unless all padding is on the left."""
    rows = ids.detach().cpu().numpy().astype(np.int64)
    pads = [0] * len(rows)
    if mask is not None:
        seen = mask.detach().cpu().numpy() != 0
        pads = [int(row.argmax()) for row in seen]
        if not all(row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
            raise UnservedCall("padding")
    return [PromptRow(row[pad:], pad) for row, pad in zip(rows, pads, strict=True)]


def _are_default(positions: Any, prompts: list[PromptRow]) -> bool:
    """Returns True if the tokens have these positions by default."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return False
    numbers = _token_numbers(prompts, positions.device)
    if positions.shape[1] != numbers.shape[1] or positions.shape[0] not in (1, len(prompts)):
        return False
    return bool(((positions == numbers) | (numbers < 0)).all())


def _columns_of(cache: Any) -> int:
    return int(cache.get_seq_length()) if isinstance(cache, Cache) and cache.layers else 0


def _check_empty(cache: Any) -> None:
    columns = _columns_of(cache)
    if columns:
        raise ModelError(
            f"the {type(cache).__name__} given already holds {columns} tokens",
            hint="pass the whole conversation as input_ids and no cache: the depot has the KV of"
            " earlier calls",
        )


def _derived_mask(ids: torch.Tensor, settings: Any) -> torch.Tensor | None:
    """The mask that generate would derive: it masks the pad token, unless that ends sequences."""
    pad, ends = settings.pad_token_id, settings.eos_token_id
    if pad is None or pad in (ends if isinstance(ends, list | tuple) else [ends]):
        return None
    return (ids != pad).long() if bool((ids == pad).any()) else None


def _static_columns(settings: Any, columns: int, *, is_default: bool) -> int:
    """The size that generate would give a static cache."""
    if settings.max_new_tokens is not None:
        total = columns + int(settings.max_new_tokens)
    else:
        total = int(settings.max_length) + (columns if is_default else 0)
    return max(total - 1, columns, int(getattr(settings, "max_cache_len", None) or 0))


def mask_of(prompts: list[PromptRow], device: torch.device) -> torch.Tensor | None:
    """The attention mask of left-padded prompts; None without padding."""
    if not any(prompt.pad for prompt in prompts):
        return None
    return (_token_numbers(prompts, device) >= 0).long()


def positions_of(prompts: list[PromptRow], device: torch.device) -> torch.Tensor:
    """The positions of all columns, counted from the first token of each row. Padding has 0."""
    return _token_numbers(prompts, device).clamp(min=0)


def _token_numbers(prompts: list[PromptRow], device: torch.device) -> torch.Tensor:
    """[row, column]: the index of the token in its prompt; negative for padding."""
    columns = torch.arange(prompts[0].columns, device=device)
    return columns[None] - torch.tensor([[prompt.pad] for prompt in prompts], device=device)
