"""Checks a running store: the index against the tiers, and all bytes against their checksums."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.depot import CheckReport
from kvdepot.core.volume import (
    SEGMENT_SHIFT,
    SEGMENTS_MAX,
    VOLUME_SHIFT,
    Outcome,
    Priority,
    page_of,
    place_of,
    segment_of,
    volume_of,
)
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import (
    HEAD_BYTES,
    TABLE_OFFSET,
    own_chunk_bytes,
    record_bytes,
    record_sizes,
)
from kvdepot.index.table import NONE
from kvdepot.memory.arena import UNOWNED
from kvdepot.native import VERIFY, address_of
from kvdepot.store.move.mover import READS_END_S, whole_reads
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.memory_tier import ArenaTier
from kvdepot.store.state.state import TEMPORARY, StoreState

_READY = int(CopyState.READY)
_BATCH = 256
_TRIES = 5
_PAUSE_S_MAX = 1.0
"""Longest wait for a drive that is being retried; its blocks then count as unreadable."""


def check_store(state: StoreState, *, deep: bool) -> CheckReport:
    """Check an open store. Changes nothing; other calls may run at the same time."""
    report = CheckReport()
    with state.lock:
        report.blocks = state.catalog.table.live
        for memory in state.memory_tiers:
            _check_memory(memory, report)
        for lower in state.lower_tiers:
            _check_lower(lower, report)
        _check_tree(state, report)
    if deep:
        for row in _leased_rows(state):
            _check_bytes(state, row, report)
    return report


def _rows(state: StoreState) -> list[int]:
    """All rows in use. With the store's lock."""
    assert state.lock.held()
    catalog = state.catalog
    return np.flatnonzero(catalog.nbytes.array > 0).tolist()


def _check_memory(memory: ArenaTier, report: CheckReport) -> None:
    catalog, arena = memory.catalog, memory.arena
    owned: Counter[int] = Counter()
    for slab in arena.slabs():
        for owner in slab.owners:
            if owner not in (UNOWNED, TEMPORARY):
                owned[owner] += 1
    holders = np.flatnonzero(memory.copies.state.array != 0).tolist()
    for row in holders:
        if owned.pop(row, 0) != 1:
            report.add(memory.name, f"block {catalog.table.key(row).hex()} does not own one slot")
    for row in owned:
        report.add(memory.name, f"a slot belongs to row {row}, which has no copy in memory")
    used = sum(slab.slot_bytes * (len(slab.owners) - len(slab.free)) for slab in arena.slabs())
    if used != arena.used_bytes:
        report.add(memory.name, f"slots take {used} bytes, the store counts {arena.used_bytes}")


def _check_lower(lower: LowerTier, report: CheckReport) -> None:
    catalog = lower.catalog
    waiting = sum(record_bytes(catalog.nbytes[row]) for row in lower.queue.tickets)
    if waiting != lower.queue.dirty_bytes:
        report.add(
            lower.name,
            f"{waiting} bytes wait to be written, the store counts {lower.queue.dirty_bytes}",
        )
    rows = np.flatnonzero(lower.copies.state.array == _READY)
    if not (catalog.residency.array[rows] & lower.copies.bit).all():
        report.add(lower.name, "a ready block is not counted as resident")
    places = lower.copies.location.array[rows]
    sizes = record_sizes(catalog.nbytes.array[rows])
    used = set()
    for entry in lower.volumes.entries:
        label, mine = entry.volume.facts().label, places >> VOLUME_SHIFT == entry.number
        table = entry.volume.segments()
        columns = (table.segments, table.live_count, table.live_bytes)
        for segment, *counted in zip(*(column.tolist() for column in columns), strict=True):
            used.add(entry.number << SEGMENT_SHIFT | segment)
            here = mine & (places >> SEGMENT_SHIFT & SEGMENTS_MAX - 1 == segment)
            found = [int(here.sum()), int(sizes[here].sum())]
            if found != counted and not lower.appending[entry.number]:
                report.add(
                    f"{label}: slot {segment}",
                    f"{found[0]} blocks, {found[1]} bytes; "
                    f"the store counts {counted[0]}, {counted[1]}",
                )
    for place in np.unique(places >> SEGMENT_SHIFT).tolist():
        if place not in used:
            where = f"slot {place & SEGMENTS_MAX - 1}"
            report.add(lower.name, f"a block is said to be in {where}, which is not in use")


