"""Any mix of use and damage: right bytes or a miss, and a repair leaves the store sound."""

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, note
from hypothesis import strategies as st

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for

BLOCK_BYTES = 5000
BLOCKS = 24
LAYOUT = KVLayout.opaque(BLOCK_BYTES, 16, 2)

blocks = st.integers(0, BLOCKS - 1)
bits = st.integers(0, 1 << 62)
steps = st.one_of(
    st.tuples(st.sampled_from(["put", "get", "remove"]), blocks),
    st.tuples(st.sampled_from(["put all", "flush", "reopen", "repair"]), st.just(0)),
    st.tuples(st.sampled_from(["flip", "truncate"]), bits),
)


@dataclass
class Bench:
    """A store, and what it must answer."""

    path: Path
    store: Store = field(init=False)
    space: NamespaceHandle = field(init=False)
    keys: list[BlockKey] = field(init=False)
    held: set[int] = field(default_factory=set)
    """Blocks that must be found, as long as nothing was damaged."""
    damaged: bool = False

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = kvdepot.open(
            dram={"capacity": "512KiB", "huge_pages": "never", "prefault": False},
            ssd={"path": str(self.path), "capacity": "4MiB", "segment": "64KiB"},
            writeback={"staging": "1MiB", "dirty_limit": 0.9},
        )
        self.space = self.store.namespace(model="m", layout=LAYOUT)
        self.keys = self.space.keys(list(range(16 * BLOCKS)))

    def step(self, name: str, argument: int) -> None:
        match name:
            case "put":
                self.put(argument)
            case "put all":
                for index in range(BLOCKS):
                    self.put(index)
            case "get":
                self.get(argument)
            case "remove":
                self.store.remove(self.keys[argument])
                self.held.discard(argument)
                if not self.damaged:
                    self.get(argument)
            case "flush":
                assert self.store.flush() or self.damaged
            case "reopen":
                self.store.close()
                self.open()
            case "repair":
                self.store.close()
                self.repair()
                self.open()
            case _:
                self.damage(name, random.Random(argument))

    def put(self, index: int) -> None:
        key = self.keys[index]
        if self.store.put(key, payload_for(key, BLOCK_BYTES), timeout_s=10.0):
            self.held.add(index)

    def get(self, index: int) -> None:
        key, target = self.keys[index], bytearray(BLOCK_BYTES)
        got = self.store.get(key, target)
        if got:
            assert bytes(target) == payload_for(key, BLOCK_BYTES)
        if not self.damaged:
            assert bool(got) == (index in self.held), got

    def damage(self, name: str, rng: random.Random) -> None:
        self.damaged = True
        # A superblock that is being replaced is there for an instant only.
        file = rng.choice([one for one in sorted(self.path.iterdir()) if one.suffix != ".new"])
        size = file.stat().st_size
        note(f"{name} {file.name}")
        with file.open("r+b") as opened:
            if name == "truncate":
                opened.truncate(rng.randrange(size + 1))
            elif size:
                offset = opened.seek(rng.randrange(size))
                (byte,) = opened.read(1)
                opened.seek(offset)
                opened.write(bytes([byte ^ 1 << rng.randrange(8)]))

    def repair(self) -> None:
        if not self.damaged:
            assert audit(self.path).findings == []
        repair(self.path)
        assert audit(self.path).findings == []


@given(st.lists(steps, max_size=30))
def test_use_and_damage_in_any_order(plan: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory) / "store")
        for name, argument in plan:
            bench.step(name, argument)
        for index in range(BLOCKS):
            bench.get(index)
        bench.store.close()
        bench.repair()
        bench.open()
        for index in range(BLOCKS):
            bench.get(index)
        assert bench.store.check().ok
        bench.store.close()
