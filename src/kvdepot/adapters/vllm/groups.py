"""vLLM's KV groups: the blocks of each group that a prompt needs to continue from a boundary.

Full attention needs all blocks before the boundary, a sliding window or a chunk of local attention
the last ones, a state-space or linear-attention layer the state at the boundary. Layers of one
group whose caches have different shapes (latent attention and its indexer) are separate groups
here: they have the same pages and different bytes.
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
"""Kinds of groups, by the vLLM class that their spec is derived from."""
_REFUSED: Final = ("RSWASpec", "HiddenStateCacheSpec", "CircularBufferSpec")
"""Derived from the classes above, with pages that follow other rules."""
_IGNORED: Final = ("EncoderOnlyAttentionSpec",)
"""These keep nothing from one step to the next."""
_CHECKPOINT_SPANS: Final = 4
_CHECKPOINT_TOKENS_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The tokens that a prompt needs of one group, and how its blocks are cut."""

    kind: GroupKind
    table: int
    """Index of this group's list of block ids in vLLM's tables."""
    page_tokens: int
    span_tokens: int = 0
    """Length of a window or a chunk."""
    kept_tokens: int = 0
    """vLLM keeps this many tokens before a window too."""
    handed_over: bool = False
    """vLLM names the pages of states, at the boundaries that have any."""

    def first_token(self, stop: int) -> int:
        """The first token whose KV is needed to continue from the token `stop`."""
        if self.kind == "window":
            return max(0, stop - self.span_tokens + 1 - self.kept_tokens)
        if self.kind == "chunk":
            return stop - stop % self.span_tokens
        return max(0, stop - 1) if self.kind == "state" else 0

    def block_tokens(self, grain: int) -> int:
        """Tokens of one block. A window may begin at any page, so its blocks are single pages."""
        return self.page_tokens if self.kind in ("window", "chunk") else grain

    def pages_per_block(self, grain: int) -> int:
        """Pages of one block. A block of states is the page at its end."""
        return 1 if self.kind == "state" else self.block_tokens(grain) // self.page_tokens


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The KV groups of a model, and where its prompts can be cut."""

    rules: tuple[GroupRule, ...] = ()
    grain: int = 0
    """Tokens of a block of full attention. A request is restored up to a multiple of it."""
    checkpoint_blocks: int = 1
    """Windows and states are saved once in this many blocks of a prompt."""
    ahead_blocks: int = 0
    """A prompt is restored up to this many blocks before the last one that the depot has."""

    @property
    def full(self) -> list[int]:
        """The groups of full attention."""
        return [group for group, rule in enumerate(self.rules) if rule.kind == "full"]

    @property
    def others(self) -> list[int]:
        return [group for group, rule in enumerate(self.rules) if rule.kind != "full"]

    def span(self, group: int, start_token: int, stop: int) -> tuple[int, int]:
        """The blocks of a group that a request needs to continue from its block `stop`, if it has
        everything before `start_token`."""
        rule, end = self.rules[group], stop * self.grain
        size = rule.block_tokens(self.grain)
        return max(start_token, rule.first_token(end)) // size, end // size


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Layers of vLLM that share one rule."""

    rule: GroupRule
    layer_names: tuple[str, ...]
    spec: str
    """The name of vLLM's class."""
    layer_specs: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's spec of each layer."""


def layer_groups(cache: Any) -> list[EngineGroup]:
    """The groups in `cache`, vLLM's KVCacheConfig, those of full attention first. ModelError if one
    cannot be served."""
    groups = []
    for table, group in enumerate(cache.kv_cache_groups):
        spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
        bases = [base.__name__ for base in type(spec).__mro__]
        if not getattr(group, "enable_kv_transfer", True) or set(bases) & set(_IGNORED):
            continue
        rule = _rule(table, group.kv_cache_spec, spec, bases)
        own_specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs = {name: own_specs.get(name, spec) for name in group.layer_names}
        groups.append(EngineGroup(rule, tuple(specs), type(spec).__name__, specs))
    if not groups:
        raise ModelError("the model has no KV cache that can be saved")
    return sorted(groups, key=lambda group: list(_KINDS.values()).index(group.rule.kind))


def _rule(table: int, whole: Any, spec: Any, bases: Sequence[str]) -> GroupRule:
    name = type(spec).__name__
    kind = next((_KINDS[base] for base in bases if base in _KINDS), None)
    if kind is None or set(bases) & set(_REFUSED) or not getattr(whole, "prefix_cacheable", True):
        raise ModelError(f"{name}: this KV cache cannot be saved by prefix")
    page_tokens = int(whole.block_size)
    if kind == "window":
        kept = int(getattr(spec, "extra_retained_tokens", 0))
        return GroupRule(kind, table, page_tokens, int(spec.sliding_window), kept)
    if kind == "chunk":
        return GroupRule(kind, table, page_tokens, int(spec.attention_chunk_size))
    if kind == "state" and spec.mamba_cache_mode == "none":
        raise ModelError(
            f"{name}: vLLM keeps no states of this model at boundaries",
            hint="start vLLM with --enable-prefix-caching and --mamba-cache-mode align",
        )
    if kind == "state" and getattr(spec, "num_speculative_blocks", 0) > 0:
        raise ModelError(
            f"{name}: speculative decoding leaves several states at a boundary",
            hint="start vLLM without --speculative-config",
        )
    handed_over = kind == "state" and spec.mamba_cache_mode == "align"
    return GroupRule(kind, table, page_tokens, handed_over=handed_over)


def grain_tokens(rules: Sequence[GroupRule], config: ConnectorConfig) -> int:
    """Tokens of a block of full attention, at whose ends all groups can be cut. ConfigError if
    `block_tokens` does not allow that."""
    page_tokens = math.lcm(*(rule.page_tokens for rule in rules))
    state_tokens = [rule.page_tokens for rule in rules if rule.kind == "state"]
    if state_tokens and config.block_tokens not in (0, page_tokens):
        raise ConfigError(
            f"{SETTING}.block_tokens",
            f"invalid value {config.block_tokens} (expected {page_tokens}: this model keeps a "
            f"state every {max(state_tokens)} tokens)",
            hint="remove the setting",
        )
    if config.block_tokens % page_tokens:
        raise ConfigError(
            f"{SETTING}.block_tokens",
            f"invalid value {config.block_tokens} (expected a multiple of vLLM's block size, "
            f"{page_tokens})",
            hint="remove the setting, or use "
            f"{-(-config.block_tokens // page_tokens) * page_tokens}",
        )
    return config.block_tokens or page_tokens


def checkpoint_tokens(rules: Sequence[GroupRule], grain: int, config: ConnectorConfig) -> int:
    """Tokens between the boundaries of a prompt at which windows and states are saved."""
    wanted = config.checkpoint_tokens
    if not wanted:
        spans = [rule.span_tokens or rule.page_tokens for rule in rules if rule.kind != "full"]
        wanted = max(_CHECKPOINT_TOKENS_MIN, _CHECKPOINT_SPANS * max(spans, default=0))
    return -(-wanted // grain) * grain
