"""What happened in a store so far, and what it holds now, as plain values for `stats`."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.store.state.lower_tier import LowerTier
    from kvdepot.store.state.memory_tier import ArenaTier
    from kvdepot.store.state.state import StoreState


@dataclass(slots=True)
class Counters:
    """Totals since the store was opened."""

    put_stored: int = 0
    put_present: int = 0
    put_throttled: int = 0
    put_refused: int = 0
    put_bytes: int = 0
    get_dram: int = 0
    get_cxl: int = 0
    get_ssd: int = 0
    get_hdd: int = 0
    get_plugin: int = 0
    get_miss: int = 0
    get_bytes: int = 0
    promoted: int = 0
    hinted: int = 0
    """Blocks brought to memory because of a hint."""
    get_mirror: int = 0
    """Blocks read from one drive because another that has them could not be read."""
    mirrored: int = 0
    """Blocks written to a second drive."""
    demoted: int = 0
    """Blocks copied to a slower tier."""
    written: int = 0
    written_bytes: int = 0
    write_failed: int = 0
    """Blocks given up by write-back: they stay in dram only."""
    evicted_dram: int = 0
    evicted_cxl: int = 0
    evicted_ssd: int = 0
    evicted_hdd: int = 0
    evicted_plugin: int = 0
    moved_ssd: int = 0
    """Blocks written again because their segment was reclaimed."""
    moved_hdd: int = 0
    moved_plugin: int = 0
    bypassed: int = 0
    """Times that a block was not worth the wear of an SSD."""
    held_below: int = 0
    """Times that a block was not promoted to the SSDs because these thrash."""
    reclaimed_segments: int = 0
    quarantined: int = 0
    """Copies dropped because their checksum or identity did not match."""
    read_failed: int = 0
    read_late: int = 0
    removed: int = 0
    removal_unrecorded: int = 0
    """Removals that could not be written down: the blocks may come back after a restart."""

    def add(self, what: str, tier: str, count: int = 1) -> None:
        """Count something that is counted for each tier: get, evicted, moved."""
        name = f"{what}_{tier}"
        setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def describe(state: "StoreState") -> dict[str, Any]:
    """Counters, and what each tier holds and how it is."""
    assert state.held()
    tiers = {memory.name: _memory(memory) for memory in state.memory_tiers}
    if state.config.cxl is not None:
        cxl = state.config.cxl
        tiers["cxl"] |= {"source": cxl.source, "emulated": cxl.emulated}
    tiers.update((lower.name, _lower(lower)) for lower in state.lower_tiers)
    for lower in state.lower_tiers[:1]:
        tiers[lower.name]["thrashing"] = state.admission.thrashing
    recorder = state.recorder
    recording = recorder and {"path": str(recorder.path), "requests": recorder.requests}
    return {
        "tiers": tiers,
        "blocks": state.catalog.table.live,
        "leased": state.leased,
        "dirty_bytes": state.dirty_bytes,
        "staging_bytes": state.staging.used_bytes,
        "index_bytes": state.catalog.table.memory_bytes(),
        "counters": state.counters.as_dict(),
        "recording": recording,
    }


def _memory(memory: "ArenaTier") -> dict[str, Any]:
    return {
        "blocks": memory.copies.count,
        "capacity_bytes": memory.arena.capacity_bytes,
        "used_bytes": memory.arena.used_bytes,
        "huge_pages": memory.arena.memory.huge,
    }


def _lower(lower: "LowerTier") -> dict[str, Any]:
    usage, health = lower.tier.usage(), lower.tier.health()
    return {
        "blocks": lower.copies.count,
        "mirrored": lower.second_copies.count if lower.second_copies is not None else 0,
        "capacity_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
        "held_bytes": usage.held_bytes,
        "healthy": health.ok,
        "errors": health.errors,
        "emulated": lower.config.emulate is not None,
        "write_mode": lower.mode.value,
        "drives": lower.tier.describe_drives(),
    }
