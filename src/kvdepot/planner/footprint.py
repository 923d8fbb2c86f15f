"""The size of a model's KV: by token, block, context and user, in memory and as stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DTYPE_BYTES, DType, KVLayout, ModelLayout
from kvdepot.errors import ConfigError
from kvdepot.planner.models import Model

CODEC_BITS: Final[Mapping[str, float]] = {"fp8": 8.0, "int8": 8.125, "int4": 4.5}
"""Bits of one stored element. int8 has a 16-bit scale for each 128 elements, int4 for each 32."""
RAW: Final = "raw"
TP_SIZES: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class StorageCodec:
    """The compression of stored KV. States are not compressed."""

    name: str
    bits: float | None = None
    """Bits of one element; None for a codec with a ratio."""
    ratio: float = 1.0

    def stored_bytes(self, group: KVLayout, nbytes: float) -> float:
        """The stored size of `nbytes` of `group`, at most `nbytes`."""
        if group.kind == "state":
            return nbytes
        if self.bits is not None:
            return nbytes * min(1.0, self.bits / (8 * DTYPE_BYTES[group.dtype]))
        return nbytes / self.ratio


def find_codec(text: str) -> StorageCodec:
    """`raw`, one of CODEC_BITS, or a measured ratio such as 1.4."""
    if text == RAW:
        return StorageCodec(RAW)
    if text in CODEC_BITS:
        return StorageCodec(text, bits=CODEC_BITS[text])
    try:
        ratio = float(text)
    except ValueError as error:
        known = ", ".join((RAW, *CODEC_BITS))
        raise ConfigError("codec", f"{text!r} is not {known} or a ratio such as 1.4") from error
    if not 1.0 <= ratio <= 100.0:
        raise ConfigError("codec", f"a ratio is between 1 and 100, got {text}")
    return StorageCodec(text, ratio=ratio)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The KV of one model, as laid out and stored."""

    layout: ModelLayout
    codec: StorageCodec = StorageCodec(RAW)
    tp: int = 1
    """Tensor-parallel shards."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that prefill writes for a token, in all attention layers."""
        return sum(group.bytes_per_token for group in self.layout.groups)

    @property
    def growth_bytes_per_token(self) -> int:
        """Bytes that a token adds to a long context; layers with windows do not grow."""
        return self.layout.bytes_per_token

    @property
    def stored_bytes_per_token(self) -> float:
        groups = self.layout.groups
        return sum(self.codec.stored_bytes(group, group.bytes_per_token) for group in groups)

    @property
    def state_bytes(self) -> int:
        """One snapshot of the state-space layers."""
        return sum(group.block_bytes for group in self.layout.groups if group.kind == "state")

    @property
    def gpu_bytes_per_token(self) -> int:
        """Bytes that prefill writes for a token on one GPU of `tp`. A latent is whole on each."""
        attention = [group for group in self.layout.groups if group.kind != "state"]
        return sum(group.shard(0, self.tp).bytes_per_token for group in attention)

    def context_bytes(self, tokens: int) -> int:
        """Bytes that are needed to continue after `tokens` tokens."""
        return self.layout.context_bytes(tokens)

    def stored_context_bytes(self, tokens: int) -> float:
        total = 0.0
        for group in self.layout.groups:
            total += self.codec.stored_bytes(group, ModelLayout((group,)).context_bytes(tokens))
        return total


def footprint_of(
    model: Model,
    *,
    dtype: DType | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    codec: str = RAW,
    tp: int = 1,
) -> Footprint:
    """Raises ConfigError for an invalid config, codec or number of shards."""
    if tp < 1:
        raise ConfigError("tp", f"must be at least 1, got {tp}")
    layout = model.layout(dtype=dtype, block_tokens=block_tokens)
    footprint = Footprint(layout, find_codec(codec), tp)
    try:
        footprint.gpu_bytes_per_token  # noqa: B018  raises for heads that do not divide
    except ConfigError as error:
        reason = str(error).removeprefix(f"{error.path}: ")
        fitting = [size for size in TP_SIZES if _divides(footprint.layout, size)]
        hint = f"{', '.join(map(str, fitting))} work for this model" if fitting else error.hint
        raise ConfigError("tp", reason, hint=hint) from error
    return footprint


def _divides(layout: ModelLayout, tp: int) -> bool:
    try:
        Footprint(layout, tp=tp).gpu_bytes_per_token  # noqa: B018
    except ConfigError:
        return False
    return True
