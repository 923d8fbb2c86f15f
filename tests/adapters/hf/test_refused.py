"""Models that cannot be served are refused with a reason, and left as they were."""

import builtins
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import _MLA, _SIZES, build, gemma3, llama, tokens, transformers

import kvdepot.adapters.hf
from kvdepot.adapters.hf import attach
from kvdepot.errors import ExtraMissingError, ModelError
from kvdepot.store.store import Store


def mamba() -> Any:
    return build(transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2))


def hybrid() -> Any:
    kinds = ["linear_attention", "full_attention"]
    linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    linear |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**_SIZES, "head_dim": 8, "layer_types": kinds, **linear, **experts}
    return build(transformers.Qwen3NextConfig(**config, shared_expert_intermediate_size=16))


def indexed() -> Any:
    return build(transformers.GlmMoeDsaConfig(**{**_SIZES, **_MLA}))


def chunked() -> Any:
    config = {**_SIZES, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8}
    return build(transformers.Llama4TextConfig(**config))


def translator() -> Any:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=128, **sizes))


def with_eyes() -> Any:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=llama(),
        vision_config=transformers.CLIPVisionConfig(**vision, intermediate_size=16, image_size=28),
        image_token_index=3,
    )
    return transformers.LlavaForConditionalGeneration(config)


def two_way() -> Any:
    return build(gemma3(use_bidirectional_attention=True))


def half_there() -> Any:
    model = build(llama())
    model.lm_head = model.lm_head.to("meta")
    return model


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (mamba, "layer 0 of the model has a LinearAttentionLayer"),
    (hybrid, "LinearAttentionLayer"),
    (indexed, "DynamicIndexedLayer"),
    (chunked, "chunked attention"),
    (translator, "encoder-decoder"),
    (with_eyes, "more than text"),
    (two_way, "tokens see those that follow them"),
    (half_there, "several devices"),
    (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
    (lambda: build(llama(), dtype=torch.float64), "float64"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(memory: Store, make: Callable[[], Any], reason: str) -> None:
    model = make()
    training = model.training
    with pytest.raises(ModelError, match=reason) as caught:
        attach(model, memory)
    assert caught.value.hint
    assert model.training == training


def test_state_beside_k_and_v_is_found_out(memory: Store) -> None:
    """A model that keeps more than K and V in its cache goes on differently from a rebuilt one."""
    model = build(llama())

    def keep_more(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        kept = vars(kwargs["past_key_values"]).setdefault("more", output[0][:, :1].clone())
        return (output[0] + kept, *output[1:])

    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_hook(keep_more, with_kwargs=True)
    with pytest.raises(ModelError, match="more than the K and V"):
        attach(model, memory)
    handle.remove()
    attach(model, memory).close()


def test_a_filled_cache_is_refused(memory: Store) -> None:
    model = build(llama())
    ids = tokens(20)
    with attach(model, memory) as depot_model:
        for cache in (
            transformers.DynamicCache(config=model.config),
            transformers.StaticCache(config=model.config, max_cache_len=64),
        ):
            with torch.no_grad():
                model(ids, past_key_values=cache)
                with pytest.raises(ModelError, match="already holds 20 tokens") as caught:
                    depot_model(ids, past_key_values=cache)
            with pytest.raises(ModelError, match="already holds 20 tokens"):
                depot_model.generate(ids, past_key_values=cache, max_new_tokens=2)
            assert "whole conversation" in caught.value.hint


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvdepot.adapters.hf.")]:
        monkeypatch.delitem(sys.modules, name)
    really = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ExtraMissingError, match="transformers is not installed") as caught:
        kvdepot.adapters.hf.attach  # noqa: B018
    assert caught.value.hint == "pip install 'kvdepot[hf]'"
