"""The layout of the bytes of a block.

A block holds N tokens of all layers of one KV group, layer-major: everything of the group's first
layer, then everything of the second, and so on. A range of layers is therefore one contiguous
range of bytes. Within a layer the order is the engine's own.

A model whose layers differ (sliding windows, chunked attention, state-space layers) has one group
for each kind, since each has its own rule of reuse: `ModelLayout` is the tuple of them.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal, get_args

from kvdepot.core.keys import encode
from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

Kind = Literal["mha", "gqa", "mla", "state", "opaque"]
DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8"]

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element. uint8 is used for opaque bytes of an engine."""

DEFAULT_BLOCK_TOKENS: Final = 256
CHUNK_BYTES_MIN: Final = 64 << 10
CHUNKS_MAX: Final = 480
"""Most checksums in the head of a record."""

_COUNT_MAX: Final = 1 << 40
_LAYERS_MAX: Final = 1 << 20
_BLOCK_BYTES_MAX: Final = 1 << 40
_SIZES: Final = ("kv_heads", "head_dim", "value_head_dim", "latent_dim", "rope_dim", "state_bytes")
_WINDOWS: Final = ("sliding_window", "attention_chunk")
_USED: Final[dict[str, tuple[str, ...]]] = {
    "mha": ("kv_heads", "head_dim", "value_head_dim"),
    "gqa": ("kv_heads", "head_dim", "value_head_dim"),
    "mla": ("latent_dim", "rope_dim"),
    "state": ("state_bytes",),
    "opaque": ("state_bytes",),
}
"""The fields of _SIZES that each kind has; the others are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of one KV group. Make it with `gqa`, `mha`, `mla`, `state` or `opaque`."""

    kind: Kind
    """mha and gqa have K and V for each head; mla one latent vector for all heads; state a snapshot
    whose size does not depend on the tokens; opaque pages whose format only the engine knows."""
    layers: int
    dtype: DType
    """Element type; for state groups that of the model."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    kv_heads: int = 0
    """K and V heads of one layer (mha, gqa)."""
    head_dim: int = 0
    """Elements of K for one head and token (mha, gqa)."""
    value_head_dim: int = 0
    """Elements of V for one head and token (mha, gqa)."""
    latent_dim: int = 0
    """kv_lora_rank: elements of the compressed K and V of one token (mla)."""
    rope_dim: int = 0
    """qk_rope_head_dim: elements of the shared rotary key that is kept with it (mla)."""
    state_bytes: int = 0
    """Bytes of one layer in a block, for any number of tokens (state, opaque)."""
    sliding_window: int | None = None
    """Number of last tokens that the layers attend to."""
    attention_chunk: int | None = None
    """The layers attend to tokens since the last multiple of this number (Llama 4)."""
    layer_ids: tuple[int, ...] = ()
    """The model's numbers of the group's layers, ascending; 0, 1, 2, ... by default."""

    def __post_init__(self) -> None:
        _check_count("layers", self.layers, 1, _LAYERS_MAX)
        ids = tuple(self.layer_ids) or tuple(range(self.layers))
        object.__setattr__(self, "layer_ids", ids)
        self._check()

    @classmethod
    def gqa(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: DType,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        value_head_dim: int | None = None,
        sliding_window: int | None = None,
        attention_chunk: int | None = None,
        layer_ids: tuple[int, ...] = (),
    ) -> "KVLayout":
        """Grouped- or multi-query attention: fewer K and V heads than query heads."""
        return cls(
            kind="gqa",
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim if value_head_dim is None else value_head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
            sliding_window=sliding_window,
            attention_chunk=attention_chunk,
            layer_ids=layer_ids,
        )

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: DType,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> "KVLayout":
        """Multi-head attention: every query head has its own K and V."""
        grouped = cls.gqa(
            layers=layers, kv_heads=heads, head_dim=head_dim, dtype=dtype, block_tokens=block_tokens
        )
        return replace(grouped, kind="mha")

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: DType,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        layer_ids: tuple[int, ...] = (),
    ) -> "KVLayout":
        """Latent attention (DeepSeek): one compressed vector for each token and layer."""
        return cls(
            kind="mla",
            layers=layers,
            latent_dim=kv_lora_rank,
            rope_dim=qk_rope_head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
            layer_ids=layer_ids,
        )

    @classmethod
    def state(
        cls,
        *,
        layers: int,
        state_bytes: int,
        dtype: DType,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        layer_ids: tuple[int, ...] = (),
    ) -> "KVLayout":
        """State-space or linear attention: the state of a layer at the end of a block."""
        return cls(
            kind="state",
            layers=layers,
            state_bytes=state_bytes,
            dtype=dtype,
            block_tokens=block_tokens,
            layer_ids=layer_ids,
        )

    @classmethod
    def opaque(
        cls, block_bytes: int, block_tokens: int, layers: int = 1, *, dtype: DType = "uint8"
    ) -> "KVLayout":
        """Layout of an engine's unconverted pages: `block_bytes` a block, split evenly over
        `layers`.
        """
        if layers < 1 or block_bytes % layers:
            raise ConfigError("layers", f"{block_bytes} bytes do not divide into {layers} layers")
        size = block_bytes // layers
        return cls(
            kind="opaque", layers=layers, state_bytes=size, dtype=dtype, block_tokens=block_tokens
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers for each token: 0 for state; rounded up for opaque."""
        if self.kind == "state":
            return 0
        if self.kind == "opaque":
            return -(-self.block_bytes // self.block_tokens)
        return self._token_layer_bytes() * self.layers

    @property
    def layer_bytes(self) -> int:
        return self.state_bytes or self._token_layer_bytes() * self.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: the size of each buffer of a put or get."""
        return self.layer_bytes * self.layers

    @property
    def chunk_bytes(self) -> int:
        """Bytes with one checksum: whole layers of at least 64 KiB; a block has
        480 chunks at most.
        """
        least = max(CHUNK_BYTES_MIN, -(-self.block_bytes // CHUNKS_MAX))
        return -(-least // self.layer_bytes) * self.layer_bytes

    @property
    def window(self) -> int | None:
        """Most tokens that these layers attend to; None if there is no limit."""
        return self.sliding_window or self.attention_chunk

    def layer_range(self, start: int, stop: int) -> tuple[int, int]:
        """Offset and length, in a block's payload, of the group's layers start <= i < stop."""
        if not 0 <= start < stop <= self.layers:
            raise ConfigError(
                "layer_range", f"{start}:{stop} is not a range of the group's {self.layers} layers"
            )
        return start * self.layer_bytes, (stop - start) * self.layer_bytes

    def shard(self, rank: int, size: int) -> "KVLayout":
        """The layout of one tensor-parallel shard.

        Heads are divided; if there are fewer heads than shards, each shard has one. A latent (mla)
        is whole on every rank. The layout is the same for every rank; the rank belongs in the
        Namespace. Raises ConfigError if the heads cannot be divided, and for more than one shard of
        state and opaque groups, which each engine divides by its own rules.
        """
        if not 0 <= rank < size:
            raise ConfigError("shard_rank", f"{rank} of {size} is not a shard")
        if size == 1 or self.kind == "mla":
            return self
        if self.kind in ("state", "opaque"):
            raise ConfigError(
                "shard_size",
                f"a group of kind {self.kind} cannot be divided into shards",
                hint="take the bytes of a layer from the engine and use KVLayout.state or opaque",
            )
        larger, smaller = max(self.kv_heads, size), min(self.kv_heads, size)
        if larger % smaller:
            raise ConfigError("shard_size", f"{self.kv_heads} kv heads do not divide by {size}")
        return replace(self, kv_heads=max(1, self.kv_heads // size))

    def canonical(self) -> bytes:
        """Encode the layout for the namespace's digest. Equal layouts have equal bytes."""
        return encode(self._values())

    def description(self) -> dict[str, Any]:
        """The fields as values for JSON; the inverse of `from_description`."""
        return dict(self._values()) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> "KVLayout":
        """Make a layout from a `description`. Raises ConfigError if it is malformed."""
        try:
            return cls(**{**fields, "layer_ids": tuple(fields["layer_ids"])})
        except (TypeError, KeyError) as error:
            raise ConfigError("layout", f"invalid description: {error}") from error

    def _values(self) -> tuple[tuple[str, Any], ...]:
        names = ("kind", "layers", "dtype", "block_tokens", *_SIZES, *_WINDOWS, "layer_ids")
        return tuple((name, getattr(self, name)) for name in names)

    def _token_layer_bytes(self) -> int:
        elements = self.kv_heads * (self.head_dim + self.value_head_dim)
        return (elements + self.latent_dim + self.rope_dim) * DTYPE_BYTES[self.dtype]

    def _check(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError("kind", f"{self.kind!r} is not one of {', '.join(get_args(Kind))}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("dtype", f"{self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        used = _USED[self.kind]
        for name in ("block_tokens", *used):
            _check_count(name, getattr(self, name), 0 if name == "rope_dim" else 1)
        for name in _SIZES:
            if name not in used and getattr(self, name) != 0:
                raise ConfigError(name, f"has no meaning for a group of kind {self.kind}")
        self._check_windows()
        self._check_layer_ids()
        if self.block_bytes > _BLOCK_BYTES_MAX:
            raise ConfigError(
                "block_tokens", f"a block would have {format_bytes(self.block_bytes)}"
            )

    def _check_windows(self) -> None:
        for name in _WINDOWS:
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
                if self.kind == "state":
                    raise ConfigError(name, "has no meaning for a group of kind state")
        if self.sliding_window and self.attention_chunk:
            raise ConfigError("attention_chunk", "excludes sliding_window")

    def _check_layer_ids(self) -> None:
        ids = self.layer_ids
        for number in ids:
            _check_count("layer_ids", number, 0)
        if len(ids) != self.layers:
            raise ConfigError("layer_ids", f"has {len(ids)} numbers for {self.layers} layers")
        if any(left >= right for left, right in pairwise(ids)):
            raise ConfigError("layer_ids", "must be ascending, each layer once")


def _check_count(name: str, value: object, least: int, most: int = _COUNT_MAX) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(name, f"must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise ConfigError(name, f"must be between {least} and {most}, got {value}")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All KV groups of a model. Every group has the same block_tokens."""

    groups: tuple[KVLayout, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("groups", "a model has at least one kv group")
        if len({group.block_tokens for group in self.groups}) != 1:
            raise ConfigError("block_tokens", "must be the same for all groups of a model")

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def bytes_per_token(self) -> int:
        """Bytes of each further token of a long context: those of full-attention groups."""
        return sum(group.bytes_per_token for group in self.groups if group.window is None)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of each group together."""
        return sum(group.block_bytes for group in self.groups)

    def context_bytes(self, tokens: int) -> int:
        """Bytes needed to continue a context of `tokens` tokens.

        All tokens of full-attention groups, at most the window of others, one snapshot of each
        state group (none for an empty context).
        """
        total = 0
        for group in self.groups:
            if group.kind == "state":
                total += group.block_bytes if tokens else 0
            else:
                total += group.bytes_per_token * min(tokens, group.window or tokens)
        return total
