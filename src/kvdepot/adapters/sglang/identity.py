"""The identity of a model in SGLang: the facts that make its pages useless to another SGLang.

SGLang's page hashes cover tokens, a request's extra key and its salt, but neither the model nor the
layout of a page. Those come from its arguments, the weight files and the host pools.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import kvdepot
from kvdepot.adapters.sglang.config import SETTING, HiCacheSettings
from kvdepot.adapters.vllm.identity import instructions
from kvdepot.adapters.vllm.weights import digest_of, weight_files
from kvdepot.core.namespace import fingerprint
from kvdepot.errors import ConfigError

KV: Final = "kv"
"""SGLang's name for the pool of K and V. Other pools have states, windows or indices."""
_ARGUMENTS: Final = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "context_length",
    "json_model_override_args",
    "model_impl",
    "load_format",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "revision",
    "device",
)
"""Arguments of SGLang that may change K or V, or the layout of a page."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """The facts for the namespaces of one SGLang process."""

    model: str
    config: str
    weights: str
    """The name of the weights; empty if their files must be read."""
    folder: Path | None
    shard: tuple[int, int]
    extra: tuple[tuple[str, str], ...]
    producer: str = "SGLang"
    """The program that computes the pages, for display."""

    def known_weights(self, settings: HiCacheSettings) -> str:
        """The name of the weights; empty while their files are being read. Does not block."""
        if self.folder is None:
            return self.weights
        return digest_of(self.folder, settings.weights.expanduser()).known()

    def namespace(
        self, settings: HiCacheSettings, weights: str, pool: str, shape: Mapping[str, str]
    ) -> dict[str, Any]:
        """The fields of the namespace of one pool's pages."""
        chained = str(settings.prefix_chain and pool == KV)
        pairs = {**dict(self.extra), **shape, "name": pool, "chained": chained}
        return {
            "model": self.model,
            "fingerprint": fingerprint({"config": self.config}, weights),
            "shard_rank": self.shard[0],
            "shard_size": self.shard[1],
            "adapter": settings.adapters,
            "tenant": settings.tenant,
            "secret": settings.secret(),
            "extra": tuple(sorted(pairs.items())),
        }


def identify(
    storage: Any, arguments: Any, settings: HiCacheSettings, version: str, setting: str = SETTING
) -> PageIdentity:
    """Reads `storage`, SGLang's HiCacheStorageConfig, and `arguments`, its ServerArgs or None.

    ConfigError, for the SGLang option `setting`, if nothing identifies the weights or the LoRAs.
    """
    if getattr(arguments, "enable_lora", False) and not settings.adapters:
        raise ConfigError(
            f"{setting}.adapters",
            "missing: SGLang identifies a LoRA by its name, not by its content",
            hint='set it to a name for the content of all LoRAs: "2026-11-01"',
        )
    path = Path(str(getattr(arguments, "model_path", "") or ""))
    folder = path if path.parts and path.is_dir() and weight_files(path) else None
    if folder is None and not settings.revision:
        raise ConfigError(
            f"{setting}.revision",
            "missing: SGLang does not show which weights it has loaded",
            hint='set it to a name for the weights, such as "2026-11-01"',
        )
    config = ""
    if path.parts and (path / "config.json").is_file():
        config = fingerprint({"config": json.loads((path / "config.json").read_text())})
    pairs = {name: str(getattr(arguments, name, None)) for name in _ARGUMENTS}
    if not torch.cuda.is_available():
        pairs["instructions"] = instructions()
    for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"):
        pairs[name] = str(getattr(storage, name, None))
    pairs |= {"tp_lcm_size": str(storage.tp_lcm_size), "engine": f"sglang {version}"}
    return PageIdentity(
        model=storage.model_name or path.name or "sglang",
        config=config,
        weights=settings.revision,
        folder=None if settings.revision else folder,
        shard=(0, 1) if storage.is_mla_model else (storage.tp_rank, storage.tp_size),
        extra=tuple(sorted(pairs.items())),
        producer=f"SGLang {version}, kvdepot {kvdepot.__version__}",
    )
