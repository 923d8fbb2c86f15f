"""Real models' configs, reduced to what matters here, and their KV bytes by arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdepot.core.hf_config import MODELS, AttentionCost, attention_costs, model_layout
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ConfigError

Fields = dict[str, Any]


def attention(
    kind: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any
) -> Fields:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_8B = attention("llama", 32, 32, 8, 4096)
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
DEEPSEEK_V3 = attention(
    "deepseek_v3", 61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128
)
QWEN3_NEXT = attention(
    "qwen3_next",
    48,
    16,
    2,
    2048,
    head_dim=256,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
)
GPT_OSS_20B = attention(
    "gpt_oss",
    24,
    64,
    8,
    2880,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
)


@pytest.mark.parametrize(
    ("name", "config", "bytes_per_token"),
    [
        # layers * kv heads * (K + V elements) * 2 bytes
        ("Llama-3.1-8B", LLAMA_8B, 32 * 8 * 256 * 2),
        ("Llama-3.3-70B", attention("llama", 80, 64, 8, 8192), 80 * 8 * 256 * 2),
        ("Llama-3.1-405B", attention("llama", 126, 128, 8, 16384), 126 * 8 * 256 * 2),
        ("SmolLM2-135M", attention("llama", 30, 9, 3, 576), 30 * 3 * 128 * 2),
        ("Qwen2.5-7B", attention("qwen2", 28, 28, 4, 3584, **QWEN_WINDOW), 28 * 4 * 256 * 2),
        ("Qwen2.5-72B", attention("qwen2", 80, 64, 8, 8192, **QWEN_WINDOW), 80 * 8 * 256 * 2),
        ("Qwen3-8B", attention("qwen3", 36, 32, 8, 4096, head_dim=128), 36 * 8 * 256 * 2),
        ("Qwen3-30B-A3B", attention("qwen3_moe", 48, 32, 4, 2048, head_dim=128), 48 * 4 * 256 * 2),
        ("Mixtral", attention("mixtral", 32, 32, 8, 4096, sliding_window=None), 32 * 8 * 256 * 2),
        (
            "Mistral-Nemo",
            attention("mistral", 40, 32, 8, 5120, head_dim=128, sliding_window=None),
            40 * 8 * 256 * 2,
        ),
        ("Gemma-7B", attention("gemma", 28, 16, 16, 3072), 28 * 16 * 512 * 2),
        ("DeepSeek-V3", DEEPSEEK_V3, 61 * 576 * 2),
        ("Phi-3-mini-128k", attention("phi3", 32, 32, 32, 3072, sliding_window=262144), 0),
        ("Falcon-7B", attention("falcon", 32, 71, 71, 4544, multi_query=True), 32 * 1 * 128 * 2),
        (
            "Falcon-40B",
            attention("falcon", 60, 128, 8, 8192, new_decoder_architecture=True),
            60 * 8 * 128 * 2,
        ),
        ("Falcon-RW", attention("falcon", 24, 32, 32, 2048, multi_query=False), 24 * 32 * 128 * 2),
    ],
)
def test_bytes_per_token(name: str, config: Fields, bytes_per_token: int) -> None:
    assert model_layout(config).bytes_per_token == bytes_per_token


def test_a_plain_model_is_one_group() -> None:
    assert model_layout(LLAMA_8B).groups == (
        KVLayout.gqa(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
    )
    quarter = model_layout(LLAMA_8B, dtype="fp8_e4m3", block_tokens=128)
    assert quarter.block_bytes * 4 == model_layout(LLAMA_8B).block_bytes


def test_no_key_value_heads_means_all_heads_where_the_class_says_so() -> None:
    config = {**LLAMA_8B, "num_key_value_heads": None}
    assert model_layout(config).groups[0].kind == "mha"
    assert model_layout(config).bytes_per_token == 32 * 32 * 256 * 2


def test_gpt2_names() -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
    expected = KVLayout.mha(layers=12, heads=12, head_dim=64, dtype="float32")
    assert model_layout(config, dtype="float32").groups == (expected,)
    starcoder = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}
    assert model_layout(starcoder, dtype="float16").bytes_per_token == 40 * 1 * 256 * 2


def test_mistral_with_a_window() -> None:
    (group,) = model_layout(attention("mistral", 32, 32, 8, 4096, sliding_window=4096)).groups
    assert group.sliding_window == 4096
    assert group.layers == 32


def test_gemma2_alternates() -> None:
    model = model_layout(attention("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096))
    full, sliding = model.groups
    assert full.layer_ids == tuple(range(1, 42, 2))
    assert sliding.layer_ids == tuple(range(0, 42, 2))
    assert (full.sliding_window, sliding.sliding_window) == (None, 4096)
    # 8 heads * (256 + 256) * 2 bytes = 8192 bytes a token and layer
    assert model.bytes_per_token == 21 * 8192
    assert model.context_bytes(100_000) == 21 * 8192 * 100_000 + 21 * 8192 * 4096


def test_gemma3_leaves_out_what_its_class_knows() -> None:
    four_b = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    }
    full, sliding = model_layout(four_b).groups
    assert full.layer_ids == (5, 11, 17, 23, 29)
    assert (sliding.layers, sliding.sliding_window) == (29, 1024)
    assert full.bytes_per_token == 5 * 4 * 512 * 2
    twelve_b = attention("gemma3_text", 48, 16, 8, 3840, sliding_window=1024)
    assert model_layout(twelve_b).bytes_per_token == 8 * 8 * 512 * 2
    typed = {**twelve_b, "layer_types": ["full_attention"] + ["sliding_attention"] * 47}
    assert model_layout(typed).groups[0].layer_ids == (0,)


def test_gpt_oss_layer_types() -> None:
    full, sliding = model_layout(GPT_OSS_20B).groups
    assert full.bytes_per_token == sliding.bytes_per_token == 12 * 8 * 128 * 2
    assert (sliding.layer_ids[:2], sliding.sliding_window) == ((0, 2), 128)


def test_qwen2_with_windows_in_the_last_layers() -> None:
    config = attention(
        "qwen2",
        28,
        28,
        4,
        3584,
        use_sliding_window=True,
        sliding_window=32768,
        max_window_layers=21,
    )
    full, sliding = model_layout(config).groups
    assert (full.layers, sliding.layer_ids) == (21, tuple(range(21, 28)))


def test_llama4_chunks() -> None:
    text = attention(
        "llama4_text", 48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192, no_rope_layers=[]
    )
    full, chunked = model_layout({"model_type": "llama4", "text_config": text}).groups
    assert full.layer_ids == tuple(range(3, 48, 4))
    assert (chunked.layers, chunked.attention_chunk, chunked.window) == (36, 8192, 8192)
    listed = {**text, "no_rope_layers": [1, 0] * 24}
    assert model_layout(listed).groups[0].layer_ids == tuple(range(1, 48, 2))


def test_multimodal_text_parts() -> None:
    inner = attention("qwen2", 28, 28, 4, 3584)
    del inner["torch_dtype"]
    for name in ("text_config", "llm_config", "language_config"):
        outer = {"model_type": "some_vision_model", "torch_dtype": "float16", name: inner}
        assert model_layout(outer).groups[0].dtype == "float16"
        assert model_layout(outer).bytes_per_token == 57_344
    flat = attention("qwen2_5_vl", 28, 28, 4, 3584, vision_config={"hidden_size": 1280})
    assert model_layout(flat).bytes_per_token == 57_344


def test_jamba() -> None:
    config = attention(
        "jamba",
        32,
        32,
        8,
        4096,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_conv=4,
        mamba_d_state=16,
        mamba_expand=2,
    )
    full, state = model_layout(config).groups
    assert full.layer_ids == (4, 12, 20, 28)
    # 8192 channels: 3 kept inputs of the convolution and 16 state elements each, 2 bytes
    assert state.state_bytes == (3 * 8192 + 8192 * 16) * 2
    assert (state.layers, state.kind) == (28, "state")


def test_granite_hybrid() -> None:
    config = attention(
        "granitemoehybrid",
        40,
        32,
        8,
        4096,
        layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    full, state = model_layout(config).groups
    assert full.layer_ids == (5, 15, 25, 35)
    # 128 heads * 64 = 8192; the convolution adds B and C: 2 * 1 group * 128
    assert state.state_bytes == 3 * (8192 + 256) * 2 + 8192 * 128 * 2 == 2_147_840
    assert model_layout({**config, "mamba_d_head": "auto"}) == model_layout(config)


def test_bamba() -> None:
    config = attention(
        "bamba",
        32,
        32,
        8,
        4096,
        attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_conv=4,
    )
    full, state = model_layout(config).groups
    assert (full.layer_ids, state.layers) == ((9, 18, 27), 29)


def test_nemotron_h() -> None:
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = attention(
        "nemotron_h",
        52,
        32,
        8,
        4096,
        attention_head_dim=128,
        hybrid_override_pattern=pattern,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
    )
    full, state = model_layout(config, dtype="fp8_e4m3").groups
    assert (full.layer_ids, full.dtype) == ((7, 18, 29, 40), "fp8_e4m3")
    # the convolution in the model's bfloat16, the state in float32, as the class says
    assert state.state_bytes == 3 * (8192 + 2 * 8 * 128) * 2 + 8192 * 128 * 4 == 4_255_744
    assert (state.layers, state.dtype) == (24, "bfloat16")
    half = model_layout({**config, "mamba_ssm_cache_dtype": "auto"}).groups[1]
    assert half.state_bytes == 3 * 10240 * 2 + 8192 * 128 * 2


def test_qwen3_next() -> None:
    full, state = model_layout(QWEN3_NEXT).groups
    assert full.layer_ids == tuple(range(3, 48, 4))
    assert full.bytes_per_token == 12 * 2 * 512 * 2
    # q and k: 16 * 128 each; v: 32 * 128; one 128 x 128 matrix for each of 32 value heads
    assert state.state_bytes == 3 * (2 * 2048 + 4096) * 2 + 32 * 128 * 128 * 2 == 1_097_728
    typed = [("linear_attention", "full_attention")[(layer + 1) % 4 == 0] for layer in range(48)]
    assert model_layout({**QWEN3_NEXT, "layer_types": typed}) == model_layout(QWEN3_NEXT)


def test_pure_state_models() -> None:
    mamba = {
        "model_type": "mamba",
        "num_hidden_layers": 24,
        "hidden_size": 768,
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
    }
    (group,) = model_layout(mamba, dtype="float32").groups
    assert group.state_bytes == (3 * 1536 + 1536 * 16) * 4
    codestral = {
        "model_type": "mamba2",
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "dtype": "bfloat16",
    }
    model = model_layout(codestral)
    assert model.groups[0].state_bytes == 3 * 10240 * 2 + 8192 * 128 * 2
    assert (model.bytes_per_token, model.context_bytes(9)) == (0, model.block_bytes)


def test_config_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert model_layout(file) == model_layout(str(file)) == model_layout(LLAMA_8B)
    for content in ("[]", "{", ""):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            model_layout(file)
        assert caught.value.path == str(file)
    with pytest.raises(ConfigError):
        model_layout(tmp_path / "absent.json")


def without(config: Fields, *names: str) -> Fields:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({}, "model_type"),
        ({**LLAMA_8B, "model_type": "llama99"}, "model_type"),
        ({**LLAMA_8B, "model_type": None}, "model_type"),
        ({"model_type": "llava", "text_config": {"model_type": "clip"}}, "model_type"),
        (without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers"),
        (without(LLAMA_8B, "num_attention_heads"), "num_attention_heads"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size"),
        (without(LLAMA_8B, "torch_dtype"), "dtype"),
        ({**LLAMA_8B, "torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers"),
        ({**LLAMA_8B, "num_key_value_heads": 0}, "num_key_value_heads"),
        ({**LLAMA_8B, "hidden_size": 4097}, "head_dim"),
        (
            without(attention("mistral", 32, 32, 8, 4096), "num_key_value_heads"),
            "num_key_value_heads",
        ),
        (attention("qwen3", 36, 32, 8, 4096), "head_dim"),
        (attention("qwen2_moe", 24, 16, 16, 2048, use_sliding_window=True), "layer_types"),
        (without(DEEPSEEK_V3, "kv_lora_rank"), "kv_lora_rank"),
        (without(GPT_OSS_20B, "layer_types"), "layer_types"),
        (without(GPT_OSS_20B, "sliding_window"), "sliding_window"),
        ({**GPT_OSS_20B, "layer_types": ["full_attention"] * 23}, "num_hidden_layers"),
        ({**GPT_OSS_20B, "layer_types": ["quantum_attention"] * 24}, "layer_types"),
        ({**LLAMA_8B, "layer_types": ["linear_attention"] * 32}, "layer_types"),
        (without(QWEN3_NEXT, "linear_num_key_heads"), "linear_num_key_heads"),
        (
            attention("nemotron_h", 2, 32, 8, 4096, hybrid_override_pattern="M?"),
            "hybrid_override_pattern",
        ),
    ],
)
def test_what_is_not_understood_is_named(config: Fields, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_layout(config)
    assert caught.value.path == path


def test_state_needs_a_type_that_models_compute_in() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        model_layout(without(QWEN3_NEXT, "torch_dtype"), dtype="fp8_e4m3")


def test_every_model_type_asks_for_what_it_lacks() -> None:
    for kind in MODELS:
        with pytest.raises(ConfigError):
            model_layout({"model_type": kind})


def test_attention_costs() -> None:
    """2 operations for each element of K and of V, query head, layer and pair of tokens."""
    assert attention_costs(LLAMA_8B) == (AttentionCost(32 * 32 * 2 * 256, None),)
    full, sliding = attention_costs(GPT_OSS_20B)
    assert full == AttentionCost(12 * 64 * 2 * 128, None)
    assert sliding == AttentionCost(12 * 64 * 2 * 128, 128)
    with pytest.raises(ConfigError, match="qk_nope_head_dim"):
        attention_costs(DEEPSEEK_V3)
    latent = attention_costs({**DEEPSEEK_V3, "qk_nope_head_dim": 128})
    assert latent == (AttentionCost(61 * 128 * 2 * (128 + 64 + 128), None),)
