"""A store in plain values, for `stats` and whoever shows them."""

from typing import Any

from kvdepot.store.level import Level
from kvdepot.store.stock import Stock


def describe(stock: Stock, *, leased: int) -> dict[str, Any]:
    """Counters, and what each tier holds and how it is. Lock held."""
    tiers = {"dram": _dram(stock)}
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
    }


def _dram(stock: Stock) -> dict[str, Any]:
    return {
        "blocks": stock.catalog.memory.count,
        "capacity_bytes": stock.arena.capacity_bytes,
        "used_bytes": stock.arena.used_bytes,
        "huge_pages": stock.arena.memory.huge,
    }


def _file_tier(level: Level) -> dict[str, Any]:
    usage, health = level.tier.usage(), level.tier.health()
    return {
        "blocks": level.copies.count,
        "capacity_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
        "held_bytes": usage.held_bytes,
        "healthy": health.ok,
        "errors": health.errors,
        "emulated": level.config.emulate is not None,
        "write_mode": level.mode.value,
        "drives": [drive.describe() for drive in level.tier.drives],
    }
