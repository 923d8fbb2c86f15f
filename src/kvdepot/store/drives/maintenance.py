"""Starts the background threads of the tiers; adds, drains and resizes volumes."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.core.admin import DepotVolumes
from kvdepot.core.units import format_bytes, parse_bytes
from kvdepot.core.volume import OpenVolume
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.drives.watchdog import VolumeWatchdog
from kvdepot.store.move.demote import DemoteAhead, Demoter
from kvdepot.store.move.drain import drain, end_drain
from kvdepot.store.move.memory_levels import MemoryLevels
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.move.reclaim import VolumeRoom
from kvdepot.store.sessions.pins import PinManager
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState
from kvdepot.store.volume_entry import VolumeEntry
from kvdepot.store.write.write_back import WriteBack

_SEGMENTS_MIN: Final = 3
SYNC_S: Final = 10.0
"""Longest wait for changed metadata to be durable."""
OpensPath = Callable[[str, Path], OpenVolume | None]
"""Returns the factory for a path of a tier; None if the tier cannot have more volumes."""
_log = logging.getLogger("kvdepot.store")


class VolumeMaintenance(DepotVolumes):
    """All writable tiers, with their background work."""

    pins: PinManager
    """Pinned blocks, which must stay on the drives."""

    def __init__(self, state: StoreState, opens: OpensPath) -> None:
        self._state = state
        self._opens = opens
        self.rooms: dict[LowerTier, VolumeRoom] = {}
        self.write_backs: dict[LowerTier, WriteBack] = {}
        self.demoters: dict[LowerTier, Demoter] = {}
        """Demoters by their upper tier."""
        self.mover = BlockMover(
            state,
            lambda lower, volume, nbytes: self.rooms[lower].make(volume, nbytes),
        )
        self._change = threading.Lock()
        """Held while volumes are added, drained or resized."""
        self.watchdog = VolumeWatchdog(state, self.rooms, self.mover)
        threads: list[threading.Thread] = []
        below: LowerTier | None = None
        for lower in reversed(state.lower_tiers):
            if not lower.writable:
                self.rooms[lower] = VolumeRoom(state, lower, self.mover, None)
                continue
            demoter = Demoter(state, lower, below, self.mover) if below is not None else None
            if demoter is not None:
                self.demoters[lower] = demoter
                threads.append(DemoteAhead(state, demoter).thread)
            room = self.rooms[lower] = VolumeRoom(state, lower, self.mover, demoter)
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
        """Wait for the threads after the store began to close. False: one is still running."""
        if self._memory_levels is not None:
            self._memory_levels.wake()
        self.watchdog.stop()
        threads = list(self._threads)
        deadline_s = self._state.clock.now() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - self._state.clock.now()))
        return not any(thread.is_alive() for thread in threads)

    def add(self, tier: str, path: str | os.PathLike[str]) -> None:
        lower, path = self._changeable(tier), Path(path)
        with self._state.using, self._change:
            if any(same_path(entry, path) for entry in lower.volumes.entries):
                raise ConfigError(f"{tier}.path", f"{path} is in use")
            open_volume = self._opens(tier, path)
            if open_volume is None:
                raise ConfigError(tier, "this tier cannot have more volumes while it is open")
            entry = self._state.volumes.add(tier, str(path), open_volume)
            self._give_its_share(lower, entry)
            with self._state.lock:
                threads = self.write_backs[lower].add_threads()
                self._threads += threads
            for thread in threads:
                thread.start()
        _log.info("%s: volume %d added: %s", tier, entry.number, path)

    def _give_its_share(self, lower: LowerTier, entry: VolumeEntry) -> None:
        """Give a new volume the largest capacity that the others have now."""
        others = [facts for number, facts in lower.volumes.all_facts() if number != entry.number]
        rooms = [facts.capacity_bytes for facts in others if facts.may_write]
        if rooms:
            least = _SEGMENTS_MIN * entry.volume.facts().segment_bytes
            self._limit(entry, max(least, *rooms))

    def _limit(self, entry: VolumeEntry, capacity_bytes: int) -> None:
        entry.capacity_bytes = capacity_bytes
        entry.volume.set_limits(capacity_bytes, may_write=not entry.draining)

    def drain(self, tier: str, path: str | os.PathLike[str]) -> int:
        path = Path(path)
        with self._state.using:
            lower = self._changeable(tier)
            self._check_pins(lower, without=path)
            self.pins.write(SYNC_S)
            return self._drain(lower, tier, path)

    def _drain(self, lower: LowerTier, tier: str, path: Path) -> int:
        with self._change:
            entry = self._entry_of(lower, path)
            others = [
                facts for number, facts in lower.volumes.all_facts() if number != entry.number
            ]
            # A detached volume lacks later removals, which this one has.
            if entry.draining or not any(facts.up and facts.may_write for facts in others):
                raise ConfigError(f"{tier}.path", f"cannot drain {path}: no other volume is up")
            moved = drain(self._state, lower, entry.number, self.mover)
            if self._state.closing.is_set():
                raise StoreClosedError(f"the store was closed before {path} was empty")
            if not self._state.volumes.retire(entry):
                end_drain(entry)
                raise ConfigError(
                    f"{tier}.path",
                    f"cannot drain {path}: its metadata could not be copied to the other volumes",
                )
            with self._state.lock:
                lower.forget_volume(entry.number)  # its number may become another volume's
                self._state.lock.work.notify_all()
        _log.info("%s: volume %d drained: %s, %d blocks moved", tier, entry.number, path, moved)
        return moved

    def _entry_of(self, lower: LowerTier, path: Path) -> VolumeEntry:
        for entry in lower.volumes.entries:
            if same_path(entry, path):
                return entry
        raise ConfigError(f"{lower.name}.path", f"{path} is not one of this store's volumes")

    def resize(self, tier: str, capacity: int | str) -> None:
        """Blocks are evicted from a tier that shrinks."""
        lower = self._changeable(tier)
        try:
            capacity_bytes = parse_bytes(capacity)
        except ValueError as error:
            raise ConfigError(f"{tier}.capacity", str(error)) from error
        with self._state.using, self._change:
            self._check_pins(lower, capacity_bytes=capacity_bytes)
            entries = [entry for entry in lower.volumes.entries if not entry.draining]
            share = capacity_bytes // len(entries)
            if any(share // _segment_bytes(entry) < _SEGMENTS_MIN for entry in entries):
                raise ConfigError(
                    f"{tier}.capacity",
                    f"is less than {_SEGMENTS_MIN} segments for each of {len(entries)} volumes",
                )
            for entry in entries:
                self._limit(entry, share // _segment_bytes(entry) * _segment_bytes(entry))
                self.rooms[lower].shrink(entry.number, lower.config.write_timeout)

    def set_write_mode(self, tier: str, mode: str) -> None:
        self._state.check_open()
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
            self._state.writes.modes_changed()

    def _check_pins(
        self, lower: LowerTier, *, without: Path | None = None, capacity_bytes: int | None = None
    ) -> None:
        """Raise ConfigError if pinned blocks would not fit the tier afterwards."""
        tier, room = lower.name, 0
        for entry in lower.volumes.entries:
            facts = entry.volume.facts()
            if without is None or not same_path(entry, without):
                room += 0 if entry.draining else facts.capacity_bytes
            elif not facts.up and self.pins.blocks.has_missing():
                raise ConfigError(
                    f"{tier}.path",
                    f"cannot drain {without}: it is down and may have missing pinned blocks",
                    hint="attach it again, or end those pins: kvdepot session unpin",
                )
        room = room if capacity_bytes is None else capacity_bytes
        with self._state.lock:
            pinned = self.pins.blocks.pinned_bytes(tier)
        if pinned and 2 * pinned > room:
            raise ConfigError(
                f"{tier}.capacity",
                f"{format_bytes(pinned)} are pinned, over half of the {format_bytes(room)} left",
                hint="end pins: kvdepot session list, kvdepot session unpin",
            )

    def _changeable(self, tier: str) -> LowerTier:
        self._state.check_open()
        for lower in self.write_backs:
            if lower.name == tier:
                return lower
        if tier in [memory.name for memory in self._state.memory_tiers]:
            raise ConfigError(
                tier,
                "memory tiers cannot change while the store is open",
                hint=f"change {tier} in the settings and restart",
            )
        raise ConfigError(tier, "this store has no such tier, or may not write to it")


def same_path(entry: VolumeEntry, path: Path) -> bool:
    known = Path(entry.path)
    return known == path or known.resolve() == path.resolve()


def _segment_bytes(entry: VolumeEntry) -> int:
    return max(1, entry.volume.facts().segment_bytes)
