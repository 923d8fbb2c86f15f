"""A model to plan for: by name from the table of well-known models, or by its config.json.

The table has, for each model, the repository on huggingface.co whose config.json has these numbers,
billions of parameters in all and at work for one token (as the model's card gives them), and the
few numbers that KV and prefill depend on. They were written down without fetching those files; the
papers' figures for 9 of the models agree (tests/planner/test_seed_tables.py). A config.json at hand
is the better source.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.core.hf_config import AttentionCost, attention_costs, model_layout, read_config
from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DType, ModelLayout
from kvdepot.errors import ConfigError

Family = Literal["dense", "moe", "sliding", "mla", "hybrid"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One published model."""

    repository: str
    family: Family
    parameters: float
    active_parameters: float
    config: Mapping[str, Any]
    aliases: tuple[str, ...] = field(default=())


def _config(kind: str, shape: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """`shape`: layers, query heads, K and V heads, hidden size."""
    layers, heads, kv_heads, hidden = shape
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "dtype": "bfloat16",
        **more,
    }


def _latent(kind: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    return _config(kind, shape, **sizes, v_head_dim=128)


def _oss(layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    shape = (layers, 64, 8, 2880)
    return _config("gpt_oss", shape, head_dim=64, sliding_window=128, layer_types=kinds)


def _dense(
    repository: str,
    billions: float,
    config: Mapping[str, Any],
    *aliases: str,
    family: Family = "dense",
) -> KnownModel:
    return KnownModel(repository, family, billions * 1e9, billions * 1e9, config, aliases)


def _sparse(
    repository: str,
    billions: tuple[float, float],
    config: Mapping[str, Any],
    *aliases: str,
    family: Family = "moe",
) -> KnownModel:
    whole, active = billions
    return KnownModel(repository, family, whole * 1e9, active * 1e9, config, aliases)


_LLAMA4: Final = _config(
    "llama4_text",
    (48, 40, 8, 5120),
    head_dim=128,
    attention_chunk_size=8192,
    no_rope_layer_interval=4,
)
_QWEN_NEXT: Final = _config(
    "qwen3_next",
    (48, 16, 2, 2048),
    head_dim=256,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
)
_JAMBA: Final = _config(
    "jamba",
    (32, 32, 8, 4096),
    attn_layer_period=8,
    attn_layer_offset=4,
    mamba_d_conv=4,
    mamba_d_state=16,
    mamba_expand=2,
)
_NEMOTRON_H: Final = _config(
    "nemotron_h",
    (52, 32, 8, 4096),
    head_dim=128,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    mamba_num_heads=128,
    mamba_head_dim=64,
    n_groups=8,
    ssm_state_size=128,
    conv_kernel=4,
)


def _llama(*shape: int) -> dict[str, Any]:
    layers, heads, kv_heads, hidden = shape
    return _config("llama", (layers, heads, kv_heads, hidden))


def _qwen3(kind: str, *shape: int) -> dict[str, Any]:
    layers, heads, kv_heads, hidden = shape
    return _config(kind, (layers, heads, kv_heads, hidden), head_dim=128)


def _qwen2(*shape: int) -> dict[str, Any]:
    layers, heads, kv_heads, hidden = shape
    return _config("qwen2", (layers, heads, kv_heads, hidden), use_sliding_window=False)


_NEMO: Final = _config("mistral", (40, 32, 8, 5120), head_dim=128, sliding_window=None)
_LARGE: Final = _config("mistral", (88, 96, 8, 12288), sliding_window=None)
_MISTRAL_7B: Final = _config("mistral", (32, 32, 8, 4096), sliding_window=4096)
_GEMMA2_9B: Final = _config("gemma2", (42, 16, 8, 3584), head_dim=256, sliding_window=4096)
_GEMMA3_4B: Final = _config("gemma3_text", (34, 8, 4, 2560), head_dim=256, sliding_window=1024)
_GEMMA3_27B: Final = _config("gemma3_text", (62, 32, 16, 5376), head_dim=128, sliding_window=1024)
_FALCON_40B: Final = _config("falcon", (60, 128, 8, 8192), new_decoder_architecture=True)

KNOWN_MODELS: Final[tuple[KnownModel, ...]] = (
    _dense("facebook/opt-13b", 13.0, _config("opt", (40, 40, 40, 5120))),
    _dense("HuggingFaceTB/SmolLM2-135M", 0.135, _llama(30, 9, 3, 576)),
    _dense("HuggingFaceTB/SmolLM2-1.7B", 1.71, _llama(24, 32, 32, 2048)),
    _dense("meta-llama/Llama-2-7b-hf", 6.74, _llama(32, 32, 32, 4096), "llama-2-7b"),
    _dense("meta-llama/Llama-2-13b-hf", 13.0, _llama(40, 40, 40, 5120), "llama-2-13b"),
    _dense("meta-llama/Llama-2-70b-hf", 69.0, _llama(80, 64, 8, 8192), "llama-2-70b"),
    _dense("meta-llama/Llama-3.2-1B", 1.24, _llama(16, 32, 8, 2048)),
    _dense("meta-llama/Llama-3.2-3B", 3.21, _llama(28, 24, 8, 3072)),
    _dense(
        "meta-llama/Llama-3.1-8B",
        8.03,
        _llama(32, 32, 8, 4096),
        "llama-3-8b",
        "meta-llama-3-8b",
        "deepseek-r1-distill-llama-8b",
    ),
    _dense(
        "meta-llama/Llama-3.3-70B-Instruct",
        70.6,
        _llama(80, 64, 8, 8192),
        "llama-3-70b",
        "meta-llama-3-70b",
        "llama-3.1-70b",
        "deepseek-r1-distill-llama-70b",
    ),
    _dense("meta-llama/Llama-3.1-405B", 405.9, _llama(126, 128, 8, 16384), "llama-3-405b"),
    _dense("Qwen/Qwen2.5-0.5B", 0.49, _qwen2(24, 14, 2, 896)),
    _dense("Qwen/Qwen2.5-1.5B", 1.54, _qwen2(28, 12, 2, 1536)),
    _dense("Qwen/Qwen2.5-3B", 3.09, _qwen2(36, 16, 2, 2048)),
    _dense("Qwen/Qwen2.5-7B", 7.62, _qwen2(28, 28, 4, 3584)),
    _dense("Qwen/Qwen2.5-14B", 14.8, _qwen2(48, 40, 8, 5120)),
    _dense("Qwen/Qwen2.5-32B", 32.8, _qwen2(64, 40, 8, 5120)),
    _dense("Qwen/Qwen2.5-72B", 72.7, _qwen2(80, 64, 8, 8192)),
    _dense("Qwen/Qwen3-4B", 4.02, _qwen3("qwen3", 36, 32, 8, 2560)),
    _dense("Qwen/Qwen3-8B", 8.19, _qwen3("qwen3", 36, 32, 8, 4096)),
    _dense("Qwen/Qwen3-14B", 14.8, _qwen3("qwen3", 40, 40, 8, 5120)),
    _dense("Qwen/Qwen3-32B", 32.8, _qwen3("qwen3", 64, 64, 8, 5120)),
    _dense("mistralai/Mistral-Nemo-Base-2407", 12.2, _NEMO, "mistral-nemo"),
    _dense("mistralai/Mistral-Large-Instruct-2407", 123.0, _LARGE, "mistral-large"),
    _dense("microsoft/phi-4", 14.7, _config("phi3", (40, 40, 10, 5120))),
    _dense("tiiuae/falcon-40b", 41.8, _FALCON_40B),
    _sparse("Qwen/Qwen3-30B-A3B", (30.5, 3.3), _qwen3("qwen3_moe", 48, 32, 4, 2048)),
    _sparse("Qwen/Qwen3-235B-A22B-Instruct-2507", (235, 22), _qwen3("qwen3_moe", 94, 64, 4, 4096)),
    _sparse(
        "mistralai/Mixtral-8x7B-v0.1",
        (46.7, 12.9),
        _config("mixtral", (32, 32, 8, 4096)),
        "mixtral-8x7b",
    ),
    _sparse(
        "mistralai/Mixtral-8x22B-v0.1",
        (141, 39),
        _config("mixtral", (56, 48, 8, 6144)),
        "mixtral-8x22b",
    ),
    _sparse("zai-org/GLM-4.5", (355, 32), _config("glm4_moe", (92, 96, 8, 5120), head_dim=128)),
    _sparse(
        "meta-llama/Llama-4-Scout-17B-16E",
        (109, 17),
        _LLAMA4,
        "llama-4-scout",
        family="sliding",
    ),
    _sparse(
        "meta-llama/Llama-4-Maverick-17B-128E",
        (400, 17),
        _LLAMA4,
        "llama-4-maverick",
        family="sliding",
    ),
    _sparse("openai/gpt-oss-20b", (20.9, 3.6), _oss(24), family="sliding"),
    _sparse("openai/gpt-oss-120b", (117, 5.1), _oss(36), family="sliding"),
    _dense("mistralai/Mistral-7B-v0.1", 7.24, _MISTRAL_7B, "mistral-7b", family="sliding"),
    _dense("google/gemma-2-9b", 9.24, _GEMMA2_9B, family="sliding"),
    _dense("google/gemma-3-4b-pt", 4.3, _GEMMA3_4B, "gemma-3-4b", family="sliding"),
    _dense("google/gemma-3-27b-pt", 27.4, _GEMMA3_27B, "gemma-3-27b", family="sliding"),
    _sparse(
        "deepseek-ai/DeepSeek-R1",
        (671, 37),
        _latent("deepseek_v3", (61, 128, 128, 7168)),
        "deepseek-v3",
        "deepseek-r1-685b",
        family="mla",
    ),
    _sparse(
        "deepseek-ai/DeepSeek-V2-Lite",
        (15.7, 2.4),
        _latent("deepseek_v2", (27, 16, 16, 2048)),
        family="mla",
    ),
    _sparse(
        "moonshotai/Kimi-K2-Instruct",
        (1040, 32),
        _latent("kimi_k2", (61, 64, 64, 7168)),
        family="mla",
    ),
    _sparse(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        (80, 3),
        _QWEN_NEXT,
        "qwen3-next-80b",
        family="hybrid",
    ),
    _sparse("ai21labs/AI21-Jamba-Mini-1.5", (52, 12), _JAMBA, "jamba-1.5-mini", family="hybrid"),
    _dense("nvidia/Nemotron-H-8B-Base-8K", 8.1, _NEMOTRON_H, "nemotron-h-8b", family="hybrid"),
)


_TUNED: Final = ("-instruct", "-chat", "-base", "-it", "-hf", "-pt")
"""Endings that say how a model was tuned, which changes nothing here."""


@dataclass(frozen=True, slots=True)
class Model:
    """What sizes and times depend on."""

    name: str
    source: str
    """Where the numbers come from."""

    config: Mapping[str, Any]
    parameters: float | None = None
    """Weights in all; None for a config.json, which does not say."""

    active_parameters: float | None = None
    """Weights that work on one token."""

    def layout(
        self, *, dtype: DType | None = None, block_tokens: int = DEFAULT_BLOCK_TOKENS
    ) -> ModelLayout:
        return model_layout(self.config, dtype=dtype, block_tokens=block_tokens)

    def attention_costs(self) -> tuple[AttentionCost, ...]:
        return attention_costs(self.config)


def find_model(text: str) -> Model:
    """The model that `text` names: a config.json, a directory with one, or a well-known name.

    Raises ConfigError for a file that cannot be read and, with the nearest names, for a name that
    is not known.
    """
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        return Model(text, str(path), read_config(path))
    named = _by_name()
    for wanted in (_plain(text), _plain(text.rpartition("/")[2])):
        if wanted in named:
            known = named[wanted]
            return Model(
                known.repository.rpartition("/")[2],
                f"huggingface.co/{known.repository} config.json",
                known.config,
                known.parameters,
                known.active_parameters,
            )
    aliases = [alias for known in KNOWN_MODELS for alias in known.aliases]
    shown = {_plain(name): name for name in (*aliases, *model_names())}
    near = difflib.get_close_matches(_plain(text.rpartition("/")[2]), shown, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(shown[name] for name in near)}; " if near else ""
    raise ConfigError(
        "model",
        f"{text!r} is neither a file nor a well-known model",
        hint=f"{hint}kvdepot size --models lists all; any config.json works",
    )


def model_names() -> tuple[str, ...]:
    """The name of every well-known model, without its aliases."""
    return tuple(known.repository.rpartition("/")[2] for known in KNOWN_MODELS)


def _by_name() -> dict[str, KnownModel]:
    names = {}
    for known in KNOWN_MODELS:
        for name in (known.repository, known.repository.rpartition("/")[2], *known.aliases):
            names[_plain(name)] = known
    return names


def _plain(name: str) -> str:
    """`name` as it is compared: lower case, without separators, dates and how it was tuned."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-").removesuffix("-2507")
    for ending in _TUNED:
        plain = plain.removesuffix(ending)
    return plain.replace("-", "")
