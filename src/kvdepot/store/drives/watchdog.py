"""The background thread for volumes: it retries failed volumes, reopens those that were attached
again, measures new ones, shrinks those with a lowered capacity, and applies changes of other nodes.

Without it only a write would find out that a failed volume works again: `match` ignores blocks on a
volume that is down, so that no call reads from it.
"""

import threading
from collections.abc import Mapping
from typing import Final

import numpy as np

from kvdepot.core.block import KEY_BYTES, BlockKey
from kvdepot.core.metadata import MetaKind, Tombstone
from kvdepot.core.volume import VOLUME_SHIFT
from kvdepot.format.record import stamp_of
from kvdepot.index.table import NONE
from kvdepot.store.drives.owed import OwedWrites
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.move.reclaim import VolumeRoom
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState
from kvdepot.store.volume_entry import VolumeEntry

_LOOK_S: Final = 1.0
_LOOK_S_MIN: Final = 0.02
_QUIET_S: Final = 0.25
"""Volumes are measured after this time without reads."""


class VolumeWatchdog:
    """The background thread of all volumes of a store."""

    def __init__(
        self, state: StoreState, rooms: Mapping[LowerTier, VolumeRoom], mover: BlockMover
    ) -> None:
        self._state = state
        self._rooms = rooms
        self._mover = mover
        self._owed = OwedWrites(state)
        self._due_s: dict[VolumeEntry, float] = {}
        self.thread = threading.Thread(target=self._run, name="kvdepot-watchdog", daemon=True)

    def stop(self) -> None:
        """Wake the thread, so that it ends when the store closes. Does not block."""
        self._state.volumes.woken.set()

    def _run(self) -> None:
        state, volumes = self._state, self._state.volumes
        while not state.closing.is_set():
            self._owed.look()
            for lower in state.lower_tiers:
                for entry in lower.volumes.entries:
                    if entry.has_news:
                        self.take_news(lower, entry)
                    volumes.metadata.catch_up(entry)
                    if state.clock.now() >= self._due_s.get(entry, 0.0):
                        self.look(lower, entry)
            next_s = min(self._due_s.values(), default=0.0) - state.clock.now()
            volumes.woken.wait(max(_LOOK_S_MIN, min(_LOOK_S, next_s)))
            volumes.woken.clear()

    def look(self, lower: LowerTier, entry: VolumeEntry) -> None:
        """Do the background work of one volume; reopen it if it was lost and can be used."""
        state = self._state
        self._due_s = {one: due_s for one, due_s in self._due_s.items() if not one.retired}
        if state.closing.is_set():
            return
        next_s = entry.volume.maintain(self._is_quiet)
        facts = entry.volume.facts()
        if facts.lost and not entry.draining and not self._rooms[lower].restore(entry.number):
            next_s = max(next_s, facts.retry_in_s)
        self._rooms[lower].shrink_again(entry.number)
        self._due_s[entry] = state.clock.now() + next_s

    def take_news(self, lower: LowerTier, entry: VolumeEntry) -> None:
        """Apply changes of other nodes on a volume. Blocks that they removed are dropped from all
        tiers.
        """
        state = self._state
        for news, blocks in state.volumes.take_news(entry):
            found = [
                Tombstone.parse(one) for one in news.metadata if one.kind is MetaKind.TOMBSTONE
            ]
            removed = list(dict.fromkeys(one for one in found if one is not None))
            with state.lock:
                places = (entry.number << VOLUME_SHIFT) + news.gone_places
                lower.forget_gone(news.gone_words, places)
                state.events.count("removed", sum(map(self._delete, removed)))
                recorded = state.stamps.next()
                lower.insert_recovered([state.volumes.without_removed(entry, blocks)])
            if removed:
                tombstones = [Tombstone(one.name, one.below, recorded) for one in removed]
                self._mover.record_tombstones(tombstones, to_others=False)

    def _delete(self, stone: Tombstone) -> int:
        """Delete the blocks of a removal on another node. Returns their number. With the lock.

        A block in memory that was put after the removal stays. The stamps of others are not in
        memory: they go.
        """
        state, catalog = self._state, self._state.catalog
        if len(stone.name) == KEY_BYTES:
            known = [row for row in catalog.rows([BlockKey(stone.name)]) if row != NONE]
        else:
            word = np.frombuffer(stone.name, np.uint64)[0]
            known = np.flatnonzero(catalog.table.tags() == word).tolist()
        rows = []
        for row in filter(catalog.is_live, known):
            memory = state.memory_of(row)
            if memory is None or stamp_of(memory.image(row)) < stone.below:
                rows.append(row)
        state.mark_deleted(rows)
        return len(rows)

    def _is_quiet(self) -> bool:
        """True if no call reads, and nothing waits to be written."""
        since_s = self._state.clock.now() - _QUIET_S
        return not self._state.closing.is_set() and not any(
            lower.queue.tickets or lower.moving or lower.is_read_since(since_s)
            for lower in self._state.lower_tiers
        )
