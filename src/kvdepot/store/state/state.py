"""The state that the parts of a store share, guarded by one lock.

The lock is held briefly, never during I/O or copies of blocks. Functions that need it begin with
`assert state.lock.held()`. Each condition of the lock is for one kind of waiting thread.
"""

import _thread
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.config.settings import Config
from kvdepot.core.block import CopyState
from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.core.keys import Keys
from kvdepot.core.requests import Array
from kvdepot.core.volume import VOLUME_SHIFT
from kvdepot.errors import StoreClosedError
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE, Rows
from kvdepot.memory.arena import Arena
from kvdepot.policy.placing.memory_levels import ReturnTimes
from kvdepot.policy.placing.write_mode import WriteMode, promotes, targets
from kvdepot.store.events import Events
from kvdepot.store.state.admission import Admission
from kvdepot.store.state.descriptions import Descriptions
from kvdepot.store.state.lower_tier import FAILED, LowerTier
from kvdepot.store.state.memory_tier import ArenaTier
from kvdepot.store.volume_set import VolumeSet

_WAITING, _POLICY, _BUDGET, _READ_ONLY, _NO_DRIVE = map(
    DURABILITY.index,
    (
        Durability.WAITING,
        Durability.POLICY,
        Durability.BUDGET,
        Durability.READ_ONLY,
        Durability.NO_DRIVE,
    ),
)
_NO_LIMIT: Final = 1 << 62
TEMPORARY: Final = -2
"""Owner of a slot that belongs to a transfer and not to a block."""


@dataclass(frozen=True, slots=True)
class StoreClocks:
    """The monotonic clock, and the clock of stamps."""

    steady: Clock
    stamps: StampClock


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory tiers, fastest first, and staging for transfers."""

    arenas: Sequence[Arena]
    staging: Arena
    return_times: ReturnTimes


class StoreLock(_thread.RLock):  # type: ignore[misc]
    """The re-entrant lock of a store, and its conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Callable[[], bool] = self._is_owned  # type: ignore[attr-defined]
        """True if this thread has the lock."""
        self.work = threading.Condition(self)
        """Notified when blocks wait to be written, or the store closes."""
        self.room = threading.Condition(self)
        """Notified when memory or a lease was freed: puts, reads and reclaims wait for room."""
        self.written = threading.Condition(self)
        """Notified when blocks were written or given up: flush, removals and drains wait for it."""
        self.arrived = threading.Condition(self)
        """Notified when blocks were read into memory: reads wait for blocks of other calls."""
        self.idle = threading.Condition(self)
        """Notified when a call or a late read has ended: close waits for it."""

    def wake_all(self) -> None:
        """Wake all waiting threads."""
        assert self.held()
        for condition in (self.work, self.room, self.written, self.arrived, self.idle):
            condition.notify_all()


