"""What can be set in SGLang's `--hicache-storage-backend-extra-config`, and in the
`linker_extra_config` of its `--unified-cache-external-linker-config`; read strictly.
"""

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
from kvdepot.core.depot import Depot
from kvdepot.errors import ConfigError

SETTING: Final = "hicache-storage-backend-extra-config"
LINKER_SETTING: Final = "unified-cache-external-linker-config.linker_extra_config"
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """The depot below SGLang's memory, and how it is used."""

    dram: DramConfig = field(default_factory=DramConfig)
    """The memory tier of a depot in this process."""

    cxl: CxlConfig | None = None
    """Its tier of slower memory, below the memory tier."""

    ssd: SsdConfig | None = None
    """Its disk tier; without it nothing survives a restart."""

    hdd: HddConfig | None = None
    """Its hard drives, below the disk tier."""

    object: ObjectConfig | None = None
    """Its bucket or shared folder, which other machines use too."""

    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    """How blocks get from memory to disk."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""

    socket: Path | None = None
    """Use the daemon on this socket; needed where SGLang has several processes."""

    daemon_user: str = ""
    """A user, by name or number, whose daemon is trusted beside SGLang's own and root."""

    tenant: str = ""
    """The tenant that owns the blocks."""

    revision: str = ""
    """What names the weights, where SGLang cannot tell them apart by itself."""

    adapters: str = ""
    """What names the content of all LoRAs together; needed where SGLang serves LoRAs."""

    weights: Path = Path("~/.cache/kvdepot/weights")
    """Where digests of weight files are kept, by inode and times, so that they are read once."""

    prefix_chain: bool = False
    """Heads of prompts outlive tails; needs interface_v1 and hicache_storage_pass_prefix_keys."""

    decide: bool = False
    """A linker loads only what is expected to come sooner than it is computed, by learnt speeds."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """Which hits are computed again and compared: docs/audit.md."""

    load_timeout: Seconds = 5.0
    """Pages that have not arrived by then are recomputed."""

    def __post_init__(self) -> None:
        if not self.load_timeout > 0:
            raise ConfigError("load_timeout", f"must be more than zero, got {self.load_timeout}")
        if self.tenant not in ("", *self.tenants):
            raise ConfigError("tenant", f"{self.tenant!r} is not one of tenants")

    def open(self, processes: int, setting: str = SETTING) -> Depot:
        """The depot: a daemon's, or one of this process where SGLang has no other."""
        if self.socket is not None:
            path = f"unix:{self.socket}"
            return kvdepot.open(path, tenants=self.tenants, daemon_user=self.daemon_user)
        if processes > 1:
            raise ConfigError(
                f"{setting}.socket",
                f"missing: SGLang has {processes} processes, which share a depot through a daemon",
                hint='kvdepot serve --config FILE --socket PATH, and "socket": PATH here',
            )
        return kvdepot.open(
            Config(
                dram=self.dram,
                cxl=self.cxl,
                ssd=self.ssd,
                hdd=self.hdd,
                object=self.object,
                writeback=self.writeback,
                tenants=self.tenants,
            )
        )


def read(extra: Mapping[str, Any]) -> HiCacheSettings:
    """The settings in `extra`. A ConfigError names the setting and what is wrong with it."""
    ours = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
    settings = load_settings(HiCacheSettings, ours, SETTING)
    if settings.decide:
        raise ConfigError(
            f"{SETTING}.decide",
            "SGLang decides itself what it fetches from a storage",
            hint="leave it out; hicache_storage_prefetch_policy is SGLang's own setting",
        )
    if settings.prefix_chain and not extra.get("interface_v1"):
        raise ConfigError(
            f"{SETTING}.prefix_chain",
            "needs SGLang's interface that tells what came before",
            hint='"interface_v1": 1, "hicache_storage_pass_prefix_keys": true',
        )
    return settings


def read_linker(extra: Mapping[str, Any]) -> HiCacheSettings:
    """The settings of a linker in `extra`."""
    settings = load_settings(HiCacheSettings, extra, LINKER_SETTING)
    if settings.prefix_chain:
        raise ConfigError(
            f"{LINKER_SETTING}.prefix_chain",
            "SGLang does not tell a linker what came before a page",
            hint="leave it out",
        )
    return settings
