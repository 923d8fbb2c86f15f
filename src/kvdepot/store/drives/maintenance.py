"""The drives of a store and the threads of its tiers: started, added to, drained and resized."""

import threading
from pathlib import Path
from typing import Final

from kvdepot.core.units import parse_bytes
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.store.drives.watchdog import Prober
from kvdepot.store.move.append import MakeRoom
from kvdepot.store.move.demote import Demoter
from kvdepot.store.move.demote_ahead import Migrator
from kvdepot.store.move.drain import Evacuator
from kvdepot.store.move.memory_levels import Porter
from kvdepot.store.move.mirror import Mirrorer
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.store.write.write_back import Writer

_SEGMENTS_MIN: Final = 3


class Fleet:
    """All writable drives, by tier."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.writers: dict[Level, list[Writer]] = {}
        self._demoters: dict[Level, Demoter] = {}
        """By the upper tier."""
        self._migrators: list[Migrator] = []
        self._mirrorers: list[Mirrorer] = []
        self._change = threading.Lock()
        """Held while drives come or go."""
        self._prober = Prober(stock, self.writers)
        writable = [level for level in stock.levels if level.tier.writable]
        for below, level in zip([None, *writable[::-1]], writable[::-1], strict=False):
            if below is not None:
                self._demoters[level] = self._demoter(level, below)
                self._migrators.append(Migrator(stock, self._demoters[level]))
            self.writers[level] = []
            for index in range(len(level.tier.drives)):
                self._add_writer(level, index)
            if level.mirrors is not None:
                self._mirrorers.append(Mirrorer(stock, level, self._room_maker(level)))
        self._porters = [Porter(stock)] if len(stock.pools) > 1 else []
        for thread in self.threads():
            thread.start()

    def threads(self) -> list[threading.Thread]:
        writers = [writer for some in self.writers.values() for writer in some]
        threads = [thread for writer in writers for thread in writer.threads]
        threads += [migrator.thread for migrator in self._migrators]
        threads += [mirrorer.thread for mirrorer in self._mirrorers]
        threads += [porter.thread for porter in self._porters]
        return [*threads, self._prober.thread] if self._stock.levels else threads

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of a store that closes. False: one is still busy."""
        for porter in self._porters:
            porter.call()
        threads = self.threads()
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def add(self, tier: str, path: Path) -> None:
        """Use one more drive, which must be empty."""
        level = self._level(tier)
        with self._change:
            index = level.tier.add(path)
            with self._stock.changed:
                writer = self._add_writer(level, index)
                level.look_again()
            for thread in writer.threads:
                thread.start()

    def drain(self, tier: str, path: Path) -> int:
        """Move a drive's blocks to the others and use it no more. Returns how many were moved."""
        level = self._level(tier)
        with self._change:
            index = level.tier.index_of(path)
            active = [drive for drive in level.tier.drives if not drive.draining]
            if level.tier.drives[index].draining or len(active) < 2:
                raise ConfigError(f"{tier}.path", f"{path} cannot go: no other drive is there")
            writers = self.writers[level]
            evacuator = Evacuator(self._stock, level, index, self._room_maker(level))
            moved = evacuator.evacuate()
            if self._stock.closing:
                raise StoreClosedError(f"the store was closed before {path} was empty")
            with self._stock.work:
                level.tier.drives[index].retire()
                self._stock.work.notify_all()
            for thread in writers[index].threads:
                thread.join()
            return moved

    def resize(self, tier: str, capacity: int | str) -> None:
        """Give a tier more or less room; blocks leave where it is less."""
        level = self._level(tier)
        try:
            capacity_bytes = parse_bytes(capacity)
        except ValueError as error:
            raise ConfigError(f"{tier}.capacity", str(error)) from error
        with self._change:
            drives = [
                (writer, drive)
                for writer, drive in zip(self.writers[level], level.tier.drives, strict=True)
                if not drive.draining
            ]
            share = capacity_bytes // len(drives)
            for _, drive in drives:
                if share // drive.settings.segment_bytes < _SEGMENTS_MIN:
                    raise ConfigError(
                        f"{tier}.capacity",
                        f"is less than {_SEGMENTS_MIN} segments for each of {len(drives)} drives",
                    )
            for writer, drive in drives:
                drive.resize(share // drive.settings.segment_bytes)
                writer.shrink()
            with self._stock.changed:
                level.look_again()

    def set_mode(self, tier: str, mode: str) -> None:
        """Change how a tier gets its blocks, from now on."""
        found = [level for level in self._stock.levels if level.name == tier]
        if not found:
            raise ConfigError(f"{tier}.write_mode", "this store has no such tier of files")
        try:
            chosen = WriteMode(mode)
        except ValueError as error:
            known = ", ".join(known.value for known in WriteMode)
            raise ConfigError(f"{tier}.write_mode", f"{mode!r} is not one of {known}") from error
        with self._stock.changed:
            found[0].mode = chosen

    def _level(self, tier: str) -> Level:
        for level in self.writers:
            if level.name == tier:
                return level
        files = [copies.tier for copies in self._stock.catalog.files]
        if tier not in files and tier in [copies.tier for copies in self._stock.catalog.tiers]:
            raise ConfigError(
                tier,
                "memory cannot change while the store is open: it is mapped by all who use it",
                hint=f"change {tier} in the settings, and start again",
            )
        raise ConfigError(tier, "this store has no such tier of files that it may write to")

    def _add_writer(self, level: Level, index: int) -> Writer:
        writer = Writer(self._stock, level, index, self._demoters.get(level))
        self.writers[level].append(writer)
        level.writers += len(writer.threads)
        return writer

    def _demoter(self, upper: Level, lower: Level) -> Demoter:
        return Demoter(self._stock, upper, lower, self._room_maker(lower))

    def _room_maker(self, level: Level) -> MakeRoom:
        writers = self.writers[level]
        return lambda drive, nbytes: writers[drive].make_room(nbytes)
