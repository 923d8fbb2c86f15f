"""The identity of a model below vLLM's CPU tier: everything that makes a chunk useless elsewhere.

vLLM tells a tier the model's name, dtype and groups. The rest is read from the configuration that
its connector is being made with, which is on the stack while the tier is made.
"""

import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvdepot.adapters.vllm.identity import MODEL_SETTINGS, check_scales, plain, weights_of
from kvdepot.adapters.vllm.weights import digest_of
from kvdepot.adapters.vllm_tier.config import SETTING, TierSettings
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace, fingerprint
from kvdepot.errors import ConfigError

_SAFE_HASHES: Final = ("sha256", "sha256_cbor")


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """What the namespaces of one engine's chunks are made of."""

    model: str
    config: str
    """Of the model's config and of all settings that change K or V."""
    weights: str
    """What names them; empty where they have to be read."""
    weights_folder: Path | None
    groups: tuple[tuple[int, int, str], ...]
    """Of each KV group its number, the tokens of a chunk, and its layers."""
    chunk_bytes: int
    extra: tuple[tuple[str, str], ...]

    def known_weights(self, settings: TierSettings) -> str:
        """What names the weights; empty as long as they are being read. Does not wait."""
        if self.weights_folder is None:
            return self.weights
        return digest_of(self.weights_folder, settings.weights.expanduser()).known()

    def namespaces(self, settings: TierSettings, weights: str) -> dict[int, Namespace]:
        """By group."""
        tenant = settings.tenants.get(settings.tenant)
        return {
            group: Namespace(
                model=self.model,
                layout=KVLayout.opaque(self.chunk_bytes, tokens),
                fingerprint=fingerprint({"config": self.config}, weights),
                adapter=settings.adapters,
                tenant=settings.tenant,
                secret=tenant.secret() if tenant is not None else b"",
                extra=(*self.extra, ("group", str(group)), ("layers", layers)),
            )
            for group, tokens, layers in self.groups
        }


def engine_config(kind: type) -> Any:
    """vLLM's configuration, of type `kind`, that one of the callers is at work with; else None."""
    for caller in inspect.stack(context=0):
        found = caller.frame.f_locals.get("vllm_config")
        if isinstance(found, kind):
            return found
    return None


def identify(
    spec: Any, engine: Any, settings: TierSettings, chunk_bytes: int, version: str
) -> TierIdentity:
    """Of `spec`, vLLM's offloading spec, and `engine`, its configuration or None.

    ConfigError for what would be served wrong: LoRAs whose content is not named, KV scales made at
    run time, hashes that collide, weights that nothing names.
    """
    told = spec.config
    if engine is None and not settings.revision:
        raise ConfigError(
            f"{SETTING}.revision",
            "missing: vLLM's configuration is out of reach, nothing tells which weights these are",
            hint='set it to whatever names the model, its weights and settings: "2026-11-01"',
        )
    config, weights, folder = "", settings.revision, ""
    pairs = {"engine": f"vllm {version}", "dtype": told.model.dtype, "chunks": "vllm"}
    if engine is not None:
        check(engine, settings)
        weights, folder = weights_of(engine, settings.revision, SETTING)
        config = fingerprint({"config": plain(engine.model_config.hf_config.to_dict())})
        pairs |= _settings(engine)
    path = Path(told.model.name)
    return TierIdentity(
        model=settings.model or (path.name if path.is_dir() else told.model.name),
        config=config,
        weights=weights,
        weights_folder=Path(folder) if folder else None,
        groups=_groups(told),
        chunk_bytes=chunk_bytes,
        extra=tuple(sorted({**pairs, **_layout(told)}.items())),
    )


def check(engine: Any, settings: TierSettings) -> None:
    """Refuse what would be served wrong, with the reason."""
    check_scales(engine)
    if getattr(engine, "lora_config", None) is not None and not settings.adapters:
        raise ConfigError(
            f"{SETTING}.adapters",
            "missing: vLLM names the chunks of a LoRA by its name, whatever its content",
            hint='set it to what names all LoRAs: "2026-11-01"; or use KVDepotConnector',
        )
    used = str(getattr(engine.cache_config, "prefix_caching_hash_algo", _SAFE_HASHES[0]))
    if used not in _SAFE_HASHES:
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"{used} can give two prompts one name",
            hint=f"--prefix-caching-hash-algo {_SAFE_HASHES[0]}",
        )


def _groups(told: Any) -> tuple[tuple[int, int, str], ...]:
    size = told.cache.blocks_per_chunk
    found: Sequence[Any] = told.groups
    return tuple(
        (
            group.group_id,
            group.tokens_per_block * size,
            fingerprint({"layers": list(group.layer_names)}),
        )
        for group in found
    ) or ((0, told.cache.tokens_per_hash * size, ""),)


def _settings(engine: Any) -> dict[str, str]:
    """What the content of a page depends on besides the model."""
    model, cache = engine.model_config, engine.cache_config
    pairs = {
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hashes": str(getattr(cache, "prefix_caching_hash_algo", None)),
        "backend": str(getattr(getattr(engine, "attention_config", None), "backend", None)),
        "lora_dtype": str(getattr(getattr(engine, "lora_config", None), "lora_dtype", None)),
        "mamba_dtypes": " ".join(
            str(getattr(cache, name, None))
            for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
        ),
    }
    pairs |= {name: str(getattr(model, name, None)) for name in MODEL_SETTINGS}
    device = str(getattr(getattr(engine, "device_config", None), "device_type", None))
    if device == "cpu":
        device = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {**pairs, "device": device}


def _layout(told: Any) -> dict[str, str]:
    """How the bytes of a chunk are ordered: by layout, and by the workers that filled it.

    Where vLLM knows that they are the same however many workers there are, these do not count.
    """
    parallel = told.parallel
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    workers = {
        "block_bytes": str(told.worker_kv_bytes_per_block),
        "workers": " ".join(f"{name}={getattr(parallel, name)}" for name in names),
    }
    if told.replicated_layout or parallel.is_parallelism_agnostic:
        workers = {"workers": "any"}
    return {
        "kv_layout": str(told.kv_cache_layout),
        "canonical": str(told.canonical_layout),
        "replicated": str(told.replicated_layout),
        "tokens_per_hash": str(told.cache.tokens_per_hash),
        "blocks_per_chunk": str(told.cache.blocks_per_chunk),
        **workers,
    }
