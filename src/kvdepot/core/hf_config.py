"""Reads a model's KV groups from its Hugging Face config.json.

Only the model types in `MODELS` are supported. A missing field gets the default of the model's own
configuration class (as of transformers 5.22) if published configs rely on it; otherwise it is an
error, since a wrong guess would give a wrong size. Draft layers for
multi-token prediction (DeepSeek, Nemotron) are not counted. Sizes are those of the whole model;
`KVLayout.shard` gives one shard's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DTYPE_BYTES, DType, KVLayout, ModelLayout
from kvdepot.errors import ConfigError

LayerKind = Literal["full", "sliding", "chunked", "state", "none"]

_LAYER_TYPES: Final[dict[str, LayerKind]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "moe": "none",
    "mlp": "none",
}
_GROUP_ORDER: Final[tuple[LayerKind, ...]] = ("full", "sliding", "chunked", "state")
_NEMOTRON: Final[dict[str, LayerKind]] = {"M": "state", "*": "full", "-": "none", "E": "none"}
_DTYPES: Final[dict[str, DType]] = {
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
_ALIASES: Final = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd", "n_embed"),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("attention_head_dim",),
    "layer_types": ("layers_block_type",),
    "dtype": ("torch_dtype",),
}
_WINDOW_OF: Final = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
_TEXT_KEYS: Final = ("text_config", "llm_config", "language_config")
_HINT: Final = "describe the layout yourself with KVLayout.gqa, mha, mla, state or opaque"


@dataclass(frozen=True, slots=True)
class _Fields:
    """The values of a config, with one name for each. A missing value is a ConfigError."""

    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value, or None if it is missing or null."""
        for alias in (name, *_ALIASES.get(name, ())):
            if self.values.get(alias) is not None:
                return self.values[alias]
        return None

    def integer(self, name: str, *, least: int = 1) -> int:
        value = self.get(name)
        if value is None:
            kind = self.values.get("model_type")
            raise ConfigError(name, f"missing in the config of model type {kind}", hint=_HINT)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, f"must be a whole number of at least {least}, got {value!r}")
        return value

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers")


LayerRule = Callable[[_Fields], list[LayerKind]]
StateRule = Callable[[_Fields, int, int], int]
"""Bytes of one layer's state, from the widths of a convolution and of a state element."""


def _all_full(fields: _Fields) -> list[LayerKind]:
    return ["full"] * fields.layers


def _all_state(fields: _Fields) -> list[LayerKind]:
    return ["state"] * fields.layers


def _one_window(fields: _Fields) -> list[LayerKind]:
    return ["full" if fields.get("sliding_window") is None else "sliding"] * fields.layers


def _last_layers_window(fields: _Fields) -> list[LayerKind]:
    if not fields.get("use_sliding_window") or fields.get("sliding_window") is None:
        return _all_full(fields)
    first = fields.integer("max_window_layers", least=0)
    return ["full" if layer < first else "sliding" for layer in range(fields.layers)]


def _window_unsupported(fields: _Fields) -> list[LayerKind]:
    if fields.get("use_sliding_window"):
        raise ConfigError("layer_types", "needed when use_sliding_window is true", hint=_HINT)
    return _all_full(fields)


def _must_be_typed(fields: _Fields) -> list[LayerKind]:
    kind = fields.get("model_type")
    raise ConfigError("layer_types", f"missing in the config of model type {kind}", hint=_HINT)


def _every(name: str, other: LayerKind) -> LayerRule:
    """Every n-th layer is full attention, the others are `other`. The config has n as `name`."""

    def rule(fields: _Fields) -> list[LayerKind]:
        period = fields.integer(name)
        return [other if (layer + 1) % period else "full" for layer in range(fields.layers)]

    return rule


def _llama4(fields: _Fields) -> list[LayerKind]:
    rope = fields.get("no_rope_layers")
    if not rope:
        return _every("no_rope_layer_interval", "chunked")(fields)
    return ["chunked" if uses_rope else "full" for uses_rope in rope]


def _jamba(fields: _Fields) -> list[LayerKind]:
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", least=0)
    return ["full" if layer % period == offset else "state" for layer in range(fields.layers)]


def _bamba(fields: _Fields) -> list[LayerKind]:
    full = set(fields.get("attn_layer_indices") or ())
    return ["full" if layer in full else "state" for layer in range(fields.layers)]


