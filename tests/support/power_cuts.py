"""Lives of a store that end in power cuts, all in one process, and what must be true after each."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.crash_workload import BLOCK_TOKENS, FULL, ROOMY, SPACES, Plan, payload_of
from tests.support.failures import DataError, check_data

from kvdepot.config.settings import Config, load
from kvdepot.core.block import BlockKey
from kvdepot.errors import ConfigError, DriveError, FormatError, KVDepotError
from kvdepot.store.check.offline import audit
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.power import PowerFiles, Seam

BOTH: frozenset[Seam] = frozenset({"sync", "sync_directory"})
_WRITES_MAX = 160
"""A life ends before it has changed the disk so often, or a little later."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A store, and what happens to it."""

    segments: int = ROOMY
    drives: int = 1
    below: str = ""
    fsync: str = "flush"
    drains: bool = False
    """Drives come and go."""
    late: float = 0.0
    """Share of the writes that miss their deadline."""
    seams: frozenset[Seam] = BOTH

    def config(self, paths: Sequence[Path], folder: Path) -> Config:
        segments = self.segments // self.drives * len(paths)
        plan = Plan(str(folder), 0, segments, below=self.below)
        tree = plan.settings()
        tree["ssd"].update(path=[str(path) for path in paths], fsync=self.fsync)
        for tier in ("ssd", "hdd"):
            if tier in tree:
                tree[tier].update(retry_initial=0.001, retry_max=0.01, profile="never")
        tree["writeback"]["put_timeout"] = _TIMEOUT_S
        return load(overrides=tree)


SETUPS = {
    "roomy": Setup(),
    "reclaim": Setup(FULL),
    "always": Setup(FULL, fsync="always"),
    "two drives": Setup(2 * FULL, drives=2),
    "demotion": Setup(FULL, below="write-back"),
    "through": Setup(FULL, below="write-through"),
    "drains": Setup(3 * FULL, drives=2, drains=True),
    "late writes": Setup(FULL, late=0.01),
}


