"""Opens the volumes of a configuration, including plug-ins of other packages.

A package offers a volume in its pyproject.toml:

    [project.entry-points."kvdepot.volumes"]
    tape = "kvdepot_tape:open_tape"

The configuration selects it: `plugin = { name = "tape", capacity = "1TiB" }`. Only then is the
package imported. `name = "kvdepot_tape:open_tape"` works without an entry point.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from kvdepot.config.settings import Config, FileTierConfig, PluginConfig
from kvdepot.core.volume import OpenVolume, Volume, VolumeContext
from kvdepot.errors import ConfigError
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import Files
from kvdepot.memory.memory import Memory
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.reader import ThroughputMeter
from kvdepot.volumes.log.volume import LogVolume
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.volume import BucketVolume

GROUP: Final = "kvdepot.volumes"
VolumeFactory = Callable[[PluginConfig, VolumeContext], Volume]
"""A plug-in: opens the volume of a configuration."""
_METHODS: Final = sorted(name for name in vars(Volume) if not name.startswith("_"))
_REGISTERED_MAX: Final = 8 << 30


class ConfiguredVolumes:
    """Opens the volumes of a configuration."""

    def __init__(
        self, config: Config, files: Files | None = None, bucket: Bucket | None = None
    ) -> None:
        """Tests replace `files`, the access to disks, and `bucket`."""
        self._logs: dict[str, tuple[MountSettings, Files, list[ThroughputMeter]]] = {}
        self.openers: list[tuple[str, str, OpenVolume]] = []
        """Tier, path and factory."""
        for tier in config.file_tiers:
            again = files.share() if files is not None and self._logs else files
            own = again or Files(depth=tier.io_depth, timeout_s=tier.write_timeout)
            self._logs[tier.TIER] = (mount_settings(tier), own, [])
            self.openers += [
                (tier.TIER, str(path), partial(self._open_log, tier.TIER, path))
                for path in tier.path
            ]
        if config.plugin is not None:
            label = str(config.plugin.path or config.plugin.name)
            self.openers.append((config.plugin.TIER, label, partial(open_plugin, config.plugin)))
        if config.object is not None:
            shared = config.object
            self.openers.append(
                (shared.TIER, shared.url, partial(BucketVolume, shared, bucket=bucket))
            )

    def opener(self, tier: str, path: Path) -> OpenVolume | None:
        """The factory for a path of a tier; None if the tier has no paths."""
        return partial(self._open_log, tier, path) if tier in self._logs else None

    def register_memory(self, memory: Memory) -> bool:
        """Register memory with the I/O engines, if the machine allows it. It must be faulted in, so
        that pinning is cheap. Every ring pins it again, so more than 8 GiB are not registered.
        """
        if memory.nbytes > _REGISTERED_MAX:
            return False
        registered = [
            files.register(memory.address, memory.nbytes) for _, files, _ in self._logs.values()
        ]
        return any(registered)

    def close(self) -> None:
        """Close the I/O engines, after all volumes."""
        for _, files, _ in self._logs.values():
            files.close()

    def _open_log(self, tier: str, path: Path, context: VolumeContext) -> LogVolume:
        settings, files, meters = self._logs[tier]
        return LogVolume(path, files, settings, context, meters)


def mount_settings(config: FileTierConfig) -> MountSettings:
    return MountSettings(
        capacity_bytes=config.path_capacity,
        segment_bytes=config.segment_bytes,
        direct_io=config.direct_io,
        fsync=config.fsync,
        write_timeout_s=config.write_timeout,
        pauses=RetryPauses(config.retry_initial, config.retry_max),
        tier=config.TIER,
        daily_bytes=config.daily_bytes,
        profile=config.profile,
        contiguous_bytes=config.contiguous_bytes,
    )


def plugin_names() -> list[str]:
    """The names of the installed plug-in volumes, sorted. Imports none of them."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_plugin(name: str) -> VolumeFactory:
    """The factory of a plug-in: the name of an entry point, or "module:factory".

    Raises ConfigError for an unknown name, one that two packages have, and a plug-in that cannot be
    imported.
    """
    if ":" in name:
        targets = {name: EntryPoint(name, name, GROUP)}
    else:
        targets = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not targets:
        known = ", ".join(plugin_names()) or "none is installed"
        raise _error(f"there is no plug-in volume {name!r}", hint=f"known: {known}")
    if len(targets) > 1:
        raise _error(f"{name!r} is claimed by several packages: {', '.join(sorted(targets))}")
    (entry,) = targets.values()
    try:
        factory: VolumeFactory = entry.load()
    except (ImportError, AttributeError) as error:
        raise _error(f"plug-in {entry.value} cannot be loaded: {error}") from error
    if not callable(factory):
        raise _error(f"plug-in {entry.value} is not callable")
    return factory


def open_plugin(config: PluginConfig, context: VolumeContext) -> Volume:
    """Open the plug-in volume of a configuration.

    Raises ConfigError if it cannot be opened or lacks a method, and any KVDepotError that the
    plug-in raises.
    """
    try:
        volume = find_plugin(config.name)(config, context)
    except OSError as error:
        raise _error(f"{config.name} cannot be opened: {error}") from error
    missing = [name for name in _METHODS if not callable(getattr(volume, name, None))]
    if missing:
        raise _error(f"{config.name} is not a volume: it lacks {', '.join(missing)}")
    return volume


def _error(reason: str, hint: str = "") -> ConfigError:
    return ConfigError("plugin.name", reason, hint=hint)
