"""What can be set in an entry of vLLM's `secondary_tiers`, read by kvdepot's own strict loader."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.config.loader import load_settings
from kvdepot.config.settings import (
    Config,
    DramConfig,
    HddConfig,
    ObjectConfig,
    Seconds,
    SsdConfig,
    TenantConfig,
    WritebackConfig,
)
from kvdepot.errors import ConfigError

SETTING: Final = "secondary_tiers.KVDepotTier"
_LOWER: Final = ("ssd", "hdd", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The depot below vLLM's CPU tier, and how it is used."""

    dram: DramConfig = field(default_factory=lambda: DramConfig(capacity=512 << 20, prefault=False))
    """Memory on the way to the drives; vLLM's own tier is the cache. Without `prefault` it is not
    touched before it is used."""

    ssd: SsdConfig | None = None
    """The disk tier."""

    hdd: HddConfig | None = None
    """Hard drives, below the disk tier."""

    object: ObjectConfig | None = None
    """A bucket or shared folder, which other machines use too."""

    writeback: WritebackConfig = field(default_factory=lambda: WritebackConfig(prefault=True))
    """How blocks get from memory to disk. `prefault`: no load has to touch new memory."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants that have a secret, by name."""

    tenant: str = ""
    """The tenant that owns the blocks."""

    model: str = ""
    """The model's name in the depot; left out, the one that vLLM was given."""

    revision: str = ""
    """What names the weights, where vLLM cannot tell them apart by itself."""

    adapters: str = ""
    """What names the content of all LoRAs together; needed where vLLM serves LoRAs."""

    weights: Path = Path("~/.cache/kvdepot/weights")
    """Where digests of weight files are kept, by inode and times, so that they are read once."""

    policy: Literal["chunk", "request"] = "chunk"
    """What vLLM offers: chunks as they are computed, or for each request all of them, also those
    that its CPU tier has already."""

    load_threads: int = 4
    """Promotions under way at the same time."""

    load_timeout: Seconds = 5.0
    """Chunks that have not arrived by then are recomputed."""

    enable_kv_events: bool = False
    """Tell vLLM's KV events of what was stored."""

    locality: Literal["", "LOCAL", "REMOTE"] = ""
    """What vLLM's requests and events call this tier's place."""

    def __post_init__(self) -> None:
        if self.load_threads < 1:
            raise ConfigError("load_threads", f"must be at least 1, got {self.load_threads}")
        if not self.load_timeout > 0:
            raise ConfigError("load_timeout", f"must be more than zero, got {self.load_timeout}")
        if self.tenant not in ("", *self.tenants):
            raise ConfigError("tenant", f"{self.tenant!r} is not one of tenants")
        if not (self.ssd or self.hdd or self.object):
            raise ConfigError(
                "ssd",
                "missing: a tier below vLLM's memory needs ssd, hdd or object",
                hint='"ssd": {"path": "/nvme/kv", "capacity": "100GiB"}',
            )

    @property
    def depot(self) -> Config:
        """The settings of the store itself."""
        return Config(
            dram=self.dram,
            ssd=self.ssd,
            hdd=self.hdd,
            object=self.object,
            writeback=self.writeback,
            tenants=self.tenants,
        )


def read(settings: Mapping[str, Any]) -> TierSettings:
    """The settings of one tier. A ConfigError names the setting and what is wrong with it."""
    given = {name: value for name, value in settings.items() if value is not None}
    # vLLM's CPU tier, which every chunk goes to, is the cache: a second copy in memory, made before
    # the first load or by it, would only take that load's time. What lies below the first tier is
    # promoted to it.
    first = next((name for name in _LOWER if name in given), "ssd")
    unless_set = {
        "dram": {"prefault": False},
        "writeback": {"prefault": True},
        first: {"promote": False},
    }
    for name, more in unless_set.items():
        if isinstance(given.get(name), Mapping):
            given[name] = {**more, **given[name]}
    return load_settings(TierSettings, given, SETTING)
