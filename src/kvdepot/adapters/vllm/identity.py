"""The identity of a model's KV in vLLM: everything that makes its pages useless elsewhere.

Taken from vLLM's configuration, from the weight files, and from the layers, which know the backend
and the instruction set that were chosen. What cannot be served is refused here, at the start.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

import kvdepot
from kvdepot.adapters.tensors.kvtensors import DTYPES, KVTensors
from kvdepot.adapters.vllm.config import SETTING, ConnectorConfig
from kvdepot.adapters.vllm.groups import EngineGroup, grain_tokens
from kvdepot.adapters.vllm.messages import GroupFacts, ShardFacts, WorkerRank
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.weights import WeightsSource, weight_files
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import fingerprint
from kvdepot.errors import ConfigError

MODEL_SETTINGS: Final = (
    "max_model_len",
    "disable_sliding_window",
    "model_impl",
    "mm_processor_kwargs",
    "override_attention_dtype",
)
"""Settings of vLLM's model config that change K or V; see docs/guides/vllm.md."""


ServedGroup = tuple[EngineGroup, KVTensors, WorkerShard]
"""A KV group as one worker has it."""


def check_engine(engine: Any) -> None:
    """ConfigError for a configuration that would be served wrong, or not at all."""
    transfer, parallel = engine.kv_transfer_config, engine.parallel_config
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            "kv_transfer_config.kv_load_failure_policy",
            f"invalid value {policy!r} (expected 'recompute'): a block that cannot be read would "
            "fail its request",
            hint='set "kv_load_failure_policy": "recompute"',
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(name, f"invalid value {size} (expected 1): tokens would be divided")
    check_scales(engine)


def check_scales(engine: Any) -> None:
    """ConfigError if KV is scaled by the content of the first request."""
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales",
            "invalid value true (expected false): KV would depend on the first request",
        )


def shard_facts(
    engine: Any,
    cache: Any,
    groups: Sequence[ServedGroup],
    config: ConnectorConfig,
    place: WorkerRank,
) -> ShardFacts:
    """The facts that name the namespaces of a worker's blocks. ConfigError if nothing names the
    weights."""
    grain = grain_tokens([group.rule for group, _, _ in groups], config)
    draft, draft_weights = draft_of(engine, config.revision)
    has_all_layers = len(groups) == 1 and place.stages == 1
    facts = []
    for group, tensors, shard in groups:
        rule = group.rule
        extra = _extra(engine, cache, group, tensors)
        extra["engine"] = place.engine
        if not has_all_layers:
            extra["layers"] = fingerprint({"layers": list(group.layer_names)})
        pages = rule.pages_per_block(grain)
        layout = KVLayout.opaque(
            tensors.pages([0]).nbytes * pages,
            rule.block_tokens(grain),
            tensors.layer_count,
            dtype=DTYPES.get(tensors.tensors[0].dtype, "uint8"),
        )
        facts.append(GroupFacts(rule, layout, pages, tuple(sorted(extra.items())), shard))
    return ShardFacts(
        model=config.model or model_name(engine.model_config.model),
        config=config_digest(engine.model_config),
        weights=weights_of(engine, config.revision, SETTING),
        place=place,
        groups=tuple(facts),
        grain=grain,
        saves_settle_at_once=groups[0][1].device.type == "cpu",
        draft=draft,
        draft_weights=draft_weights,
    )


def producer_of(facts: ShardFacts) -> str:
    """A description of the program that computes the blocks, for display."""
    extra = dict(facts.groups[0].extra)
    weights = facts.weights.name or facts.weights.folder
    parts = (
        facts.place.engine,
        f"torch {torch.__version__}",
        f"kvdepot {kvdepot.__version__}",
        f"attention {extra['backend']}",
        f"cache {extra['cache_dtype']} of {extra['model_dtype']}",
        f"weights {weights[-40:]}",
    )
    return ", ".join(parts)


def model_name(model: str) -> str:
    """The model's name, or the name of its folder."""
    return Path(model).name if Path(model).is_dir() else str(model)


def config_digest(model: Any) -> str:
    """A digest of every key of a model's configuration."""
    content = json.dumps(model.hf_config.to_dict(), default=str)
    return fingerprint({"config": json.loads(content)})


def weights_of(engine: Any, revision: str, setting: str) -> WeightsSource:
    """The source of the weights' name. ConfigError, for `setting`, if there is none."""
    model = engine.model_config
    if revision:
        return WeightsSource(revision)
    load_format = str(getattr(engine.load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        return WeightsSource(f"dummy {model.seed}")
    folder = Path(model.model)
    if folder.is_dir() and weight_files(folder):
        return WeightsSource(folder=str(folder.absolute()))
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"{setting}.revision",
            f"missing: vLLM does not report which weights of {model.model} it has loaded",
            hint='set it to a name for the weights, such as "2026-11-01"',
        )
    return WeightsSource(f"commit {commit}")


def draft_of(engine: Any, revision: str) -> tuple[str, WeightsSource | None]:
    """The name of a draft model (EAGLE, MTP, a smaller model) whose layers have KV, empty if there
    is none; and its weights, if they have to be read."""
    drafts: Any = getattr(engine, "speculative_config", None)
    model = getattr(drafts, "draft_model_config", None)
    if model is None or not (drafts.use_eagle() or drafts.method == "draft_model"):
        return "", None
    described = f"drafted by {drafts.method} {config_digest(model)}"
    if model.model == engine.model_config.model:
        return described, None
    own = SimpleNamespace(model_config=model, load_config=engine.load_config)
    weights = weights_of(own, revision, SETTING)
    return (f"{described} {weights.name}", None) if weights.name else (described, weights)


def drafts_ahead(engine: Any) -> bool:
    """True if the KV of draft layers depends on the next token too (EAGLE, MTP), so that vLLM's own
    prefix hits leave out their last block."""
    drafts = getattr(engine, "speculative_config", None)
    if drafts is None or getattr(drafts, "disable_eagle_block_drop", False):
        return False
    return bool(drafts.use_eagle())


def model_facts(engine: Any) -> dict[str, str]:
    """The facts on which the content of a page depends, besides the group and the backend."""
    model, cache = engine.model_config, engine.cache_config
    lora = getattr(engine, "lora_config", None)
    return {
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "lora_dtype": str(getattr(lora, "lora_dtype", None)),
        **{name: str(getattr(model, name, None)) for name in MODEL_SETTINGS},
    }


def state_dtypes(engine: Any) -> dict[str, str]:
    """The facts on which the content of a state depends."""
    names = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    return {name: str(getattr(engine.cache_config, name, None)) for name in names}


def instructions() -> str:
    """The instruction set of this processor, as torch uses it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _extra(engine: Any, cache: Any, group: EngineGroup, tensors: KVTensors) -> dict[str, str]:
    """The facts on which the content of a group's pages depends."""
    layers = getattr(engine.compilation_config, "static_forward_context", {})
    first = layers.get(group.layer_names[0])
    backend = getattr(first, "attn_backend", None)
    pairs = model_facts(engine) | {
        "page_tokens": str(group.rule.page_tokens),
        "page_shape": str(tuple(tensors.tensors[0].shape[1:])),
        "spec": group.spec,
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "backend": str(backend.get_name()) if backend is not None else "unknown",
        "instructions": "",
    }
    if tensors.device.type == "cpu":
        isa = getattr(first, "isa", None) or getattr(getattr(first, "impl", None), "isa", None)
        pairs["instructions"] = f"{instructions()} {isa}"
    if group.rule.kind == "state":
        pairs |= state_dtypes(engine)
    return pairs
