"""The identity of a model in SGLang: what makes its pages useless to another SGLang.

SGLang's page hashes cover tokens, a request's extra key and its salt: neither the model nor how a
page looks. Both are taken from its arguments, the weight files and the host pools.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvdepot.adapters.sglang.config import SETTING, HiCacheSettings
from kvdepot.adapters.vllm.weights import digest_of, weight_files
from kvdepot.core.namespace import fingerprint
from kvdepot.errors import ConfigError

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
"""Of SGLang's arguments, what may change K or V, or how a page looks."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What the namespaces of one SGLang process are made of."""

    model: str
    config: str
    weights: str
    """What names them; empty where they have to be read."""
    folder: Path | None
    shard: tuple[int, int]
    extra: tuple[tuple[str, str], ...]

    def known_weights(self, settings: HiCacheSettings) -> str:
        """What names the weights; empty as long as they are being read. Does not wait."""
        if self.folder is None:
            return self.weights
        return digest_of(self.folder, settings.weights.expanduser()).known()

    def namespace(
        self, settings: HiCacheSettings, weights: str, pool: str, shape: Mapping[str, str]
    ) -> dict[str, Any]:
        """The fields of the namespace of one pool's pages."""
        tenant = settings.tenants.get(settings.tenant)
        chained = str(settings.prefix_chain and pool == "kv")
        pairs = {**dict(self.extra), **shape, "name": pool, "chained": chained}
        return {
            "model": self.model,
            "fingerprint": fingerprint({"config": self.config}, weights),
            "shard_rank": self.shard[0],
            "shard_size": self.shard[1],
            "adapter": settings.adapters,
            "tenant": settings.tenant,
            "secret": tenant.secret() if tenant is not None else b"",
            "extra": tuple(sorted(pairs.items())),
        }


def identify(
    storage: Any, arguments: Any, settings: HiCacheSettings, version: str, setting: str = SETTING
) -> PageIdentity:
    """Of `storage`, SGLang's HiCacheStorageConfig, and `arguments`, its ServerArgs or None.

    ConfigError, for the SGLang option `setting`, where nothing names the weights, or the content of
    LoRAs.
    """
    if getattr(arguments, "enable_lora", False) and not settings.adapters:
        raise ConfigError(
            f"{setting}.adapters",
            "missing: SGLang names the pages of a LoRA by its name, whatever its content",
            hint='set it to what names all LoRAs: "2026-11-01"',
        )
    path = Path(str(getattr(arguments, "model_path", "") or ""))
    folder = path if path.parts and path.is_dir() and weight_files(path) else None
    if settings.revision:
        folder = None
    elif folder is None:
        raise ConfigError(
            f"{setting}.revision",
            "missing: SGLang does not tell which weights it has loaded",
            hint='set it to whatever names them, such as "2026-11-01"',
        )
    config = ""
    if path.parts and (path / "config.json").is_file():
        config = fingerprint({"config": json.loads((path / "config.json").read_text())})
    pairs = {name: str(getattr(arguments, name, None)) for name in _ARGUMENTS}
    if not torch.cuda.is_available():
        pairs["instructions"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"):
        pairs[name] = str(getattr(storage, name, None))
    pairs["tp_lcm_size"] = str(storage.tp_lcm_size)
    shard = (0, 1) if storage.is_mla_model else (storage.tp_rank, storage.tp_size)
    return PageIdentity(
        model=storage.model_name or path.name or "sglang",
        config=config,
        weights=settings.revision,
        folder=folder,
        shard=shard,
        extra=tuple(sorted({**pairs, "engine": f"sglang {version}"}.items())),
    )
