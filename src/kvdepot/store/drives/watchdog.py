"""Looks after drives: tries those that failed, mounts those that came back, measures new ones,
shrinks those that were made smaller, and takes in what other stores did to a tier that they share.

Without it a drive would come back only when something is written to it: `match` does not promise
blocks on a drive that is down, so that no call reads from it.
"""

import threading
from collections.abc import Mapping
from typing import Final

import numpy as np

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.metadata import Tombstone
from kvdepot.core.tier import Changes, ChangesDrives, SharesContents
from kvdepot.index.table import NONE
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.move.reclaim import DriveRoom
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_LOOK_S: Final = 1.0
_LOOK_S_MIN: Final = 0.02
_SHARED_LOOK_S: Final = 0.2
"""How often to take in what other stores did."""
_QUIET_S: Final = 0.25
"""A tier that was not read from for so long can be measured."""


class DriveWatchdog:
    """The background thread of all drives of a store."""

    def __init__(
        self, state: StoreState, rooms: Mapping[LowerTier, DriveRoom], mover: BlockMover
    ) -> None:
        self._state = state
        self._rooms = rooms
        self._mover = mover
        self.thread = threading.Thread(target=self._run, name="kvdepot-watchdog", daemon=True)

    def _run(self) -> None:
        tiers = [
            (lower, lower.tier)
            for lower in self._state.lower_tiers
            if isinstance(lower.tier, ChangesDrives)
        ]
        shared = [
            (lower, lower.tier)
            for lower in self._state.lower_tiers
            if isinstance(lower.tier, SharesContents)
        ]
        longest_s = _SHARED_LOOK_S if shared else _LOOK_S
        pause_s = _LOOK_S_MIN
        try:
            while not self._state.closing.wait(pause_s):
                for lower, tier in shared:
                    news = tier.take_changes()
                    if news is not None:
                        self.take_changes(lower, news)
                for lower, _ in tiers:
                    for drive in range(lower.tier.drive_count()):
                        self.look(lower, drive)
                measure_s = [changes.measure(self._is_quiet) for _, changes in tiers]
                pause_s = max(_LOOK_S_MIN, min([longest_s, *measure_s, *self._retries_s()]))
        finally:
            for _, changes in tiers:
                changes.stop_measuring()

    def look(self, lower: LowerTier, drive: int) -> None:
        """Bring one drive back if it is away and can be."""
        if lower.tier.drive(drive).draining or self._state.closing.is_set():
            return
        if isinstance(lower.tier, ChangesDrives):
            lower.tier.probe(drive)
        if lower.tier.drive(drive).lost:
            self._rooms[lower].restore(drive)
        self._rooms[lower].shrink_again(drive)

    def take_changes(self, lower: LowerTier, changes: Changes) -> None:
        """Other stores have written to a tier, or removed blocks: these go from all tiers here."""
        state, catalog = self._state, self._state.catalog
        removed = list(dict.fromkeys(changes.removed))
        others = [one for one in state.lower_tiers if one is not lower and one.tier.writable]
        with state.lock:
            lower.forget_gone(changes.gone_words, changes.gone_locations)
            keys = [BlockKey(one.name) for one in removed if len(one.name) == KEY_BYTES]
            rows = [row for row in catalog.rows(keys) if row != NONE] if keys else []
            for tag in [one.name for one in removed if len(one.name) == TAG_BYTES]:
                word = np.frombuffer(tag, np.uint64)[0]
                known = np.flatnonzero(catalog.table.tags() == word).tolist()
                rows += [row for row in known if catalog.is_live(row)]
            state.mark_deleted(rows)
            state.counters.removed += len(rows)
            recorded = state.stamps.next()
            lower.insert_recovered(changes.come)
        tombstones = [Tombstone(one.name, one.below, recorded) for one in removed]
        for other in others if tombstones else ():
            self._mover.record_tombstones(other, tombstones)

    def _is_quiet(self) -> bool:
        """Whether no call reads, and nothing waits to be written."""
        since_s = self._state.clock.now() - _QUIET_S
        return not self._state.closing.is_set() and not any(
            lower.tickets or lower.moving or lower.foreground.busy_since(since_s)
            for lower in self._state.lower_tiers
        )

    def _retries_s(self) -> list[float]:
        """In how many seconds each drive that failed may be tried again."""
        facts = [
            lower.tier.drive(drive)
            for lower in self._state.lower_tiers
            for drive in range(lower.tier.drive_count())
        ]
        return [fact.retry_in_s for fact in facts if not fact.draining and not fact.up]
