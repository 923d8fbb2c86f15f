"""The store checks itself: its books against each other, and every byte against its checksum."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, own_chunk_bytes, record_bytes
from kvdepot.core.block import BlockKey, CopyState
from kvdepot.core.depot import CheckReport
from kvdepot.core.tier import drive_of, segment_of
from kvdepot.index.table import NONE, Rows
from kvdepot.native import VERIFY, address_of
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.memory_tier import Pool
from kvdepot.store.state.second_copies import Mirrors
from kvdepot.store.state.state import TEMPORARY, Stock
from kvdepot.tiers.memory.arena import NOBODY
from kvdepot.tiers.memory.copy_ops import transfers

_READY = int(CopyState.READY)
_BATCH = 256
_TRIES = 5
_PAUSE_S_MAX = 1.0
"""A drive that is left alone for longer is not waited for: what it has cannot be read."""


def check_stock(stock: Stock, *, deep: bool) -> CheckReport:
    """Check an open store. Changes nothing; may run beside other callers."""
    report = CheckReport()
    with stock.changed:
        report.blocks = stock.catalog.table.live
        for pool in stock.pools:
            _check_memory_books(pool, report)
        for level in stock.levels:
            _check_file_books(level, report)
        _check_tree(stock, report)
    if deep:
        for row in _leased_rows(stock):
            _check_bytes(stock, row, report)
    return report


def _rows(stock: Stock) -> list[int]:
    """All rows in use. Lock held."""
    catalog = stock.catalog
    return np.flatnonzero(catalog.nbytes.array > 0).tolist()


def _check_memory_books(pool: Pool, report: CheckReport) -> None:
    catalog, arena = pool.catalog, pool.arena
    owned: Counter[int] = Counter()
    for slab in arena.slabs():
        for owner in slab.owners:
            if owner not in (NOBODY, TEMPORARY):
                owned[owner] += 1
    holders = np.flatnonzero(pool.copies.state.array != 0).tolist()
    for row in holders:
        if owned.pop(row, 0) != 1:
            report.add(pool.name, f"block {catalog.table.key(row).hex()} does not own one slot")
    for row in owned:
        report.add(pool.name, f"a slot belongs to row {row}, which has no copy in memory")
    used = sum(slab.slot_bytes * (len(slab.owners) - len(slab.free)) for slab in arena.slabs())
    if used != arena.used_bytes:
        report.add(pool.name, f"slots take {used} bytes, the books say {arena.used_bytes}")


def _check_file_books(level: Level, report: CheckReport) -> None:
    catalog = level.catalog
    waiting = sum(record_bytes(catalog.nbytes[row]) for row in level.tickets)
    if waiting != level.dirty_bytes:
        report.add(
            level.name, f"{waiting} bytes wait to be written, the books say {level.dirty_bytes}"
        )
    rows = np.flatnonzero(level.copies.state.array == _READY)
    if not (catalog.residency.array[rows] & level.copies.bit).all():
        report.add(level.name, "a ready block is not counted as resident")
    places = level.copies.location.array[rows]
    if level.mirrors is not None:
        places, rows = _with_mirrors(level, level.mirrors, report)
    sizes = HEAD_BYTES + -(-catalog.nbytes.array[rows].astype(np.int64) // 4096) * 4096
    for index, drive in enumerate(level.tier.drives):
        mine = places >> 56 == index
        for slot, segment in list(drive.segments.items()):
            here = mine & (places >> 32 & 0xFFFFFF == slot)
            found = (int(here.sum()), int(sizes[here].sum()))
            books = (segment.live_count, segment.live_bytes)
            if found != books:
                report.add(
                    f"{drive.medium.label}: slot {slot}",
                    f"{found[0]} blocks, {found[1]} bytes; the books say {books[0]}, {books[1]}",
                )
    for location in places.tolist():
        if segment_of(location) not in level.tier.drives[location >> 56].segments:
            where = f"slot {segment_of(location)}"
            report.add(level.name, f"a block is said to be in {where}, which is not in use")


def _with_mirrors(level: Level, mirrors: Mirrors, report: CheckReport) -> tuple[Rows, Rows]:
    """Places and rows of all copies in a tier that mirrors."""
    first, second = level.copies.location.array, mirrors.location.array
    ready = level.copies.state.array == _READY
    twice = second != NONE
    if (twice & ~ready).any() or (twice & (first >> 56 == second >> 56)).any():
        report.add(level.name, "a second copy is without a first one on another drive")
    if int(twice.sum()) != mirrors.count:
        where = f"{int(twice.sum())} blocks are mirrored, the books say {mirrors.count}"
        report.add(level.name, where)
    rows = np.concatenate([np.flatnonzero(ready), np.flatnonzero(twice)])
    return np.concatenate([first[ready], second[twice]]), rows


def _check_tree(stock: Stock, report: CheckReport) -> None:
    catalog = stock.catalog
    for row in _rows(stock):
        parent = catalog.tree.parent[row]
        if parent == NONE:
            continue
        if catalog.table.name(parent) != catalog.table.parent_name(row):
            report.add("index", f"row {row} hangs below a row that is not its parent")


def _leased_rows(stock: Stock) -> Iterator[int]:
    """Every row, each leased while it is looked at."""
    with stock.changed:
        everything = _rows(stock)
    for start in range(0, len(everything), _BATCH):
        with stock.changed:
            batch = [
                row for row in everything[start : start + _BATCH] if stock.catalog.is_live(row)
            ]
            stock.catalog.lease(batch)
        try:
            yield from batch
        finally:
            with stock.changed:
                stock.unlease(batch)


def _check_bytes(stock: Stock, row: int, report: CheckReport) -> None:
    catalog = stock.catalog
    with stock.changed:
        here = [pool for pool in stock.pools if pool.copies.ready(row)]
    report.nbytes += catalog.nbytes[row]
    for pool in here:
        if not _memory_intact(pool, row):
            what = f"block {catalog.table.key(row).hex()} does not match its checksum"
            report.add(pool.name, what)
    for level in stock.levels:
        with stock.changed:
            places = level.places(row)
        for location in places:
            _check_copy(stock, level, row, location, report)


def _check_copy(stock: Stock, level: Level, row: int, location: int, report: CheckReport) -> None:
    """Read a block's copy at one place of a file tier."""
    catalog = stock.catalog
    nbytes = record_bytes(catalog.nbytes[row])
    with stock.changed:
        slot = stock.staging.allocate(nbytes, TEMPORARY)
    if slot is None:
        return
    key = catalog.table.key(row)
    intact = _read(stock, level, key, location, stock.staging.image(slot, nbytes))
    with stock.changed:
        stock.staging.free(slot)
        moved = location not in level.places(row)
    if not intact and not moved:
        drive = level.tier.drives[location >> 56]
        report.add(
            f"{drive.medium.label}: slot {segment_of(location)}, page {location & 0xFFFFFFFF}",
            f"block {key.hex()} cannot be read back",
        )


def _read(stock: Stock, level: Level, key: BlockKey, location: int, image: memoryview) -> bool:
    """Read and verify a record; a drive that is left alone for a moment is waited for."""
    drive = level.tier.drives[drive_of(location)]
    for _ in range(_TRIES):
        worked = drive.breaker.closed
        if level.tier.read_image(key, location, image):
            return True
        pause_s = drive.breaker.health().retry_in_s
        if (worked and drive.breaker.closed) or drive.lost or pause_s > _PAUSE_S_MAX:
            break
        stock.ended.wait(pause_s)
    return False


def _memory_intact(pool: Pool, row: int) -> bool:
    image, nbytes = pool.image(row), pool.catalog.nbytes[row]
    chunk_bytes = own_chunk_bytes(image, pool.catalog.table.key(row), nbytes)
    if not chunk_bytes:
        return False
    slot = address_of(image)[0]
    op = (0, slot + HEAD_BYTES, 0, nbytes, chunk_bytes, slot + TABLE_OFFSET, VERIFY)
    return bool(transfers([op])[0] == 0)
