"""What happened so far, counted. Changed under the store's lock."""

from dataclasses import dataclass, fields


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