class StoreState:
    """The shared state of one store."""

    def __init__(
        self,
        config: Config,
        clocks: StoreClocks,
        catalog: Catalog,
        memory: StoreMemory,
        volumes: VolumeSet,
        lower_tiers: Sequence[LowerTier],
    ) -> None:
        self.config = config
        self.clock = clocks.steady
        self.catalog = catalog
        self.stamps = clocks.stamps
        self.staging = memory.staging
        self.volumes = volumes
        self.lower_tiers = tuple(lower_tiers)
        """Fastest first."""
        self.return_times = memory.return_times
        self.memory_tiers = tuple(
            ArenaTier(arena, catalog, copies, leaves)
            for arena, copies, leaves in zip(
                memory.arenas, catalog.memories, catalog.orders, strict=True
            )
        )
        self.events = Events()
        self.lock = StoreLock()
        self.using = StoreCall(self)
        """The scope of calls that use the store's memory: close waits for them."""
        self.closing = threading.Event()
        """Set once, with the lock held, when the store closes."""
        self.leased = 0
        """Number of leases of callers on blocks."""
        self.descriptions = Descriptions(self)
        self.writes = PendingWrites(self)

    def check_open(self) -> None:
        if self.closing.is_set():
            raise StoreClosedError("the store is closed")

    def request_refresh(self) -> None:
        """Request a refresh of volumes shared with other nodes. Does not block."""
        self.volumes.look()

    def lease(self, rows: list[int]) -> None:
        """Lease rows for a caller until `release`."""
        assert self.lock.held()
        self.catalog.lease(rows)
        self.leased += len(rows)

    def release(self, rows: list[int]) -> None:
        """End a caller's lease."""
        with self.lock:
            self.leased -= len(rows)
            if not self.closing.is_set():
                self.unlease(rows)

    @property
    def arena(self) -> Arena:
        """The arena of the fastest memory tier."""
        return self.memory_tiers[0].arena

    @property
    def all_arenas(self) -> list[Arena]:
        """The arenas of all memory tiers, and staging."""
        return [*(memory.arena for memory in self.memory_tiers), self.staging]

    def usable_prefix(self, rows: list[int]) -> list[int]:
        """The leading resident rows, up to the first one that is only on a drive that is down."""
        assert self.lock.held()
        if not self.volumes.down:
            return rows
        for index, row in enumerate(rows):
            if not self.catalog.in_memory(row) and not any(
                lower.usable(row) for lower in self.lower_tiers
            ):
                return rows[:index]
        return rows

    def memory_of(self, row: int) -> ArenaTier | None:
        """The fastest memory tier that has a block."""
        return next((memory for memory in self.memory_tiers if memory.copies.ready(row)), None)

    def locations(self, rows: Rows) -> Rows:
        """The locations to read rows from: on the fastest tier whose volume is up, else on the
        fastest one; NONE for rows that no lower tier has.
        """
        assert self.lock.held()
        found, down = np.full(len(rows), NONE, np.int64), list(self.volumes.down)
        for may_be_down in (False, True) if down else (True,):
            for lower in self.lower_tiers:
                ready = lower.copies.state.array[rows] == int(CopyState.READY)
                ready &= (rows != NONE) & (found == NONE)
                places = lower.copies.location.array[rows]
                if not may_be_down:
                    ready &= ~np.isin(places >> VOLUME_SHIFT, down)
                found[ready] = places[ready]
        return found

    def addresses(self, rows: Rows) -> Rows:
        """Addresses of records in the fastest memory that has them; 0 if none has."""
        assert self.lock.held()
        found = np.zeros(len(rows), np.int64)
        for memory in reversed(self.memory_tiers):
            here = (rows != NONE) & (memory.copies.state.array[rows] == int(CopyState.READY))
            found = np.where(here, memory.address + memory.copies.location.array[rows], found)
        return found

    def tier_of(self, volume: int) -> LowerTier:
        """The tier of a volume."""
        name = self.volumes.entries[volume].tier
        return next(lower for lower in self.lower_tiers if lower.name == name)

    def source(self, row: int) -> LowerTier | None:
        """The lower tier to read a block from: the fastest whose drive is up, else the fastest."""
        found = [lower for lower in self.lower_tiers if lower.copies.ready(row)]
        return next((lower for lower in found if lower.usable(row)), found[0] if found else None)

    def drop_unreadable(self, row: int) -> None:
        """Drop copies on drives that are down, so that the block can be put again."""
        for lower in self.lower_tiers:
            if lower.copies.ready(row) and not lower.usable(row):
                lower.drop(row)
                self.catalog.unwritten.view[row] = FAILED

    def drop_everywhere(self, row: int) -> None:
        """Drop a block that is not in use from all tiers."""
        assert self.lock.held()
        for memory in self.memory_tiers:
            if memory.copies.ready(row):
                memory.drop(row)
        for lower in self.lower_tiers:
            lower.queue.deferred.pop(row, None)
            if lower.copies.ready(row):
                lower.drop(row)
        self.catalog.forget_if_gone(row)

    def unlease(self, rows: list[int]) -> None:
        """End the leases of rows. Drops those that were removed meanwhile."""
        assert self.lock.held()
        gone = self.catalog.unlease(rows)
        if gone:
            self.drop_unused(gone)
        self.lock.room.notify_all()

    def drop_unused(self, rows: list[int]) -> None:
        """Drop blocks that were removed while they were leased."""
        for row in rows:
            if self.catalog.nbytes.view[row]:
                self.drop_everywhere(row)

    def mark_deleted(self, rows: list[int]) -> None:
        """Hide blocks from lookups, and drop those that are not in use."""
        assert self.lock.held()
        for row in dict.fromkeys(rows):  # a dropped row must not be deleted twice
            if self.catalog.mark_deleted(row) and not self.writes.is_dirty(row):
                self.drop_everywhere(row)


