"""Makes small models with random weights, of kinds that differ in their KV. Run by vLLM's Python.

python tests/e2e/tiny_models.py KIND TOKENIZER_FOLDER TARGET
"""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    FalconH1Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)

SHARED: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
GROUPED: dict[str, Any] = {**SHARED, "num_key_value_heads": 2, "head_dim": 32}
LATENT: dict[str, Any] = {
    **SHARED,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
}
GROWN = ("falcon-h1", "qwen3-next")
MIXERS = (".mamba.", ".linear_attn.", ".self_attn.")
"""Kinds whose layers get larger weights: a wrong restored layer must show."""
WITH_LORA = ("gemma3",)
"""Kinds that get two adapters too."""
KINDS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**GROUPED, num_hidden_layers=4),
    "eagle": lambda: LlamaConfig(**GROUPED, num_hidden_layers=1),
    "mistral": lambda: MistralConfig(**GROUPED, num_hidden_layers=3, sliding_window=256),
    "gemma3": lambda: Gemma3TextConfig(
        **GROUPED,
        num_hidden_layers=6,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **{**GROUPED, "intermediate_size": 128},
        num_hidden_layers=4,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "nemotron-h": lambda: NemotronHConfig(
        **{**GROUPED, "num_hidden_layers": 8, "hybrid_override_pattern": "M-M*-M-*"},
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=32,
        conv_kernel=4,
        chunk_size=128,
        mlp_hidden_act="relu2",
    ),
    "falcon-h1": lambda: FalconH1Config(
        **GROUPED,
        num_hidden_layers=4,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_chunk_size=256,
        mamba_rms_norm=True,
    ),
    "deepseek": lambda: DeepseekV2Config(**LATENT, q_lora_rank=None),
    "qwen3-next": lambda: Qwen3NextConfig(
        **GROUPED,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **{**GROUPED, "num_nextn_predict_layers": 1},
        num_hidden_layers=3,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def make_lora(kind: str, seed: int, target: Path) -> None:
    """A LoRA of the attention layers of a kind, in the form that PEFT writes."""
    config = KINDS[kind]()
    chance = torch.Generator().manual_seed(seed)
    heads = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, count in heads.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            ends = {"lora_A": (8, config.hidden_size), "lora_B": (count * config.head_dim, 8)}
            for end, shape in ends.items():
                tensors[f"{path}.{end}.weight"] = torch.randn(shape, generator=chance) * 0.2
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(heads)}
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(config))


def make(kind: str, tokenizer: Path, target: Path) -> None:
    torch.manual_seed(1)
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(KINDS[kind]())
    for name, weights in model.named_parameters():
        if name.endswith("A_log"):  # states fade slowly, so that those restored are seen
            torch.nn.init.constant_(weights, math.log(0.01))
        elif kind in GROWN and weights.dim() > 1 and any(part in name for part in MIXERS):
            torch.nn.init.normal_(weights, std=1.5 / math.sqrt(weights[0].numel()))
    model.save_pretrained(target)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, target)
    if kind in WITH_LORA:
        for seed in (1, 2):
            make_lora(kind, seed, target / f"lora {seed}")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
