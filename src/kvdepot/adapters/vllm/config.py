"""The settings of the connector, vLLM's `kv_connector_extra_config`, read strictly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

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
from kvdepot.core.block_wait import IDLE_S
from kvdepot.errors import ConfigError

SETTING: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepotSettings:
    """A depot that an engine uses, and the owner of the blocks in it."""

    STORE_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Further settings of the store itself."""
    dram: DramConfig = field(default_factory=DramConfig)
    """The memory tier of a depot that this engine opens or starts."""
    ssd: SsdConfig | None = None
    """Its SSD tier."""
    hdd: HddConfig | None = None
    """Its hard drives, below the SSD tier."""
    object: ObjectConfig | None = None
    """Its bucket or shared folder, which other machines use too."""
    writeback: WritebackConfig = field(default_factory=WritebackConfig)
    """Settings of the writes from memory to drives."""
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""
    tenant: str = ""
    """The tenant that owns the blocks."""
    revision: str = ""
    """A name for the weights, if the engine does not show which weights it has loaded."""
    weights: Path = Path("~/.cache/kvdepot/weights")
    """The file that keeps digests of weight files, by inode and times: each is read once."""
    load_timeout: Seconds = 5.0
    """Blocks that have not arrived after this time are computed."""

    def __post_init__(self) -> None:
        if not self.load_timeout > 0:
            raise ConfigError("load_timeout", f"invalid value {self.load_timeout} (expected > 0)")

    @property
    def depot(self) -> Config:
        """The settings of the store itself."""
        names = ("dram", "ssd", "hdd", "object", "writeback", "tenants", *self.STORE_SETTINGS)
        return Config(**{name: getattr(self, name) for name in names})

    def secret(self) -> bytes:
        """The secret of the tenant; empty if it has none."""
        tenant = self.tenants.get(self.tenant)
        return tenant.secret() if tenant is not None else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDepotSettings(DepotSettings):
    """A depot that vLLM uses, as a connector or as a tier."""

    model: str = ""
    """The model's name in the depot, by default the one that vLLM was given."""
    load_threads: int = 4
    """Loads that run at the same time."""

    def __post_init__(self) -> None:
        super(VllmDepotSettings, self).__post_init__()
        if self.load_threads < 1:
            raise ConfigError("load_threads", f"invalid value {self.load_threads} (expected >= 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig(VllmDepotSettings):
    """The depot that the connector uses, and how it uses it."""

    STORE_SETTINGS = ("cxl", "nats")

    cxl: CxlConfig | None = None
    """A tier of slower memory, below the memory tier."""
    nats: NatsConfig | None = None
    """The NATS server through which depots exchange hints and news of blocks."""
    socket: Path | None = None
    """Use the daemon on this socket, or start one there. Default: no daemon if vLLM is one process;
    otherwise a socket named after the depot's drives."""
    daemon: Literal["auto", "never"] = "auto"
    """Start a daemon if none answers, or never."""
    daemon_user: str = ""
    """A user, by name or number, whose daemon is trusted besides vLLM's own user and root."""
    block_tokens: int = 0
    """Tokens in one block, a multiple of vLLM's block size. 0: vLLM's block size."""
    checkpoint_tokens: int = 0
    """Tokens between the places of a prompt at which windows and states are saved, besides its end.
    0: four times what they cover, at least 1024."""
    save: Literal["all", "prompt", "none"] = "all"
    """Save prompts and answers, prompts only, or nothing."""
    decide: bool = True
    """Fetch blocks only if measured speeds predict that this is faster than computing them. False:
    fetch all blocks that are found."""
    speeds: Path = Path("~/.cache/kvdepot/speeds")
    """The folder that keeps measured speeds for the next start on this machine."""
    audit: AuditConfig = field(default_factory=AuditConfig)
    """The hits that are computed again and compared; see docs/audit.md."""
    wait: Seconds = 0.0
    """A request waits this long for blocks of its prompt that another machine is about to commit,
    for a server that decodes what others prefill, of models with full attention. 0: not at all."""
    wait_idle: Seconds = IDLE_S
    """The wait ends when no further block of the prompt has come for this time."""
    hint: Seconds = 30.0
    """Blocks of a request in vLLM's queue are brought from hard drives and buckets to memory for at
    most this long. 0: not at all."""

    def __post_init__(self) -> None:
        super(ConnectorConfig, self).__post_init__()
        for name in ("block_tokens", "checkpoint_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"invalid value {getattr(self, name)} (expected >= 0)")
        if self.tenants and self.tenant not in ("", *self.tenants):
            raise ConfigError("tenant", f"invalid value {self.tenant!r} (expected one of tenants)")


def read(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The settings in `extra`. A ConfigError names the setting and the mistake."""
    return load_settings(ConnectorConfig, extra, SETTING)
