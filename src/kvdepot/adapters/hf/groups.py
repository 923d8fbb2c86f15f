"""The KV groups of a model: layers that are kept and reused alike, each group with its own blocks.

Layers of full attention need every block of a prefix. Layers that see a window need only the blocks
that reach into it, so the blocks of such a group stand alone: none is worth less without another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvdepot.adapters.hf.probe import LayerShape
from kvdepot.core.block import LINK_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.keys import ROOT_LINK, TokenIds
from kvdepot.core.layout import DType, KVLayout
from kvdepot.errors import ConfigError, ModelError

ORDER: Final = "kv head token dim"
"""Order of the axes in one layer of a block: the order they have in transformers' caches."""
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 256
_BLOCK_BYTES: Final = 1 << 20
_DTYPES: Final[dict[torch.dtype, DType]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Group:
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
        """One key for each full block. A window's blocks have no parent."""
        keys = self.space.keys(token_ids)
        return keys if self.window is None else [unchained(key) for key in keys]

    def needed(self, tokens: int) -> range:
        """The blocks without which a model cannot go on after `tokens` tokens."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // self.block_tokens, -(-tokens // self.block_tokens))

    def empty(self, batch: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New tensors for K and V of its layers, not filled."""
        return [self.empty_layer(batch, tokens) for _ in self.layers]

    def empty_layer(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors for K and V of one layer, not filled."""
        shape = self.shape
        keys = (batch, shape.key_heads, tokens, shape.key_dim)
        values = (batch, shape.value_heads, tokens, shape.value_dim)
        return (
            torch.empty(keys, dtype=shape.dtype, device=shape.device),
            torch.empty(values, dtype=shape.dtype, device=shape.device),
        )


def unchained(key: BlockKey) -> BlockKey:
    """The key of the same block as one that follows no other: it can be evicted by itself."""
    return BlockKey(key[:TAG_BYTES] + ROOT_LINK + key[TAG_BYTES + LINK_BYTES :])


def sort_layers(shapes: Sequence[LayerShape]) -> list[tuple[LayerShape, ...]]:
    """Layers that belong to one group together, groups by their first layer."""
    groups: dict[tuple[object, ...], list[LayerShape]] = {}
    for shape in shapes:
        kind = (
            shape.window,
            (shape.key_heads, shape.key_dim),
            (shape.value_heads, shape.value_dim),
            shape.dtype,
        )
        groups.setdefault(kind, []).append(shape)
    return [tuple(group) for group in groups.values()]


def default_block_tokens(groups: Sequence[Sequence[LayerShape]]) -> int:
    """The smallest power of two whose blocks are worth a disk's while: a MiB a block."""
    full = [group for group in groups if group[0].window is None] or groups
    token_bytes = sum(_token_bytes(shape) for group in full for shape in group)
    tokens = BLOCK_TOKENS_MIN
    while tokens < BLOCK_TOKENS_MAX and tokens * token_bytes < _BLOCK_BYTES:
        tokens *= 2
    return tokens


def layout_of(layers: Sequence[LayerShape], block_tokens: int) -> KVLayout:
    """What a block of these layers, all of one group, is."""
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


def extra_of(layers: Sequence[LayerShape]) -> tuple[tuple[str, str], ...]:
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
