"""The contents of a store as plain values, for `stats`."""

from typing import Any

from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.memory_tier import ArenaTier
from kvdepot.store.state.state import StoreState


def describe(state: StoreState) -> dict[str, Any]:
    """Describe the contents and the state of each tier."""
    assert state.lock.held()
    tiers = {memory.name: _memory(memory) for memory in state.memory_tiers}
    if state.config.cxl is not None:
        cxl = state.config.cxl
        tiers["cxl"] |= {"source": cxl.source, "emulated": cxl.emulated}
    tiers.update((lower.name, _lower(lower)) for lower in state.lower_tiers)
    for lower in state.lower_tiers[:1]:
        tiers[lower.name]["thrashing"] = state.writes.admission.thrashing
    now_s = state.clock.now()
    for lower in state.lower_tiers:
        tiers[lower.name]["owed"] = len(lower.queue.owed.rows()) if lower.queue.owed.any else 0
        tiers[lower.name]["write_queue"] = {
            "blocks": len(lower.queue.tickets),
            "bytes": lower.queue.dirty_bytes,
            "oldest_s": round(lower.queue.oldest_age_s(now_s), 3),
        }
    return {
        "tiers": tiers,
        "blocks": state.catalog.table.live,
        "leased": state.leased,
        "dirty_bytes": state.writes.dirty_bytes,
        "dirty_limit_bytes": state.writes.dirty_limit_bytes,
        "staging_bytes": state.staging.used_bytes,
        "index_bytes": state.catalog.table.memory_bytes(),
    }


def _memory(memory: ArenaTier) -> dict[str, Any]:
    return {
        "blocks": memory.copies.count,
        "capacity_bytes": memory.arena.capacity_bytes,
        "used_bytes": memory.arena.used_bytes,
        "huge_pages": memory.arena.memory.huge,
    }


def _lower(lower: LowerTier) -> dict[str, Any]:
    facts, drives = [one for _, one in lower.volumes.all_facts()], lower.volumes.describe()
    return {
        "blocks": lower.copies.count,
        "capacity_bytes": sum(one.capacity_bytes for one in facts),
        "used_bytes": sum(one.used_bytes for one in facts),
        "held_bytes": sum(one.held_bytes for one in facts),
        "healthy": all(one.up for one in facts),
        "errors": sum(one.errors for one in facts),
        "emulated": any(drive["emulated"] for drive in drives),
        "write_mode": lower.mode.value,
        "drives": drives,
    }
