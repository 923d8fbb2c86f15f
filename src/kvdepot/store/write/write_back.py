"""Write-back: one thread a drive takes dirty blocks from memory and appends them to its log.

A block that cannot be written is given up: it stays in memory as long as there is room, is counted,
and `flush` tells. So a failed disk makes the store smaller, never slower or stuck.
"""

import threading
from typing import Final

from kvdepot.codec.record import record_bytes
from kvdepot.store.drives.restore import Restorer
from kvdepot.store.move.demote import Demoter
from kvdepot.store.move.reclaim import Reclaimer
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.tiers.log.drive import Drive

_BLOCKS_MAX: Final = 512
_THREADS: Final = 2
_LINGER_S: Final = 0.5
"""How long blocks wait for others of their prompt, where these should lie together."""
_PAUSE_S_MIN: Final = 0.001
_UPKEEP_S: Final = 1.0
_YIELD_S: Final = 0.1
_PART_BYTES_MIN: Final = 1 << 20
"""Of what waits, a drive takes its part only, so that a prompt lies on all of them; or this."""
_TRIES_MAX: Final = 8
"""The other thread may take the room that one has made."""
_PATIENCE_S: Final = 2.0
"""How long blocks wait for room that others have in use, before they are given up."""
_LOOK_AGAIN_S: Final = 0.05


