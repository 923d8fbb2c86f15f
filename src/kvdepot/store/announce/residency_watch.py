"""Finds changes of residency by comparing each row of the index with its last published state.

No events are queued, so that the store never waits and nothing can overflow. A block that is stored
and evicted between two comparisons is not seen. A freed row is detected by a column of the index,
which returns to zero then.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.core.keys import Keys
from kvdepot.core.volume import VOLUME_SHIFT
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.store.state.state import StoreState

IN_MEMORY: Final = 1
BELOW: Final = 2
"""The block is in a store with tiers below memory. Routers search the first blocks in memory and
the next ones below, never in memory again, so a block in memory is published for both."""
_SILENT: Final = 4
"""The change was seen, and must not be published."""
Media = npt.NDArray[np.uint8]


class ResidencyChange(NamedTuple):
    """Changed blocks: their keys, four u64 each, and the media, as bits."""

    gone: Keys
    gone_from: Media
    come: Keys
    come_to: Media
    come_rows: Rows
    seen: int
    """Number of changed rows; 0 if nothing has changed."""


class ResidencyWatch:
    """Compares the residency of a store with what was published. For one thread."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        table = state.catalog.table
        memories = len(state.memory_tiers)
        self._memory_bits = (1 << memories) - 1
        self._mark = table.column(np.uint8, 0)
        """Equal to `_told`, except for rows freed since."""
        self._told = np.zeros(table.rows, np.uint8)
        self._words = np.zeros((table.rows, 4), np.uint64)
        """Keys of the published blocks."""
        self._settled: tuple[Media, bool] | None = None
        """State of lookups and of the volumes when there was nothing to publish."""

    @property
    def told(self) -> int:
        """Number of blocks that are published and not withdrawn."""
        return int(np.count_nonzero(self._told & (IN_MEMORY | BELOW)))

    def reset(self) -> None:
        """Publish all blocks again."""
        with self._state.lock:
            self._told[:] = 0
            self._mark.array[:] = 0
            self._settled = None

    def take(self, limit: int) -> ResidencyChange:
        """Return the next changes, at most `limit` blocks of each kind, withdrawn blocks first.

        They count as published; call `silence` for those that are not.
        """
        if self._is_settled():
            return _nothing()
        self._settled = None
        with self._state.lock:
            now = self._media()
            told = self._grown(len(now))
            freed = told != self._mark.array
            before = told & (IN_MEMORY | BELOW)
            gone = np.where(freed, before, before & ~now)
            rows = np.flatnonzero(freed | (gone != 0))
            if len(rows):
                rows = rows[:limit]
                words = self._words[rows].copy()
                left = np.where(freed[rows], 0, told[rows] & ~gone[rows] & 0xFF).astype(np.uint8)
                # silenced as it was before: its present state may be published
                left[now[rows] == 0] = 0
                self._tell(rows, left)
                said = gone[rows] != 0
                return _nothing()._replace(
                    gone=words[said], gone_from=gone[rows][said], seen=len(rows)
                )
            come = np.where(told & _SILENT, 0, now & ~told)
            rows = np.flatnonzero(come)[:limit]
            if not len(rows):
                self._settled = self._state.catalog.visible(), self._all_up()
                return _nothing()
            words = self._state.catalog.table.words(rows)
            self._words[rows] = words
            self._tell(rows, told[rows] | come[rows])
            return _nothing()._replace(
                come=words, come_to=come[rows], come_rows=rows, seen=len(rows)
            )

    def silence(self, rows: Rows, come_to: Media) -> None:
        """Mark changes that were not published: without token ids, or private."""
        with self._state.lock:
            same = self._told[rows] == self._mark.array[rows]
            rows, come_to = rows[same], come_to[same]
            self._tell(rows, (self._told[rows] & ~come_to & 0xFF | _SILENT).astype(np.uint8))

    def _is_settled(self) -> bool:
        """True if nothing has changed since the last comparison without changes. Works without the
        lock: a concurrent change is seen the next time.
        """
        catalog, before = self._state.catalog, self._settled
        return (
            before is not None
            and before[1] == self._all_up()
            and np.array_equal(before[0], catalog.visible())
            and np.array_equal(self._told, self._mark.array)
        )

    def _all_up(self) -> bool:
        return not self._state.volumes.down

    def _tell(self, rows: Rows, told: Media) -> None:
        self._told[rows] = told
        self._mark.array[rows] = told

    def _grown(self, rows: int) -> Media:
        more = rows - len(self._told)
        if more > 0:
            self._told = np.concatenate([self._told, np.zeros(more, np.uint8)])
            self._words = np.concatenate([self._words, np.zeros((more, 4), np.uint64)])
        return self._told

    def _media(self) -> Media:
        """For each row the media on which a lookup finds its block, as bits."""
        state = self._state
        assert state.lock.held()
        catalog = state.catalog
        residency = np.zeros_like(catalog.residency.array)
        rows = catalog.live_rows()
        residency[rows] = catalog.residency.array[rows]
        if not self._all_up():
            residency = np.where(self._usable(residency), residency, 0)
        media = np.where(residency & self._memory_bits, IN_MEMORY, 0).astype(np.uint8)
        if state.lower_tiers:
            media |= np.where(residency, BELOW, 0).astype(np.uint8)
        return media

    def _usable(self, residency: Media) -> Bools:
        """True for blocks in memory, or on a volume that is up."""
        usable: Bools = (residency & self._memory_bits) != 0
        down = list(self._state.volumes.down)
        for lower in self._state.lower_tiers:
            ready = (residency & lower.copies.bit) != 0
            places = lower.copies.location.array
            usable |= ready & (places != NONE) & ~np.isin(places >> VOLUME_SHIFT, down)
        return usable


def _nothing() -> ResidencyChange:
    words, media, rows = np.zeros((0, 4), np.uint64), np.zeros(0, np.uint8), np.zeros(0, np.int64)
    return ResidencyChange(words, media, words, media, rows, 0)
