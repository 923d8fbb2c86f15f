"""Readers and writers on a store of three drives, one of which will fail."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.waiting import eventually

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.volume import Volume, volume_of
from kvdepot.io.files import Files
from kvdepot.store.open import Mode, assemble
from kvdepot.store.store import Store

DRIVES = 3
BAD = 1


def opened(path: Path, tier: str, files: Files | None, mode: Mode = "rw") -> Store:
    table: dict[str, Any] = {
        "path": [str(path / f"drive-{number}") for number in range(DRIVES)],
        "capacity": "48MiB",
        "segment": "1MiB",
        "retry_initial": "200ms",
        "retry_max": "1s",
        "read_timeout": "5s",
        "promote": False,
    }
    if tier == "hdd":
        table["run"] = 8 * BLOCK_BYTES
    dram = {"capacity": "4MiB", "prefault": False, "huge_pages": "never"}
    tree: dict[str, Any] = {"dram": dram, tier: table, "writeback": {"staging": "8MiB"}}
    return assemble(load(overrides=tree), files=files, mode=mode)


@dataclass
class Traffic:
    """Readers of one drive's blocks each; who writes puts what is missing, and more."""

    store: Store
    by_drive: dict[int, list[BlockKey]]
    writes: bool
    hits: Counter[int] = field(default_factory=Counter)
    misses: Counter[int] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        works: list[Callable[[], None]] = [
            lambda drive=drive: self._read(drive)  # type: ignore[misc]
            for drive in self.by_drive
        ]
        works += [self._write] if self.writes else []
        threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        assert not self.failures

    def _repeat(self, work: Callable[[], None]) -> None:
        try:
            while not self.stop.is_set():
                work()
        except BaseException as error:
            self.failures.append(error)
            raise

    def _read(self, drive: int) -> None:
        keys = self.by_drive[drive][:8]
        got = tiers(self.store, keys)  # checks every byte
        self.hits[drive] += sum(one is not None for one in got)
        self.misses[drive] += got.count(None)
        if None in got:
            if self.writes:
                assert all(put(self.store, keys))
            self.stop.wait(0.01)

    def _write(self) -> None:
        number = 1000 + self.misses[-1]
        self.misses[-1] += 1
        keys = prompt(space_of(self.store), number, 4)
        assert all(put(self.store, keys))
        assert None not in tiers(self.store, keys), "what was just put is there"
        self.stop.wait(0.005)

    def goes_on(self, drives: list[int], blocks: int) -> bool:
        """Whether so many more blocks are read from each of these drives."""
        before = Counter(self.hits)
        return eventually(lambda: all(self.hits[n] >= before[n] + blocks for n in drives))


def spread(store: Store) -> dict[int, list[BlockKey]]:
    """Blocks on every drive, nowhere else."""
    space = space_of(store)
    level = store.inspect().lower()
    keys: list[BlockKey] = []
    for number in range(60):
        some = prompt(space, number, 4)
        assert all(put(store, some))
        keys += some
        assert store.flush()
    found: dict[int, list[BlockKey]] = {drive: [] for drive in range(DRIVES)}
    with store.inspect().state.lock:
        for key, row in zip(keys, store.inspect().catalog.rows(keys), strict=True):
            if store.inspect().catalog.memory.ready(row):
                store.inspect().memory().drop(row)
            found[volume_of(level.copies.location[row])].append(key)
    assert all(len(some) >= 8 for some in found.values())
    return found


def bad_volume(store: Store) -> Volume:
    return store.inspect().volumes.entries[BAD].volume


def is_up(store: Store) -> bool:
    facts = bad_volume(store).facts()
    return facts.up and not facts.lost and BAD not in store.inspect().volumes.down
