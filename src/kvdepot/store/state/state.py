"""What the parts of a store share, guarded by one lock.

The lock is held for bookkeeping only, never over I/O or copies of blocks. Functions that need it
begin with `assert state.held()`. Each condition below is for one kind of waiter; all use the lock.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from kvdepot.config.settings import Config
from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.errors import StoreClosedError
from kvdepot.index.catalog import Catalog
from kvdepot.memory.arena import Arena
from kvdepot.policy.placing.memory_levels import ReturnTimes
from kvdepot.policy.placing.write_mode import WriteMode, promotes, targets
from kvdepot.store.state.admission import Admission
from kvdepot.store.state.descriptions import Descriptions
from kvdepot.store.state.ledger import SavingsLedger
from kvdepot.store.state.lower_tier import FAILED, LowerTier
from kvdepot.store.state.traffic import StoreTraffic
from kvdepot.store.trace_recorder import TraceRecorder
from kvdepot.store.volume_set import VolumeSet
from kvdepot.store.write.memory_eviction import ArenaTier

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
TEMPORARY: Final = -2
"""Owner of a slot that belongs to a transfer, not to a block."""


@dataclass(frozen=True, slots=True)
class StoreClocks:
    """Time within this process, and the order of puts and removals everywhere."""

    steady: Clock
    stamps: StampClock


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Memory for blocks, fastest first, and for transfers that have no slot there."""

    arenas: Sequence[Arena]
    staging: Arena
    return_times: ReturnTimes


