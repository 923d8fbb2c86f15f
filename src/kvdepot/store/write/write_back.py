"""Write-back: threads take dirty blocks from memory and append them to the volumes of a tier.

A block that cannot be written is owed to the tier: it is written when the tier works again. It
stays in memory until it is evicted, and on the drives of other tiers. It is reported by
`flush`. A failed disk reduces the capacity, but never blocks calls.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvdepot.core.block import CopyState
from kvdepot.core.depot import DURABILITY, Durability, FlushReport, TierReport
from kvdepot.core.keys import Keys
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.volume import VOLUME_SHIFT
from kvdepot.format.record import record_bytes
from kvdepot.index.table import NONE, Rows
from kvdepot.store.move.mover import BlockMover, CopyBatch, CopyJob
from kvdepot.store.move.reclaim import VolumeRoom
from kvdepot.store.state.background_throttle import FLASH_SHARE, HEAD_SHARE, backoff_s
from kvdepot.store.state.lower_tier import FAILED, LowerTier
from kvdepot.store.state.state import StoreState

_BLOCKS_MAX: Final = 512
_THREADS_MAX: Final = 8
_LINGER_S: Final = 0.5
"""Longest wait of blocks for others of their prompt, if these should lie together."""
_YIELD_S: Final = 0.1
"""Time for which a slower volume leaves blocks to a faster busy one."""
_REST_S_MAX: Final = 0.25
_PRESSED_S: Final = 1.0
"""Time during which blocks are written at once after an allocation has failed."""
_PAUSE_S_MIN: Final = 0.001
_PART_BYTES_MIN: Final = 1 << 20
"""Least bytes of a batch; else it is the volume's share, to spread a prompt over all volumes."""
_PART_BYTES_MAX: Final = 32 << 20
_NO_LIMIT: Final = 1 << 62
_DURABLE: Final = DURABILITY.index(Durability.DURABLE)
_log = RateLimitedLog("kvdepot.store")


class WriteDown(CopyJob):
    in_place = True
    counter = "written"
    is_owed = False

    def __init__(self, state: StoreState, lower: LowerTier, volume: int) -> None:
        super().__init__(lower)
        self._state = state
        self._volume = volume
        self.given_up = 0
        self._returned: list[int] = []

    def claim(self, rows: list[int]) -> None:
        self.target.copies.reserve_all(rows, [self._volume << VOLUME_SHIFT] * len(rows))

    def enter(self, rows: list[int], locations: list[int]) -> None:
        lower = self.target
        lower.copies.location.array[rows] = locations
        lower.copies.seal_all(rows)
        lower.enter(rows, locations)
        if lower is self._state.lower_tiers[0]:
            lower.reset_hits(rows)

    def give_up(self, row: int) -> None:
        """Queue a block that could not be written for another volume, or give it up."""
        lower = self.target
        lower.copies.drop(row)
        failed_on = lower.queue.failed_on.setdefault(row, set())
        failed_on.add(self._volume)
        others = (facts for number, facts in lower.volumes.all_facts() if number not in failed_on)
        if any(facts.takes_blocks for facts in others):
            self._returned.append(row)
        else:
            self.given_up += 1
            self._state.writes.give_up(row, self.target)

    def release(self, rows: list[int]) -> None:
        ready = self.target.copies.state.array[rows] == CopyState.READY
        if len(written := np.array(rows)[ready].tolist()):
            self._state.writes.mark_clean(written, self.target)
        self.target.queue.dirty.extendleft(reversed(self._returned))
        self._returned.clear()


class WriteOwed(WriteDown):
    """Writes blocks that are owed to a tier, from memory or the drives of another tier."""

    counter = "owed_written"
    is_owed = True

    def is_wanted(self, row: int) -> bool:
        lower = self.target
        queued = row in lower.queue.tickets or not lower.copies.absent(row)
        return self._state.catalog.is_live(row) and not queued and bool(lower.copies.owed.view[row])

    def source(self, row: int) -> tuple[LowerTier, int] | None:
        source = self._state.source(row)
        return (source, source.place(row)) if source is not None else None

    def claim(self, rows: list[int]) -> None:
        super().claim(rows)
        self.target.moving.update(rows)

    def give_up(self, row: int) -> None:
        """It stays owed while the tier is away. Else its copy here is damaged, or there is no room
        for it.
        """
        lower = self.target
        lower.copies.drop(row)
        if any(facts.takes_blocks for _, facts in lower.volumes.all_facts()):
            lower.queue.owed.give_up([row])
            self.given_up += 1

    def release(self, rows: list[int]) -> None:
        self.target.end_moving(rows)


