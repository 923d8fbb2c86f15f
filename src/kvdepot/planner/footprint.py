"""How large the KV of a model is: by token, block, context and user, in memory and as stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DTYPE_BYTES, DType, KVLayout, ModelLayout
from kvdepot.errors import ConfigError
from kvdepot.planner.models import Model

CODEC_BITS: Final[Mapping[str, float]] = {"fp8": 8.0, "int8": 8.125, "int4": 4.5}
"""Bits of one stored element. int8: a 16-bit scale for each 128 elements; int4: for each 32."""
RAW: Final = "raw"
TP_SIZES: Final = (1, 2, 4, 8, 16)
EXISTING_CODECS: Final = (RAW,)
"""Those that a store has; the others are there to compare with."""


@dataclass(frozen=True, slots=True)
class StorageCodec:
    """How much smaller stored KV is than KV in use. States are stored as they are."""

    name: str
    bits: float | None = None
    """Of one element; None for a codec that is known by its ratio."""
    ratio: float = 1.0

    def stored_bytes(self, group: KVLayout, nbytes: float) -> float:
        """What `nbytes` of `group` become; never more than they were."""
        if group.kind == "state":
            return nbytes
        if self.bits is not None:
            return nbytes * min(1.0, self.bits / (8 * DTYPE_BYTES[group.dtype]))
        return nbytes / self.ratio


def find_codec(text: str) -> StorageCodec:
    """`raw`, one of CODEC_BITS, or a ratio such as 1.4, as measured on one's own data."""
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


def existing_codec(text: str) -> str:
    """`text` where kvdepot stores blocks so. ConfigError for codecs that can only be imagined."""
    find_codec(text)
    if text not in EXISTING_CODECS:
        raise ConfigError(
            "codec",
            f"{text} cannot be bought: kvdepot stores blocks as they are ({RAW})",
            hint=f"kvdepot size --codec {text} shows what it would save",
        )
    return text


@dataclass(frozen=True, slots=True)
class Footprint:
    """The KV of one model, as laid out and stored."""

    layout: ModelLayout
    codec: StorageCodec = StorageCodec(RAW)
    tp: int = 1
    """Tensor-parallel shards."""

    @property
    def bytes_per_token(self) -> int:
        """What prefill writes for a token: every attention layer, windows or not."""
        return sum(group.bytes_per_token for group in self.layout.groups)

    @property
    def growth_bytes_per_token(self) -> int:
        """What a token adds to a long context: layers with windows forget as much."""
        return self.layout.bytes_per_token

    @property
    def stored_bytes_per_token(self) -> float:
        groups = self.layout.groups
        return sum(self.codec.stored_bytes(group, group.bytes_per_token) for group in groups)

    @property
    def state_bytes(self) -> int:
        """State-space layers' snapshot; one for each block boundary that is kept."""
        return sum(group.block_bytes for group in self.layout.groups if group.kind == "state")

    @property
    def gpu_bytes_per_token(self) -> int:
        """What prefill writes for a token on one GPU of `tp`. A latent is whole on each."""
        attention = [group for group in self.layout.groups if group.kind != "state"]
        return sum(group.shard(0, self.tp).bytes_per_token for group in attention)

    def context_bytes(self, tokens: int) -> int:
        """What must be there to go on after `tokens` tokens."""
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
    """Raises ConfigError for a config, codec or number of shards that does not work."""
    if tp < 1:
        raise ConfigError("tp", f"must be at least 1, got {tp}")
    found = Footprint(model.layout(dtype=dtype, block_tokens=block_tokens), find_codec(codec), tp)
    try:
        found.gpu_bytes_per_token  # noqa: B018  heads that do not divide are told now
    except ConfigError as error:
        reason = str(error).removeprefix(f"{error.path}: ")
        fitting = [size for size in TP_SIZES if _divides(found.layout, size)]
        hint = f"{', '.join(map(str, fitting))} work for this model" if fitting else error.hint
        raise ConfigError("tp", reason, hint=hint) from error
    return found


def _divides(layout: ModelLayout, tp: int) -> bool:
    try:
        Footprint(layout, tp=tp).gpu_bytes_per_token  # noqa: B018
    except ConfigError:
        return False
    return True