@dataclass(slots=True)
class Counters:
    """Totals since the store was opened."""

    put_stored: int = 0
    put_present: int = 0
    put_throttled: int = 0
    put_refused: int = 0
    put_deferred: int = 0
    """Of those stored: taken while too much waited to be written, and written if they stay."""
    put_bytes: int = 0
    get_dram: int = 0
    get_cxl: int = 0
    get_ssd: int = 0
    get_hdd: int = 0
    get_plugin: int = 0
    get_object: int = 0
    get_miss: int = 0
    get_bytes: int = 0
    promoted: int = 0
    hinted: int = 0
    """Blocks brought to memory because of a hint."""
    demoted: int = 0
    """Blocks copied to a slower tier."""
    written: int = 0
    written_bytes: int = 0
    write_failed: int = 0
    """Blocks given up by write-back: they stay in dram only."""
    evicted_dram: int = 0
    evicted_cxl: int = 0
    evicted_ssd: int = 0
    evicted_hdd: int = 0
    evicted_plugin: int = 0
    evicted_object: int = 0
    moved_ssd: int = 0
    """Blocks written again because their segment was reclaimed."""
    moved_hdd: int = 0
    moved_plugin: int = 0
    moved_object: int = 0
    bypassed: int = 0
    """Times that a block was not worth the wear of an SSD."""
    held_below: int = 0
    """Times that a block was not promoted to the SSDs because these thrash."""
    reclaimed_segments: int = 0
    quarantined: int = 0
    """Copies dropped because their checksum or identity did not match."""
    read_failed: int = 0
    read_late: int = 0
    removed: int = 0
    removal_unrecorded: int = 0
    """Removals that could not be written down: the blocks may come back after a restart."""

    def add(self, what: str, tier: str, count: int = 1) -> None:
        """Count something that is counted for each tier: get, evicted, moved."""
        name = f"{what}_{tier}"
        setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class StoreState:
    """Shared state of one store."""

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
        self.arena = memory.arenas[0]
        """Of the fastest memory tier."""
        self.counters = Counters()
        self.traffic = StoreTraffic()
        self.ledger = SavingsLedger(config.ledger)
        self.admission = Admission(catalog, self.lower_tiers, self.counters)
        self.descriptions = Descriptions(self)
        self.recorder: TraceRecorder | None = None
        self.last_ticket = 0
        """Blocks that wait to be written are numbered in the order in which they came."""
        self.lock = threading.RLock()
        self.held: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        """Whether this thread has the lock."""
        self.work = threading.Condition(self.lock)
        """There is something to write, or the store closes."""
        self.room = threading.Condition(self.lock)
        """Memory or a lease became free: puts, reads and reclaims that wait for room look again."""
        self.written = threading.Condition(self.lock)
        """Blocks were written or given up: flush, removals and drains look again."""
        self.arrived = threading.Condition(self.lock)
        """Blocks came to memory: reads that wait for the same blocks look again."""
        self.idle = threading.Condition(self.lock)
        """A call or a late read ended: close looks again."""
        self.closing = threading.Event()
        """Set once, with the lock held, when the store closes."""
        self.calls = 0
        """Calls that use the store's memory now: close waits for them."""
        self.leased = 0
        """Blocks that callers hold a lease on."""
        self.modes_changed()

    def check_open(self) -> None:
        if self.closing.is_set():
            raise StoreClosedError("the store is closed")

    def request_refresh(self) -> None:
        """Have the volumes that other stores write to looked at soon. Does not block."""
        self.volumes.look()

    def using(self) -> "StoreCall":
        """A call that works on the store's memory: close waits for it."""
        return StoreCall(self)

    def lease(self, rows: list[int]) -> None:
        """Protect rows for a caller, until `release`."""
        assert self.held()
        self.catalog.lease(rows)
        self.leased += len(rows)

    def release(self, rows: list[int]) -> None:
        """End a caller's lease."""
        with self.lock:
            self.leased -= len(rows)
            if not self.closing.is_set():
                self.unlease(rows)

    @property
    def all_arenas(self) -> list[Arena]:
        """All memory that views of blocks lie in."""
        return [*(memory.arena for memory in self.memory_tiers), self.staging]

    @property
    def dirty_bytes(self) -> int:
        """What waits to be written."""
        total = 0
        for lower in self.lower_tiers:
            total += lower.queue.dirty_bytes
        return total

    @property
    def dirty_limit_bytes(self) -> int:
        """How much of memory may wait to be written."""
        return max(1, int(self.config.dram.capacity * self.config.writeback.dirty_limit))

    @property
    def writes_back(self) -> bool:
        """Whether blocks are written to a lower tier; else they stay in memory."""
        return any(lower.queue.writers for lower in self.lower_tiers)

    def usable_prefix(self, rows: list[int]) -> list[int]:
        """Cut a run of resident rows where it needs a drive that is known to be down."""
        assert self.held()
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

    def source(self, row: int) -> LowerTier | None:
        """The lower tier to read a block from: the fastest whose drive is up, else the fastest."""
        found = [lower for lower in self.lower_tiers if lower.copies.ready(row)]
        return next((lower for lower in found if lower.usable(row)), found[0] if found else None)

    def drop_unreadable(self, row: int) -> None:
        """Drop copies on drives that are down, so that the block can be kept in memory anew."""
        for lower in self.lower_tiers:
            if lower.copies.ready(row) and not lower.usable(row):
                lower.drop(row)
                self.catalog.unwritten.view[row] = FAILED

    def drop_everywhere(self, row: int) -> None:
        """Drop a block that is not in use from every tier."""
        assert self.held()
        for memory in self.memory_tiers:
            if memory.copies.ready(row):
                memory.drop(row)
        for lower in self.lower_tiers:
            lower.queue.deferred.pop(row, None)
            if lower.copies.ready(row):
                lower.drop(row)
        self.catalog.forget_if_gone(row)

    def unlease(self, rows: list[int]) -> None:
        """End the use of rows. Those that were removed meanwhile are dropped."""
        assert self.held()
        for row in self.catalog.unlease(rows):
            if self.catalog.nbytes.view[row]:
                self.drop_everywhere(row)
        self.room.notify_all()

    def mark_deleted(self, rows: list[int]) -> None:
        """Make blocks unfindable for good; drop those that are not in use."""
        assert self.held()
        for row in dict.fromkeys(rows):  # a row that was dropped may not be doomed again
            if self.catalog.mark_deleted(row) and not self.is_dirty(row):
                self.drop_everywhere(row)

    def is_being_written(self, rows: Iterable[int]) -> bool:
        """Whether one of the rows waits to be written, or is being copied, to any lower tier."""
        tiers = self.lower_tiers
        return any(
            row in lower.queue.tickets or row in lower.moving for row in rows for lower in tiers
        )

    def write_new(self, rows: list[int], *, later: bool = False) -> None:
        """New blocks in memory wait to be written to the lower tiers that want them.

        `later`: too much waits already; they may be evicted before their turn comes.
        """
        unwritten, learns = self.catalog.unwritten.view, self.admission.learns
        if not self.lower_tiers:
            for row in rows:
                unwritten[row] = _NO_DRIVE
            return
        for row in rows:
            promising = learns and self.admission.made(row)
            unwritten[row] = _WAITING
            self._write_to(row, self._targets[promising], later=later)
        self.counters.put_deferred += len(rows) if later else 0

    def written_through(self) -> LowerTier | None:
        """The first lower tier, where a put is to wait until it has the block."""
        first = self.lower_tiers[0] if self.lower_tiers else None
        waits = (
            first is not None and first.mode is WriteMode.THROUGH and not first.volumes.is_remote
        )
        return first if waits else None

    def write_deferred(self, lower: LowerTier, limit_bytes: int) -> None:
        """What was deferred waits to be written now, until so much does: first what was asked for
        since, then the oldest.
        """
        assert self.held()
        catalog = self.catalog
        while lower.queue.deferred and self.dirty_bytes < limit_bytes:
            row, _ = lower.queue.deferred.popitem(last=False)
            if catalog.memory.ready(row) and catalog.is_live(row):
                self._queue(row, lower)

    def give_up_writing(self, row: int, lower: LowerTier) -> None:
        """A block could not be written to this tier; it is in memory while there is room."""
        assert self.held()
        self.counters.write_failed += 1
        if self.catalog.unwritten.view[row]:
            self.catalog.unwritten.view[row] = FAILED
        self.mark_clean(row, lower)

    def write_again(self, row: int) -> None:
        """A block that could not be written before waits to be written."""
        assert self.held()
        if self.catalog.memory.ready(row):
            self._write_to(row, self._targets[True])

    def write_used(self, rows: list[int]) -> None:
        """Blocks were asked for again: those in memory may be worth writing now."""
        assert self.held()
        if self.admission.learns:
            self.admission.asked(rows)
        for lower in self.lower_tiers:
            for row in reversed(rows) if lower.queue.deferred else ():
                if row in lower.queue.deferred:
                    lower.queue.deferred.move_to_end(row, last=False)
        if self._targets[False] == self._targets[True]:
            return
        for row in rows:
            if self.catalog.memory.ready(row) and self.catalog.is_live(row):
                self._write_to(row, self._targets[True])
        self.work.notify_all()

    def promotes_from(self, source: LowerTier) -> bool:
        """Whether blocks read from `source` may go to a lower tier above it, as things are."""
        return bool(self._above[source])

    def promote(self, row: int, source: LowerTier, sample: int) -> None:
        """A block read from `source` is in memory now: it goes to the lower tiers above it too.

        Not while much waits to be written: a put must not wait for it. `sample` is a byte of the
        prompt's own: while a tier thrashes, only some prompts enter it.
        """
        assert self.held()
        if 2 * self.dirty_bytes > self.dirty_limit_bytes or not self.catalog.is_live(row):
            return
        above = self._above[source]
        if above and self.admission.promotes(row, sample):
            self._write_to(row, above)
            self.work.notify_all()

    def is_dirty(self, row: int) -> bool:
        """Whether a block waits to be written to any lower tier."""
        return any(row in lower.queue.tickets for lower in self.lower_tiers)

    def mark_clean(self, row: int, lower: LowerTier) -> None:
        """A block no longer waits to be written to this tier."""
        assert self.held()
        lower.queue.mark_clean(row)
        catalog = self.catalog
        if catalog.is_deleted(row) and not catalog.leases(row) and not self.is_dirty(row):
            self.drop_everywhere(row)

    def _queue(self, row: int, lower: LowerTier) -> None:
        """A block in memory waits to be written to a tier, unless it is there or waits already."""
        if lower.queue.writers and lower.copies.absent(row) and row not in lower.queue.tickets:
            self.last_ticket += 1
            lower.queue.mark_dirty(row, self.last_ticket, self.clock.now())

    def _write_to(self, row: int, numbers: list[int], *, later: bool = False) -> None:
        """A block in memory waits to be written to those of these tiers that it may enter."""
        kept = _POLICY
        if self.admission.learns:
            wanted, numbers = numbers, self.admission.sift(row, numbers)
            kept = _BUDGET if wanted and not numbers else _POLICY
        for number in numbers:
            lower = self.lower_tiers[number]
            if later and lower.queue.writers:
                lower.queue.deferred[row] = None
            else:
                self._queue(row, lower)
        if self.catalog.unwritten.view[row]:
            if self.is_dirty(row) or any(row in lower.queue.deferred for lower in self.lower_tiers):
                kept = _WAITING
            elif not self.writes_back:
                kept = _READ_ONLY if self.lower_tiers else _NO_DRIVE
            self.catalog.unwritten.view[row] = kept

    def modes_changed(self) -> None:
        """The write modes of the lower tiers are other ones now."""
        modes = [lower.mode for lower in self.lower_tiers]
        self.admission.modes_changed()
        self._targets = {used: targets(modes, touched=used) for used in (False, True)}
        self._above = {
            lower: promotes(modes, number) for number, lower in enumerate(self.lower_tiers)
        }


class StoreCall:
    """Counts active calls. `close` waits until there are none."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def __enter__(self) -> None:
        with self._state.lock:
            self._state.check_open()
            self._state.calls += 1

    def __exit__(self, *_: object) -> None:
        state = self._state
        with state.lock:
            state.calls -= 1
            if state.closing.is_set():
                state.idle.notify_all()
