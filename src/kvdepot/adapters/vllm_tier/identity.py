"""The identity of a chunk below vLLM's CPU tier: everything that makes it useless elsewhere.

vLLM gives a tier the model's name, dtype and groups. The rest is read from the configuration with
which its connector is made, which is on the stack while the tier is made.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.adapters.vllm.identity import (
    check_scales,
    config_digest,
    instructions,
    model_facts,
    model_name,
    state_dtypes,
    weights_of,
)
from kvdepot.adapters.vllm.weights import WeightsSource
from kvdepot.adapters.vllm_tier.config import SETTING, TierSettings
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace, fingerprint
from kvdepot.errors import ConfigError

_SAFE_HASHES: Final = ("sha256", "sha256_cbor")


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """The facts that name the namespaces of one engine's chunks."""

    model: str
    config: str
    """A digest of the model's configuration."""
    weights: WeightsSource
    groups: tuple[tuple[int, int, str], ...]
    """The number, the tokens of a chunk, and a digest of the layers of each KV group."""
    chunk_bytes: int
    extra: tuple[tuple[str, str], ...]

    def namespaces(self, settings: TierSettings, weights: str) -> dict[int, Namespace]:
        """Namespaces by group; `weights` is the name of the loaded weights."""
        return {
            group: Namespace(
                model=self.model,
                layout=KVLayout.opaque(self.chunk_bytes, tokens),
                fingerprint=fingerprint({"config": self.config}, weights),
                adapter=settings.adapters,
                tenant=settings.tenant,
                secret=settings.secret(),
                extra=(*self.extra, ("group", str(group)), ("layers", layers)),
            )
            for group, tokens, layers in self.groups
        }


def engine_config(kind: type) -> Any:
    """vLLM's configuration, of type `kind`, that one of the callers has; None if none has it."""
    for caller in inspect.stack(context=0):
        config = caller.frame.f_locals.get("vllm_config")
        if isinstance(config, kind):
            return config
    return None


def identify(
    spec: Any, engine: Any, settings: TierSettings, chunk_bytes: int, version: str
) -> TierIdentity:
    """The identity of `spec`, vLLM's offloading spec, and `engine`, its configuration or None.
    ConfigError for what would be served wrong: LoRAs whose content has no name, KV scales made at
    run time, hashes that collide, weights that nothing names."""
    config, parallel = spec.config, spec.config.parallel
    pairs = {
        "engine": f"vllm {version}",
        "dtype": config.model.dtype,
        "chunks": "vllm",
        "kv_layout": str(config.kv_cache_layout),
        "canonical": str(config.canonical_layout),
        "replicated": str(config.replicated_layout),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
    }
    if config.replicated_layout or parallel.is_parallelism_agnostic:
        pairs["workers"] = "any"  # the bytes are the same for any number of workers
    else:
        names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        pairs["workers"] = " ".join(f"{name}={getattr(parallel, name)}" for name in names)
        pairs["block_bytes"] = str(config.worker_kv_bytes_per_block)
    if engine is not None:
        _check(engine, settings)
        weights = weights_of(engine, settings.revision, SETTING)
        device = str(getattr(getattr(engine, "device_config", None), "device_type", None))
        pairs |= model_facts(engine) | state_dtypes(engine)
        pairs["device"] = f"cpu {instructions()}" if device == "cpu" else device
        pairs["hashes"] = str(getattr(engine.cache_config, "prefix_caching_hash_algo", None))
        pairs["backend"] = str(getattr(getattr(engine, "attention_config", None), "backend", None))
    elif settings.revision:
        weights = WeightsSource(settings.revision)
    else:
        raise ConfigError(
            f"{SETTING}.revision",
            "missing: vLLM's configuration cannot be found, so nothing names the weights",
            hint='set it to a name for the model, its weights and settings, such as "2026-11-01"',
        )
    size = config.cache.blocks_per_chunk
    groups = [
        (
            group.group_id,
            group.tokens_per_block * size,
            fingerprint({"layers": list(group.layer_names)}),
        )
        for group in config.groups
    ]
    return TierIdentity(
        model=settings.model or model_name(config.model.name),
        config=config_digest(engine.model_config) if engine is not None else "",
        weights=weights,
        groups=tuple(groups) or ((0, config.cache.tokens_per_hash * size, ""),),
        chunk_bytes=chunk_bytes,
        extra=tuple(sorted(pairs.items())),
    )


def _check(engine: Any, settings: TierSettings) -> None:
    """ConfigError for a configuration that would be served wrong."""
    check_scales(engine)
    if getattr(engine, "lora_config", None) is not None and not settings.adapters:
        raise ConfigError(
            f"{SETTING}.adapters",
            "missing: vLLM names the chunks of a LoRA by the LoRA's name, not by its content",
            hint='set it to a name for all LoRAs, such as "2026-11-01", or use KVDepotConnector',
        )
    algorithm = str(getattr(engine.cache_config, "prefix_caching_hash_algo", _SAFE_HASHES[0]))
    if algorithm not in _SAFE_HASHES:
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"invalid value {algorithm} (expected {' or '.join(_SAFE_HASHES)}): two prompts can "
            "have one hash",
            hint=f"start vLLM with --prefix-caching-hash-algo {_SAFE_HASHES[0]}",
        )
