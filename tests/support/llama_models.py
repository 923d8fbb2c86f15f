"""A small model with sliding windows for llama.cpp, and LoRAs for SmolLM2-135M, of random weights,
as GGUF files."""

from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 64
LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 8, 64, 2, 128, 320


def write_window_model(target: Path) -> None:
    """Cohere 2: three of four layers see the last WINDOW tokens only."""
    import gguf

    writer = gguf.GGUFWriter(target, "cohere2")
    letters = [chr(code if 33 <= code <= 126 else 256 + code) for code in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(letters + [f"<{at}>" for at in range(256, VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_eps(1e-5)
    writer.add_sliding_window(WINDOW)
    writer.add_logit_scale(0.0625)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    _add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: Any) -> None:
    chance = np.random.default_rng(7)
    narrow = WIDTH // HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (narrow, WIDTH),
        "attn_v": (narrow, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    ones = np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", chance.standard_normal((VOCABULARY, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        for name, shape in shapes.items():
            weight = chance.standard_normal(shape, np.float32) / 8
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)


def write_lora(target: Path, seed: int, rank: int = 4) -> None:
    """For all layers of SmolLM2-135M: their K and V are others with it."""
    import gguf

    chance = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    for layer in range(30):
        for name in ("attn_k", "attn_v"):
            into = chance.standard_normal((rank, 576), np.float32) / 8
            out = chance.standard_normal((192, rank), np.float32) / 8
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", into)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
