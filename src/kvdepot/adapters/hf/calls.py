"""Reading a call of the model: whether the depot can serve it, or why it is left to the model.

Served calls are prompts of plain text, padded on the left if at all, with a cache that is empty.
All else passes through untouched, and the reason is counted. A cache that is already filled is an
error: neither serving nor passing on could be meant.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
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
"""Arguments of a forward that are understood."""
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


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row: `pad` columns of padding, then the tokens."""

    tokens: Tokens
    pad: int

    @property
    def columns(self) -> int:
        return self.pad + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PassedCall:
    """A call that is left to the model alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class ServableCall:
    """A call that can be served."""

    arguments: dict[str, Any]
    """As given, by name."""
    ids: torch.Tensor
    prompts: list[PromptRow]
    mask: torch.Tensor | None
    """As given or, where the padding was left to generate to find out, as found out."""
    cache: Cache | None
    """As given: empty."""


@dataclass(frozen=True, slots=True)
class ServableGeneration:
    """A call of generate that can be served."""

    call: ServableCall
    beams: int
    expand: int
    """Rows of the cache for each prompt."""
    chunk: int | None
    """Tokens of a step of the prefill."""
    static_columns: int | None
    """Room of a static cache to be made; None: the cache is dynamic."""
    ends: tuple[int, ...]
    """Tokens after which a sequence is over."""
    settled: tuple[str, ...]
    """Settings that have been seen to already, which generate must not see."""


def read_forward(
    model: Any, binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ServableCall | PassedCall:
    """A plain forward. Raises ModelError for a filled cache."""
    arguments = _bound(model.forward, args, kwargs)
    if arguments is None:
        return PassedCall("arguments")
    used = arguments.pop("use_cache", None)
    if not (model.config.use_cache if used is None else used):
        return PassedCall("no cache")
    unknown = {
        name
        for name, value in arguments.items()
        if value is not None and not (name.startswith("output_") and value is False)
    } - _FORWARD
    if unknown:
        return PassedCall("labels" if "labels" in unknown else "arguments")
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
        return PassedCall("gradients")
    if _is_own(arguments.get("past_key_values")):
        return PassedCall("continued")
    call = _read(model, binding, arguments, arguments.get("attention_mask"))
    padded = isinstance(call, ServableCall) and any(prompt.pad for prompt in call.prompts)
    if padded and not binding.relative and arguments.get("position_ids") is None:
        return PassedCall("padding")  # the model would count positions from the padding's start
    return call


def read_generate(
    model: Any, binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ServableGeneration | PassedCall:
    """A call of generate. Raises ModelError for a filled cache."""
    arguments = _bound(model.generate, args, kwargs)
    if arguments is None:
        return PassedCall("arguments")
    named = set(inspect.signature(model.generate).parameters)
    free = {name: value for name, value in arguments.items() if name not in named}
    if arguments.get("custom_generate") is not None or free.get("cache_implementation") == "paged":
        return PassedCall("custom generate")
    config = arguments.get("generation_config")
    settings, inputs = model._prepare_generation_config(config, **free)
    reason = _unserved(settings, arguments)
    if reason is None and {name for name, value in inputs.items() if value is not None} - _INPUTS:
        reason = "arguments"
    if reason is not None:
        return PassedCall(reason)
    if arguments.get("inputs") is not None:
        if "input_ids" in arguments:
            return PassedCall("arguments")  # generate says that it is one too many
        arguments["input_ids"] = arguments.pop("inputs")
    ids = arguments.get("input_ids")
    mask = arguments.get("attention_mask")
    if mask is None and isinstance(ids, torch.Tensor):
        mask = _found_mask(ids, settings)
    call = _read(model, binding, arguments, mask)
    if isinstance(call, PassedCall):
        return call
    given = free.get("max_length"), getattr(config, "max_length", None)
    is_default = all(value is None for value in (*given, model.generation_config.max_length))
    columns = _static_columns(settings, call.ids.shape[1], is_default=is_default)
    ends = settings.eos_token_id
    return ServableGeneration(
        call,
        settings.num_beams or 1,
        max(settings.num_beams or 1, settings.num_return_sequences or 1),
        settings.prefill_chunk_size,
        columns if settings.cache_implementation == "static" else None,
        tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),),
        tuple(name for name in _SETTLED if getattr(settings, name, None) is not None),
    )


def _bound(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name; None where they do not fit: the model itself raises the best error."""
    signature = inspect.signature(function)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(name, ()):
            return None
    return arguments