def _nemotron(fields: _Fields) -> list[LayerKind]:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(_NEMOTRON):
        raise ConfigError("hybrid_override_pattern", f"not understood: {pattern!r}", hint=_HINT)
    return [_NEMOTRON[letter] for letter in pattern]


def _mamba(inner: str, state: str, kernel: str) -> StateRule:
    """Mamba 1: a convolution window and a state vector for each inner channel.

    All but one of the kernel's inputs are kept, as vLLM does. `inner` names the expansion factor.
    """

    def rule(fields: _Fields, conv_width: int, state_width: int) -> int:
        channels = fields.integer(inner) * fields.integer("hidden_size")
        conv = (fields.integer(kernel, least=2) - 1) * channels
        return conv * conv_width + channels * fields.integer(state) * state_width

    return rule


def _mamba2(heads: str, head_dim: str, groups: str, state: str, kernel: str) -> StateRule:
    """Mamba 2: the convolution also covers B and C of each group; one matrix for each head."""

    def rule(fields: _Fields, conv_width: int, state_width: int) -> int:
        count, size = fields.integer(heads), fields.integer(state)
        if fields.get(head_dim) == "auto":
            inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
        else:
            inner = count * fields.integer(head_dim)
        channels = inner + 2 * fields.integer(groups) * size
        conv = (fields.integer(kernel, least=2) - 1) * channels
        return conv * conv_width + inner * size * state_width

    return rule


def _gated_delta_net(fields: _Fields, conv_width: int, state_width: int) -> int:
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    values = fields.integer("linear_num_value_heads") * fields.integer("linear_value_head_dim")
    conv = (fields.integer("linear_conv_kernel_dim", least=2) - 1) * (2 * keys + values)
    return conv * conv_width + values * fields.integer("linear_key_head_dim") * state_width


@dataclass(frozen=True, slots=True)
class _Model:
    """Rules for reading the configs of one model type."""

    layers: LayerRule = _all_full
    """The kinds of layers, if the config has no layer_types."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the model's class for fields that published configs leave out."""
    kv_heads: Literal["given", "as heads", "falcon", "bigcode"] = "given"
    """How the number of K and V heads is read; "as heads": that of all heads if not given."""
    head_dim: Literal["given", "divided"] = "divided"
    """"divided": a missing head_dim is hidden_size / num_attention_heads; "given": an error."""
    mla: bool = False
    state: StateRule | None = None


_MAMBA2_NAMED: Final = _mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
)
_AS_HEADS: Final = _Model(kv_heads="as heads")
_HEAD_DIM_GIVEN: Final = _Model(head_dim="given")
_QWEN: Final = _Model(_last_layers_window)
_QWEN_NEXT: Final = _Model(
    _every("full_attention_interval", "state"),
    {"full_attention_interval": 4},
    head_dim="given",
    state=_gated_delta_net,
)
_QWEN3_MOE: Final = _Model(_window_unsupported, head_dim="given")
_GEMMA2: Final = {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA3: Final = _GEMMA2 | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window_pattern": 6,
}
_SLIDING_BUT_EVERY_NTH: Final = _every("sliding_window_pattern", "sliding")