class StoreCall:
    """Counts active calls; `close` waits until there are none. All calls share one."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.active = 0

    def __enter__(self) -> None:
        state = self._state
        with state.lock:
            if state.closing.is_set():
                raise StoreClosedError("the store is closed")
            self.active += 1

    def __exit__(self, *_: object) -> None:
        state = self._state
        with state.lock:
            self.active -= 1
            if state.closing.is_set():
                state.lock.idle.notify_all()


class PendingWrites:
    """Queues blocks in memory to be written to lower tiers. Call with the lock held."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._catalog = state.catalog
        self._lower_tiers = state.lower_tiers
        self._events = state.events
        self.admission = Admission(state.catalog, state.lower_tiers, state.events)
        self.last_ticket = 0
        """The last ticket. Queued blocks are numbered in their order."""
        self.follows_uses = True
        """True if `note_use` must be called."""
        self.modes_changed()

    @property
    def dirty_bytes(self) -> int:
        """Bytes that wait to be written."""
        total = 0
        for lower in self._lower_tiers:
            total += lower.queue.dirty_bytes
        return total

    @property
    def dirty_limit_bytes(self) -> int:
        """Most bytes of memory that may wait to be written."""
        config = self._state.config
        return max(1, int(config.dram.capacity * config.writeback.dirty_limit))

    def room_bytes(self) -> int:
        """Bytes of new blocks that may still be queued for writing."""
        queues = [lower.queue for lower in self._lower_tiers if lower.queue.writers]
        if not queues:
            return _NO_LIMIT
        return self.dirty_limit_bytes - sum([queue.dirty_bytes for queue in queues])

    def are_moving(self, rows: Iterable[int]) -> bool:
        """True if one of the rows is queued for, or being copied to, a lower tier."""
        tiers = self._lower_tiers
        return any(
            row in lower.queue.tickets or row in lower.moving for row in rows for lower in tiers
        )

    def add_new(self, rows: list[int], *, later: bool = False) -> None:
        """Queue new blocks for the lower tiers, by their write modes.

        `later`: the queue is full, so that they are deferred and may be evicted unwritten.
        """
        if not self._lower_tiers:
            self._catalog.unwritten.array[rows] = _NO_DRIVE
            return
        self._catalog.unwritten.array[rows] = _WAITING
        if self.admission.learns:
            for row in rows:
                self._add([row], self._targets[self.admission.made(row)], later=later)
        else:
            self._add(rows, self._targets[False], later=later)
        if later:
            self._events.count("put_deferred", len(rows))

    def written_through(self) -> LowerTier | None:
        """The first lower tier if puts wait until it has their blocks; else None."""
        first = self._lower_tiers[0] if self._lower_tiers else None
        waits = (
            first is not None and first.mode is WriteMode.THROUGH and not first.volumes.is_remote
        )
        return first if waits else None

    def queue_deferred(self, lower: LowerTier, limit_bytes: int) -> None:
        """Queue deferred rows until `limit_bytes` wait to be written: first those requested since,
        then the oldest.
        """
        assert self._state.lock.held()
        catalog = self._catalog
        while lower.queue.deferred and self.dirty_bytes < limit_bytes:
            row, _ = lower.queue.deferred.popitem(last=False)
            if catalog.memory.ready(row) and catalog.is_live(row):
                if lower.queue.writers:
                    now_s = self._state.clock.now()
                    self.last_ticket = lower.queue.mark_dirty([row], self.last_ticket, now_s)
            elif catalog.is_live(row) and lower.copies.absent(row):
                lower.queue.owed.add(row)  # it has left memory, and is on a drive

    def give_up(self, row: int, lower: LowerTier) -> None:
        """Record that a block could not be written to this tier: it is owed to it. It stays in
        memory until evicted, and on other drives up to half of their room.
        """
        assert self._state.lock.held()
        if self._catalog.is_live(row):
            lower.queue.owed.add(row)
        self._events.count("write_failed")
        if self._catalog.unwritten.view[row]:
            self._catalog.unwritten.view[row] = FAILED
        self.mark_clean([row], lower)

    def add_again(self, row: int) -> None:
        """Queue a block again that could not be written before."""
        assert self._state.lock.held()
        if self._catalog.memory.ready(row):
            self._add([row], self._targets[True])

    def note_use(self, rows: list[int]) -> None:
        """Record a further request for blocks: those in memory may be worth writing now."""
        assert self._state.lock.held()
        differ = self._targets[False] != self._targets[True]
        deferred = any(lower.queue.deferred for lower in self._lower_tiers)
        self.follows_uses = self.admission.learns or differ or deferred
        if self.admission.learns:
            self.admission.asked(rows)
        for lower in self._lower_tiers:
            for row in reversed(rows) if lower.queue.deferred else ():
                if row in lower.queue.deferred:
                    lower.queue.deferred.move_to_end(row, last=False)
        if not differ:
            return
        for row in rows:
            if self._catalog.memory.ready(row) and self._catalog.is_live(row):
                self._add([row], self._targets[True])
        self._state.lock.work.notify_all()

    def promotes_from(self, source: LowerTier) -> bool:
        """True if blocks read from `source` may be promoted to a faster lower tier."""
        return bool(self._above[source])

    def promote(self, row: int, source: LowerTier, sample: int) -> None:
        """Queue a block that was read from `source` for the faster lower tiers.

        Does nothing while the queue is half full, so that no put has to wait. `sample` is a byte of
        the prompt's key: while a tier thrashes, only some prompts are promoted.
        """
        assert self._state.lock.held()
        if 2 * self.dirty_bytes > self.dirty_limit_bytes or not self._catalog.is_live(row):
            return
        above = self._above[source]
        if above and self.admission.promotes(row, sample):
            self._add([row], above)
            self._state.lock.work.notify_all()

    def is_dirty(self, row: int) -> bool:
        """True if a block is queued for any lower tier."""
        return any(row in lower.queue.tickets for lower in self._lower_tiers)

    def _add(self, rows: list[int], numbers: list[int], *, later: bool = False) -> None:
        """Queue blocks in memory for the tiers of `numbers` that admit them; while admission
        learns, one block.
        """
        kept, tiers = _POLICY, self._lower_tiers
        if self.admission.learns:
            wanted, numbers = numbers, self.admission.sift(rows[0], numbers)
            kept = _BUDGET if wanted and not numbers else _POLICY
        for lower in [tiers[number] for number in numbers if tiers[number].queue.writers]:
            if later:
                lower.queue.deferred.update(dict.fromkeys(rows))
                self.follows_uses = True
            else:
                now_s = self._state.clock.now()
                self.last_ticket = lower.queue.mark_dirty(rows, self.last_ticket, now_s)
        if not any(lower.queue.writers for lower in tiers):
            kept = _READ_ONLY if tiers else _NO_DRIVE
        queues, unwritten = [lower.queue for lower in tiers], self._catalog.unwritten.view
        for row in [row for row in rows if unwritten[row]]:
            waits = any(row in one.tickets or row in one.deferred for one in queues)
            unwritten[row] = _WAITING if waits else kept

    def modes_changed(self) -> None:
        """Called when the write mode of a lower tier was changed."""
        modes = [lower.mode for lower in self._lower_tiers]
        self.follows_uses = True
        self.admission.modes_changed()
        self._targets = {used: targets(modes, touched=used) for used in (False, True)}
        self._above = {
            lower: promotes(modes, number) for number, lower in enumerate(self._lower_tiers)
        }

    def mark_clean(self, rows: list[int], lower: LowerTier) -> None:
        """Remove blocks from the queue of a tier; drop those that were deleted meanwhile."""
        assert self._state.lock.held()
        lower.queue.mark_clean(rows)
        catalog = self._catalog
        for row in catalog.deleted(rows):
            if not catalog.leases(row) and not self.is_dirty(row):
                self._state.drop_everywhere(row)


@dataclass(slots=True)
class BlockLease:
    """Protects blocks from eviction from all tiers until `release`."""

    state: StoreState
    rows: list[int] = field(default_factory=list)
    words: Keys = field(default_factory=lambda: np.empty((0, 4), np.uint64))
    """The keys, if the lease was made by keys."""

    def places(self) -> tuple[Array, Array]:
        """Address of each block's record in memory, 0 if it is on a drive only; and the length of
        its payload.
        """
        state, rows = self.state, np.asarray(self.rows, np.int64)
        with state.lock:
            state.check_open()
            return state.addresses(rows), state.catalog.nbytes.array[rows]

    def release(self) -> None:
        """End the protection. A second call does nothing."""
        rows, self.rows = self.rows, []
        self.state.release(rows)
