"""A tier below memory: its volumes, the locations of its blocks, and its write queue.

Guarded by the store's lock, except for `volumes`.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import LowerTierConfig
from kvdepot.core.block import CopyState
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.core.keys import Keys
from kvdepot.core.metadata import MetaKind
from kvdepot.core.volume import (
    SEGMENT_SHIFT,
    VOLUME_SHIFT,
    Ints,
    SegmentTable,
    Volume,
    VolumeFacts,
    WriteBudget,
    place_of,
    volume_of,
)
from kvdepot.format.record import record_sizes
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.paths import path_order
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.index.tree import HITS_MAX
from kvdepot.policy.placing.drive_shares import DriveLoad, Shares, are_uneven
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.state.owed_blocks import OwedBlocks
from kvdepot.store.volume_entry import VolumeEntry
from kvdepot.store.volume_set import Blocks, VolumeSet

FAILED: Final = DURABILITY.index(Durability.FAILED)
_PLACES: Final = (1 << VOLUME_SHIFT) - 1
_ARRIVALS_MAX: Final = 3600
_ARRIVALS_APART_S: Final = 1.0
_WAVE_BYTES: Final = 32 << 20
_REMOTE_WAVE_BYTES: Final = 64 << 20
"""Bytes of a wave from a bucket: enough for all parallel requests."""
_NO_LIMIT: Final = 1 << 62
MARK_BYTES: Final = 8
"""Size of the mark that store/drives/owed.py writes."""
_UNEVEN: Final = 1.25
"""Volumes whose speeds differ by a smaller factor count as equal."""


class TierVolumes:
    """The volumes of a store that belong to one tier."""

    def __init__(self, volumes: VolumeSet, tier: str) -> None:
        self._all = volumes
        self._tier = tier
        self.is_remote = False
        """True if they are behind a network: no put waits for them."""
        self.is_durable = False
        """True if they can hold pinned blocks: volumes of this node that are synced."""
        self.contiguous_bytes = 0
        """Bytes of one prompt that should lie together; 0 if seeks cost nothing."""
        self.writers = 1
        """Number of useful parallel appends to one volume."""
        self.wave_bytes = _WAVE_BYTES
        """Bytes read from a volume in one wave."""
        self.learn_facts()
        self.shares = VolumeShares(self)

    @property
    def entries(self) -> list[VolumeEntry]:
        """The volumes that are in use."""
        return [one for one in self._all.entries if one.tier == self._tier and not one.retired]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Volume:
        return self._all.entries[number].volume

    def is_up(self, location: int) -> bool:
        """True unless the volume of this location is known to be down."""
        return self._all.is_up(location)

    @property
    def are_up(self) -> bool:
        """True unless a volume is known to be down."""
        down = self._all.down
        return not down or not any(entry.number in down for entry in self.entries)

    def all_facts(self) -> list[tuple[int, VolumeFacts]]:
        """The number and the present facts of each volume."""
        return [(entry.number, entry.volume.facts()) for entry in self.entries]

    @property
    def capacity_bytes(self) -> int:
        return sum(facts.capacity_bytes for _, facts in self.all_facts())

    def describe(self) -> list[dict[str, Any]]:
        """The values for `stats`, including those of drained volumes."""
        every = [entry for entry in self._all.entries if entry.tier == self._tier]
        return [self._all.describe(entry) for entry in every]

    def budget(self) -> WriteBudget | None:
        """The write budget of all volumes together; None if there is no limit."""
        limited = [facts for _, facts in self.all_facts() if facts.budget is not None]
        if not limited:
            return None
        usable = [facts.budget for facts in limited if facts.up and facts.may_write]
        parts = [budget for budget in usable if budget is not None]
        return WriteBudget(
            sum(part.bucket_bytes for part in parts), sum(part.left_bytes for part in parts)
        )

    def sync(self, timeout_s: float) -> bool:
        """Make all writes durable. False if a volume failed; volumes that are not open do not
        count.
        """
        done = [entry.volume.sync(timeout_s) for entry in self.entries if entry.error is None]
        return all(done)

    def owed_since(self) -> int:
        """The stamp from which blocks may be missing on the tier; 0: its drives have no mark."""
        mark = self._all.metadata.values(MetaKind.OWED).get(self._tier.encode(), b"")
        return int.from_bytes(mark, "little") if len(mark) == MARK_BYTES else 0

    def learn_facts(self) -> None:
        """Read the facts that the volumes have in common, from those that are up."""
        for _, facts in self.all_facts():
            self.is_remote |= facts.is_remote
            self.is_durable |= facts.is_durable
            self.contiguous_bytes = max(self.contiguous_bytes, facts.contiguous_bytes)
            self.writers = max(self.writers, facts.writers)
        self.wave_bytes = 4 * self.contiguous_bytes or _WAVE_BYTES
        if self.is_remote:
            self.wave_bytes = _REMOTE_WAVE_BYTES


class VolumeShares:
    """Chooses the volume for the next batch, by measured speed and queued bytes."""

    def __init__(self, volumes: TierVolumes) -> None:
        self._volumes = volumes
        self._shares = Shares()
        self._writing: Counter[int] = Counter()
        """Bytes that are being written to each volume."""
        self.taken_s = 0.0
        """Time at which a volume was last given a batch."""

    def next(self) -> int | None:
        """The volume for the next batch; None if no volume accepts blocks."""
        loads = self._loads()
        return loads[0].drive if len(loads) == 1 else self._shares.next(loads)

    def take(self, volume: int, nbytes: int, now_s: float) -> None:
        """Count a batch as being written to a volume until `done`."""
        if len(self._volumes.entries) > 1:
            self._shares.take(volume, nbytes, self._loads())
        self._writing[volume] += nbytes
        self.taken_s = now_s

    def done(self, volume: int, nbytes: int) -> None:
        """Count a batch as written or given up."""
        self._writing[volume] -= nbytes

    def part(self, volume: int) -> float:
        """This volume's share of the tier's write queue."""
        return self._shares.part(volume, self._loads())

    def are_uneven(self) -> bool:
        """True if some volumes are known to be faster than others."""
        return are_uneven(self._loads(), _UNEVEN)

    def _loads(self) -> list[DriveLoad]:
        return [
            DriveLoad(number, facts.read_bytes_per_s, self._writing[number] + facts.queued_bytes)
            for number, facts in self._volumes.all_facts()
            if facts.takes_blocks
        ]


class WriteQueue:
    """Blocks in memory that wait to be written to one tier."""

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self._catalog = catalog
        self._copies = copies
        self.owed = OwedBlocks(catalog, copies)
        """Blocks that could not be written to the tier."""
        self.dirty: deque[int] = deque()
        """Rows that wait, oldest first."""
        self.dirty_bytes = 0
        """Bytes of records that wait or are being written."""
        self.dirty_since_s = 0.0
        self.deferred: OrderedDict[int, None] = OrderedDict()
        """Rows above the dirty limit. They are queued when there is room, unless evicted before."""
        self.tickets: dict[int, int] = {}
        """Rows that wait or are being written, oldest first, with their tickets."""
        self.failed_on: dict[int, set[int]] = {}
        """Volumes that failed to write a waiting row, by row."""
        self.flush_ticket = 0
        """Rows with tickets up to this one do not wait for others of their prompt."""
        self.writers = 0
        """Number of writing threads; without any, blocks are not queued."""
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=_ARRIVALS_MAX)
        """Tickets and their times, one for each second with arrivals."""

    def mark_dirty(self, rows: Iterable[int], ticket: int, now_s: float) -> int:
        """Queue blocks to be written, except for those that the tier has or that are queued. They
        cannot be evicted from memory before. `ticket` is the last one; returns the new last one.
        """
        tickets, states = self.tickets, self._copies.state.view
        new = [row for row in rows if row not in tickets and states[row] == CopyState.ABSENT]
        if not new:
            return ticket
        if not self.dirty:
            self.dirty_since_s = now_s
        if not self._arrivals or now_s - self._arrivals[-1][1] >= _ARRIVALS_APART_S:
            self._arrivals.append((ticket + 1, now_s))
        self._catalog.leaves.hold_all(new)
        tickets.update(zip(new, range(ticket + 1, ticket + 1 + len(new)), strict=True))
        self.dirty.extend(new)
        self.dirty_bytes += int(record_sizes(self._catalog.nbytes.array[new]).sum())
        return ticket + len(new)

    def mark_clean(self, rows: list[int]) -> None:
        """Remove blocks that were written or given up from the queue."""
        self.dirty_bytes -= int(record_sizes(self._catalog.nbytes.array[rows]).sum())
        for row in rows:
            self.tickets.pop(row, None)
            self.failed_on.pop(row, None)
        self._catalog.leaves.release_all(rows)

    def oldest_ticket(self) -> int | None:
        return next(iter(self.tickets.values()), None)

    def oldest_age_s(self, now_s: float) -> float:
        """Return the waiting time of the oldest block, to about a second."""
        oldest, arrivals = self.oldest_ticket(), self._arrivals
        if oldest is None:
            return 0.0
        while len(arrivals) > 1 and arrivals[1][0] <= oldest:
            arrivals.popleft()
        return max(0.0, now_s - arrivals[0][1])

    def sort(self) -> None:
        """Sort the waiting rows by prompt."""
        self.dirty = deque(path_order(self._catalog.tree, self.dirty))


class LowerTier:
    """A tier below memory."""

    def __init__(
        self,
        volumes: TierVolumes,
        config: LowerTierConfig,
        catalog: Catalog,
        copies: Copies,
        *,
        writable: bool,
    ) -> None:
        self.volumes = volumes
        self.name = copies.tier
        self.config = config
        self.writable = writable
        self.catalog = catalog
        self.copies = copies
        self.foreground_reads = 0
        """Number of waves that callers wait for."""
        self.foreground_s = -1.0
        """Time at which the last of them ended."""
        self.mode = WriteMode(config.write_mode)
        self.queue = WriteQueue(catalog, copies)
        if writable and self.mode is WriteMode.THROUGH:
            self.queue.owed.since = volumes.owed_since()
        self.segment_rows: dict[int, array[int]] = {}
        """Rows written to each segment, by location without page; some have been moved since."""
        self.appending: Counter[int] = Counter()
        """Number of appends to each volume whose records are not all in the index yet."""
        self.moving: Counter[int] = Counter()
        """Rows whose records are being copied to this tier or within it."""
        self.pinned = PinnedRows(catalog.table)
        """Pinned blocks of the whole store, see `share`."""
        self._others: list[LowerTier] = []
        self._hits_before = catalog.table.column(np.uint16, 0)
        """Number of requests for each block before it was written here."""

    def share(self, pinned: PinnedRows, tiers: Iterable["LowerTier"]) -> None:
        """Set the pin counts, and the other lower tiers of the store."""
        self.pinned = pinned
        self._others = others = [lower for lower in tiers if lower is not self]
        self.queue.owed.limit_bytes = lambda: _owed_limit_bytes(others, pinned)

    def bound(self, rows: Rows) -> Bools:
        """True for rows that are pinned, or owed to another tier, and that no other durable tier
        has: they must stay in this tier.
        """
        found = np.zeros(len(rows), dtype=bool)
        if self.pinned.total:
            found |= self.pinned.pins.array[rows] > 0
        for other in self._others:
            if other.queue.owed.any:
                found |= other.queue.owed.has(rows)
        if not found.any():
            return found
        for other in self._others:
            if other.volumes.is_durable and other.volumes.are_up:
                found &= other.copies.state.array[rows] != CopyState.READY
        return found

    def is_bound(self, row: int) -> bool:
        """`bound` for one row."""
        return has_bound(self) and bool(self.bound(np.array([row], np.int64))[0])

    def usable(self, row: int) -> bool:
        """True if there is a copy here on a volume that is up."""
        return self.copies.ready(row) and self.volumes.is_up(self.copies.location[row])

    def place(self, row: int) -> int:
        """Return the location of the block's copy in this tier; NONE if none is ready."""
        return self.copies.location[row] if self.copies.ready(row) else NONE

    def place_on(self, row: int, volume: int) -> int:
        """Return the location of the block's copy on this volume, or NONE."""
        place = self.place(row)
        return place if volume_of(place) == volume else NONE

    def place_in(self, row: int, volume: int, segment: int) -> int:
        """Return the location of the block's copy in this segment, or NONE."""
        place = self.place(row)
        return place if place >> SEGMENT_SHIFT == volume << SEGMENT_SHIFT | segment else NONE

    def enter(self, rows: list[int], locations: list[int]) -> None:
        """Record that blocks were written to `locations`."""
        self.catalog.unwritten.array[rows] = 0
        self.copies.owed.array[rows] = 0
        for row, location in zip(rows, locations, strict=True):
            self.segment_rows.setdefault(location >> SEGMENT_SHIFT, array("i")).append(row)

    def relocate(self, row: int, source: int, target: int) -> None:
        """Record that the copy at `source` was written again at `target`. If it was dropped
        meanwhile, the new record is discarded.
        """
        if source == NONE or self.place(row) != source:  # the copy was dropped meanwhile
            self._discard_one(target, self.catalog.nbytes[row])
            return
        self.copies.move(row, target)
        self._discard_one(source, self.catalog.nbytes[row])
        self.enter([row], [target])

    def drop(self, row: int) -> None:
        """Drop the block's copy in this tier; its bytes stay until their segment is released."""
        location = self.place(row)
        self.copies.drop(row)
        if location != NONE:
            self._discard_one(location, self.catalog.nbytes[row])

    def drop_all(self, rows: list[int]) -> None:
        """`drop` for distinct rows whose copies here are ready."""
        if rows:
            self.discard(self.copies.drop_all(rows), self.catalog.nbytes.array[rows])

    def discard(self, locations: Sequence[int] | Ints, payload_bytes: Sequence[int] | Ints) -> None:
        """Mark records as not in use on their volumes."""
        places, sizes = np.asarray(locations, np.int64), np.asarray(payload_bytes, np.int64)
        volumes = places >> VOLUME_SHIFT
        for number in np.unique(volumes).tolist():
            mine = volumes == number
            self.volumes[number].discard(places[mine] & _PLACES, sizes[mine])

    def _discard_one(self, location: int, payload_bytes: int) -> None:
        volume = self.volumes[volume_of(location)]
        volume.discard(np.array([place_of(location)]), np.array([payload_bytes]))

    def forget_volume(self, number: int) -> None:
        """Drop all copies on a volume that was lost or emptied."""
        places = self.copies.location.array
        here = (places != NONE) & (places >> VOLUME_SHIFT == number)
        for row in np.flatnonzero(here).tolist():
            if self.copies.ready(row):
                self.copies.drop(row)
                self.catalog.unwritten.view[row] = FAILED
                self.catalog.forget_if_gone(row)
        for segment in [one for one in self.segment_rows if one >> SEGMENT_SHIFT == number]:
            del self.segment_rows[segment]

    def forget_gone(self, words: Keys, locations: Ints) -> None:
        """Drop copies whose records other nodes have removed from a shared volume."""
        rows = self.catalog.table.find_many(words) if len(words) else np.zeros(0, np.int64)
        for row, location in zip(rows.tolist(), locations.tolist(), strict=True):
            if row != NONE and location == self.place(row):
                self.drop(row)
                self.catalog.forget_if_gone(row)

    def live(self, volume: int, segment: int) -> Rows:
        """The rows with a copy in this segment, in the order of their places."""
        place = volume << SEGMENT_SHIFT | segment
        listed = self.segment_rows.get(place)
        if not listed:
            return np.zeros(0, dtype=np.int64)
        rows = np.unique(np.array(listed, dtype=np.int64))
        places = self.copies.location.array[rows]
        here = (self.copies.state.array[rows] == CopyState.READY) & (
            places >> SEGMENT_SHIFT == place
        )
        found: Rows = rows[here][np.argsort(places[here])]
        return found

    def forget_segment(self, volume: int, segment: int) -> None:
        """Drop the list of rows of an empty segment."""
        self.segment_rows.pop(volume << SEGMENT_SHIFT | segment, None)

    def unentered(self, number: int, table: SegmentTable) -> set[int]:
        """Segments of a volume with appended records that are not in the index yet."""
        if not self.appending[number]:
            return set()
        counted = zip(table.segments.tolist(), table.live_count.tolist(), strict=True)
        return {segment for segment, count in counted if count > len(self.live(number, segment))}

    def hits(self, rows: Rows) -> Rows:
        """Return the number of requests for each block since it was written here."""
        total = self.catalog.tree.hits.array[rows].astype(np.int64)
        hits: Rows = np.where(total == HITS_MAX, 1, total - self._hits_before.array[rows])
        return hits

    def reset_hits(self, rows: list[int]) -> None:
        """Start to count requests again: earlier ones were served by other tiers."""
        self._hits_before.array[rows] = self.catalog.tree.hits.array[rows]

    def is_read_since(self, moment_s: float) -> bool:
        """True if a caller has waited for a read from this tier since then."""
        return self.foreground_reads > 0 or self.foreground_s >= moment_s

    def end_moving(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.moving[row] -= 1
            if not self.moving[row]:
                del self.moving[row]

    def insert_recovered(self, parts: Sequence[Blocks]) -> None:
        """Enter blocks that were recovered from volumes. Of several records with one key only the
        newest counts.
        """
        self.volumes.learn_facts()
        blocks = self._newest(parts)
        words, locations = blocks.words, blocks.locations
        rows = self.catalog.table.find_many(words)
        known = np.flatnonzero(rows != NONE)
        twice = self.copies.state.array[rows[known]] != CopyState.ABSENT
        surplus = known[twice]
        self.discard(locations[surplus], blocks.payload_bytes[surplus])
        known = known[~twice]
        self.copies.seal_many(rows[known], locations[known])
        self.catalog.unwritten.array[rows[known]] = 0
        self.copies.owed.array[rows[known]] = 0
        new = np.flatnonzero(rows == NONE)
        rows[new] = self.catalog.recover(
            words[new], blocks.payload_bytes[new], locations[new], self.copies
        )
        entered = np.concatenate([known, new])
        if len(entered):
            self._list_rows(rows[entered], locations[entered])

    def _newest(self, parts: Sequence[Blocks]) -> Blocks:
        if len(parts) == 1:
            return parts[0]
        words = np.concatenate([np.zeros((0, 4), np.uint64), *(part.words for part in parts)])
        empty = np.zeros(0, np.int64)
        locations = np.concatenate([empty, *(part.locations for part in parts)])
        payload_bytes = np.concatenate([empty, *(part.payload_bytes for part in parts)])
        stamps = np.concatenate([empty, *(part.stamps for part in parts)])
        order = np.argsort(stamps, kind="stable")
        keys = np.ascontiguousarray(words[order]).view("V32").reshape(-1)
        _, last = np.unique(keys[::-1], return_index=True)
        newest = order[np.sort(len(order) - 1 - last)]
        surplus = np.setdiff1d(order, newest)
        self.discard(locations[surplus], payload_bytes[surplus])
        return Blocks(words[newest], locations[newest], payload_bytes[newest], stamps[newest])

    def _list_rows(self, rows: Rows, locations: Rows) -> None:
        segments = locations >> SEGMENT_SHIFT
        order = np.argsort(segments, kind="stable")
        places, starts = np.unique(segments[order], return_index=True)
        for place, part in zip(places.tolist(), np.split(rows[order], starts[1:]), strict=True):
            listed = self.segment_rows.setdefault(place, array("i"))
            listed.frombytes(part.astype(np.int32).tobytes())


def has_bound(lower: LowerTier) -> bool:
    """False: `bound` is true for no row."""
    return bool(lower.pinned.total) or any(other.queue.owed.any for other in lower._others)


def _owed_limit_bytes(others: Sequence[LowerTier], pinned: PinnedRows) -> int:
    """Half of the smallest of the durable tiers, which keep what is owed to another one; a quarter
    if there are pinned blocks, which may take half.
    """
    rooms = [one.volumes.capacity_bytes for one in others if one.volumes.is_durable]
    return min(rooms) // (4 if pinned.total else 2) if rooms else _NO_LIMIT