class Writer:
    """The background threads of one drive: while one waits for the disk, the other keeps books."""

    def __init__(
        self, stock: Stock, level: Level, index: int, demoter: Demoter | None = None
    ) -> None:
        self._stock = stock
        self._level = level
        self._tier = level.tier
        self._index = index
        self._reclaimer = Reclaimer(stock, level, index, demoter)
        self._restorer = Restorer(stock, level, index)
        self._upkeep = threading.Lock()
        """Held by the thread that reclaims or restores."""
        self.threads = [
            threading.Thread(target=self._run, name=f"kvdepot-{level.name}-{index}", daemon=True)
            for _ in range(1 if level.run_bytes else _THREADS)
        ]

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._write(batch)
        finally:
            self._give_up()

    def _next(self) -> list[int]:
        """Wait for dirty blocks and take some. Empty: the store closes."""
        stock = self._stock
        batch: list[int] = []
        with stock.work:
            while not batch:
                while not self._ends() and (pause_s := self._pause_s()) != 0.0:
                    stock.work.wait(pause_s)
                if not self._level.dirty or self._drive.draining:
                    break
                batch = self._take()
                stock.changed.notify_all()
                if not batch and self._level.dirty:
                    stock.work.wait(_LINGER_S)
        return batch

    @property
    def _drive(self) -> Drive:
        return self._tier.drives[self._index]

    def _ends(self) -> bool:
        return self._stock.closing or self._drive.draining

    def _pause_s(self) -> float | None:
        """How long to wait before work is taken: 0 not at all, None until it comes. Lock held."""
        level = self._level
        if not level.dirty:
            return None
        if self._sits_out():
            retry_s = self._tier.drives[self._index].breaker.health().retry_in_s
            return max(_PAUSE_S_MIN, retry_s or _LINGER_S)
        if not level.run_bytes:
            return self._yield_s()
        enough = level.dirty_bytes >= level.run_bytes * (1 + len(self._tier.drives))
        pressed = 2 * self._stock.dirty_bytes >= self._stock.dirty_limit_bytes
        hurried = next(iter(level.tickets.values())) <= level.hurry
        since_s = 0.0 if enough or pressed or hurried else level.dirty_since_s
        if level.turns.next() != self._index:
            since_s = max(since_s, level.turns.passed_s)
        left_s = since_s + _LINGER_S - self._stock.clock.now()
        return left_s if left_s > _PAUSE_S_MIN else 0.0

    def _yield_s(self) -> float:
        """How long to let a drive go first that is faster than this one. Lock held.

        Where much waits everybody takes of it, and who is faster comes more often.
        """
        level, stock = self._level, self._stock
        if 2 * stock.dirty_bytes >= stock.dirty_limit_bytes or not level.turns.are_uneven():
            return 0.0
        if level.turns.next() == self._index:
            return 0.0
        since_s = max(level.turns.passed_s, level.dirty_since_s)
        left_s = since_s + _YIELD_S - stock.clock.now()
        return left_s if left_s > _PAUSE_S_MIN else 0.0

    def _sits_out(self) -> bool:
        """Whether this drive is down or worn for now while another one can do the work."""
        return not self._is_up(self._index) and self._another_is_up()

    def _another_is_up(self) -> bool:
        others = range(len(self._tier.drives))
        return any(self._is_up(index) for index in others if index != self._index)

    def _is_up(self, index: int) -> bool:
        if self._tier.drives[index].draining or self._tier.drives[index].wear.spent:
            return False
        health = self._tier.drives[index].breaker.health()
        return health.ok or (index == self._index and not health.retry_in_s)

    def _give_up(self) -> None:
        """The thread ends. If that is not by plan, nothing may wait for it any longer."""
        stock = self._stock
        with stock.changed:
            self._level.writers -= 1
            if not self._level.writers:
                for row in list(self._level.tickets):
                    stock.counters.write_failed += 1
                    stock.mark_clean(row, self._level)
                self._level.dirty.clear()
            stock.changed.notify_all()

    def _take(self) -> list[int]:
        """The next dirty blocks, now in flight. Lock held."""
        stock, catalog = self._stock, self._stock.catalog
        segment_bytes = self._tier.drives[self._index].settings.segment_bytes
        self._level.sort_dirty()
        budget = min(self._level.run_bytes or self._part_bytes(), segment_bytes // 4)
        batch: list[int] = []
        for _ in range(min(len(self._level.dirty), _BLOCKS_MAX)):
            row = self._level.dirty[0]
            nbytes = record_bytes(catalog.nbytes[row])
            if batch and nbytes > budget:
                break
            self._level.dirty.popleft()
            if catalog.is_doomed(row) or not self._level.copies.absent(row):
                stock.mark_clean(row, self._level)
                continue
            if self._written_elsewhere(row):
                self._level.dirty.append(row)
                continue
            budget -= nbytes
            self._level.copies.reserve(row, self._index << 56)
            batch.append(row)
        catalog.lease(batch)
        if batch:
            self._level.turns.take(self._index, self._bytes_of(batch), stock.clock.now())
        if batch and self._level.run_bytes:
            stock.work.notify_all()
        return batch

    def _part_bytes(self) -> int:
        level, most = self._level, self._stock.config.writeback.batch
        if len(self._tier.drives) == 1:
            return most
        part = int(level.dirty_bytes * level.turns.part(self._index) / len(self.threads))
        return min(most, max(_PART_BYTES_MIN, part))

    def _bytes_of(self, rows: list[int]) -> int:
        return sum(record_bytes(self._stock.catalog.nbytes[row]) for row in rows)

    def _written_elsewhere(self, row: int) -> bool:
        """Whether another tier's thread has the record in hand: its head is that one's now."""
        others = [level for level in self._stock.levels if level is not self._level]
        return any(not other.copies.absent(row) and not other.copies.ready(row) for other in others)

    def _write(self, batch: list[int]) -> None:
        """Append blocks, making room as long as that helps.

        What has been written is entered before room is looked for: a segment with a block that is
        in no books cannot be reclaimed, and the other thread may be looking too.
        """
        nbytes, total = self._stock.catalog.nbytes, self._bytes_of(batch)
        left = self._enter(batch, self._append(batch))
        for _ in range(_TRIES_MAX):
            if not left or not self._find_room(max(record_bytes(nbytes[row]) for row in left)):
                break
            left = self._enter(left, self._append(left))
        self._pass_on(left)
        with self._stock.changed:
            self._level.turns.done(self._index, total)
        self._keep_spare()

    def _append(self, rows: list[int]) -> dict[int, int]:
        stock = self._stock
        images = [
            stock.arena.image(
                stock.catalog.memory.location[row], record_bytes(stock.catalog.nbytes[row])
            )
            for row in rows
        ]
        locations = self._tier.append(self._index, images)
        return {row: at for row, at in zip(rows, locations, strict=True) if at is not None}

    def _find_room(self, nbytes: int) -> bool:
        """Make room, once others have let go of it. False: nothing helps."""
        stock = self._stock
        deadline_s = stock.clock.now() + _PATIENCE_S
        while not self.make_room(nbytes):
            with stock.changed:
                held_up = self._reclaimer.is_held_up() and stock.clock.now() < deadline_s
                if held_up:
                    stock.changed.wait(_LOOK_AGAIN_S)
            if not held_up:
                return self.make_room(nbytes)  # they may have let go just now
        return True

    def make_room(self, nbytes: int) -> bool:
        """Do what lets a refused write succeed. False: nothing helps."""
        with self._upkeep:
            drive = self._tier.drives[self._index]
            if drive.lost:
                return self._restorer.restore()
            if not drive.breaker.health().ok:
                return False
            return drive.has_room(nbytes) or self._reclaimer.reclaim()

    def restore(self) -> bool:
        """Start a drive that was lost anew, unless somebody does. True: it can be used."""
        if not self._upkeep.acquire(timeout=_UPKEEP_S):
            return False
        try:
            return self._drive.lost and self._restorer.restore()
        finally:
            self._upkeep.release()

    def shrink(self) -> None:
        """Reclaim until the drive has no more segments than it may."""
        with self._upkeep:
            while not self._drive.trim() and self._reclaimer.reclaim():
                pass

    def _keep_spare(self) -> None:
        """Reclaim ahead of need, while the new segment still has room for what is kept."""
        if not self._upkeep.acquire(blocking=False):
            return
        try:
            drive = self._tier.drives[self._index]
            while drive.breaker.health().ok and not drive.lost and drive.spare_slots() < 1:
                if not self._reclaimer.reclaim():
                    return
        finally:
            self._upkeep.release()

    def _enter(self, rows: list[int], places: dict[int, int]) -> list[int]:
        """Put what was written into the books. Returns what was not."""
        stock, catalog = self._stock, self._stock.catalog
        removed = []
        with stock.changed:
            for row, location in places.items():
                self._level.copies.location[row] = location
                self._level.copies.seal(row)
                self._level.enter(row, location)
                if self._level is stock.levels[0]:
                    self._level.count_anew(row)
                stock.counters.written += 1
                stock.counters.written_bytes += record_bytes(catalog.nbytes[row])
                if catalog.is_doomed(row):
                    removed.append(self._tier.removal(catalog.table.key(row)))
        unrecorded = bool(removed) and bool(self._tier.erase(removed))
        with stock.changed:
            stock.counters.removal_unrecorded += unrecorded
            for row in places:
                stock.mark_clean(row, self._level)
            stock.unlease(list(places))
        return [row for row in rows if row not in places]

    def _pass_on(self, rows: list[int]) -> None:
        """What could not be written goes to another drive, or is given up."""
        stock = self._stock
        another = not self._is_up(self._index) and self._another_is_up()
        with stock.changed:
            for row in rows:
                self._level.copies.drop(row)
                if not another:
                    stock.counters.write_failed += 1
                    stock.mark_clean(row, self._level)
            if another:
                self._level.dirty.extendleft(reversed(rows))
            stock.unlease(rows)
            if rows or len(stock.levels) > 1:
                stock.work.notify_all()
