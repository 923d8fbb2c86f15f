"""The settings in SGLang's `--hicache-storage-backend-extra-config`, and in `linker_extra_config`
of its `--unified-cache-external-linker-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.config.loader import load_settings
from kvdepot.config.settings import (
    AuditConfig,
    Config,
    CxlConfig,
    DramConfig,
    HddConfig,
    ObjectConfig,
    Seconds,
    SsdConfig,
    TenantConfig,
    WritebackConfig,
)
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError

SETTING: Final = "hicache-storage-backend-extra-config"
LINKER_SETTING: Final = "unified-cache-external-linker-config.linker_extra_config"
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")
_STORE: Final = ("dram", "cxl", "ssd", "hdd", "object", "writeback", "tenants")
"""The settings of a store in SGLang's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """The depot below SGLang's memory, and how it is used."""

    dram: DramConfig = field(default_factory=DramConfig)
    cxl: CxlConfig | None = None
    ssd: SsdConfig | None = None
    hdd: HddConfig | None = None
    object: ObjectConfig | None = None
    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    tenants: dict[str, TenantConfig] = field(default_factory=dict)

    socket: Path | None = None
    """Use the daemon on this socket; needed if SGLang has several processes."""

    daemon_user: str = ""
    """A user, by name or number, whose daemon is trusted besides SGLang's own user and root."""

    tenant: str = ""
    """The tenant that owns the blocks."""

    revision: str = ""
    """A name for the weights, if SGLang loads them from no folder."""

    adapters: str = ""
    """A name for the content of all LoRAs together; needed if SGLang serves LoRAs."""

    weights: Path = Path("~/.cache/kvdepot/weights")
    """The file that keeps digests of weight files, so that each file is read once."""

    prefix_chain: bool = False
    """Evict ends of prompts first; needs interface_v1 and hicache_storage_pass_prefix_keys."""

    decide: bool = False
    """The linker loads only pages that are expected to arrive sooner than they are computed."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """The hits that are computed again and compared; see docs/audit.md."""

    load_timeout: Seconds = 5.0
    """Pages that have not arrived by then are computed."""

    def __post_init__(self) -> None:
        if not self.load_timeout > 0:
            raise ConfigError("load_timeout", f"must be more than zero, got {self.load_timeout}")
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
        return kvdepot.open(Config(**{name: getattr(self, name) for name in _STORE}))


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
