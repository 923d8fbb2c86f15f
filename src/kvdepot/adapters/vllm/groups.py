"""vLLM's KV groups: what of each a prompt needs to go on from a boundary, and which are refused.

Full attention needs all blocks before the boundary, a sliding window or a chunk of local attention
the last ones, a state-space or linear-attention layer the state at the boundary itself. Layers of
one group whose caches have different shapes (as latent attention and its indexer) are groups of
their own here: same pages, other bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvdepot.adapters.vllm.config import SETTING, ConnectorConfig
from kvdepot.errors import ConfigError, ModelError

GroupKind = Literal["full", "window", "chunk", "state"]
_KINDS: Final[dict[str, GroupKind]] = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}
"""By the class in vLLM that a group's spec is derived from."""
_REFUSED: Final = ("RSWASpec", "HiddenStateCacheSpec", "CircularBufferSpec")
"""Derived from the above, with pages that follow other rules."""
_LEFT_ALONE: Final = ("EncoderOnlyAttentionSpec",)
"""Nothing of these is kept from one step to the next."""
_CHECKPOINT_SPANS: Final = 4
_CHECKPOINT_TOKENS_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What of one group a prompt needs."""

    kind: GroupKind
    table: int
    """Which of vLLM's lists of block ids is this group's."""
    page_tokens: int
    span_tokens: int = 0
    """Of a window or a chunk; kept before the end of a window are also `kept_tokens`."""
    kept_tokens: int = 0
    handed_over: bool = False
    """vLLM names the pages of states, at the boundaries where there are any."""

    def first_token(self, stop: int) -> int:
        """The first token whose KV is needed to go on from the token `stop`."""
        if self.kind == "window":
            return max(0, stop - self.span_tokens + 1 - self.kept_tokens)
        if self.kind == "chunk":
            return stop - stop % self.span_tokens
        return max(0, stop - 1) if self.kind == "state" else 0


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Layers of vLLM that share one rule."""

    rule: GroupRule
    layer_names: tuple[str, ...]
    spec: str
    """The name of vLLM's class."""
    layer_specs: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own of each layer."""


def layer_groups(cache: Any) -> list[EngineGroup]:
    """The groups of a model, those with full attention first; ModelError if one cannot be served.

    `cache` is vLLM's KVCacheConfig.
    """
    found = []
    for table, group in enumerate(cache.kv_cache_groups):
        spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
        bases = [base.__name__ for base in type(spec).__mro__]
        if not getattr(group, "enable_kv_transfer", True) or set(bases) & set(_LEFT_ALONE):
            continue
        rule = _rule(table, group.kv_cache_spec, spec, bases)
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs = {name: each.get(name, spec) for name in group.layer_names}
        found.append(EngineGroup(rule, tuple(specs), type(spec).__name__, specs))
    if not found:
        raise ModelError("the model has no KV cache that could be kept")
    return sorted(found, key=lambda one: list(_KINDS.values()).index(one.rule.kind))


def _rule(table: int, whole: Any, spec: Any, bases: Sequence[str]) -> GroupRule:
    name = type(spec).__name__
    kind = next((_KINDS[base] for base in bases if base in _KINDS), None)
    if kind is None or set(bases) & set(_REFUSED) or not getattr(whole, "prefix_cacheable", True):
        raise ModelError(f"{name}: not a KV cache that can be kept by prefix")
    page_tokens = int(whole.block_size)
    if kind == "window":
        kept = int(getattr(spec, "extra_retained_tokens", 0))
        return GroupRule(kind, table, page_tokens, int(spec.sliding_window), kept)
    if kind == "chunk":
        return GroupRule(kind, table, page_tokens, int(spec.attention_chunk_size))
    if kind == "state" and spec.mamba_cache_mode == "none":
        raise ModelError(
            f"{name}: vLLM keeps the states of this model at no boundary",
            hint="--enable-prefix-caching, with --mamba-cache-mode align",
        )
    if kind == "state" and getattr(spec, "num_speculative_blocks", 0) > 0:
        raise ModelError(
            f"{name}: states beside speculative decoding, which has more than one for a boundary",
            hint="leave out --speculative-config",
        )
    handed_over = kind == "state" and spec.mamba_cache_mode == "align"
    return GroupRule(kind, table, page_tokens, handed_over=handed_over)


def grain_tokens(rules: Sequence[GroupRule], config: ConnectorConfig) -> int:
    """Tokens of a block of full attention; all groups can be cut there. ConfigError if not."""
    page_tokens = math.lcm(*(rule.page_tokens for rule in rules))
    kept = [rule.page_tokens for rule in rules if rule.kind == "state"]
    if kept and config.block_tokens not in (0, page_tokens):
        raise ConfigError(
            f"{SETTING}.block_tokens",
            f"is {config.block_tokens}; states of this model are kept every {max(kept)} tokens",
            hint="leave it out",
        )
    if config.block_tokens % page_tokens:
        raise ConfigError(
            f"{SETTING}.block_tokens",
            f"{config.block_tokens} is not a multiple of vLLM's block size, {page_tokens}",
            hint=f"leave it out, or take {-(-config.block_tokens // page_tokens) * page_tokens}",
        )
    return config.block_tokens or page_tokens


def block_tokens(rule: GroupRule, grain: int) -> int:
    """Tokens of one block of a group.

    The last pages of a window begin anywhere: its blocks are single pages.
    """
    return rule.page_tokens if rule.kind in ("window", "chunk") else grain


def pages_per_block(rule: GroupRule, grain: int) -> int:
    """Pages of one block of a group; of states the one at its end."""
    return 1 if rule.kind == "state" else block_tokens(rule, grain) // rule.page_tokens


def checkpoint_tokens(rules: Sequence[GroupRule], grain: int, config: ConnectorConfig) -> int:
    """Tokens between the boundaries of a prompt at which windows and states are saved."""
    if config.checkpoint_tokens:
        wanted = config.checkpoint_tokens
    else:
        spans = [rule.span_tokens or rule.page_tokens for rule in rules if rule.kind != "full"]
        wanted = max(_CHECKPOINT_TOKENS_MIN, _CHECKPOINT_SPANS * max(spans, default=0))
    return -(-wanted // grain) * grain
