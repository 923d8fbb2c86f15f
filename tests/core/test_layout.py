"""The bytes of a block, by arithmetic that can be checked by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.layout import CHUNK_BYTES_MIN, CHUNKS_MAX, DTYPE_BYTES, KVLayout, ModelLayout
from kvdepot.errors import ConfigError

LLAMA_8B = KVLayout.gqa(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")


def test_gqa() -> None:
    # 8 heads * (128 K + 128 V) * 2 bytes = 4096 bytes a token and layer
    assert LLAMA_8B.bytes_per_token == 32 * 4096
    assert LLAMA_8B.layer_bytes == 256 * 4096
    assert LLAMA_8B.block_bytes == 32 * 256 * 4096
    assert LLAMA_8B.layer_ids == tuple(range(32))


def test_value_heads_of_another_size() -> None:
    layout = KVLayout.gqa(
        layers=1, kv_heads=2, head_dim=192, value_head_dim=128, dtype="float16", block_tokens=1
    )
    assert layout.block_bytes == 2 * (192 + 128) * 2


def test_mha() -> None:
    layout = KVLayout.mha(layers=12, heads=12, head_dim=64, dtype="float32", block_tokens=16)
    assert layout.bytes_per_token == 12 * 12 * (64 + 64) * 4
    assert layout.kind == "mha"


def test_mla_is_one_tensor() -> None:
    layout = KVLayout.mla(layers=61, kv_lora_rank=512, qk_rope_head_dim=64, dtype="bfloat16")
    assert layout.bytes_per_token == 61 * 576 * 2 == 70_272
    assert layout.block_bytes == 256 * 70_272


def test_state_does_not_grow_with_tokens() -> None:
    small, large = (
        KVLayout.state(layers=3, state_bytes=1000, dtype="bfloat16", block_tokens=tokens)
        for tokens in (16, 4096)
    )
    assert small.block_bytes == large.block_bytes == 3000
    assert small.bytes_per_token == 0


def test_opaque() -> None:
    layout = KVLayout.opaque(5_898_240, 128, layers=30)
    assert (layout.block_bytes, layout.layer_bytes) == (5_898_240, 196_608)
    assert layout.bytes_per_token == 46_080
    assert KVLayout.opaque(1001, 10).bytes_per_token == 101
    assert (
        layout.canonical() != KVLayout.opaque(5_898_240, 128, layers=30, dtype="int8").canonical()
    )


@pytest.mark.parametrize(("dtype", "width"), DTYPE_BYTES.items())
def test_dtype_widths(dtype: Any, width: int) -> None:
    layout = KVLayout.gqa(layers=1, kv_heads=1, head_dim=1, dtype=dtype, block_tokens=1)
    assert layout.block_bytes == 2 * width


def test_layer_range_is_contiguous() -> None:
    assert LLAMA_8B.layer_range(0, 32) == (0, LLAMA_8B.block_bytes)
    assert LLAMA_8B.layer_range(4, 6) == (4 << 20, 2 << 20)
    for start, stop in ((-1, 2), (2, 2), (3, 2), (0, 33)):
        with pytest.raises(ConfigError, match="32 layers"):
            LLAMA_8B.layer_range(start, stop)


@pytest.mark.parametrize(
    ("layout", "chunk"),
    [
        (LLAMA_8B, 1 << 20),
        (KVLayout.opaque(4096, 16), 16 * 4096),
        (KVLayout.opaque(1000 * 4096, 16, layers=1000), 16 * 4096),
        (KVLayout.opaque(100_000 * 4096, 16, layers=100_000), 209 * 4096),
        (KVLayout.opaque(3 * 50_000, 16, layers=3), 100_000),
    ],
)
def test_checksum_chunk(layout: KVLayout, chunk: int) -> None:
    assert layout.chunk_bytes == chunk


@given(st.integers(1, 5000), st.integers(1, 1 << 20))
def test_checksum_chunk_is_the_smallest_that_will_do(layers: int, layer_bytes: int) -> None:
    layout = KVLayout.opaque(layers * layer_bytes, 16, layers=layers)

    def will_do(chunk: int) -> bool:
        return chunk >= CHUNK_BYTES_MIN and -(-layout.block_bytes // chunk) <= CHUNKS_MAX

    assert layout.chunk_bytes % layer_bytes == 0
    assert will_do(layout.chunk_bytes)
    smaller = layout.chunk_bytes - layer_bytes
    assert smaller == 0 or not will_do(smaller)


def test_shards() -> None:
    assert LLAMA_8B.shard(0, 1) == LLAMA_8B
    assert LLAMA_8B.shard(3, 4).kv_heads == 2
    assert LLAMA_8B.shard(3, 4).block_bytes * 4 == LLAMA_8B.block_bytes
    assert LLAMA_8B.shard(15, 16).kv_heads == 1
    latent = KVLayout.mla(layers=2, kv_lora_rank=512, qk_rope_head_dim=64, dtype="bfloat16")
    assert latent.shard(7, 8) == latent


@pytest.mark.parametrize(
    ("layout", "rank", "size", "path"),
    [
        (LLAMA_8B, 0, 3, "shard_size"),
        (LLAMA_8B, 0, 12, "shard_size"),
        (LLAMA_8B, 2, 2, "shard_rank"),
        (LLAMA_8B, 0, 0, "shard_rank"),
        (KVLayout.opaque(4096, 16), 0, 2, "shard_size"),
        (KVLayout.state(layers=1, state_bytes=4096, dtype="float32"), 0, 2, "shard_size"),
    ],
)
def test_impossible_shards(layout: KVLayout, rank: int, size: int, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout.shard(rank, size)
    assert caught.value.path == path


GQA: dict[str, Any] = {
    "kind": "gqa",
    "layers": 2,
    "dtype": "float16",
    "kv_heads": 1,
    "head_dim": 1,
    "value_head_dim": 1,
}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"kind": "linear"}, "kind"),
        ({"dtype": "float64"}, "dtype"),
        ({"layers": 0}, "layers"),
        ({"layers": 1 << 30}, "layers"),
        ({"layers": 2.0}, "layers"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"value_head_dim": 0}, "value_head_dim"),
        ({"latent_dim": 1}, "latent_dim"),
        ({"state_bytes": 1}, "state_bytes"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": 1, "attention_chunk": 1}, "attention_chunk"),
        ({"layer_ids": (0,)}, "layer_ids"),
        ({"layer_ids": (1, 0)}, "layer_ids"),
        ({"layer_ids": (1, 1)}, "layer_ids"),
        ({"layer_ids": (-1, 1)}, "layer_ids"),
        ({"head_dim": 1 << 39}, "block_tokens"),
    ],
    ids=repr,
)
def test_bad_fields_are_named(change: dict[str, Any], path: str) -> None:
    KVLayout(**GQA)
    with pytest.raises(ConfigError) as caught:
        KVLayout(**{**GQA, **change})
    assert caught.value.path == path


def test_opaque_bytes_must_divide_into_layers() -> None:
    for size, layers in ((10, 3), (10, 0), (0, 1)):
        with pytest.raises(ConfigError):
            KVLayout.opaque(size, 16, layers=layers)


def test_description_of_something_else() -> None:
    for fields in ({}, {**LLAMA_8B.description(), "more": 1}):
        with pytest.raises(ConfigError):
            KVLayout.from_description(fields)


def test_model_of_several_groups() -> None:
    full = KVLayout.gqa(layers=2, kv_heads=1, head_dim=64, dtype="float16", layer_ids=(2, 5))
    sliding = KVLayout.gqa(
        layers=4,
        kv_heads=1,
        head_dim=64,
        dtype="float16",
        sliding_window=1000,
        layer_ids=(0, 1, 3, 4),
    )
    state = KVLayout.state(layers=1, state_bytes=777, dtype="float16")
    model = ModelLayout((full, sliding, state))
    # 64 K + 64 V, 2 bytes each: 256 bytes a token and layer
    assert model.bytes_per_token == 2 * 256
    assert model.block_tokens == 256
    assert model.block_bytes == 256 * 6 * 256 + 777
    assert model.context_bytes(0) == 0
    assert model.context_bytes(10) == 10 * 6 * 256 + 777
    assert model.context_bytes(5000) == 5000 * 2 * 256 + 1000 * 4 * 256 + 777


def test_groups_of_a_model_agree_on_the_block() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ModelLayout(())
    with pytest.raises(ConfigError, match="same for all"):
        ModelLayout((KVLayout.opaque(4096, 16), KVLayout.opaque(4096, 32)))
