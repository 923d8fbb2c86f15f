"""Putting a store together from a configuration."""

import logging
import os
import resource
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from kvdepot.cluster.link import connect_options
from kvdepot.config.settings import (
    Config,
    CxlConfig,
    FileTierConfig,
    ObjectConfig,
    PluginConfig,
    SsdConfig,
    load,
)
from kvdepot.core.clock import Clock, StampClock, SystemClock, WallClock
from kvdepot.core.tier import Tier
from kvdepot.errors import ConfigError, DriveError, KVDepotError
from kvdepot.format.record import round_up
from kvdepot.index.catalog import Catalog
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import Files
from kvdepot.memory.arena import Arena
from kvdepot.memory.dax import open_device
from kvdepot.memory.memory import HUGE_BYTES, Memory, trim_heap
from kvdepot.memory.numa import check_node
from kvdepot.policy.eviction import order_named
from kvdepot.policy.placing.memory_levels import ReturnTimes
from kvdepot.store.drives.disk_room import shortages
from kvdepot.store.state.lower_tier import LowerTier, share_tombstones
from kvdepot.store.state.state import StoreClocks, StoreState
from kvdepot.store.store import Store
from kvdepot.volumes.log.hdd import HardDriveTier
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.tier import LogTier
from kvdepot.volumes.object.tier import ObjectTier
from kvdepot.volumes.registry import open_plugin

_log = logging.getLogger("kvdepot.store")
Mode = Literal["rw", "r"]
HugePages = Literal["auto", "always", "never"]


