"""KV groups of vLLM: what of each a prompt needs, how their blocks are cut, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import PAGE_TOKENS, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import (
    GroupRule,
    checkpoint_tokens,
    grain_tokens,
    layer_groups,
)
from kvdepot.errors import ConfigError, ModelError


def cache(*specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"], **more) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_full_attention_comes_first() -> None:
    found = layer_groups(cache(MambaSpec(), SlidingWindowSpec(), FullAttentionSpec()))
    assert [group.rule.kind for group in found] == ["full", "window", "state"]
    assert [group.rule.table for group in found] == [2, 1, 0]
    assert found[2].rule.handed_over


def test_layers_of_one_kind_and_several_sizes_are_one_group() -> None:
    whole = SimpleNamespace(first_spec=FullAttentionSpec(), block_size=PAGE_TOKENS)
    (group,) = layer_groups(cache(whole))
    assert group.rule == GroupRule("full", 0, PAGE_TOKENS)


def test_caches_of_encoders_are_left_alone() -> None:
    encoder = type("EncoderOnlyAttentionSpec", (), {"block_size": 16})()
    (group,) = layer_groups(cache(encoder, FullAttentionSpec()))
    assert group.rule.table == 1
    with pytest.raises(ModelError, match="no KV cache"):
        layer_groups(cache(encoder))


def test_caches_that_cannot_be_saved_by_prefix_are_refused() -> None:
    ring = type("CircularBufferSpec", (FullAttentionSpec,), {})()
    unknown = type("CrossAttentionSpec", (), {"block_size": 16})()
    hidden = type("SlidingWindowMLASpec", (SlidingWindowSpec,), {"prefix_cacheable": False})()
    for spec in (ring, unknown, hidden):
        with pytest.raises(
            ModelError, match=f"{type(spec).__name__}: this KV cache cannot be saved"
        ):
            layer_groups(cache(FullAttentionSpec(), spec))
    nowhere = MambaSpec()
    nowhere.mamba_cache_mode = "none"
    with pytest.raises(ModelError, match="no states of this model at boundaries") as caught:
        layer_groups(cache(nowhere))
    assert "--enable-prefix-caching" in caught.value.hint
    drafted = MambaSpec()
    drafted.num_speculative_blocks = 3
    with pytest.raises(ModelError, match="speculative decoding leaves several states") as caught:
        layer_groups(cache(FullAttentionSpec(), drafted))
    assert "--speculative-config" in caught.value.hint


def test_first_token_that_is_needed_to_go_on() -> None:
    window = GroupRule("window", 0, 16, 100)
    assert [window.first_token(stop) for stop in (50, 100, 160)] == [0, 1, 61]
    assert GroupRule("window", 0, 16, 100, 8).first_token(160) == 53
    chunk = GroupRule("chunk", 0, 16, 64)
    assert [chunk.first_token(stop) for stop in (50, 64, 160)] == [0, 64, 128]
    assert GroupRule("state", 0, 16).first_token(160) == 159
    assert GroupRule("full", 0, 16).first_token(160) == 0


def test_blocks_fit_the_pages_of_all_groups() -> None:
    rules = [GroupRule("full", 0, 16), GroupRule("window", 1, 24, 100)]
    assert grain_tokens(rules, ConnectorConfig()) == 48
    assert grain_tokens(rules, ConnectorConfig(block_tokens=96)) == 96
    with pytest.raises(ConfigError, match="a multiple of vLLM's block size, 48") as one:
        grain_tokens(rules, ConnectorConfig(block_tokens=100))
    assert "144" in one.value.hint
    assert [rule.block_tokens(96) for rule in rules] == [96, 24]
    states = [GroupRule("state", 0, 48)]
    assert grain_tokens(states, ConnectorConfig(block_tokens=48)) == 48
    with pytest.raises(ConfigError, match="state every 48 tokens"):
        grain_tokens(states, ConnectorConfig(block_tokens=96))


def test_checkpoints_are_further_apart_than_what_they_cost() -> None:
    config = ConnectorConfig()
    assert checkpoint_tokens([GroupRule("window", 0, 16, 128)], 16, config) == 1024
    assert checkpoint_tokens([GroupRule("window", 0, 16, 1024)], 256, config) == 4096
    assert checkpoint_tokens([GroupRule("state", 0, 528)], 528, config) == 2112
    wanted = ConnectorConfig(checkpoint_tokens=100)
    assert checkpoint_tokens([GroupRule("window", 0, 16, 128)], 16, wanted) == 112