@dataclass(slots=True)
class Verdict:
    """What cuts did that they must not."""

    cuts: int = 0
    wrong: int = 0
    lost: int = 0
    back: int = 0
    checked: int = 0
    """Blocks that had to be there and were looked for, over all cuts."""
    damage: list[str] = field(default_factory=list)
    """What an offline check says of a store after a cut."""
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise a DataError if a cut did what it must not."""
        check_data(not (self.wrong or self.lost or self.back or self.damage), self)


class Lives:
    """One folder and what its stores have promised."""

    def __init__(self, setup: Setup, folder: Path, seed: int) -> None:
        self.setup = setup
        self.folder = folder
        self.random = random.Random(seed)
        self.verdict = Verdict()
        self.paths = [folder / f"drive-{number}" for number in range(setup.drives)]
        self.known: set[BlockKey] = set()
        self.durable: set[BlockKey] = set()
        """A flush has said so; those that were evicted since may be gone."""
        self.gone: set[BlockKey] = set()
        """Removed, and a flush has said so since."""
        self.removed: set[BlockKey] = set()
        """Removed, and that is not durable yet."""
        self.written: list[BlockKey] = []
        self.number = 0

    def run(self, cuts: int) -> Verdict:
        for _ in range(cuts):
            try:
                self.live()
            except KVDepotError as error:
                text = f"the store cannot be used after {self.verdict.cuts} cuts"
                raise DataError(text) from error
            self.verdict.cuts += 1
        return self.verdict

    def live(self) -> None:
        files = PowerFiles(
            random.Random(self.random.getrandbits(32)),
            timeout_s=_TIMEOUT_S,
            late=0.0,
            seams=self.setup.seams,
        )
        config = self.setup.config(self.paths, self.folder)
        if self.verdict.cuts:
            self.judge(self.read(config))
            self.check()
        store = assemble(config, files=files)
        try:
            for space in SPACES.values():
                store.namespace(space)
            if self.verdict.cuts:
                self.judge(self.on_drives(store))
            self.removed.clear()
            files.late = self.setup.late
            files.cut_at = files.writes + self.random.randrange(1, _WRITES_MAX)
            rounds = 0
            while not files.off and rounds < 30:
                self.step(store, files)
                rounds += 1
            files.cut()
            self.durable &= self.on_drives(store)
        finally:
            files.cut()
            store.close(_TIMEOUT_S)

    def read(self, config: Config) -> set[BlockKey]:
        """What is there, by a store that changes nothing; every byte must be right."""
        present: set[BlockKey] = set()
        try:
            store = assemble(config, mode="r")
        except FormatError:  # nothing ever came to the disk
            return present
        except DriveError as error:  # nor to any of several
            drives = len(self.paths) + bool(self.setup.below)
            if str(error).count("there is no store here") < drives:
                raise
            return present
        with store:
            for space in SPACES.values():
                store.namespace(space)
            for key in sorted(self.known):
                into = bytearray(len(payload_of(key)))
                if store.get_many([key], [into])[0]:
                    present.add(key)
                    self.verdict.wrong += into != payload_of(key)
        return present

    def check(self) -> None:
        """What a cut leaves is not damage."""
        for path in self.folder.iterdir():
            if (path / "superblock").exists():
                try:
                    self.verdict.damage += [str(finding) for finding in audit(path).findings]
                except FormatError as error:
                    self.verdict.damage.append(str(error))

    def judge(self, present: set[BlockKey]) -> None:
        """What must be there is, and what must not be is not."""
        lost, back = self.durable - present, self.gone & present
        self.verdict.lost += len(lost)
        self.verdict.back += len(back)
        self.verdict.checked += len(self.durable)
        if lost or back:
            text = f"cut {self.verdict.cuts}: {len(lost)} lost, {len(back)} back"
            self.verdict.notes.append(f"{text}, of {len(self.durable)} and {len(self.gone)}")
        self.durable -= lost
        self.gone -= back
        # What is there without a promise may go with the next cut, or be made durable by it.
        self.written = [key for key in sorted(present) if key not in self.durable]

    def step(self, store: Store, files: PowerFiles) -> None:
        choice = self.random.random()
        if choice < 0.45:
            self.put(store)
        elif choice < 0.6:
            self.look(store)
        elif choice < 0.75:
            self.remove(store)
        elif choice < 0.97 or not self.setup.drains:
            self.flush(store, files)
        else:
            self.change_drives(store, files)

    def put(self, store: Store) -> None:
        name = self.random.choice(("small", "small", "large", "brief"))
        self.number += 1
        fresh = SPACES[name].keys(
            [self.number * 1000 + at for at in range(self.random.randrange(1, 8) * BLOCK_TOKENS)]
        )
        again = [key for key in sorted(self.gone) if self.random.random() < 0.1]
        for keys in (fresh, again):
            self.known.update(keys)
            self.gone.difference_update(keys)
            self.removed.difference_update(keys)
            store.put_many(keys, [payload_of(key) for key in keys], timeout_s=_TIMEOUT_S)
            self.written += keys

    def look(self, store: Store) -> None:
        for key in self.random.sample(sorted(self.known), min(6, len(self.known))):
            into = bytearray(len(payload_of(key)))
            if store.get_many([key], [into])[0]:
                self.verdict.wrong += into != payload_of(key)

    def remove(self, store: Store) -> None:
        there = sorted(self.known - self.gone - self.removed)
        if self.random.random() < 0.3:
            keys = [key for key in there if key.startswith(SPACES["brief"].tag)]
            self._forget(keys)
            store.remove(namespace=store.namespace(SPACES["brief"]))
        else:
            keys = self.random.sample(there, min(4, len(there)))
            self._forget(keys)
            store.remove(keys)
        if not store.stats()["counters"]["removal_unrecorded"]:
            self.removed.update(keys)

    def _forget(self, keys: list[BlockKey]) -> None:
        self.durable.difference_update(keys)
        self.written = [key for key in self.written if key not in keys]

    def flush(self, store: Store, files: PowerFiles) -> None:
        written = set(self.written)
        if store.flush(_TIMEOUT_S):
            there = self.on_drives(store)
            if not files.off:
                self.durable |= written & there
                self.gone |= self.removed
            self.written = [key for key in self.written if key not in written]
            self.removed.clear()

    def change_drives(self, store: Store, files: PowerFiles) -> None:
        """Drain a drive, or add one."""
        if len(self.paths) > 2 or (len(self.paths) == 2 and self.random.random() < 0.5):
            leaving = self.random.choice(self.paths)
            try:
                store.volumes.drain("ssd", leaving)
            except ConfigError:  # all drives are down once the power is off
                if not files.off:
                    raise
            if not files.off:
                self.paths.remove(leaving)
        else:
            path = self.folder / f"drive-{self.number}-more"
            self.number += 1
            with contextlib.suppress(KVDepotError):
                store.volumes.add("ssd", path)
                self.paths.append(path)

    def on_drives(self, store: Store) -> set[BlockKey]:
        """What the index says is on a drive."""
        inspect = store.inspect()
        keys = sorted(self.known)
        tiers = [inspect.are_in(keys, number) for number in range(len(inspect.state.lower_tiers))]
        return {key for at, key in enumerate(keys) if any(tier[at] for tier in tiers)}
