"""The settings of the tier, an entry of vLLM's `secondary_tiers`, read strictly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvdepot.adapters.vllm.config import VllmDepotSettings
from kvdepot.config.loader import load_settings
from kvdepot.config.settings import DramConfig, WritebackConfig
from kvdepot.errors import ConfigError

SETTING: Final = "secondary_tiers.KVDepotTier"
_LOWER: Final = ("ssd", "hdd", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings(VllmDepotSettings):
    """The depot below vLLM's CPU tier, and how it is used."""

    dram: DramConfig = field(default_factory=lambda: DramConfig(capacity=512 << 20, prefault=False))
    """Memory on the way to the drives; vLLM's own tier is the cache. Without `prefault` it is not
    touched before it is used."""
    writeback: WritebackConfig = field(default_factory=lambda: WritebackConfig(prefault=True))
    """Settings of the writes from memory to drives. `prefault`: no load has to touch new memory."""
    adapters: str = ""
    """A name for the content of all LoRAs together; needed if vLLM serves LoRAs."""
    policy: Literal["chunk", "request"] = "chunk"
    """chunk: vLLM offers each chunk once computed. request: vLLM offers all chunks of each request,
    also those that its CPU tier has."""
    enable_kv_events: bool = False
    """Announce stored chunks in vLLM's KV events."""
    locality: Literal["", "LOCAL", "REMOTE"] = ""
    """The locality of this tier in vLLM's requests and events."""

    def __post_init__(self) -> None:
        super(TierSettings, self).__post_init__()
        if self.tenant not in ("", *self.tenants):
            raise ConfigError("tenant", f"invalid value {self.tenant!r} (expected one of tenants)")
        if not (self.ssd or self.hdd or self.object):
            raise ConfigError(
                "ssd",
                "missing: a tier below vLLM's memory needs ssd, hdd or object",
                hint='add "ssd": {"path": "/nvme/kv", "capacity": "100GiB"}',
            )


def read(settings: Mapping[str, Any]) -> TierSettings:
    """The settings of one tier. A ConfigError names the setting and the mistake."""
    given = {name: value for name, value in settings.items() if value is not None}
    # Every chunk is in vLLM's CPU tier too, so a second copy in memory would only cost time before
    # or during the first load. Blocks below the first tier are promoted to that tier.
    first = next((name for name in _LOWER if name in given), "ssd")
    defaults = {
        "dram": {"prefault": False},
        "writeback": {"prefault": True},
        first: {"promote": False},
    }
    for name, more in defaults.items():
        if isinstance(given.get(name), Mapping):
            given[name] = {**more, **given[name]}
    return load_settings(TierSettings, given, SETTING)
