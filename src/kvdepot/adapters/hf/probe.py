"""Finds out what a model's cache consists of, by three short forwards.

The first shows the kind and the shapes of every layer. The second has other tokens at its end, and
must leave K and V of the first tokens unchanged: a prefix must not depend on what follows it. The
third continues from a cache that was rebuilt from K and V alone, and must give the same logits as
the original: the model must not keep anything else.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvdepot.adapters.hf.caches import DepotCache
from kvdepot.errors import ModelError

_FIRST: Final = 5
_THEN: Final = 3
"""Tokens of the two steps of the trial."""
_SAME: Final = 3
"""Tokens of the first step that do not change when the others do."""
_CLOSE: Final = 1e-3
"""The greatest difference between equal results, relative to the largest value."""
_HINT: Final = "use the model without a depot; see docs/transformers.md for what can be served"
_TRIAL_ERRORS: Final = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one layer of a model's cache."""

    window: int | None
    """Tokens that the layer sees, itself included; None: all."""
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


def probe(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """The layers of the model's cache. Raises ModelError if it cannot be served."""
    _check_kind(model)
    name, training = type(model).__name__, model.training
    model.train(False)
    try:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            for index, layer in enumerate(cache.layers):
                _check_type(index, layer)
            _step(model, cache, 0, _FIRST)
            shapes = tuple(_shape(index, layer) for index, layer in enumerate(cache.layers))
            if not shapes:
                raise ModelError(f"{name} has no layers with K and V", hint=_HINT)
            _check_causal(model, cache)
            _check_rebuilt(model, cache, shapes)
    finally:
        model.train(training)
    return shapes


def _check_kind(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{name} is not a transformers model",
            hint="attach the PreTrainedModel itself, before torch.compile; for a PEFT model its"
            " get_base_model(), which contains the adapters",
        )
    config = model.config
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model", hint=_HINT)
    if config.get_text_config(decoder=True) is not config:
        raise ModelError(
            f"{name} takes more than text: token ids do not determine its KV",
            hint="attach the text model, such as AutoModelForCausalLM makes from the text config",
        )
    if not model.can_generate():
        raise ModelError(f"{name} does not generate text", hint=_HINT)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None):
        raise ModelError(
            f"{name} has layers with chunked attention, whose cache in transformers does not start"
            " at a chunk",
            hint=_HINT,
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ModelError(
            f"{name} is spread over several devices: {', '.join(sorted(devices))}",
            hint="load it onto one device",
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ModelError(f"{name} is sharded over processes", hint="use one process")


def _check_type(index: int, layer: object) -> None:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ModelError(
            f"layer {index} of the model has a {type(layer).__name__}, not K and V of every token:"
            " it cannot be cut into blocks",
            hint=_HINT,
        )


def _step(
    model: PreTrainedModel, cache: Cache, start: int, count: int, changed_from: int | None = None
) -> torch.Tensor:
    """Run tokens through the model. Returns the logits of the last one."""
    name, embeddings = type(model).__name__, model.get_input_embeddings()
    ids = torch.arange(start, start + count, device=model.device)
    if changed_from is not None:
        ids[changed_from:] += count
    ids %= len(embeddings.weight)  # type: ignore[arg-type]
    try:
        output: Any = model(input_ids=ids[None], past_key_values=cache, use_cache=True)
        filled = output.past_key_values
    except _TRIAL_ERRORS as error:
        reason = f"{name} does not take a cache of transformers: {error}"
        raise ModelError(reason, hint=_HINT) from error
    if filled is not cache or cache.get_seq_length() != start + count:
        raise ModelError(f"{name} does not keep its KV in the cache given", hint=_HINT)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def _shape(index: int, layer: Any) -> LayerShape:
    _check_type(index, layer)
    keys, values = layer.keys, layer.values
    if keys is None or keys.ndim != 4 or values.ndim != 4:
        raise ModelError(
            f"layer {index} of the model leaves its cache empty, or not as [batch, head, token,"
            " dim]",
            hint=_HINT,
        )
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    key, value = keys.shape, values.shape
    return LayerShape(window, key[1], key[3], value[1], value[3], keys.dtype, keys.device)


def _check_causal(model: PreTrainedModel, cache: DynamicCache) -> None:
    """K and V of a token must not depend on those after it."""
    other = DynamicCache(config=model.config)
    _step(model, other, 0, _FIRST, changed_from=_SAME)
    for layer, changed in zip(cache.layers, other.layers, strict=True):
        for plane in ("keys", "values"):
            expected, found = getattr(layer, plane), getattr(changed, plane)
            if expected.shape[-2] == _FIRST and not _close(
                expected[:, :, :_SAME].float(), found[:, :, :_SAME].float()
            ):
                raise ModelError(
                    f"in {type(model).__name__} tokens see those that follow them: the KV of a"
                    " prefix depends on the whole prompt",
                    hint=_HINT,
                )


def _check_rebuilt(
    model: PreTrainedModel, cache: DynamicCache, shapes: tuple[LayerShape, ...]
) -> None:
    """A continuation from K and V alone must equal one from the cache itself."""
    rebuilt = DepotCache([shape.window for shape in shapes])
    layers: list[Any] = list(cache.layers)
    for target, layer in zip(rebuilt.depot_layers, layers, strict=True):
        target.fill((layer.keys.clone(), layer.values.clone()), _FIRST)
    expected = _step(model, cache, _FIRST, _THEN)
    if not _close(expected, _step(model, rebuilt, _FIRST, _THEN)):
        name = type(model).__name__
        raise ModelError(f"{name} depends on more than the K and V in its cache", hint=_HINT)


def _close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    apart, largest = (expected - found).abs().max(), expected.abs().max()
    return bool(apart <= _CLOSE * largest.clamp(min=1e-6))
