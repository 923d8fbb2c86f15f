"""What the child does until it is killed, and the diary by which the parent judges what is left.

The diary is a file of JSON lines, each written before or after something became true: what it says
survives the child. Everything else follows from the seed.
"""

import json
import os
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.failures import check_data
from tests.support.phases import Phase, Phases

from kvdepot.config.settings import Config, load
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.io.files import EngineKind
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import BOUNDARIES, Fault, FaultyFiles, Kill, Operation
from kvdepot.testing.images import payload_for

BLOCK_TOKENS = 4
SEGMENT_BYTES = 128 << 10
ROUNDS = 12
ROOMY, FULL = 32, 8
SPACES = {
    "small": Namespace(model="small", layout=KVLayout.opaque(12_000, BLOCK_TOKENS, 3)),
    "large": Namespace(model="large", layout=KVLayout.opaque(20_480, BLOCK_TOKENS, 5)),
    "brief": Namespace(model="brief", layout=KVLayout.opaque(4_096, BLOCK_TOKENS)),
}
LAYOUTS = {space.tag: space.layout for space in SPACES.values()}

Moment = Literal["before", "torn", "after", "without"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a child."""

    folder: str
    seed: int
    segments: int
    """Of capacity, over all drives. ROOMY: nothing is evicted. FULL: segments are reclaimed."""
    drives: int = 1
    engine: EngineKind = "auto"
    boundary: int = 0
    """Be killed at this write boundary; 0 for none."""
    moment: Moment = "before"
    kill_after_s: float | None = None
    """Be killed by the parent after this time."""
    drains: bool = False
    """Drain the first drive in the second session."""
    below: str = ""
    """The write mode of a hard drive below; none for no such drive."""
    phase: Phase | Literal[""] = ""
    """Count the boundaries of this phase only."""

    @property
    def roomy(self) -> bool:
        """Whether all that the workload puts fits: what was acknowledged must be there then."""
        return self.segments >= ROOMY

    @property
    def diary(self) -> Path:
        return Path(self.folder) / "diary"

    @property
    def paths(self) -> list[Path]:
        return [Path(self.folder) / f"drive-{number}" for number in range(self.drives)]

    @property
    def hdd_paths(self) -> list[Path]:
        return [Path(self.folder) / "below"] if self.below else []

    @property
    def capacity_bytes(self) -> int:
        return self.segments * SEGMENT_BYTES

    def config(self) -> Config:
        return load(overrides=self.settings())

    def settings(self) -> dict[str, Any]:
        ssd: dict[str, Any] = {
            "path": [str(path) for path in self.paths],
            "capacity": self.capacity_bytes,
            "segment": SEGMENT_BYTES,
        }
        writeback = {"staging": 1 << 20, "put_timeout": 10.0}
        dram = {"capacity": 3 << 20, "huge_pages": "never", "prefault": False}
        tree: dict[str, Any] = {"dram": dram, "ssd": ssd, "writeback": writeback}
        if self.below:
            tree["hdd"] = {
                "path": [str(path) for path in self.hdd_paths],
                "capacity": 4 * ROOMY * SEGMENT_BYTES,
                "segment": 4 * SEGMENT_BYTES,
                "run": 4 * SEGMENT_BYTES,
                "write_mode": self.below,
            }
        return tree

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def payload_of(key: BlockKey) -> bytes:
    return payload_for(key, LAYOUTS[key[:8]].block_bytes)


def register(store: Store) -> None:
    for space in SPACES.values():
        store.namespace(space)


class Diary:
    """Facts, one line each, on disk's side of a SIGKILL when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, fact: str, keys: list[BlockKey], **more: Any) -> None:
        line = {"fact": fact, "keys": [key.hex() for key in keys], **more}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


@dataclass(slots=True)
class PinnedRows:
    """What the diary says must be there and must not; of anything else nothing is known."""

    known: set[BlockKey] = field(default_factory=set)
    there: set[BlockKey] = field(default_factory=set)
    gone: set[BlockKey] = field(default_factory=set)
    boundaries: int = 0
    finished: bool = False
    died_in: str = ""
    """The phase that a write was in when it was to be the last."""
    in_phase: int = 0
    """Boundaries that were in the plan's phase."""

    @classmethod
    def read(cls, path: Path) -> "PinnedRows":
        promises = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            promises.take(json.loads(line))
        return promises

    def take(self, line: dict[str, Any]) -> None:
        keys = {BlockKey(bytes.fromhex(key)) for key in line["keys"]}
        match line["fact"]:
            case "putting":
                self.known |= keys
                self.gone -= keys
            case "flushed":
                self.there |= keys
            case "removing":
                self.there -= keys
            case "removed":
                self.there -= keys
                self.gone |= keys
            case "finished":
                self.finished = True
                self.boundaries = line["boundaries"]
                self.in_phase = line["in_phase"]
            case "dying":
                self.died_in = line["phase"]


class Workload:
    """Rounds of puts, gets, removals and flushes, in two sessions with a close between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.diary = Diary(plan.diary)
        self.living: list[BlockKey] = []
        self.unflushed: list[BlockKey] = []
        self.boundaries = 0
        self.in_phase = 0
        self.phases = Phases()

    def run(self) -> None:
        if self.plan.phase:
            self.phases.install()
        for half in (range(ROUNDS // 2), range(ROUNDS // 2, ROUNDS)):
            self.session(half)
        self.diary.write("finished", [], boundaries=self.boundaries, in_phase=self.in_phase)

    def session(self, rounds: range) -> None:
        files = FaultyFiles(self.plan.engine, faults=self.faults())
        files.boundaries = self.boundaries
        store = assemble(self.plan.config(), files=files)
        register(store)
        for number in rounds:
            self.round(store, number)
        if store.close():
            self.diary.write("flushed", self.unflushed)
        self.unflushed = []
        self.boundaries = files.boundaries

    def faults(self) -> list[Fault]:
        """What is to happen, if anything."""
        kill = Kill(self.plan.moment)
        if self.plan.phase:
            return [Fault(BOUNDARIES, kill, times=None, where=self.is_last_in_phase)]
        return [Fault.at_boundary(self.plan.boundary, kill)] if self.plan.boundary else []

    def is_last_in_phase(self, operation: Operation) -> bool:
        """Whether this write is the one in the plan's phase to die at; says so in the diary."""
        del operation
        if not self.plan.phase or not self.phases.contains(self.plan.phase):
            return False
        self.in_phase += 1
        last = self.in_phase == self.plan.boundary
        if last:
            self.diary.write("dying", [], phase=self.plan.phase)
        return last

    def round(self, store: Store, number: int) -> None:
        if self.plan.drains and number == ROUNDS // 2 + 1:
            store.volumes.drain("ssd", self.plan.paths[0])
        self.put(store, self.chain("small", number, 5))
        self.put(store, self.chain("large", number, 2))
        self.look(store)
        if number % 3 != 2:
            self.flush(store)
        if number % 2:
            self.remove(store, self.random.sample(self.living, min(3, len(self.living))))
        if number % 4 == 1:
            self.put(store, self.chain("brief", number, 3))
        if number % 4 == 3:
            self.remove_namespace(store)
        if number == ROUNDS - 2:
            again = self.chain("small", 1, 5)
            self.put(store, again)
            self.flush(store)

    def chain(self, name: str, number: int, blocks: int) -> list[BlockKey]:
        tokens = [number * 1000 + at for at in range(blocks * BLOCK_TOKENS)]
        return SPACES[name].keys(tokens)

    def put(self, store: Store, keys: list[BlockKey]) -> None:
        self.diary.write("putting", keys)
        answers = store.put_many(keys, [payload_of(key) for key in keys], timeout_s=10.0)
        if not all(answers):
            raise AssertionError(f"put said {answers}")
        self.unflushed += keys
        self.living += [key for key in keys if key not in self.living]

    def look(self, store: Store) -> None:
        """Use some blocks, so that reclaim finds them worth keeping."""
        for key in self.random.sample(self.living, min(6, len(self.living))):
            into = bytearray(len(payload_of(key)))
            if store.get_many([key], [into])[0]:
                check_data(into == payload_of(key), f"wrong bytes for {key.hex()}")

    def flush(self, store: Store) -> None:
        if not store.flush():
            raise AssertionError("flush failed")
        self.diary.write("flushed", self.unflushed)
        self.unflushed = []

    def remove(self, store: Store, keys: list[BlockKey]) -> None:
        self.forget(keys)
        self.diary.write("removing", keys)
        store.remove(keys)
        self.removed(store, keys)

    def remove_namespace(self, store: Store) -> None:
        tag = SPACES["brief"].tag
        keys = [key for key in self.living if key.startswith(tag)]
        self.forget(keys)
        self.diary.write("removing", keys)
        store.remove(namespace=store.namespace(SPACES["brief"]))
        self.removed(store, keys)

    def removed(self, store: Store, keys: list[BlockKey]) -> None:
        assert not store.stats()["counters"]["removal_unrecorded"], "there was no room for a note"
        self.diary.write("removed", keys)

    def forget(self, keys: list[BlockKey]) -> None:
        self.living = [key for key in self.living if key not in keys]
        self.unflushed = [key for key in self.unflushed if key not in keys]
