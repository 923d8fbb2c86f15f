"""One tier below memory as the store sees it: where its blocks lie, and what waits to be written.

Guarded by the store's lock, but for `tier` itself.
"""

import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvdepot.config.settings import FileTierConfig, HddConfig, LowerTierConfig, ObjectConfig
from kvdepot.core.block import CopyState
from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.core.metadata import Metadata, Tombstone, merged, surviving
from kvdepot.core.tier import Array, Contents, Tier, drive_of, segment_of
from kvdepot.format.record import record_bytes
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.paths import path_order
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.index.tree import HITS_MAX
from kvdepot.policy.placing.drive_shares import DriveLoad, Shares, are_uneven
from kvdepot.policy.placing.write_mode import WriteMode

FAILED: Final = DURABILITY.index(Durability.FAILED)
_WAVE_BYTES: Final = 32 << 20
_REMOTE_WAVE_BYTES: Final = 64 << 20
"""Enough for all requests at once; what is read is handed over wave by wave."""
_ARRIVALS_MAX: Final = 3600
_ARRIVALS_APART_S: Final = 1.0
_WRITERS_A_DRIVE: Final = 2
"""While one waits for the disk, the other keeps the index."""
_UPLOADS_MAX: Final = 8
_UNEVEN: Final = 1.25
"""Drives whose speeds differ by less count as alike."""