class WriteBack:
    """The background threads of one tier."""

    def __init__(
        self, state: StoreState, lower: LowerTier, mover: BlockMover, room: VolumeRoom
    ) -> None:
        self._state = state
        self._lower = lower
        self._mover = mover
        self._room = room
        self._a_volume = lower.volumes.writers
        self._busy: Counter[int] = Counter()
        """Number of threads that write to each volume."""
        self._is_paying = False
        """True if a thread writes blocks that are owed to the tier."""
        self._rests_until_s = 0.0
        self.threads: list[threading.Thread] = []
        self.add_threads()

    def add_threads(self) -> list[threading.Thread]:
        """Create as many threads as the volumes can use. Returns the new ones, not started."""
        wanted = min(_THREADS_MAX, self._a_volume * len(self._lower.volumes))
        new = [
            threading.Thread(
                target=self._run, name=f"kvdepot-{self._lower.name}-write-{number}", daemon=True
            )
            for number in range(len(self.threads), wanted)
        ]
        self.threads += new
        self._lower.queue.writers += len(new)
        return new

    def _run(self) -> None:
        try:
            while (taken := self._next()) is not None:
                since_s = self._state.clock.now()
                self._write(*taken)
                self._rest(since_s)
        finally:
            self._end_thread()

    def _next(self) -> tuple[int, CopyBatch, WriteDown] | None:
        """Wait for dirty blocks and claim some for a volume. None: the store is closing."""
        state, lower = self._state, self._lower
        with state.lock:
            while not state.closing.is_set():
                if lower.queue.owed.waiting and not self._is_paying:
                    owed = self._next_owed()
                    if owed is not None:
                        return owed
                if lower.queue.deferred:
                    state.writes.queue_deferred(lower, state.writes.dirty_limit_bytes // 2)
                volume, pause_s = self._choose_volume()
                if volume is not None:
                    job = WriteDown(state, lower, volume)
                    rows = self._take(volume)
                    state.lock.room.notify_all()
                    piece, _ = self._mover.claim(job, rows, 1 << 62)
                    if piece.rows:
                        lower.volumes.shares.take(volume, piece.nbytes, state.clock.now())
                        self._busy[volume] += 1
                        if lower.volumes.contiguous_bytes:
                            state.lock.work.notify_all()
                        return volume, piece, job
                    pause_s = _LINGER_S if lower.queue.dirty else None
                state.lock.work.wait(pause_s)
        return None

    def _next_owed(self) -> tuple[int, CopyBatch, WriteDown] | None:
        """Claim blocks that are owed to the tier; None if there are none, or no volume is free."""
        lower = self._lower
        able = [number for number, one in lower.volumes.all_facts() if one.takes_blocks]
        free = [number for number in able if self._busy[number] < self._a_volume]
        if not able:
            lower.queue.owed.waiting.clear()
        if not free:
            return None
        volume = min(free, key=self._busy.__getitem__)
        job = WriteOwed(self._state, lower, volume)
        waiting = lower.queue.owed.waiting
        rows = [waiting.popleft() for _ in range(min(len(waiting), _BLOCKS_MAX))]
        piece, left = self._mover.claim(job, rows, lower.volumes[volume].facts().segment_bytes)
        waiting.extendleft(reversed(left))
        if not piece.rows:
            return None
        self._is_paying = True
        lower.volumes.shares.take(volume, piece.nbytes, self._state.clock.now())
        self._busy[volume] += 1
        return volume, piece, job

    def _write(self, volume: int, piece: CopyBatch, job: WriteDown) -> None:
        state, nbytes = self._state, piece.nbytes
        self._mover.copy(
            job, piece, [volume], lambda _, number, least: self._room.wait_for(number, least)
        )
        if state.descriptions.missing:
            state.descriptions.ensure(piece.rows)
        if job.given_up:
            _log.warning("%s: %d blocks were not written", self._lower.name, job.given_up)
        with state.lock:
            self._lower.volumes.shares.done(volume, nbytes)
        if not state.volumes.entries[volume].volume.facts().spare_segments:
            self._room.keep_spare(volume)
        with state.lock:
            self._busy[volume] -= 1
            self._is_paying = self._is_paying and not job.is_owed
            state.lock.work.notify_all()

    def _rest(self, since_s: float) -> None:
        """Pause writes if callers have read from the tier since `since_s`."""
        lower, now_s = self._lower, self._state.clock.now()
        if not lower.volumes.is_remote and lower.is_read_since(since_s):
            share = HEAD_SHARE if lower.volumes.contiguous_bytes else FLASH_SHARE
            self._rests_until_s = now_s + min(_REST_S_MAX, backoff_s(now_s - since_s, share))

    def _is_pressed(self) -> bool:
        """True if the queue is half full or an allocation has failed recently, so that writes must
        not wait.
        """
        state = self._state
        if 2 * state.writes.dirty_bytes >= state.writes.dirty_limit_bytes:
            return True
        return state.clock.now() < state.memory_tiers[0].full_s + _PRESSED_S

    def _is_flushed(self) -> bool:
        """True if a flush waits for the oldest queued block, or nothing is queued."""
        return (self._lower.queue.oldest_ticket() or 0) <= self._lower.queue.flush_ticket

    def _choose_volume(self) -> tuple[int | None, float | None]:
        """The volume to write to now; else None and the time to wait (None:
        until there is work).
        """
        state, lower = self._state, self._lower
        assert state.lock.held()
        if not lower.queue.dirty:
            return None, None
        if lower.volumes.contiguous_bytes or self._rests_until_s:
            wait_s = self._linger_s()
            if wait_s and not (self._is_pressed() or self._is_flushed()):
                return None, wait_s
        able, retry_s = self._able_volumes()
        if not able:
            self._give_up_all()
            return None, None
        failed_on = lower.queue.failed_on.get(lower.queue.dirty[0], ())
        able = [volume for volume in able if volume not in failed_on] or able
        free = [volume for volume in able if self._busy[volume] < self._a_volume]
        if not free:
            return None, retry_s
        if len(able) == 1:
            return able[0], None
        first = lower.volumes.shares.next()
        if first in free:
            return first, None
        if first in able and not self._is_pressed():
            # The volume for the next batch is busy: wait for it briefly.
            wait_s = 0.0
            if lower.volumes.contiguous_bytes:
                wait_s = self._left_s(lower.volumes.shares.taken_s, _LINGER_S)
            elif lower.volumes.shares.are_uneven():
                wait_s = self._left_s(
                    max(lower.volumes.shares.taken_s, lower.queue.dirty_since_s), _YIELD_S
                )
            if wait_s:
                return None, wait_s
        return min(free, key=self._busy.__getitem__), None

    def _linger_s(self) -> float:
        """The time for which blocks should still wait for reads, or for others of their prompt."""
        lower, resting_s = self._lower, self._left_s(self._rests_until_s, 0.0)
        volumes = lower.volumes
        enough = lower.queue.dirty_bytes >= volumes.contiguous_bytes * (1 + len(volumes))
        if resting_s or not lower.volumes.contiguous_bytes or enough:
            return resting_s
        return self._left_s(lower.queue.dirty_since_s, _LINGER_S)

    def _left_s(self, since_s: float, span_s: float) -> float:
        left_s = since_s + span_s - self._state.clock.now()
        return left_s if left_s > _PAUSE_S_MIN else 0.0

    def _able_volumes(self) -> tuple[list[int], float | None]:
        """The volumes that accept blocks or are due for a retry, and the time until the next retry.

        If there are none, all writable volumes: writes then fail, and blocks are given up.
        """
        every = [one for one in self._lower.volumes.all_facts() if one[1].may_write]
        able = [number for number, facts in every if facts.takes_blocks]
        down = [(number, facts.retry_in_s) for number, facts in every if not facts.up]
        due = [number for number, retry_in_s in down if not retry_in_s]
        retries = [retry_in_s for _, retry_in_s in down if retry_in_s]
        retry_s = max(_PAUSE_S_MIN, min(retries)) if retries else None
        return [*able, *due] or [number for number, _ in every], retry_s

    def _take(self, volume: int) -> list[int]:
        """Take the next dirty rows for a volume off the queue."""
        state, lower, catalog = self._state, self._lower, self._state.catalog
        if lower.volumes.contiguous_bytes:
            lower.queue.sort()
        segment_bytes = state.volumes.entries[volume].volume.facts().segment_bytes
        most = segment_bytes if lower.volumes.is_remote else segment_bytes // 4
        budget = lower.volumes.contiguous_bytes or _PART_BYTES_MAX
        if len(lower.volumes.entries) > 1 and not lower.volumes.contiguous_bytes:
            budget = min(budget, self._part_bytes(volume))
        budget = min(budget, most)
        others, states = len(state.lower_tiers) > 1, lower.copies.state.view
        deleted = set(catalog.deleted(list(itertools.islice(lower.queue.dirty, _BLOCKS_MAX))))
        rows: list[int] = []
        passed_over: list[int] = []
        for _ in range(min(len(lower.queue.dirty), _BLOCKS_MAX)):
            row = lower.queue.dirty[0]
            nbytes = record_bytes(catalog.nbytes[row])
            if rows and nbytes > budget:
                break
            lower.queue.dirty.popleft()
            if row in deleted or states[row] != CopyState.ABSENT:
                state.writes.mark_clean([row], lower)
                state.lock.written.notify_all()
            elif others and self._mover.is_appended_elsewhere(row, lower):
                passed_over.append(row)  # another tier is writing to its head
            elif rows and volume in lower.queue.failed_on.get(row, ()):
                passed_over.append(row)  # another volume is chosen for it
            else:
                budget -= nbytes
                rows.append(row)
        lower.queue.dirty.extend(passed_over)
        return rows

    def _part_bytes(self, volume: int) -> int:
        """The volume's share of the queue, for each of its threads."""
        share = self._lower.volumes.shares.part(volume) / self._a_volume
        return max(_PART_BYTES_MIN, int(self._lower.queue.dirty_bytes * share))

    def _end_thread(self) -> None:
        """Count an ended thread. If it was the last, give up all waiting blocks."""
        with self._state.lock:
            self._lower.queue.writers -= 1
            if not self._lower.queue.writers:
                self._give_up_all()

    def _give_up_all(self) -> None:
        state, lower = self._state, self._lower
        lower.queue.dirty.clear()
        for row in [row for row in lower.queue.tickets if lower.copies.absent(row)]:
            state.writes.give_up(row, lower)
        state.lock.written.notify_all()
        state.lock.room.notify_all()


class Flusher:
    """Serves `flush`, and waits for write-through puts."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def write_through(self, timeout_s: float) -> None:
        """If the first lower tier is written through, wait until it has all blocks put so far."""
        state = self._state
        first = state.writes.written_through()
        if first is None:
            return
        with state.lock:
            last = state.writes.last_ticket
            self._do_not_linger(last)
            state.lock.written.wait_for(
                lambda: (first.queue.oldest_ticket() or last + 1) > last, timeout_s
            )

    def flush(self, timeout_s: float, keys: Keys | None, told: Counter[int]) -> FlushReport:
        """Wait until blocks put before are written, then until they are durable; with `keys` only
        these blocks. Blocks for `timeout_s` at most. `told`: the evicted blocks that the caller
        knows of, by reason; this is brought up to date.
        """
        state = self._state
        deadline = state.clock.now() + timeout_s
        with state.lock:
            self._try_again()
            last = state.writes.last_ticket
            self._do_not_linger(last)
            rows = None if keys is None else set(state.catalog.table.find_many(keys).tolist())
            state.volumes.woken.set()  # blocks that are owed to a tier that works are written now
            done = state.lock.written.wait_for(lambda: self._is_written(last, rows), timeout_s)
            owed = [lower for lower in state.lower_tiers if self._owes(lower, rows)]
            left_s = deadline - state.clock.now()
            state.lock.written.wait_for(
                lambda: not any(self._owes(lower, rows) for lower in owed), left_s
            )
        unsynced: dict[LowerTier, Durability] = {}
        for lower in state.lower_tiers:
            if lower.writable:
                left_s = max(0.0, deadline - state.clock.now())
                if not done:
                    unsynced[lower] = Durability.WAITING
                elif not lower.volumes.sync(left_s):
                    unsynced[lower] = Durability.FAILED
        with state.lock:
            if keys is not None:
                codes = self._durability(state.catalog.table.find_many(keys), unsynced)
                found = state.catalog.table.find_many(keys)
                tiers = self._tiers(found[found != NONE], unsynced, last)
                return FlushReport.of((DURABILITY[code] for code in codes.tolist()), tiers)
            return self._report(last, unsynced, told)

    def _try_again(self) -> None:
        """Queue blocks that were deferred or could not be written before."""
        state, catalog = self._state, self._state.catalog
        for lower in state.lower_tiers:
            state.writes.queue_deferred(lower, _NO_LIMIT)
        rows = catalog.live_rows()
        for row in rows[catalog.unwritten.array[rows] == FAILED].tolist():
            if not any(row in lower.moving for lower in state.lower_tiers):
                state.writes.add_again(row)

    def _is_written(self, last: int, rows: set[int] | None) -> bool:
        tiers = self._state.lower_tiers
        if rows is not None:
            tickets = (lower.queue.tickets.get(row, last + 1) for lower in tiers for row in rows)
            return all(ticket > last for ticket in tickets)
        return all((lower.queue.oldest_ticket() or last + 1) > last for lower in tiers)

    def _owes(self, lower: LowerTier, rows: set[int] | None) -> bool:
        """True if blocks are owed to a tier that can take them."""
        if not lower.queue.owed.any or not any(
            facts.takes_blocks for _, facts in lower.volumes.all_facts()
        ):
            return False
        return rows is None or bool(
            lower.queue.owed.has(np.array([*rows - {NONE}], np.int64)).any()
        )

    def _tiers(
        self, rows: Rows, unsynced: Mapping[LowerTier, Durability], last: int
    ) -> dict[str, TierReport]:
        """The report on these rows for each tier."""
        residency, wanted = self._state.catalog.residency.array[rows], set(rows.tolist())
        found = {}
        for lower in self._state.lower_tiers:
            here = int((residency & lower.copies.bit != 0).sum())
            queued = [row for row, ticket in lower.queue.tickets.items() if ticket <= last]
            unwritten = len(wanted.intersection(queued))
            lost = here if lower in unsynced else 0
            owed = int(lower.queue.owed.has(rows).sum()) if lower.queue.owed.any else 0
            found[lower.name] = TierReport(here - lost, unwritten + lost, owed)
        return found

    def _report(
        self, last: int, unsynced: Mapping[LowerTier, Durability], told: Counter[int]
    ) -> FlushReport:
        """The report on all blocks with tickets up to `last`."""
        tiers = self._state.lower_tiers
        rows = self._state.catalog.live_rows()
        later = {
            row for lower in tiers for row, ticket in lower.queue.tickets.items() if ticket > last
        }
        rows = rows[~np.isin(rows, list(later))]
        totals = np.bincount(self._durability(rows, unsynced), minlength=len(DURABILITY))
        counts = Counter(dict(zip(DURABILITY, totals.tolist(), strict=True)))
        counts[Durability.EVICTED] = 0  # evicted after it was durable
        for code, gone in (self._state.catalog.left_unwritten - told).items():
            counts[Durability.FAILED if code == FAILED else Durability.EVICTED] += gone
        told.update(self._state.catalog.left_unwritten - told)
        durable = counts.pop(Durability.DURABLE)
        unfinished = unsynced or counts[Durability.WAITING] or counts[Durability.FAILED]
        by_tier = self._tiers(rows, unsynced, last)
        for lower in self._state.lower_tiers:
            given_up = lower.queue.owed.take_given_up()
            self._state.events.count("owed_given_up", given_up)
            by_tier[lower.name] = replace(by_tier[lower.name], given_up=given_up)
        complete = not unfinished and all(one.is_complete for one in by_tier.values())
        complete = complete and self._state.volumes.metadata.is_recorded()
        return FlushReport(complete, durable, +counts, (), by_tier)

    def _durability(self, rows: Rows, unsynced: Mapping[LowerTier, Durability]) -> Rows:
        """An index into DURABILITY for each row; NONE for blocks that the store does not have."""
        catalog = self._state.catalog
        residency = catalog.residency.array[rows]
        codes: Rows = catalog.unwritten.array[rows].astype(np.int64)
        on_none = np.ones(len(rows), bool)
        for lower in [lower for lower in self._state.lower_tiers if lower in unsynced]:
            here = residency & lower.copies.bit != 0
            codes[here] = DURABILITY.index(unsynced[lower])
            on_none &= ~here
        for lower in [lower for lower in self._state.lower_tiers if lower not in unsynced]:
            here = residency & lower.copies.bit != 0
            codes[here] = _DURABLE
            on_none &= ~here
        codes[on_none & (codes == _DURABLE)] = DURABILITY.index(Durability.EVICTED)
        codes[(rows == NONE) | (residency == 0)] = DURABILITY.index(Durability.ABSENT)
        return codes

    def _do_not_linger(self, ticket: int) -> None:
        """Stop blocks up to this ticket from waiting for others of their prompt."""
        for lower in self._state.lower_tiers:
            lower.queue.flush_ticket = max(lower.queue.flush_ticket, ticket)
        self._state.lock.work.notify_all()
