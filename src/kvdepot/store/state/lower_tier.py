"""One file tier as the store sees it: its drives, its books, and what waits to be written to it."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import CopyState
from kvdepot.core.config import FileTierConfig, HddConfig
from kvdepot.core.tier import Contents, drive_of, segment_of
from kvdepot.index.catalog import Catalog, Copies
from kvdepot.index.paths import path_order
from kvdepot.index.table import NONE, Column, Rows
from kvdepot.index.tree import HITS_MAX
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.state.drive_shares import Turns
from kvdepot.store.state.second_copies import Mirrors
from kvdepot.store.state.yielding import Pace
from kvdepot.tiers.log.tier import SegmentTier

_WAVE_BYTES: Final = 8 << 20


@dataclass(slots=True, eq=False)
class Level:
    """Guarded by the stock's lock, but for `tier` itself."""

    tier: SegmentTier
    config: FileTierConfig
    catalog: Catalog
    copies: Copies
    pace: Pace
    segment_rows: "dict[tuple[int, int], array[int]]" = field(default_factory=dict)
    """(drive, slot) to the rows once written there; some have left since."""
    dirty: deque[int] = field(default_factory=deque)
    """Rows in memory that wait to be written to this tier, oldest first."""
    tickets: dict[int, int] = field(default_factory=dict)
    """Rows waiting or being written, oldest first, with the number of their arrival."""
    dirty_bytes: int = 0
    moving: set[int] = field(default_factory=set)
    """Rows whose record is being written again by a reclaim."""
    writers: int = 0
    """Threads that write dirty blocks down; without any, blocks stay where they are."""
    mode: WriteMode = field(init=False)
    hurry: int = 0
    """The last ticket that somebody waits for."""
    dirty_since_s: float = 0.0
    """When something began to wait."""
    turns: Turns = field(init=False)
    """Which drive gets the next run, so that a prompt spreads as the drives are fast."""

    hits_before: Column = field(init=False)
    """How often each block had been asked for when its hits were last counted anew."""
    mirrors: Mirrors | None = field(init=False)
    """Second copies, where this tier keeps some."""

    def __post_init__(self) -> None:
        self.turns = Turns(self.tier)
        self.mode = WriteMode(self.config.write_mode)
        self.hits_before = self.catalog.table.column(np.uint16, 0)
        self.mirrors = Mirrors(self.catalog, self.copies) if self.config.mirror else None

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def run_bytes(self) -> int:
        """How much of one prompt should lie in one piece; 0 where that does not matter."""
        return self.config.run if isinstance(self.config, HddConfig) else 0

    @property
    def wave_bytes(self) -> int:
        """How much is read from a drive in one go."""
        return 4 * self.run_bytes or _WAVE_BYTES

    def usable(self, row: int) -> bool:
        """Whether there is a copy here on a drive that works, as far as is known."""
        if self.mirrors is None:
            return self.copies.ready(row) and self.works(self.copies.location[row])
        return any(self.works(place) for place in self.places(row))

    def works(self, location: int) -> bool:
        """Whether the drive of this place works, as far as is known."""
        return self.tier.drives[drive_of(location)].breaker.closed

    def places(self, row: int) -> list[int]:
        """Where copies of a block are ready in this tier."""
        if not self.copies.ready(row):
            return []
        first = self.copies.location[row]
        second = self.mirrors.location[row] if self.mirrors is not None else NONE
        return [first] if second == NONE else [first, second]

    def place_in(self, row: int, drive: int, slot: int) -> int:
        """Where in this segment a copy of the block is, or NONE."""
        segment = drive << 24 | slot
        return next((place for place in self.places(row) if place >> 32 == segment), NONE)

    def readable(self, row: int) -> int:
        """A place of the block on a drive that works, else any, else NONE."""
        places = self.places(row)
        return next((place for place in places if self.works(place)), [*places, NONE][0])

    def spared(self, row: int, location: int) -> bool:
        """Whether a drive that works has the block too, besides this place."""
        return any(self.works(place) for place in self.places(row) if place != location)

    def drop(self, row: int) -> None:
        """Drop a block's copies from the books; their bytes die with their segments."""
        locations = self.places(row)
        self.copies.drop(row)
        if self.mirrors is not None:
            self.mirrors.leave(row)
        self.tier.discard(locations, [self.catalog.nbytes[row]] * len(locations))

    def lose(self, row: int, location: int, *, again: bool = False) -> None:
        """Drop the copy at `location`, if there is one; by another the block stays in the tier.

        `again`: it shall have two again.
        """
        left = self.places(row)
        if location not in left:
            return
        left.remove(location)
        if not left or self.mirrors is None:
            self.drop(row)
            return
        self.mirrors.leave(row)
        if again:
            self.mirrors.fresh[row] = None
        self.copies.move(row, left[0])
        self.tier.discard([location], [self.catalog.nbytes[row]])

    def relocate(self, row: int, source: int, target: int) -> None:
        """The copy at `source`, if it is there still, was written again at `target`."""
        places = self.places(row)
        if source not in places:
            self._discard_unused(row, target)
            return
        places.remove(source)
        self.copies.move(row, target)
        if self.mirrors is not None and places:
            owed = row not in self.mirrors.owed
            self.mirrors.leave(row)
            if drive_of(places[0]) != drive_of(target):
                self.mirrors.enter(row, places.pop())
                if owed:
                    self.mirrors.owed.add(row)
        surplus = [source, *places]
        self.tier.discard(surplus, [self.catalog.nbytes[row]] * len(surplus))
        self.enter(row, target)

    def _discard_unused(self, row: int, location: int) -> None:
        """A record was written for nothing."""
        self.tier.count(location, self.catalog.nbytes[row])
        self.tier.discard([location], [self.catalog.nbytes[row]])

    def live(self, drive: int, slot: int) -> Rows:
        """The rows whose copy is in this segment, in the order they lie in."""
        listed = self.segment_rows.get((drive, slot))
        if not listed:
            return np.zeros(0, dtype=np.int64)
        rows = np.unique(np.array(listed, dtype=np.int64))
        places = self.copies.location.array[rows]
        if self.mirrors is not None:
            second = self.mirrors.location.array[rows]
            places = np.where(second >> 32 == drive << 24 | slot, second, places)
        here = (self.copies.state.array[rows] == CopyState.READY) & (
            places >> 32 == drive << 24 | slot
        )
        found: Rows = rows[here][np.argsort(places[here])]
        return found

    def hits(self, rows: Rows) -> Rows:
        """How often each block was asked for, since `count_anew` where that was called."""
        total = self.catalog.tree.hits.array[rows].astype(np.int64)
        since: Rows = np.where(total == HITS_MAX, 1, total - self.hits_before.array[rows])
        return since

    def count_anew(self, row: int) -> None:
        """What brought the block here says nothing of how often it will be read from here."""
        self.hits_before.view[row] = self.catalog.tree.hits.view[row]

    def enter(self, row: int, location: int) -> None:
        """A block's record is at `location` now: count it, and let reclaim find it."""
        self.tier.count(location, self.catalog.nbytes[row])
        self._list(row, location)
        if self.mirrors is not None and self.mirrors.location[row] == NONE:
            self.mirrors.fresh[row] = None

    def enter_mirror(self, row: int, location: int) -> bool:
        """A second copy was written. False: the block has no use for it any more."""
        mirrors, places = self.mirrors, self.places(row)
        if mirrors is None or len(places) != 1 or drive_of(places[0]) == drive_of(location):
            self._discard_unused(row, location)
            return False
        mirrors.enter(row, location)
        self.enter(row, location)
        return True

    def look_again(self) -> None:
        """There may be room for second copies that there was none for."""
        if self.mirrors is not None:
            self.mirrors.look_at_all = True

    def mark_dirty(self, row: int, ticket: int, now_s: float) -> None:
        """A block in memory waits to be written; it cannot leave memory before."""
        if not self.dirty:
            self.dirty_since_s = now_s
        self.catalog.leaves.hold(row)
        self.tickets[row] = ticket
        self.dirty.append(row)
        self.dirty_bytes += record_bytes(self.catalog.nbytes[row])

    def mark_clean(self, row: int) -> None:
        """The block no longer waits."""
        self.dirty_bytes -= record_bytes(self.catalog.nbytes[row])
        self.tickets.pop(row, None)
        self.catalog.leaves.release(row)

    def sort_dirty(self) -> None:
        """Bring what waits into the order of prompts, where that matters."""
        if self.run_bytes:
            self.dirty = deque(path_order(self.catalog.tree, self.dirty))

    def take_in(self, contents: Contents) -> None:
        """Enter blocks that were found on the drives."""
        words, locations = contents.words, contents.locations
        rows = self.catalog.table.find_many(words)
        known = np.flatnonzero(rows != NONE)
        twice = self.copies.state.array[rows[known]] != CopyState.ABSENT
        surplus = known[twice]
        self._take_in_again(rows[surplus], locations[surplus], contents.payload_bytes[surplus])
        known = known[~twice]
        self.copies.seal_many(rows[known], locations[known])
        new = np.flatnonzero(rows == NONE)
        rows[new] = self.catalog.recover(
            words[new], contents.payload_bytes[new], locations[new], self.copies
        )
        entered = np.concatenate([known, new])
        if len(entered):
            self._list_many(rows[entered], locations[entered])
        twins = contents.second_of
        self._take_in_again(rows[twins], contents.second_locations, contents.payload_bytes[twins])

    def _take_in_again(self, rows: Rows, locations: Rows, payload_bytes: Rows) -> None:
        """Blocks that have a place already were found at another: second copies, or surplus."""
        surplus = np.ones(len(rows), dtype=bool)
        if self.mirrors is not None and len(rows):
            taken = self.mirrors.take_in(rows, locations)
            surplus[taken] = False
            self._list_many(rows[taken], locations[taken])
        self.tier.discard(locations[surplus].tolist(), payload_bytes[surplus].tolist())

    def _list_many(self, rows: Rows, locations: Rows) -> None:
        order = np.argsort(locations >> 32, kind="stable")
        places, starts = np.unique(locations[order] >> 32, return_index=True)
        for place, part in zip(places.tolist(), np.split(rows[order], starts[1:]), strict=True):
            listed = self.segment_rows.setdefault((place >> 24, place & 0xFFFFFF), array("i"))
            listed.frombytes(part.astype(np.int32).tobytes())

    def _list(self, row: int, location: int) -> None:
        place = (drive_of(location), segment_of(location))
        self.segment_rows.setdefault(place, array("i")).append(row)