def open_store(
    config: str | os.PathLike[str] | Config | None = None,
    *,
    mode: Mode = "rw",
    env: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> Store:
    """Open a store.

    `config` is a TOML file's path or a Config; `settings` are the same tree as keyword arguments
    and win over it: `open(dram="2GiB", ssd={"path": "/mnt/nvme/kv", "capacity": "20GiB"})`. With
    mode "r" disk tiers are opened read-only, beside a writer if there is one; puts then stay in
    memory. Raises ConfigError, FormatError or StoreBusyError, and then nothing is left open.
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
    config: Config, *, mode: Mode = "rw", files: Files | None = None, wall: Clock | None = None
) -> Store:
    """`open_store` for a finished configuration.

    `files` puts something between the store and its disks; `wall` tells the time of day.
    """
    if config.nats is not None:
        connect_options(config.nats)  # refuse what cannot work before anything is open
    clock = SystemClock()
    stamps = StampClock(wall or WallClock())
    _raise_open_files_limit()
    if mode == "rw":
        for disk in shortages(config):
            _log.warning("%s; blocks are evicted when the disk is full", disk)
    held: list[Closable] = []
    try:
        tiers: list[Tier] = []
        for settings in config.lower_tiers:
            if isinstance(settings, PluginConfig):
                tiers.append(open_plugin(settings, mode == "rw"))
            elif isinstance(settings, ObjectConfig):
                tiers.append(ObjectTier(settings, writable=mode == "rw", wall=wall, stamps=stamps))
            else:
                given = files.share() if files is not None and tiers else files
                tiers.append(_open_tier(settings, given, mode, wall or WallClock(), stamps))
            held.append(tiers[-1])
        _require_a_drive(tiers)
        dram = config.dram
        arena = _arena("dram.capacity", dram.capacity, dram.huge_pages, shared=dram.shared)
        held.append(arena)
        huge_pages: HugePages = "never" if dram.huge_pages == "never" else "auto"
        staging = _arena(
            "writeback.staging", config.writeback.staging, huge_pages, shared=dram.shared
        )
        held.append(staging)
        cxl = _slower_arena(config.cxl, shared=dram.shared) if config.cxl else None
        held += [cxl] if cxl else []
        _lock(config, arena, cxl)
    except KVDepotError:
        for part in held:
            part.close()
        raise
    return_times = ReturnTimes()
    catalog = Catalog(
        [tier.name for tier in tiers] or ["ssd"],
        ("dram", "cxl") if cxl else ("dram",),
        order=order_named(config.dram.eviction, config.block_tokens),
        below=return_times,
    )
    lower_tiers = [
        LowerTier(tier, settings, catalog, copies, clock)
        for tier, settings, copies in zip(tiers, config.lower_tiers, catalog.files, strict=False)
    ]
    promises = _take_in(catalog, lower_tiers)
    share_tombstones(lower_tiers, stamps)
    touched = [arena] * config.dram.prefault
    touched += [staging] * (config.dram.prefault or config.writeback.prefault)
    for memory in (one.memory for one in touched):
        memory.prefault(partial(_register, tiers, memory))
    if cxl and config.cxl and config.cxl.prefault:
        cxl.memory.prefault(bool)
    arenas = [arena, cxl] if cxl else [arena]
    state = StoreState(
        config, StoreClocks(clock, stamps), catalog, arenas, staging, lower_tiers, return_times
    )
    return Store(state, promises, wall or WallClock())


def _require_a_drive(tiers: Sequence[Tier]) -> None:
    """Raise where no drive at all could be mounted. One of several may be missing."""
    logs = [tier for tier in tiers if isinstance(tier, LogTier)]
    reasons = [error for tier in logs for error in tier.left_out.values()]
    if len(logs) < len(tiers) or len(reasons) < sum(tier.drive_count() for tier in logs):
        return
    if len(reasons) == 1:
        raise reasons[0]
    if reasons:
        told = "; ".join(map(str, reasons))
        raise DriveError(f"{logs[0].name}.path", f"no drive works: {told}", hint=reasons[0].hint)


def _take_in(catalog: Catalog, lower_tiers: Sequence[LowerTier]) -> PinnedRows:
    """Enter what was found, the fullest tier first: an empty index takes in millions at once.
    Returns where the tiers look up what is under contract.
    """
    promises = PinnedRows(catalog.table)
    for lower in lower_tiers:
        lower.share(promises, lower_tiers)
    found = [(lower, lower.tier.take_contents()) for lower in lower_tiers]
    for lower, contents in sorted(found, key=lambda one: -len(one[1].words)):
        lower.insert_recovered(contents)
        trim_heap()
    return promises


def _register(tiers: Sequence[Tier], memory: Memory) -> None:
    """Tell every tier's I/O engine of memory that is faulted in."""
    for tier in tiers:
        if isinstance(tier, LogTier):
            tier.register_memory(memory)


class Closable(Protocol):
    """Something that holds resources."""

    def close(self) -> None:
        """Give them up."""


def _lock(config: Config, arena: Arena, cxl: Arena | None) -> None:
    wanted = {"dram.lock": arena if config.dram.lock else None}
    wanted["cxl.lock"] = cxl if config.cxl and config.cxl.lock else None
    for setting, one in wanted.items():
        if one and not one.memory.lock():
            raise ConfigError(
                setting, "the memlock limit is too low", hint="ulimit -l unlimited, or lock = false"
            )


def _slower_arena(config: CxlConfig, *, shared: bool) -> Arena:
    """The memory that the `cxl` settings name."""
    nbytes = config.capacity
    try:
        if config.node is not None:
            check_node("cxl.node", config.node, nbytes)
            return Arena(nbytes, memory=Memory.on_node(nbytes, config.node, shared=shared))
        if config.path is not None:
            whole = round_up(nbytes, HUGE_BYTES)
            fd = open_device("cxl.path", config.path, whole)
            return Arena(nbytes, memory=Memory.mapped((fd, whole)))
    except OSError as error:
        setting = "cxl.path" if config.path is not None else "cxl.node"
        raise ConfigError(setting, f"cannot map the memory: {error.strerror}") from error
    return _arena("cxl.capacity", nbytes, "auto", shared=shared)


def _arena(path: str, nbytes: int, huge_pages: HugePages, *, shared: bool = False) -> Arena:
    try:
        return Arena(nbytes, huge_pages, shared=shared)
    except OSError as error:
        raise ConfigError(path, f"cannot get the memory: {error.strerror}") from error


def _open_tier(
    config: FileTierConfig, files: Files | None, mode: Mode, wall: Clock, stamps: StampClock
) -> LogTier:
    files = files or Files(depth=config.io_depth, timeout_s=config.write_timeout)
    settings = MountSettings(
        capacity_bytes=config.path_capacity,
        segment_bytes=config.segment_bytes,
        direct_io=config.direct_io,
        fsync=config.fsync,
        write_timeout_s=config.write_timeout,
        pauses=RetryPauses(config.retry_initial, config.retry_max),
        writable=mode == "rw",
        tier=config.TIER,
        daily_bytes=config.daily_bytes if isinstance(config, SsdConfig) else 0,
        wall=wall,
        profile=config.profile,
    )
    kind = HardDriveTier if config.TIER == "hdd" else LogTier
    return kind(config.path, files, settings, SystemClock(), stamps)


def _raise_open_files_limit() -> None:
    """Every segment is an open file; the soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
