"""A store in plain values, for `stats` and whoever shows them."""

from typing import Any

from kvdepot.core.config import CxlConfig
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.memory_tier import Pool
from kvdepot.store.state.state import Stock


def describe(stock: Stock, *, leased: int) -> dict[str, Any]:
    """Counters, and what each tier holds and how it is. Lock held."""
    tiers = {pool.name: _memory(pool) for pool in stock.pools}
    if stock.config.cxl is not None:
        tiers["cxl"] |= _origin(stock.config.cxl)
    tiers.update((level.name, _file_tier(level)) for level in stock.levels)
    for level in stock.levels[:1]:
        tiers[level.name]["thrashing"] = stock.admission.thrashing
    return {
        "tiers": tiers,
        "blocks": stock.catalog.table.live,
        "leased": leased,
        "dirty_bytes": stock.dirty_bytes,
        "staging_bytes": stock.staging.used_bytes,
        "index_bytes": stock.catalog.table.memory_bytes(),
        "counters": stock.counters.as_dict(),
        "recording": _recording(stock),
    }


def _recording(stock: Stock) -> dict[str, Any] | None:
    recorder = stock.recorder
    if recorder is None:
        return None
    return {"path": str(recorder.path), "requests": recorder.requests}


def _memory(pool: Pool) -> dict[str, Any]:
    return {
        "blocks": pool.copies.count,
        "capacity_bytes": pool.arena.capacity_bytes,
        "used_bytes": pool.arena.used_bytes,
        "huge_pages": pool.arena.memory.huge,
    }


def _origin(cxl: CxlConfig) -> dict[str, Any]:
    """Whose memory it is, and whether it is only in the place of slower memory."""
    return {"source": cxl.source, "emulated": cxl.emulated}


def _file_tier(level: Level) -> dict[str, Any]:
    usage, health = level.tier.usage(), level.tier.health()
    return {
        "blocks": level.copies.count,
        "mirrored": level.mirrors.count if level.mirrors is not None else 0,
        "capacity_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
        "held_bytes": usage.held_bytes,
        "healthy": health.ok,
        "errors": health.errors,
        "emulated": level.config.emulate is not None,
        "write_mode": level.mode.value,
        "drives": level.tier.describe_drives(),
    }
