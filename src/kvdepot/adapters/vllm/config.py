"""What can be set in vLLM's `kv_connector_extra_config`, read by kvdepot's own strict loader."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.config.loader import load_settings
from kvdepot.config.settings import (
    AuditConfig,
    Config,
    CxlConfig,
    DramConfig,
    HddConfig,
    NatsConfig,
    ObjectConfig,
    Seconds,
    SsdConfig,
    TenantConfig,
    WritebackConfig,
)
from kvdepot.errors import ConfigError

SETTING: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The depot that vLLM uses, and how."""

    dram: DramConfig = field(default_factory=DramConfig)
    """The memory tier of a depot that this vLLM opens or starts."""

    cxl: CxlConfig | None = None
    """Its tier of slower memory, below the memory tier."""

    ssd: SsdConfig | None = None
    """Its disk tier; without it nothing survives a restart."""

    hdd: HddConfig | None = None
    """Its hard drives, below the disk tier."""

    object: ObjectConfig | None = None
    """Its bucket or shared folder, which other machines use too."""

    nats: NatsConfig | None = None
    """The server through which it hears of other machines, and of hints."""

    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    """How blocks get from memory to disk."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""

    socket: Path | None = None
    """Use the daemon on this socket, or start one there. Left out, vLLM in one process keeps the
    depot in that process, and otherwise the socket's place follows from the depot's."""

    daemon: Literal["auto", "never"] = "auto"
    """Whether a daemon is started when none answers."""

    daemon_user: str = ""
    """A user, by name or number, whose daemon is trusted beside vLLM's own and root."""

    tenant: str = ""
    """The tenant that owns the blocks."""

    model: str = ""
    """The model's name in the depot; left out, the one that vLLM was given."""

    revision: str = ""
    """What names the weights, where vLLM cannot tell them apart by itself."""

    block_tokens: int = 0
    """Tokens in one block, a multiple of vLLM's block size; 0 takes that."""

    checkpoint_tokens: int = 0
    """Tokens between the places of a prompt at which windows and states are saved beside its end;
    0: four times what they cover, 1024 at least."""

    save: Literal["all", "prompt", "none"] = "all"
    """What is offloaded: prompts and answers, prompts only, or nothing."""

    decide: bool = True
    """Fetch only what is expected to be faster than computing it, by measured speeds; false: all
    that is found."""

    speeds: Path = Path("~/.cache/kvdepot/speeds")
    """Where measured speeds are kept for the next start on this machine."""

    weights: Path = Path("~/.cache/kvdepot/weights")
    """Where digests of weight files are kept, by inode and times, so that they are read once."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """Which hits are computed again and compared: docs/audit.md."""

    load_threads: int = 4
    """Requests that are loaded at the same time."""

    load_timeout: Seconds = 5.0
    """Blocks that have not arrived by then are recomputed."""

    wait: Seconds = 0.0
    """A request waits this long for blocks of its prompt that another machine is about to
    commit: for a server that decodes what others prefill, of models with full attention; 0: not."""

    hint: Seconds = 30.0
    """A request in vLLM's queue has its blocks brought from hard drives and buckets to memory
    meanwhile, for this long at most; 0: not."""

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 0), ("checkpoint_tokens", 0), ("load_threads", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, f"must be at least {least}, got {getattr(self, name)}")
        if not self.load_timeout > 0:
            raise ConfigError("load_timeout", f"must be more than zero, got {self.load_timeout}")
        if not self.wait >= 0:
            raise ConfigError("wait", f"must not be negative, got {self.wait}")
        if not self.hint >= 0:
            raise ConfigError("hint", f"must not be negative, got {self.hint}")
        if self.tenant not in ("", *self.tenants) and self.tenants:
            raise ConfigError("tenant", f"{self.tenant!r} is not one of tenants")

    @property
    def depot(self) -> Config:
        """The settings of the store itself."""
        return Config(
            dram=self.dram,
            cxl=self.cxl,
            ssd=self.ssd,
            hdd=self.hdd,
            object=self.object,
            nats=self.nats,
            writeback=self.writeback,
            tenants=self.tenants,
        )


def read(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The settings in `extra`. A ConfigError names the setting and what is wrong with it."""
    return load_settings(ConnectorConfig, extra, SETTING)
