"""A model bound to a depot: its groups of layers, their namespaces, and the signs of its identity.

A group is layers that are kept and reused alike. Layers of full attention need every block of a
prefix. Layers that see a window need only the blocks that reach into it, so the blocks of such a
group have no parents: none is worth less without another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

import kvdepot
from kvdepot.adapters.hf.identity import Signs, model_fingerprint, signs_of, tuner_layers
from kvdepot.adapters.hf.probe import LayerShape, probe
from kvdepot.adapters.tensors.kvtensors import DTYPES
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot, NamespaceHandle
from kvdepot.core.keys import TokenIds, without_link
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ConfigError, ModelError

AXES: Final = "batch head token dim"
"""The axes of a layer's K and V in transformers' caches."""
ORDER: Final = "kv head token dim"
"""Order of the axes in one layer of a block: the order they have in transformers' caches."""
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 256
_BLOCK_BYTES: Final = 1 << 20
_DTYPES: Final = {dtype: name for dtype, name in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `attach` was given."""

    name: str | None = None
    revision: str | None = None
    tenant: str = ""
    secret: bytes | None = None
    block_tokens: int | None = None
    timeout_s: float | None = None
    audit: AuditConfig = field(default_factory=AuditConfig)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and shape, and the namespace that their blocks are in."""

    shape: LayerShape
    """Of any of its layers."""
    layers: tuple[int, ...]
    """Where they are in the model's cache."""
    space: NamespaceHandle

    @property
    def window(self) -> int | None:
        """Tokens that the layers see; None: all."""
        return self.shape.window

    @property
    def block_tokens(self) -> int:
        return self.space.layout.block_tokens

    def keys(self, token_ids: TokenIds) -> list[BlockKey]:
        """One key for each full block. Without parents for a window: each is evicted by itself."""
        keys = self.space.keys(token_ids)
        return keys if self.window is None else [without_link(key) for key in keys]

    def needed(self, tokens: int) -> range:
        """The blocks without which a model cannot go on after `tokens` tokens."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // self.block_tokens, -(-tokens // self.block_tokens))

    def empty(self, batch: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.empty_layer(batch, tokens) for _ in self.layers]

    def empty_layer(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors for K and V of one layer, not filled."""
        shape = self.shape
        kind: Any = {"dtype": shape.dtype, "device": shape.device}
        keys = torch.empty((batch, shape.key_heads, tokens, shape.key_dim), **kind)
        return keys, torch.empty((batch, shape.value_heads, tokens, shape.value_dim), **kind)


@dataclass(frozen=True, slots=True)
class Binding:
    """One model in one state. Another state is another binding."""

    groups: tuple[LayerGroup, ...]
    windows: tuple[int | None, ...]
    """Of each layer of the model's cache; None: full attention."""
    device: torch.device
    tokens_max: int | None
    """Beyond this many tokens the K of a token depends on those after it (dynamic rope scaling)."""
    relative: bool
    """Positions enter as rotations only: shifting all of them changes nothing."""
    tuners: tuple[torch.nn.Module, ...]
    signs: Signs
    producer: str
    """What computes the blocks, in words."""

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Whether the model is in the state that this binding is of, as far as signs show."""
        return signs_of(model, self.tuners) == self.signs


def bind(model: PreTrainedModel, store: Depot, options: Options) -> Binding:
    """Find out what the model is and register its groups. Raises ModelError if it cannot be."""
    shapes = probe(model)
    layers = _by_kind(shapes)
    block_tokens = options.block_tokens or _default_block_tokens(layers)
    tuners = tuple(tuner_layers(model))
    # Before the weights are read: what is written meanwhile shows at the next look.
    signs = signs_of(model, tuners)
    identity = model_fingerprint(model, options.revision)
    # Weights that are fingerprinted need no telling name, and may move to another folder.
    path = str(getattr(model.config, "_name_or_path", "") or "")
    default_name = path if options.revision is not None and path else type(model).__name__
    groups = [
        LayerGroup(
            group[0],
            tuple(shape.index for shape in group),
            store.namespace(
                model=options.name or default_name,
                layout=_layout(group, block_tokens),
                tenant=options.tenant,
                secret=options.secret,
                fingerprint=identity,
                extra=_extra(group),
            ),
        )
        for group in layers
    ]
    producer = _producer(model, shapes[0], identity)
    number = store.audits.producer(producer)
    for group in groups:
        group.space.made_by(number)
    return Binding(
        tuple(groups),
        tuple(shape.window for shape in shapes),
        shapes[0].device,
        _tokens_max(model.config),
        bool(getattr(model.config, "rope_parameters", None)),
        tuners,
        signs,
        producer,
    )


def _producer(model: PreTrainedModel, shape: LayerShape, identity: str) -> str:
    """For people: what the namespace leaves out, since it does not change what KV means."""
    kernels = getattr(model.config, "_attn_implementation", None) or "unknown"
    parts = (
        f"transformers {transformers.__version__}",
        f"torch {torch.__version__}",
        f"kvdepot {kvdepot.__version__}",
        f"attention {kernels}",
        f"{shape.dtype} on {shape.device.type}".removeprefix("torch."),
        f"model {identity[:16]}",
    )
    return ", ".join(parts)


def _by_kind(shapes: Sequence[LayerShape]) -> list[list[LayerShape]]:
    """Layers that belong to one group together, groups by their first layer."""
    groups: dict[LayerShape, list[LayerShape]] = {}
    for shape in shapes:
        groups.setdefault(replace(shape, index=0), []).append(shape)
    return list(groups.values())


def _default_block_tokens(groups: Sequence[Sequence[LayerShape]]) -> int:
    """The smallest power of two whose blocks have a MiB, which is large enough for a disk."""
    full = [group for group in groups if group[0].window is None] or groups
    token_bytes = sum(_token_bytes(shape) for group in full for shape in group)
    tokens = BLOCK_TOKENS_MIN
    while tokens < BLOCK_TOKENS_MAX and tokens * token_bytes < _BLOCK_BYTES:
        tokens *= 2
    return tokens


def _layout(layers: Sequence[LayerShape], block_tokens: int) -> KVLayout:
    shape = layers[0]
    if shape.dtype not in _DTYPES:
        raise ModelError(
            f"layer {shape.index} keeps K and V as {str(shape.dtype).removeprefix('torch.')}",
            hint=f"load the model as one of {', '.join(sorted(_DTYPES.values()))}",
        )
    try:
        if shape.key_heads != shape.value_heads:
            nbytes = sum(_token_bytes(layer) for layer in layers) * block_tokens
            return KVLayout.opaque(nbytes, block_tokens, len(layers), dtype=_DTYPES[shape.dtype])
        return KVLayout.gqa(
            layers=len(layers),
            kv_heads=shape.key_heads,
            head_dim=shape.key_dim,
            value_head_dim=shape.value_dim,
            dtype=_DTYPES[shape.dtype],
            block_tokens=block_tokens,
            sliding_window=shape.window,
            layer_ids=tuple(layer.index for layer in layers),
        )
    except ConfigError as error:
        raise ModelError(f"the model's KV has no layout: {error}") from error


def _extra(layers: Sequence[LayerShape]) -> tuple[tuple[str, str], ...]:
    """What else the bytes depend on, for the namespace."""
    shape = layers[0]
    return (
        ("engine", "transformers 5"),
        ("order", ORDER),
        ("layers", ",".join(str(layer.index) for layer in layers)),
        ("window", str(shape.window)),
        ("keys", f"{shape.key_heads}x{shape.key_dim}"),
        ("values", f"{shape.value_heads}x{shape.value_dim}"),
    )


def _token_bytes(shape: LayerShape) -> int:
    elements = shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    return elements * shape.dtype.itemsize


def _tokens_max(config: Any) -> int | None:
    limits = []
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            known = (
                rope.get("original_max_position_embeddings"),
                getattr(config, "original_max_position_embeddings", None),
                getattr(config, "max_position_embeddings", None),
            )
            limits += [int(limit) for limit in known if limit]
    # At the limit itself the model may still use the rotation of a longer sequence before.
    return min(limits) - 1 if limits else None


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All descriptions of a rotation: there may be one for each layer type."""
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _ropes(value)
