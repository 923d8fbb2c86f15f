"""Tiny models of real architectures, with random weights large enough for context to matter."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 128
WINDOW = 24
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def llama(**changes: Any) -> Any:
    """Grouped-query attention."""
    return transformers.LlamaConfig(**{**_SIZES, **changes})


def mistral(**changes: Any) -> Any:
    """Every layer sees a window."""
    return transformers.MistralConfig(**{**_SIZES, "sliding_window": WINDOW, **changes})


def gemma3(**changes: Any) -> Any:
    """Windows and full attention, mixed."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    mixed = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": WINDOW, "layer_types": kinds}
    return transformers.Gemma3TextConfig(**{**_SIZES, **mixed, **changes})


def gpt_oss(**changes: Any) -> Any:
    """Windows, full attention, attention sinks and experts."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    mixed = {"head_dim": 8, "sliding_window": WINDOW, **experts}
    return transformers.GptOssConfig(**{**_SIZES, **mixed, **changes})


def deepseek(**changes: Any) -> Any:
    """Latent attention."""
    return transformers.DeepseekV3Config(**{**_SIZES, **_MLA, **changes})


def gpt2(**changes: Any) -> Any:
    """Positions that are learned, not rotated."""
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )


SERVED: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "mistral": mistral,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
    "gpt2": gpt2,
}


def build(config: Any, *, seed: int = 7, dtype: Any = torch.float32) -> Any:
    """The config's model, ready for use."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def tokens(count: int, seed: int = 1, rows: int = 1) -> Any:
    """Random token ids, [rows, count]; no 0, which may stand for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, count), generator=generator)


def padded(rows: list[Any], pad: int = 0) -> dict[str, Any]:
    """Prompts of different lengths as one batch, padded on the left."""
    columns = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), columns), pad)
    mask = torch.zeros((len(rows), columns), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, columns - row.shape[1] :] = row[0]
        mask[index, columns - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}