def _unserved(settings: Any, arguments: Mapping[str, Any]) -> str | None:
    if settings.use_cache is False:
        return "no cache"
    mode = settings.get_generation_mode(arguments.get("assistant_model"))
    if mode not in _MODES or settings.token_healing or getattr(settings, "is_assistant", False):
        return "assisted decoding"
    if settings.cache_implementation not in (None, "dynamic", "static"):
        return "kind of cache"
    return None


def _read(
    model: Any, binding: Binding, arguments: dict[str, Any], mask: Any
) -> ServableCall | PassedCall:
    ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
    if model.training:
        return PassedCall("training")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return PassedCall("input_ids")
    if not ids.numel() or bool((ids < 0).any()):
        return PassedCall("input_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
        _check_empty(cache)
        return PassedCall("mask")
    prompts = read_prompts(ids, mask)
    if prompts is None:
        return PassedCall("padding")
    if binding.tokens_max and max(len(prompt.tokens) for prompt in prompts) > binding.tokens_max:
        return PassedCall("long rope")
    positions = arguments.get("position_ids")
    if positions is not None and not _are_plain(positions, prompts):
        return PassedCall("positions")
    _check_empty(cache)
    kinds = (DynamicCache, DepotCache, StaticCache)
    if cache is not None and (type(cache) not in kinds or cache.offloading):
        return PassedCall("kind of cache")
    return ServableCall(arguments, ids, prompts, mask, cache)


def _are_plain(positions: Any, prompts: list[PromptRow]) -> bool:
    """Whether the positions given are those that the tokens have anyway."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return False
    numbers = _token_numbers(prompts, positions.device)
    if positions.shape[1] != numbers.shape[1] or positions.shape[0] not in (1, len(prompts)):
        return False
    return bool(((positions == numbers) | (numbers < 0)).all())


def _check_empty(cache: Any) -> None:
    columns = int(cache.get_seq_length()) if isinstance(cache, Cache) and cache.layers else 0
    if columns:
        raise ModelError(
            f"the {type(cache).__name__} given holds {columns} tokens already",
            hint="give the whole conversation as input_ids and no cache: what was computed before"
            " comes from the depot",
        )


def _is_own(cache: Any) -> bool:
    """Whether a call was served with this cache before, and goes on with it now."""
    layers = cache.layers if isinstance(cache, Cache) else []
    ours = bool(layers) and isinstance(layers[-1], DepotLayer | DepotSlidingLayer)
    return ours and int(cache.get_seq_length()) > 0


def _found_mask(ids: torch.Tensor, settings: Any) -> torch.Tensor | None:
    """The mask that generate would find: padding is where the pad token is, if that is certain."""
    pad, ends = settings.pad_token_id, settings.eos_token_id
    certain = ends if isinstance(ends, list | tuple) else [ends]
    if pad is None or pad in certain or not bool((ids == pad).any()):
        return None
    mask: torch.Tensor = ids != pad
    return mask.long()


def _static_columns(settings: Any, columns: int, *, is_default: bool) -> int:
    """The room that generate would give a static cache."""
    if settings.max_new_tokens is not None:
        total = columns + int(settings.max_new_tokens)
    else:
        total = int(settings.max_length) + (columns if is_default else 0)
    return max(total - 1, columns, int(getattr(settings, "max_cache_len", None) or 0))


def read_prompts(ids: torch.Tensor, mask: torch.Tensor | None) -> list[PromptRow] | None:
    """The rows of [batch, column] token ids; None unless all padding is on the left."""
    rows = ids.detach().cpu().numpy().astype(np.int64)
    pads = [0] * len(rows)
    if mask is not None:
        seen = mask.detach().cpu().numpy() != 0
        pads = [int(row.argmax()) for row in seen]
        if not all(row[pad:].all() for row, pad in zip(seen, pads, strict=True)):
            return None
    return [PromptRow(row[pad:], pad) for row, pad in zip(rows, pads, strict=True)]


def mask_of(prompts: list[PromptRow], device: torch.device) -> torch.Tensor | None:
    """The attention mask of left-padded prompts; None where nothing is padded."""
    if not any(prompt.pad for prompt in prompts):
        return None
    return (_token_numbers(prompts, device) >= 0).long()


def positions_of(prompts: list[PromptRow], device: torch.device) -> torch.Tensor:
    """The positions of all columns: each row counts from its first token; padding is at 0."""
    return _token_numbers(prompts, device).clamp(min=0)


def _token_numbers(prompts: list[PromptRow], device: torch.device) -> torch.Tensor:
    """[row, column]: which token of its prompt; below 0 for padding."""
    columns = torch.arange(prompts[0].columns, device=device)
    return columns[None] - torch.tensor([[prompt.pad] for prompt in prompts], device=device)
