"""The drives of a store and the threads of its tiers: started, added to, drained and resized."""

import logging
import threading
from pathlib import Path
from typing import Final

from kvdepot.core.tier import ChangesDrives
from kvdepot.core.units import parse_bytes
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.drives.watchdog import DriveWatchdog
from kvdepot.store.move.demote import DemoteAhead, Demoter
from kvdepot.store.move.drain import drain
from kvdepot.store.move.memory_levels import MemoryLevels
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.move.reclaim import DriveRoom
from kvdepot.store.move.renew import renew
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState
from kvdepot.store.write.write_back import WriteBack

_SEGMENTS_MIN: Final = 3
_log = logging.getLogger("kvdepot.store")


class DriveMaintenance:
    """All writable tiers, with their background work."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.rooms: dict[LowerTier, DriveRoom] = {}
        self.write_backs: dict[LowerTier, WriteBack] = {}
        self.demoters: dict[LowerTier, Demoter] = {}
        """By the upper tier."""
        self.mover = BlockMover(
            state,
            lambda lower, drive, nbytes: self.rooms[lower].make(drive, nbytes),
        )
        self._change = threading.Lock()
        """Held while drives come or go."""
        self.watchdog = DriveWatchdog(state, self.rooms, self.mover)
        threads: list[threading.Thread] = []
        below: LowerTier | None = None
        for lower in reversed(state.lower_tiers):
            if not lower.tier.writable:
                self.rooms[lower] = DriveRoom(state, lower, self.mover, None)
                continue
            demoter = Demoter(state, lower, below, self.mover) if below is not None else None
            if demoter is not None:
                self.demoters[lower] = demoter
                threads.append(DemoteAhead(state, demoter).thread)
            room = self.rooms[lower] = DriveRoom(state, lower, self.mover, demoter)
            write_back = self.write_backs[lower] = WriteBack(state, lower, self.mover, room)
            threads += write_back.threads
            below = lower
        self._memory_levels = MemoryLevels(state) if len(state.memory_tiers) > 1 else None
        if self._memory_levels is not None:
            threads.append(self._memory_levels.thread)
        if state.lower_tiers:
            threads.append(self.watchdog.thread)
        self._threads = threads
        for thread in threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of a store that closes. False: one is still busy."""
        if self._memory_levels is not None:
            self._memory_levels.wake()
        threads = list(self._threads)
        deadline_s = self._state.clock.now() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._state.clock.now()))
        return not any(thread.is_alive() for thread in threads)

    def add(self, tier: str, path: Path) -> None:
        """Use one more drive, which must be empty."""
        lower, drives = self._changeable(tier)
        with self._change:
            drive = drives.add(path)
            self._give_its_share(lower, drives, drive)
            with self._state.lock:
                threads = self.write_backs[lower].add_threads()
                self._threads += threads
            for thread in threads:
                thread.start()
        _log.info("%s: drive %d added: %s", tier, drive, path)

    def _give_its_share(self, lower: LowerTier, drives: ChangesDrives, drive: int) -> None:
        """A drive that comes gets as much room as the others have now, whatever they began with."""
        count = lower.tier.drive_count()
        others = [lower.tier.drive(one) for one in range(count) if one != drive]
        rooms = [fact.segments_max * fact.segment_bytes for fact in others if not fact.draining]
        if rooms:
            segments = max(rooms) // lower.tier.drive(drive).segment_bytes
            drives.resize(drive, max(_SEGMENTS_MIN, segments))

    def drain(self, tier: str, path: Path) -> int:
        """Move a drive's blocks to the others and use it no more. Returns how many were moved."""
        lower, drives = self._changeable(tier)
        with self._change:
            drive = drives.index_of(path)
            facts = [lower.tier.drive(one) for one in range(lower.tier.drive_count())]
            others = [fact for one, fact in enumerate(facts) if one != drive and not fact.draining]
            # One that is away does not know yet what was removed meanwhile: this one does.
            if facts[drive].draining or not any(fact.up for fact in others):
                raise ConfigError(f"{tier}.path", f"cannot drain {path}: no other drive is up")
            moved = drain(self._state, lower, drive, self.mover)
            if self._state.closing.is_set():
                raise StoreClosedError(f"the store was closed before {path} was empty")
            if not drives.retire(drive):
                drives.end_drain(drive)
                raise ConfigError(
                    f"{tier}.path",
                    f"cannot drain {path}: its metadata could not be copied to the other drives",
                )
            with self._state.lock:
                lower.forget_drive(drive)  # its number may become another drive's
                self._state.work.notify_all()
        _log.info("%s: drive %d drained: %s, %d blocks moved", tier, drive, path, moved)
        return moved

    def renew(self, lower: LowerTier, rows: list[int]) -> bool:
        """Write blocks again; see store/move/renew.py. False: some could not be."""
        return not rows or renew(self._state, lower, rows, self.mover)

    def resize(self, tier: str, capacity: int | str) -> None:
        """Give a tier more or less room; blocks leave where it is less."""
        lower, drives = self._changeable(tier)
        try:
            capacity_bytes = parse_bytes(capacity)
        except ValueError as error:
            raise ConfigError(f"{tier}.capacity", str(error)) from error
        with self._change:
            facts = [(drive, lower.tier.drive(drive)) for drive in range(lower.tier.drive_count())]
            facts = [(drive, fact) for drive, fact in facts if not fact.draining]
            share = capacity_bytes // len(facts)
            for _, fact in facts:
                if share // fact.segment_bytes < _SEGMENTS_MIN:
                    raise ConfigError(
                        f"{tier}.capacity",
                        f"is less than {_SEGMENTS_MIN} segments for each of {len(facts)} drives",
                    )
            for drive, fact in facts:
                drives.resize(drive, share // fact.segment_bytes)
                self.rooms[lower].shrink(drive, lower.config.write_timeout)

    def set_mode(self, tier: str, mode: str) -> None:
        """Change how a tier gets its blocks, from now on."""
        found = [lower for lower in self._state.lower_tiers if lower.name == tier]
        if not found:
            raise ConfigError(f"{tier}.write_mode", "this store has no such tier of files")
        try:
            chosen = WriteMode(mode)
        except ValueError as error:
            known = ", ".join(known.value for known in WriteMode)
            raise ConfigError(f"{tier}.write_mode", f"{mode!r} is not one of {known}") from error
        with self._state.lock:
            found[0].mode = chosen
            self._state.modes_changed()

    def _changeable(self, tier: str) -> tuple[LowerTier, ChangesDrives]:
        for lower in self.write_backs:
            if lower.name == tier:
                if isinstance(lower.tier, ChangesDrives):
                    return lower, lower.tier
                raise ConfigError(tier, "this tier's drives cannot change while it is open")
        if tier in [memory.name for memory in self._state.memory_tiers]:
            raise ConfigError(
                tier,
                "memory cannot change while the store is open: it is mapped by all who use it",
                hint=f"change {tier} in the settings, and start again",
            )
        raise ConfigError(tier, "this store has no such tier of files that it may write to")
