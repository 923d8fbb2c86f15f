"""Opens a store: creates its parts from a configuration."""

import contextlib
import logging
import os
import resource
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kvdepot.cluster.link import connect_options
from kvdepot.config.settings import Config, load
from kvdepot.core.clock import Clock, StampClock, SystemClock, WallClock
from kvdepot.core.volume import VolumeContext
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.io.files import Files
from kvdepot.memory.arena import Arena, open_arena, open_cxl_arena
from kvdepot.memory.memory import HugePages, trim_heap
from kvdepot.policy.eviction import order_named
from kvdepot.policy.placing.memory_levels import ReturnTimes
from kvdepot.store.drives.disk_room import shortages
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.state.lower_tier import LowerTier, TierVolumes
from kvdepot.store.state.state import StoreClocks, StoreMemory, StoreState
from kvdepot.store.store import Store
from kvdepot.store.volume_set import Blocks, VolumeSet
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.registry import ConfiguredVolumes

_log = logging.getLogger("kvdepot.store")
Mode = Literal["rw", "r"]


def open_store(
    config: str | os.PathLike[str] | Config | None = None,
    *,
    mode: Mode = "rw",
    env: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> Store:
    """Open a store.

    `config` is a Config or the path of a TOML file. `settings` are the same tree as keyword
    arguments, and override the file: `open(dram="2GiB", ssd={"path": "/mnt/nvme/kv", "capacity":
    "20GiB"})`. With mode "r" the drives are opened read-only, even if another process writes to
    them, and puts are kept in memory only. Raises ConfigError, FormatError, UnsafePathError or
    StoreBusyError, and then leaves nothing open.
    """
    if mode not in ("rw", "r"):
        raise ConfigError("mode", f"{mode!r} is not 'rw' or 'r'")
    if isinstance(config, Config):
        if settings:
            raise ConfigError("settings", "give a Config or keyword settings, not both")
        tree = config
    else:
        tree = load(Path(config) if config is not None else None, env=env, overrides=settings)
    return assemble(tree, mode=mode)


def assemble(
    config: Config,
    *,
    mode: Mode = "rw",
    files: Files | None = None,
    bucket: Bucket | None = None,
    wall: Clock | None = None,
) -> Store:
    """`open_store` for a Config. Tests replace `files`, the access to disks, `bucket`, that to the
    object tier, and `wall`, the time of day.
    """
    if config.nats is not None:
        connect_options(config.nats)  # check the settings before anything is opened
    clock, wall = SystemClock(), wall or WallClock()
    stamps = StampClock(wall)
    writable = mode == "rw"
    _raise_open_files_limit()
    if writable:
        for disk in shortages(config):
            _log.warning("%s; blocks are evicted when the disk is full", disk)
    with contextlib.ExitStack() as held:
        configured = ConfiguredVolumes(config, files, bucket)
        held.callback(configured.close)
        volumes = VolumeSet(VolumeContext(clock, wall, stamps, writable))
        contents = volumes.open_all(configured.openers)
        held.callback(volumes.close)
        dram = config.dram
        arena = open_arena("dram.capacity", dram.capacity, dram.huge_pages, shared=dram.shared)
        held.callback(arena.close)
        huge_pages: HugePages = "never" if dram.huge_pages == "never" else "auto"
        staging = open_arena(
            "writeback.staging", config.writeback.staging, huge_pages, shared=dram.shared
        )
        held.callback(staging.close)
        cxl = open_cxl_arena(config.cxl, shared=dram.shared) if config.cxl else None
        if cxl is not None:
            held.callback(cxl.close)
        _lock(config, [arena, cxl] if cxl else [arena])
        held.pop_all()
    return_times = ReturnTimes()
    catalog = Catalog(
        [settings.TIER for settings in config.lower_tiers] or ["ssd"],
        ("dram", "cxl") if cxl else ("dram",),
        order=order_named(config.dram.eviction, config.block_tokens),
        below=return_times,
    )
    lower_tiers = [
        LowerTier(TierVolumes(volumes, copies.tier), settings, catalog, copies, writable=writable)
        for settings, copies in zip(config.lower_tiers, catalog.files, strict=False)
    ]
    pinned = _take_in(catalog, lower_tiers, contents)
    touched = [arena] * config.dram.prefault
    touched += [staging] * (config.dram.prefault or config.writeback.prefault)
    for one in touched:
        one.memory.prefault(partial(configured.register_memory, one.memory))
    if cxl and config.dram.prefault:
        cxl.memory.prefault(bool)
    memory = StoreMemory([arena, cxl] if cxl else [arena], staging, return_times)
    state = StoreState(config, StoreClocks(clock, stamps), catalog, memory, volumes, lower_tiers)
    maintenance = VolumeMaintenance(state, configured.opener)
    return Store(state, maintenance, pinned, wall, configured.close)


def _take_in(
    catalog: Catalog, lower_tiers: Sequence[LowerTier], contents: Sequence[Blocks]
) -> PinnedRows:
    """Enter recovered blocks into the index, the fullest tier first, because that is fast while the
    index is empty. Returns the pin counts.
    """
    pinned = PinnedRows(catalog.table)
    found = []
    for lower in lower_tiers:
        lower.share(pinned, lower_tiers)
        found.append((lower, [contents[entry.number] for entry in lower.volumes.entries]))
    for lower, parts in sorted(found, key=lambda one: -sum(len(part.words) for part in one[1])):
        lower.insert_recovered(parts)
        trim_heap()
    for lower in lower_tiers:
        for other, parts in found:
            if other is not lower and not other.volumes.is_remote:
                for part in parts:
                    lower.queue.owed.recall(part.words, part.stamps)
    return pinned


def _lock(config: Config, arenas: Sequence[Arena]) -> None:
    if config.dram.lock and not all(arena.memory.lock() for arena in arenas):
        hint = "ulimit -l unlimited, or lock = false"
        raise ConfigError("dram.lock", "the memlock limit is too low", hint=hint)


def _raise_open_files_limit() -> None:
    """Raise the soft limit, often 1024, because every segment is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
