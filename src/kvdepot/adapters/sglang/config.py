"""The settings in SGLang's `--hicache-storage-backend-extra-config`, and in `linker_extra_config`
of its `--unified-cache-external-linker-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.adapters.vllm.config import DepotSettings
from kvdepot.config.loader import load_settings
from kvdepot.config.settings import AuditConfig, CxlConfig
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError

SETTING: Final = "hicache-storage-backend-extra-config"
LINKER_SETTING: Final = "unified-cache-external-linker-config.linker_extra_config"
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings(DepotSettings):
    """The depot below SGLang's memory, and how it is used."""

    STORE_SETTINGS = ("cxl",)

    cxl: CxlConfig | None = None
    """A tier of slower memory, below the memory tier."""

    socket: Path | None = None
    """Use the daemon on this socket; needed if SGLang has several processes."""

    daemon_user: str = ""
    """A user, by name or number, whose daemon is trusted besides SGLang's own user and root."""

    adapters: str = ""
    """A name for the content of all LoRAs together; needed if SGLang serves LoRAs."""

    prefix_chain: bool = False
    """Evict ends of prompts first; needs interface_v1 and hicache_storage_pass_prefix_keys."""

    decide: bool = False
    """The linker loads only pages that are expected to arrive sooner than they are computed."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """The hits that are computed again and compared; see docs/audit.md."""

    def __post_init__(self) -> None:
        super(HiCacheSettings, self).__post_init__()
        if self.tenant not in ("", *self.tenants):
            raise ConfigError("tenant", f"{self.tenant!r} is not one of tenants")

    def open(self, processes: int, setting: str = SETTING) -> Depot:
        """The depot: a daemon's, or one of this process if SGLang has no other process."""
        if self.socket is not None:
            address = f"unix:{self.socket}"
            return kvdepot.open(address, tenants=self.tenants, daemon_user=self.daemon_user)
        if processes > 1:
            raise ConfigError(
                f"{setting}.socket",
                f"missing: SGLang's {processes} processes must share a depot through a daemon",
                hint='kvdepot serve --config FILE --socket PATH, and "socket": PATH here',
            )
        return kvdepot.open(self.depot)


def read(extra: Mapping[str, Any]) -> HiCacheSettings:
    """The settings of a storage. A ConfigError names the setting and the mistake."""
    ours = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
    settings = load_settings(HiCacheSettings, ours, SETTING)
    if settings.decide:
        raise ConfigError(
            f"{SETTING}.decide",
            "only a linker can decide: SGLang itself decides what it fetches from a storage",
            hint="leave it out; hicache_storage_prefetch_policy is SGLang's own setting",
        )
    if settings.prefix_chain and not extra.get("interface_v1"):
        raise ConfigError(
            f"{SETTING}.prefix_chain",
            "needs the SGLang interface that passes prefixes",
            hint='"interface_v1": 1, "hicache_storage_pass_prefix_keys": true',
        )
    return settings


def read_linker(extra: Mapping[str, Any]) -> HiCacheSettings:
    """The settings of a linker."""
    settings = load_settings(HiCacheSettings, extra, LINKER_SETTING)
    if settings.prefix_chain:
        raise ConfigError(
            f"{LINKER_SETTING}.prefix_chain",
            "SGLang does not pass prefixes to a linker",
            hint="leave it out",
        )
    return settings
