"""The identity of a model in vLLM: everything that makes its pages useless to another vLLM.

Taken from vLLM's configuration, from the weight files, and from the layers themselves, which know
the backend and the instruction set that were chosen. What cannot be served is refused here, at
start.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvdepot.adapters.tensors.kvtensors import DTYPES, KVTensors
from kvdepot.adapters.vllm.config import SETTING, ConnectorConfig, pages_per_block
from kvdepot.adapters.vllm.messages import ShardFacts
from kvdepot.adapters.vllm.weights import WeightsDigest, digest_of, weight_files
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace, fingerprint
from kvdepot.errors import ConfigError, ModelError

_MODEL_SETTINGS: Final = (
    "max_model_len",
    "disable_sliding_window",
    "model_impl",
    "mm_processor_kwargs",
    "override_attention_dtype",
)
"""Of vLLM's model config, what changes K or V beside the model's own; see docs/guides/vllm.md."""


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """A worker's place in its engine."""

    rank: int
    """Among those that divide each layer's heads."""
    ranks: int
    engine: str
    """vLLM and its version: the content of a page may change with it."""


def check_engine(engine: Any) -> None:
    """Refuse what would be served wrong, or not at all, with the reason."""
    transfer, parallel = engine.kv_transfer_config, engine.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_transfer_config.kv_load_failure_policy",
            f"is {transfer.kv_load_failure_policy!r}: a block that cannot be read would fail its "
            "request",
            hint='"kv_load_failure_policy": "recompute"',
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(name, "must be 1 with kvdepot: layers or tokens would be divided")
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales", "makes KV depend on the first request: it cannot be kept"
        )


def check_groups(cache: Any) -> Any:
    """The one KV group; ModelError for a model that has several."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ModelError(
            f"the model has {len(groups)} KV groups ({kinds}); kvdepot serves one",
            hint="--disable-hybrid-kv-cache-manager",
        )
    spec = groups[0].kv_cache_spec
    if not getattr(spec, "prefix_cacheable", True) or not hasattr(spec, "num_kv_heads"):
        raise ModelError(f"{type(spec).__name__}: not a KV cache that can be kept by prefix")
    return groups[0]


def shard_facts(
    engine: Any, cache: Any, tensors: KVTensors, config: ConnectorConfig, place: WorkerRank
) -> ShardFacts:
    """What the namespace of this worker's blocks is made of."""
    group = check_groups(cache)
    page_tokens = group.kv_cache_spec.block_size
    ratio = pages_per_block(config.block_tokens, page_tokens)
    page_bytes = tensors.pages([0]).nbytes
    layout = KVLayout.opaque(
        page_bytes * ratio,
        page_tokens * ratio,
        tensors.layer_count,
        dtype=DTYPES.get(tensors.tensors[0].dtype, "uint8"),
    )
    replicas = max(1, getattr(cache, "kv_tp_replicas", 1) or 1)
    model = engine.model_config
    path = Path(model.model)
    weights, weights_folder = _weights(engine, config)
    return ShardFacts(
        model=config.model or (path.name if path.is_dir() else str(model.model)),
        config=fingerprint({"config": _plain(model.hf_config.to_dict())}),
        weights=weights,
        weights_folder=weights_folder,
        layout=layout.description(),
        shard_rank=place.rank // replicas,
        shard_size=max(1, place.ranks // replicas),
        extra=(*_extra(engine, cache, group, tensors), ("engine", place.engine)),
        pages_per_block=ratio,
        saves_settle_at_once=tensors.device.type == "cpu",
    )


def namespace_of(facts: ShardFacts, config: ConnectorConfig, adapter: str) -> Namespace:
    """The namespace of a shard's blocks under one adapter. ModelError while the weights are not
    known."""
    weights = known_weights(facts, config)
    if not weights:
        raise ModelError(f"the weights are not known: {_digest(facts, config).reason}")
    tenant = config.tenants.get(config.tenant)
    return Namespace(
        model=facts.model,
        layout=KVLayout.from_description(facts.layout),
        fingerprint=fingerprint({"config": facts.config}, weights),
        shard_rank=facts.shard_rank,
        shard_size=facts.shard_size,
        adapter=adapter,
        tenant=config.tenant,
        secret=tenant.secret() if tenant is not None else b"",
        extra=facts.extra,
    )


def known_weights(facts: ShardFacts, config: ConnectorConfig) -> str:
    """What names the weights; empty as long as they are being read. Does not wait."""
    return facts.weights or _digest(facts, config).known()


def _digest(facts: ShardFacts, config: ConnectorConfig) -> WeightsDigest:
    return digest_of(Path(facts.weights_folder), config.weights.expanduser())


def adapter_of(lora: Any, loaded: Mapping[int, str]) -> str:
    """A LoRA adapter's name and content, as `loaded` has it by vLLM's number; empty for none.

    ModelError while it is not known what vLLM has loaded, as before its first use.
    """
    if lora is None:
        return ""
    digest = loaded.get(lora.lora_int_id, "")
    if not digest:
        raise ModelError(f"vLLM has not said what it loads as LoRA {lora.lora_name}")
    return f"{lora.lora_name} {digest}"


def _weights(engine: Any, config: ConnectorConfig) -> tuple[str, str]:
    """What names the weights; or, where that has to be read, the folder that they are in."""
    model = engine.model_config
    if config.revision:
        return config.revision, ""
    load_format = str(getattr(engine.load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        return f"dummy {model.seed}", ""
    folder = Path(model.model)
    if folder.is_dir() and weight_files(folder):
        return "", str(folder.absolute())
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"{SETTING}.revision",
            f"missing: vLLM does not tell which weights of {model.model} it has loaded",
            hint='set it to whatever names them, such as "2026-11-01"',
        )
    return f"commit {commit}", ""


def _extra(engine: Any, cache: Any, group: Any, tensors: KVTensors) -> tuple[tuple[str, str], ...]:
    """What the content of a page depends on besides the model."""
    layers = getattr(engine.compilation_config, "static_forward_context", {})
    first = layers.get(group.layer_names[0])
    backend = getattr(first, "attn_backend", None)
    pairs = {
        "model_dtype": str(engine.model_config.dtype),
        "quantization": str(engine.model_config.quantization),
        "cache_dtype": str(engine.cache_config.cache_dtype),
        "page_tokens": str(group.kv_cache_spec.block_size),
        "page_shape": str(tuple(tensors.tensors[0].shape[1:])),
        "spec": type(group.kv_cache_spec).__name__,
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "backend": str(backend.get_name()) if backend is not None else "unknown",
        "instructions": "",
        "lora_dtype": str(getattr(getattr(engine, "lora_config", None), "lora_dtype", None)),
    }
    for name in _MODEL_SETTINGS:
        pairs[name] = str(getattr(engine.model_config, name, None))
    if tensors.device.type == "cpu":
        isa = getattr(first, "isa", None) or getattr(getattr(first, "impl", None), "isa", None)
        capability = torch.backends.cpu.get_cpu_capability()
        pairs["instructions"] = f"{platform.machine()} {capability} {isa}"
    return tuple(sorted(pairs.items()))


def _plain(value: Any) -> Any:
    """A config's content as JSON would have it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