MODELS: Final[Mapping[str, _Model]] = {
    **dict.fromkeys(("llama", "phi", "olmo", "olmo2", "olmoe", "granite", "granitemoe"), _AS_HEADS),
    **dict.fromkeys(("cohere", "nemotron", "gpt2", "gptj", "gpt_neox", "opt", "bloom"), _AS_HEADS),
    **dict.fromkeys(("stablelm", "ernie4_5"), _Model()),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "seed_oss"), _HEAD_DIM_GIVEN),
    **dict.fromkeys(("mixtral", "starcoder2", "phimoe"), _Model(_one_window)),
    "phi3": _Model(_one_window, kv_heads="as heads"),
    "mistral": _Model(_one_window, {"sliding_window": 4096}),
    "ministral": _Model(_must_be_typed),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text"), _QWEN),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), _QWEN),
    "qwen2_moe": _Model(_window_unsupported),
    "qwen3": _Model(_last_layers_window, head_dim="given"),
    "qwen3_vl_text": _HEAD_DIM_GIVEN,
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _QWEN3_MOE),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN_NEXT),
    "smollm3": _Model(_window_unsupported),
    "gemma": _Model(defaults={"head_dim": 256}),
    "gemma2": _Model(_SLIDING_BUT_EVERY_NTH, _GEMMA2),
    "gemma3_text": _Model(_SLIDING_BUT_EVERY_NTH, _GEMMA3),
    "cohere2": _Model(
        _SLIDING_BUT_EVERY_NTH,
        {"sliding_window": 4096, "sliding_window_pattern": 4},
        kv_heads="as heads",
    ),
    "gpt_oss": _Model(_must_be_typed, head_dim="given"),
    "llama4_text": _Model(_llama4, {"no_rope_layer_interval": 4}, head_dim="given"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _Model(mla=True)),
    "falcon": _Model(defaults={"multi_query": True}, kv_heads="falcon"),
    "gpt_bigcode": _Model(defaults={"multi_query": True}, kv_heads="bigcode"),
    "jamba": _Model(_jamba, state=_mamba("mamba_expand", "mamba_d_state", "mamba_d_conv")),
    "bamba": _Model(_bamba, state=_MAMBA2_NAMED),
    "granitemoehybrid": _Model(_must_be_typed, kv_heads="as heads", state=_MAMBA2_NAMED),
    "nemotron_h": _Model(
        _nemotron,
        {"mamba_ssm_cache_dtype": "float32"},
        head_dim="given",
        state=_mamba2(
            "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
        ),
    ),
    "mamba": _Model(_all_state, state=_mamba("expand", "state_size", "conv_kernel")),
    "mamba2": _Model(
        _all_state, state=_mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    ),
}
"""The supported model types, and the rules to read their configs."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of one kind, with the block size and dtype that the caller chose."""

    kind: LayerKind
    ids: tuple[int, ...]
    dtype: DType | None
    block_tokens: int