class LowerTier:
    """The store's side of one tier."""

    def __init__(
        self, tier: Tier, config: LowerTierConfig, catalog: Catalog, copies: Copies, clock: Clock
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.config = config
        self.catalog = catalog
        self.copies = copies
        self.foreground = ForegroundReads(clock)
        self.mode = WriteMode(config.write_mode)
        self.is_remote = isinstance(config, ObjectConfig)
        """Its medium is behind a network: no put waits for it."""
        self.contiguous_bytes = _run_bytes(config)
        """How much of one prompt should lie in one piece; 0 where that does not matter."""
        self.writers_a_drive = _writers_a_drive(config)
        self.wave_bytes = (
            _REMOTE_WAVE_BYTES if self.is_remote else 4 * self.contiguous_bytes or _WAVE_BYTES
        )
        """How much is read from a drive in one go."""
        self.shares = DriveShares(tier)
        self.segment_rows: dict[tuple[int, int], array[int]] = {}
        """(drive, segment) to the rows once written there; some have left since."""
        self.mounts: Counter[int] = Counter()
        """How often each drive was mounted anew: what was appended before is gone."""
        self.moving: Counter[int] = Counter()
        """Rows whose record is being copied to this tier or within it."""
        self.dirty: deque[int] = deque()
        """Rows in memory that wait to be written, oldest first."""
        self.deferred: OrderedDict[int, None] = OrderedDict()
        """Rows in memory beyond what may wait: written when there is room, unless they are evicted
        before."""
        self.tickets: dict[int, int] = {}
        """Rows waiting or being written, oldest first, with the number of their arrival."""
        self.failed_on: dict[int, set[int]] = {}
        """Rows waiting that could not be written before, and the drives that failed to."""
        self.dirty_bytes = 0
        self.dirty_since_s = 0.0
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=_ARRIVALS_MAX)
        """Tickets and when they came, one for each second that something came."""
        self.flush_ticket = 0
        """Blocks up to this number do not wait for others of their prompt."""
        self.writers = 0
        """Threads that write dirty blocks; without any, blocks stay where they are."""
        self.promises = PinnedRows(catalog.table)
        """Blocks under contract: of the whole store, see `share`."""
        self._others: list[LowerTier] = []
        self._hits_before = catalog.table.column(np.uint16, 0)
        """How often each block had been asked for when it was written here."""

    def share(self, promises: PinnedRows, tiers: Iterable["LowerTier"]) -> None:
        """Know what is under contract, and the other lower tiers of the store."""
        self.promises = promises
        self._others = [lower for lower in tiers if lower is not self]

    @property
    def is_durable(self) -> bool:
        """Whether a contract of retention may rest on it: this machine's drives, synced."""
        config = self.config
        return self.tier.writable and isinstance(config, FileTierConfig) and config.fsync != "never"

    def bound(self, rows: Rows) -> Bools:
        """Which rows a contract binds to this tier: no other durable one has them."""
        found: Bools = self.promises.contracts.array[rows] > 0
        if not self.promises.total or not found.any():
            return np.zeros(len(rows), dtype=bool)
        for other in self._others:
            if other.is_durable and other.tier.is_up():
                found &= other.copies.state.array[rows] != CopyState.READY
        return found

    def is_bound(self, row: int) -> bool:
        """`bound` for one row."""
        if not self.promises.total or not self.promises.contracts.view[row]:
            return False
        return bool(self.bound(np.array([row], np.int64))[0])

    def usable(self, row: int) -> bool:
        """Whether there is a copy here on a drive that is up."""
        return self.copies.ready(row) and self.is_up(self.copies.location[row])

    def is_up(self, location: int) -> bool:
        """Whether the drive of this location works, as far as is known."""
        return self.tier.is_up(drive_of(location))

    def place(self, row: int) -> int:
        """Where the block's copy in this tier lies; NONE if there is none that is ready."""
        return self.copies.location[row] if self.copies.ready(row) else NONE

    def place_on(self, row: int, drive: int) -> int:
        """Where on this drive the block's copy lies, or NONE."""
        place = self.place(row)
        return place if drive_of(place) == drive else NONE

    def place_in(self, row: int, drive: int, slot: int) -> int:
        """Where in this segment the block's copy lies, or NONE."""
        place = self.place(row)
        return place if place >> 32 == drive << 24 | slot else NONE

    def enter(self, row: int, location: int) -> None:
        """A block's record is at `location` now: count it, and let reclaim find it."""
        self.tier.count(location, self.catalog.nbytes[row])
        self.catalog.unwritten.view[row] = 0
        place = (drive_of(location), segment_of(location))
        self.segment_rows.setdefault(place, array("i")).append(row)

    def relocate(self, row: int, source: int, target: int) -> None:
        """The copy at `source`, if it is there still, was written again at `target`."""
        nbytes = self.catalog.nbytes[row]
        if source == NONE or self.place(row) != source:  # the record was written for nothing
            self.tier.count(target, nbytes)
            self.tier.discard([target], [nbytes])
            return
        self.copies.move(row, target)
        self.tier.discard([source], [nbytes])
        self.enter(row, target)

    def drop(self, row: int) -> None:
        """Drop the block's copy in this tier; its bytes die with their segment."""
        location = self.place(row)
        self.copies.drop(row)
        if location != NONE:
            self.tier.discard([location], [self.catalog.nbytes[row]])

    def forget_drive(self, drive: int) -> None:
        """A drive's blocks are gone: forget where they were."""
        self.mounts[drive] += 1
        places = self.copies.location.array
        for row in np.flatnonzero((places != NONE) & (places >> 56 == drive)).tolist():
            if self.copies.ready(row):
                self.copies.drop(row)
                self.catalog.unwritten.view[row] = FAILED
                self.catalog.forget_if_gone(row)
        for place in [place for place in self.segment_rows if place[0] == drive]:
            del self.segment_rows[place]

    def forget_gone(self, words: Array, locations: Array) -> None:
        """Records are gone from a tier that others write to as well: forget where they were."""
        rows = self.catalog.table.find_many(words) if len(words) else np.zeros(0, np.int64)
        for row, location in zip(rows.tolist(), locations.tolist(), strict=True):
            if row != NONE and location == self.place(row):
                self.drop(row)
                self.catalog.forget_if_gone(row)

    def live(self, drive: int, slot: int) -> Rows:
        """The rows whose copy is in this segment, in the order they lie in."""
        listed = self.segment_rows.get((drive, slot))
        if not listed:
            return np.zeros(0, dtype=np.int64)
        rows = np.unique(np.array(listed, dtype=np.int64))
        segment = drive << 24 | slot
        places = self.copies.location.array[rows]
        here = (self.copies.state.array[rows] == CopyState.READY) & (places >> 32 == segment)
        found: Rows = rows[here][np.argsort(places[here])]
        return found

    def hits(self, rows: Rows) -> Rows:
        """How often each block was asked for since it was written here."""
        total = self.catalog.tree.hits.array[rows].astype(np.int64)
        hits: Rows = np.where(total == HITS_MAX, 1, total - self._hits_before.array[rows])
        return hits

    def reset_hits(self, row: int) -> None:
        """What brought the block here says nothing of how often it will be read from here."""
        self._hits_before.view[row] = self.catalog.tree.hits.view[row]

    def begin_moving(self, rows: Iterable[int]) -> None:
        self.moving.update(rows)

    def end_moving(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.moving[row] -= 1
            if not self.moving[row]:
                del self.moving[row]

    def mark_dirty(self, row: int, ticket: int, now_s: float) -> None:
        """A block in memory waits to be written; it cannot leave memory before."""
        if not self.dirty:
            self.dirty_since_s = now_s
        if not self._arrivals or now_s - self._arrivals[-1][1] >= _ARRIVALS_APART_S:
            self._arrivals.append((ticket, now_s))
        self.catalog.leaves.hold(row)
        self.tickets[row] = ticket
        self.dirty.append(row)
        self.dirty_bytes += record_bytes(self.catalog.nbytes[row])

    def mark_clean(self, row: int) -> None:
        """A block no longer waits."""
        self.dirty_bytes -= record_bytes(self.catalog.nbytes[row])
        self.tickets.pop(row, None)
        self.failed_on.pop(row, None)
        self.catalog.leaves.release(row)

    def oldest_ticket(self) -> int | None:
        return next(iter(self.tickets.values()), None)

    def oldest_age_s(self, now_s: float) -> float:
        """How long the oldest block has been waiting to be written, to about a second."""
        oldest, arrivals = self.oldest_ticket(), self._arrivals
        if oldest is None:
            return 0.0
        while len(arrivals) > 1 and arrivals[1][0] <= oldest:
            arrivals.popleft()
        return max(0.0, now_s - arrivals[0][1])

    def sort_dirty(self) -> None:
        """Bring what waits into the order of prompts, where that matters."""
        if self.contiguous_bytes:
            self.dirty = deque(path_order(self.catalog.tree, self.dirty))

    def insert_recovered(self, contents: Contents) -> None:
        """Enter blocks that were found on the drives, but for those that another tier knows to be
        removed.
        """
        contents = _without_removed(self.tier, contents, self._others)
        words, locations = contents.words, contents.locations
        rows = self.catalog.table.find_many(words)
        known = np.flatnonzero(rows != NONE)
        twice = self.copies.state.array[rows[known]] != CopyState.ABSENT
        surplus = known[twice]
        self.tier.discard(locations[surplus].tolist(), contents.payload_bytes[surplus].tolist())
        known = known[~twice]
        self.copies.seal_many(rows[known], locations[known])
        self.catalog.unwritten.array[rows[known]] = 0
        new = np.flatnonzero(rows == NONE)
        rows[new] = self.catalog.recover(
            words[new], contents.payload_bytes[new], locations[new], self.copies
        )
        entered = np.concatenate([known, new])
        if len(entered):
            self._list_rows(rows[entered], locations[entered])

    def _list_rows(self, rows: Rows, locations: Rows) -> None:
        order = np.argsort(locations >> 32, kind="stable")
        places, starts = np.unique(locations[order] >> 32, return_index=True)
        for place, part in zip(places.tolist(), np.split(rows[order], starts[1:]), strict=True):
            listed = self.segment_rows.setdefault((place >> 24, place & 0xFFFFFF), array("i"))
            listed.frombytes(part.astype(np.int32).tobytes())


def share_tombstones(lower_tiers: Sequence[LowerTier], stamps: StampClock) -> None:
    """Record on the tiers of this node what another tier alone knows to be removed: that one may
    forget it before they do.
    """
    known = [(lower, lower.tier.metadata().tombstones) for lower in lower_tiers]
    every = merged(Metadata(tombstones=stones) for _, stones in known).tombstones
    for lower, stones in known:
        lacking = [
            Tombstone(name, stone.below, stamps.next()).entry
            for name, stone in every.items()
            if name not in stones or stones[name].below < stone.below
        ]
        if lacking and lower.tier.writable and not lower.is_remote:
            lower.tier.put_meta(lacking)


def _without_removed(tier: Tier, contents: Contents, others: Iterable[LowerTier]) -> Contents:
    """Drop the records that tombstones of the other tiers cover: a power cut may have left the
    tombstone on one tier alone, and a tier that nodes share tells of the others' removals.
    """
    stones = merged(other.tier.metadata() for other in others).tombstones
    if not stones or not len(contents.words):
        return contents
    alive = surviving(contents.words, contents.stamps, stones)
    dead = np.setdiff1d(np.arange(len(contents.words)), alive)
    sizes = contents.payload_bytes
    tier.discard(contents.locations[dead].tolist(), sizes[dead].tolist())
    return Contents(
        contents.words[alive], contents.locations[alive], sizes[alive], contents.stamps[alive]
    )


def _run_bytes(config: LowerTierConfig) -> int:
    if isinstance(config, HddConfig):
        return config.run
    return config.object_bytes if isinstance(config, ObjectConfig) else 0


def _writers_a_drive(config: LowerTierConfig) -> int:
    """How many threads write to one drive of a tier."""
    if isinstance(config, ObjectConfig):
        return min(_UPLOADS_MAX, config.parallel)
    return 1 if isinstance(config, HddConfig) else _WRITERS_A_DRIVE


class DriveShares:
    """Which drive of a tier gets the next run, by measured speed and by what waits for each."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._shares = Shares()
        self._writing: Counter[int] = Counter()
        """Bytes under way to each drive."""
        self.taken_s = 0.0
        """When a drive last took a run."""

    def next(self) -> int | None:
        """The drive that gets the next run; None where no drive takes blocks."""
        return self._shares.next(self._loads())

    def take(self, drive: int, nbytes: int, now_s: float) -> None:
        """A drive takes a run; `done` says when it has it."""
        self._shares.take(drive, nbytes, self._loads())
        self._writing[drive] += nbytes
        self.taken_s = now_s

    def done(self, drive: int, nbytes: int) -> None:
        """A run that a drive has taken is written, or given up."""
        self._writing[drive] -= nbytes

    def part(self, drive: int) -> float:
        """Of what waits for the tier, how much falls to this drive."""
        return self._shares.part(drive, self._loads())

    def are_uneven(self) -> bool:
        """Whether some drives are known to be faster than others."""
        return are_uneven(self._loads(), _UNEVEN)

    def _loads(self) -> list[DriveLoad]:
        facts = ((drive, self._tier.drive(drive)) for drive in range(self._tier.drive_count()))
        return [
            DriveLoad(drive, fact.read_bytes_per_s, self._writing[drive] + fact.queued_bytes)
            for drive, fact in facts
            if fact.takes_blocks
        ]


class ForegroundReads:
    """Knows when a tier was last read from by a caller that waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = 0
        self._last_s = -1.0

    def begin(self) -> None:
        """A caller waits for a read, until `end`."""
        with self._lock:
            self._reading += 1

    def end(self) -> None:
        with self._lock:
            self._reading -= 1
            self._last_s = self._clock.now()

    def busy_since(self, moment_s: float) -> bool:
        """Whether a caller has waited for a read since then."""
        with self._lock:
            return self._reading > 0 or self._last_s >= moment_s