def _check_tree(state: StoreState, report: CheckReport) -> None:
    catalog = state.catalog
    for row in _rows(state):
        parent = catalog.tree.parent[row]
        if parent == NONE:
            continue
        if catalog.table.name(parent) != catalog.table.parent_name(row):
            report.add("index", f"row {row} hangs below a row that is not its parent")


def _leased_rows(state: StoreState) -> Iterator[int]:
    """Yield every row, leased until the next one is requested."""
    with state.lock:
        everything = _rows(state)
    for start in range(0, len(everything), _BATCH):
        with state.lock:
            batch = [
                row for row in everything[start : start + _BATCH] if state.catalog.is_live(row)
            ]
            state.catalog.lease(batch)
        try:
            yield from batch
        finally:
            with state.lock:
                state.unlease(batch)


def _check_bytes(state: StoreState, row: int, report: CheckReport) -> None:
    catalog = state.catalog
    with state.lock:
        here = [memory for memory in state.memory_tiers if memory.copies.ready(row)]
    report.nbytes += catalog.nbytes[row]
    for memory in here:
        if not _memory_intact(memory, row):
            what = f"block {catalog.table.key(row).hex()} does not match its checksum"
            report.add(memory.name, what)
    for lower in state.lower_tiers:
        with state.lock:
            location = lower.place(row)
        if location != NONE:
            _check_copy(state, lower, row, location, report)


def _check_copy(
    state: StoreState, lower: LowerTier, row: int, location: int, report: CheckReport
) -> None:
    """Read a block's copy at one place of a lower tier."""
    catalog = state.catalog
    nbytes = record_bytes(catalog.nbytes[row])
    with state.lock:
        slot = state.staging.allocate(nbytes, TEMPORARY)
    if slot is None:
        return
    key = catalog.table.key(row)
    intact = _read(state, lower, row, location, state.staging.address + slot)
    with state.lock:
        state.staging.free(slot)
        moved = location != lower.place(row)
    if not intact and not moved:
        label = state.volumes.facts(volume_of(location)).label
        report.add(
            f"{label}: slot {segment_of(location)}, page {page_of(location)}",
            f"block {key.hex()} cannot be read back",
        )


def _read(state: StoreState, lower: LowerTier, row: int, location: int, image: int) -> bool:
    """Read and verify a record. Waits for a volume that is being retried."""
    catalog, number = state.catalog, volume_of(location)
    words = catalog.table.words(np.array([row]))
    reads = whole_reads(words, [place_of(location)], catalog.nbytes.array[[row]], [image])
    for _ in range(_TRIES):
        volume = state.volumes[number]
        was_up = number not in state.volumes.down
        reading = volume.read(reads, Priority.BACKGROUND, lower.config.write_timeout)
        outcome = reading.result()[0]
        while not reading.released(READS_END_S):
            pass
        if outcome == Outcome.OK:
            return True
        facts = volume.facts()
        if (was_up and facts.up) or facts.lost or facts.retry_in_s > _PAUSE_S_MAX:
            break
        state.closing.wait(facts.retry_in_s)
    return False


def _memory_intact(memory: ArenaTier, row: int) -> bool:
    image, nbytes = memory.image(row), memory.catalog.nbytes[row]
    chunk_bytes = own_chunk_bytes(image, memory.catalog.table.key(row), nbytes)
    if not chunk_bytes:
        return False
    slot = address_of(image)[0]
    op = (0, slot + HEAD_BYTES, 0, nbytes, chunk_bytes, slot + TABLE_OFFSET, VERIFY)
    return bool(transfers([op])[0] == 0)
