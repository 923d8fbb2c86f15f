"""A model bound to a depot: its groups of layers, their namespaces, and the signs of its identity.

Layers of one group are kept and reused together. Layers of full attention need every block of a
prefix. Layers with a window need only the blocks that reach into it, so the blocks of such a group
have no parents and are evicted independently.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

import kvdepot
from kvdepot.adapters.hf.caches import KV
from kvdepot.adapters.hf.identity import Signs, model_fingerprint, signs_of, tuner_layers
from kvdepot.adapters.hf.probe import LayerShape, probe
from kvdepot.adapters.tensors.kvtensors import DTYPES
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.keys import TokenIds, without_link
from kvdepot.core.layout import KVLayout
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError, ModelError

AXES: Final = "batch head token dim"
"""The axes of a layer's K and V in transformers' caches."""
ORDER: Final = "head token dim"
"""The order of the axes within K or V of one layer of a block."""
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 256
_BLOCK_BYTES: Final = 1 << 20
_DTYPES: Final = {dtype: name for dtype, name in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `attach`."""

    name: str | None
    revision: str | None
    tenant: str
    secret: bytes | None
    block_tokens: int | None
    timeout_s: float | None
    audit: AuditConfig


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and shape, and the namespace of their blocks."""

    shape: LayerShape
    layers: tuple[int, ...]
    """Their indices in the model's cache."""
    space: NamespaceHandle

    @property
    def window(self) -> int | None:
        """Tokens that the layers see; None: all."""
        return self.shape.window

    @property
    def block_tokens(self) -> int:
        return self.space.layout.block_tokens

    def keys(self, token_ids: TokenIds) -> list[BlockKey]:
        """One key for each full block; without parents for a window."""
        keys = self.space.keys(token_ids)
        return keys if self.window is None else [without_link(key) for key in keys]

    def needed(self, tokens: int) -> range:
        """The blocks that the model needs to continue after `tokens` tokens."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // self.block_tokens, -(-tokens // self.block_tokens))

    def empty_layer(self, batch: int, tokens: int) -> KV:
        """New tensors for K and V of one layer, not filled."""
        shape = self.shape
        kind: Any = {"dtype": shape.dtype, "device": shape.device}
        keys = torch.empty((batch, shape.key_heads, tokens, shape.key_dim), **kind)
        return keys, torch.empty((batch, shape.value_heads, tokens, shape.value_dim), **kind)


@dataclass(frozen=True, slots=True)
class Binding:
    """One model in one state. A model that changes gets another binding."""

    groups: tuple[LayerGroup, ...]
    windows: tuple[int | None, ...]
    """The window of each layer of the model's cache; None: full attention."""
    device: torch.device
    tokens_max: int | None
    """Beyond this many tokens the K of a token depends on later tokens (dynamic rope scaling)."""
    relative: bool
    """Positions enter as rotations only, so a shift of all positions changes nothing."""
    tuners: tuple[torch.nn.Module, ...]
    signs: Signs
    producer: str

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Returns True if the model is in the state of this binding, as far as signs show."""
        return signs_of(model, self.tuners) == self.signs


def bind(model: PreTrainedModel, store: Depot, options: Options) -> Binding:
    """Find out what the model consists of, and register its groups. Raises ModelError if the model
    cannot be served."""
    shapes = probe(model)
    kinds: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(shapes):
        kinds.setdefault(shape, []).append(index)
    block_tokens = options.block_tokens or _default_block_tokens(kinds)
    tuners = tuple(tuner_layers(model))
    # Before the weights are read: a write meanwhile shows at the next call.
    signs = signs_of(model, tuners)
    identity = model_fingerprint(model, options.revision)
    # A fingerprint of the weights identifies them alone: the folder's name may change.
    path = str(getattr(model.config, "_name_or_path", "") or "")
    default_name = path if options.revision is not None and path else type(model).__name__
    groups = []
    for shape, layers in kinds.items():
        space = store.namespace(
            model=options.name or default_name,
            layout=_layout(shape, layers, block_tokens),
            tenant=options.tenant,
            secret=options.secret,
            fingerprint=identity,
            extra=(
                ("engine", "transformers 5"),
                ("order", ORDER),
                ("layers", ",".join(map(str, layers))),
                ("window", str(shape.window)),
                ("keys", f"{shape.key_heads}x{shape.key_dim}"),
                ("values", f"{shape.value_heads}x{shape.value_dim}"),
            ),
        )
        groups.append(LayerGroup(shape, tuple(layers), space))
    producer = _producer(model, shapes[0], identity)
    number = store.audits.producer(producer)
    for group in groups:
        group.space.made_by(number)
    return Binding(
        groups=tuple(groups),
        windows=tuple(shape.window for shape in shapes),
        device=shapes[0].device,
        tokens_max=_tokens_max(model.config),
        relative=bool(getattr(model.config, "rope_parameters", None)),
        tuners=tuners,
        signs=signs,
        producer=producer,
    )


def _producer(model: PreTrainedModel, shape: LayerShape, identity: str) -> str:
    """A description for display, of facts that do not change KV and are in no namespace."""
    kernels = getattr(model.config, "_attn_implementation", None) or "unknown"
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"kvdepot {kvdepot.__version__}, attention {kernels}, "
        f"{str(shape.dtype).removeprefix('torch.')} on {shape.device.type}, model {identity[:16]}"
    )


def _default_block_tokens(kinds: dict[LayerShape, list[int]]) -> int:
    """The smallest power of two whose blocks have a MiB, which is large enough for a disk."""
    full = [shape for shape in kinds if shape.window is None] or list(kinds)
    token_bytes = sum(_token_bytes(shape) * len(kinds[shape]) for shape in full)
    tokens = BLOCK_TOKENS_MIN
    while tokens < BLOCK_TOKENS_MAX and tokens * token_bytes < _BLOCK_BYTES:
        tokens *= 2
    return tokens


def _layout(shape: LayerShape, layers: list[int], block_tokens: int) -> KVLayout:
    if shape.dtype not in _DTYPES:
        raise ModelError(
            f"layer {layers[0]} keeps K and V as {str(shape.dtype).removeprefix('torch.')}",
            hint=f"load the model as one of {', '.join(sorted(_DTYPES.values()))}",
        )
    dtype = _DTYPES[shape.dtype]
    try:
        if shape.key_heads != shape.value_heads:
            nbytes = _token_bytes(shape) * len(layers) * block_tokens
            return KVLayout.opaque(nbytes, block_tokens, len(layers), dtype=dtype)
        return KVLayout.gqa(
            layers=len(layers),
            kv_heads=shape.key_heads,
            head_dim=shape.key_dim,
            value_head_dim=shape.value_dim,
            dtype=dtype,
            block_tokens=block_tokens,
            sliding_window=shape.window,
            layer_ids=tuple(layers),
        )
    except ConfigError as error:
        raise ModelError(f"the model's KV has no layout: {error}") from error


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
    # At the limit itself the model may still use the rotation of an earlier, longer sequence.
    return min(limits) - 1 if limits else None


def _ropes(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All descriptions of a rotation: there may be one for each layer type."""
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _ropes(value)
