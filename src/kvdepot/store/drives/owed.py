"""Finds blocks that are owed to tiers, after a restart too, and has them written when a tier works.

A mark on the drives of this node has a stamp for each shared tier that is written through: blocks
with an earlier one were written to the tier. After a restart, blocks with that stamp or a later one
that the tier lacks are owed to it. The mark is written when the store opens and moves on while
nothing is owed. A tier of drives has no mark: it may lack blocks because it has evicted them.
"""

from collections import deque
from typing import Final

from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.index.paths import path_order
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.state.lower_tier import MARK_BYTES, LowerTier
from kvdepot.store.state.state import StoreState

_MARK_S: Final = 60.0
"""The mark is at most this time behind while nothing is owed and blocks are put."""
_SLACK_S: Final = 5.0


class OwedWrites:
    """Used by the watchdog's thread."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._due_s = 0.0
        self._last_tickets: dict[LowerTier, int] = {}

    def look(self) -> None:
        """Queue owed blocks for tiers that work, and move the marks on."""
        state = self._state
        for lower in state.lower_tiers:
            if lower.queue.owed.any:
                self._queue(lower)
        if state.clock.now() >= self._due_s:
            self._due_s = state.clock.now() + _MARK_S
            self._mark()

    def _queue(self, lower: LowerTier) -> None:
        with self._state.lock:
            lower.queue.owed.trim()
        entries = lower.volumes.entries
        # Blocks that other nodes have written meanwhile are entered first.
        if any(entry.has_news for entry in entries):
            return
        if not any(entry.volume.facts().takes_blocks for entry in entries):
            return
        with self._state.lock:
            if lower.queue.owed.any and not lower.queue.owed.waiting:
                rows = lower.queue.owed.rows().tolist()
                lower.queue.owed.waiting = deque(path_order(self._state.catalog.tree, rows))
                self._state.lock.work.notify_all()
                self._state.lock.written.notify_all()

    def _mark(self) -> None:
        """Write the marks of tiers to which nothing is owed, if blocks were put since."""
        state, entries = self._state, []
        for lower in state.lower_tiers[1:]:
            is_shared = lower.volumes.is_remote  # False until it has been up once
            if not (is_shared and lower.writable and lower.mode is WriteMode.THROUGH):
                continue
            with state.lock:
                last = state.writes.last_ticket
                is_old = self._last_tickets.get(lower) != last
                settled = (
                    not (lower.queue.owed.any or lower.queue.deferred) and lower.volumes.are_up
                )
                if lower.queue.owed.since and not (is_old and settled):
                    continue
                self._last_tickets[lower] = last
                age_s = lower.queue.oldest_age_s(state.clock.now()) + _SLACK_S
                stamp = state.stamps.next()
                lower.queue.owed.since = max(lower.queue.owed.since, stamp - int(age_s * 1e6))
            value = lower.queue.owed.since.to_bytes(MARK_BYTES, "little")
            entries.append(MetaEntry(MetaKind.OWED, lower.name.encode(), stamp, value))
        if entries and state.volumes.metadata.local():
            state.volumes.metadata.put(entries)