def model_layout(
    config: Mapping[str, Any] | str | Path,
    *,
    dtype: DType | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> ModelLayout:
    """The KV groups of the model with this `config`: the content or path of a config.json.

    `dtype` is that of the KV cache, by default that of the weights; states have the model's dtype.
    For a multimodal model the groups are those of its text part. Raises ConfigError, which names
    the field that is missing or not supported.
    """
    fields, model = _text_fields(config)
    kinds = _layer_kinds(fields, model)
    groups = []
    for kind in _GROUP_ORDER:
        ids = tuple(layer for layer, found in enumerate(kinds) if found == kind)
        if ids:
            build = _state_group if kind == "state" else _attention_group
            groups.append(build(fields, model, _Part(kind, ids, dtype, block_tokens)))
    return ModelLayout(tuple(groups))


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Cost of attention in layers of one kind."""

    pair_flops: int
    """Floating-point operations, over these layers, for each pair of tokens that attend."""
    window: int | None
    """Most tokens that these layers attend to; None if there is no limit."""


def attention_costs(config: Mapping[str, Any] | str | Path) -> tuple[AttentionCost, ...]:
    """Return the cost of attention in prefill for each kind of attention layer in `config`.

    A score takes 2 operations for each element of K and of V, in each query head; a latent (mla)
    is expanded to full heads first. Raises ConfigError as `model_layout` does.
    """
    fields, model = _text_fields(config)
    kinds = _layer_kinds(fields, model)
    costs = []
    for kind in _GROUP_ORDER[:3]:
        if layers := kinds.count(kind):
            flops = 2 * layers * fields.integer("num_attention_heads") * _key_value(fields, model)
            window = fields.integer(_WINDOW_OF[kind]) if kind in _WINDOW_OF else None
            costs.append(AttentionCost(flops, window))
    return tuple(costs)


def _key_value(fields: _Fields, model: _Model) -> int:
    """Elements of K and V of one head, as prefill multiplies them."""
    if not model.mla:
        return 2 * _head_dim(fields, model)
    key = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim", least=0)
    return key + fields.integer("v_head_dim")


def read_config(path: Path) -> Mapping[str, Any]:
    """Read a config.json. Raises ConfigError if there is none."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read as a config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), "is not a config.json: it is not a JSON object")
    return config


def _text_fields(config: Mapping[str, Any] | str | Path) -> tuple[_Fields, _Model]:
    """The values of the model's text part, completed with the defaults of its class."""
    if not isinstance(config, Mapping):
        config = read_config(Path(config))
    for name in _TEXT_KEYS:
        if isinstance(config.get(name), Mapping):
            text = _Fields(config[name])
            whole = {"dtype": _Fields(config).get("dtype")} if text.get("dtype") is None else {}
            config = {**text.values, **whole}
            break
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("model_type", "missing in the config", hint=_HINT)
    if kind not in MODELS:
        raise ConfigError("model_type", f"{kind!r} is not understood", hint=_HINT)
    model = MODELS[kind]
    return _Fields({**model.defaults, **config}), model


def _layer_kinds(fields: _Fields, model: _Model) -> list[LayerKind]:
    types = fields.get("layer_types")
    if types is None:
        kinds = model.layers(fields)
    else:
        unknown = [name for name in types if str(name) not in _LAYER_TYPES]
        if unknown:
            raise ConfigError("layer_types", f"{unknown[0]!r} is not understood", hint=_HINT)
        kinds = [_LAYER_TYPES[name] for name in types]
    count = fields.get("num_hidden_layers")
    if count is not None and len(kinds) != count:
        raise ConfigError("num_hidden_layers", f"is {count}, but {len(kinds)} layers are described")
    return kinds


def _attention_group(fields: _Fields, model: _Model, part: _Part) -> KVLayout:
    dtype = _model_dtype(fields) if part.dtype is None else part.dtype
    if model.mla:
        return KVLayout.mla(
            layers=len(part.ids),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            dtype=dtype,
            block_tokens=part.block_tokens,
            layer_ids=part.ids,
        )
    kv_heads, head_dim = _kv_heads(fields, model), _head_dim(fields, model)
    return KVLayout(
        kind="mha" if kv_heads == fields.integer("num_attention_heads") else "gqa",
        layers=len(part.ids),
        dtype=dtype,
        block_tokens=part.block_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        sliding_window=fields.integer("sliding_window") if part.kind == "sliding" else None,
        attention_chunk=fields.integer("attention_chunk_size") if part.kind == "chunked" else None,
        layer_ids=part.ids,
    )


def _state_group(fields: _Fields, model: _Model, part: _Part) -> KVLayout:
    if model.state is None:
        name = fields.get("model_type")
        raise ConfigError("layer_types", f"the state of {name} is not understood", hint=_HINT)
    if fields.get("dtype") is None and part.dtype is not None:
        dtype = _dtype("dtype", part.dtype)
    else:
        dtype = _model_dtype(fields)
    named = fields.get("mamba_ssm_cache_dtype") or fields.get("mamba_ssm_dtype")
    state_dtype = dtype if named in (None, "auto") else _dtype("mamba_ssm_cache_dtype", named)
    return KVLayout.state(
        layers=len(part.ids),
        state_bytes=model.state(fields, DTYPE_BYTES[dtype], DTYPE_BYTES[state_dtype]),
        dtype=dtype,
        block_tokens=part.block_tokens,
        layer_ids=part.ids,
    )


def _kv_heads(fields: _Fields, model: _Model) -> int:
    if model.kv_heads == "bigcode":
        return 1 if fields.get("multi_query") else fields.integer("num_attention_heads")
    grouped = fields.get("new_decoder_architecture") or not fields.get("multi_query")
    if model.kv_heads == "falcon" and not grouped:
        return 1
    if model.kv_heads != "given" and fields.get("num_key_value_heads") is None:
        return fields.integer("num_attention_heads")
    return fields.integer("num_key_value_heads")


def _head_dim(fields: _Fields, model: _Model) -> int:
    if fields.get("head_dim") is not None or model.head_dim == "given":
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise ConfigError("head_dim", f"missing, and {hidden} does not divide by {heads} heads")
    return hidden // heads


def _model_dtype(fields: _Fields) -> DType:
    value = fields.get("dtype")
    if value is None:
        raise ConfigError("dtype", "missing in the config", hint="pass dtype, such as 'bfloat16'")
    return _dtype("dtype", value)


def _dtype(name: str, value: object) -> DType:
    text = str(value).removeprefix("torch.")
    if text not in _DTYPES:
        raise ConfigError(
            name,
            f"{value!r} is not a type that models compute in: {', '.join(_DTYPES)}",
            hint="pass dtype, such as 'bfloat16'; a model with states needs it in the config",
        )
    return _DTYPES[text]
