"""The store of a torture round: random tiers, folders of drives, and blocks."""

import faulthandler
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.depot import Depot
from kvdepot.io.files import EngineKind, Files
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, EmulatedFiles
from kvdepot.testing.images import payload_for
from kvdepot.volumes.object.bucket import Bucket

BLOCK_TOKENS: Final = 4
SEGMENT_BYTES: Final = 64 << 10
LIMIT_S: Final = 10.0
"""Timeout of puts, reads and writes; long, because a busy machine may look like a slow disk."""
HARD_DRIVE: Final = DriveModel(read_bandwidth=200_000_000, write_bandwidth=200_000_000, seek=0.002)
SPACES: Final = (
    Namespace(model="small", layout=KVLayout.opaque(6_000, BLOCK_TOKENS, 3)),
    Namespace(model="large", layout=KVLayout.opaque(20_480, BLOCK_TOKENS, 5)),
    Namespace(model="brief", layout=KVLayout.opaque(4_096, BLOCK_TOKENS)),
)
PROMPTS: Final = ((10, 6), (6, 3), (5, 4))
"""Number of prompts, and of blocks of each prompt, by namespace."""

WriteModeName = Literal["write-back", "write-through", "write-through-selective", "pass-through"]
FsyncName = Literal["never", "flush", "always"]
EvictionName = Literal["default", "lru", "fifo", "lfu", "s3fifo"]


@dataclass(frozen=True, slots=True)
class Block:
    """A block that rounds put, get and remove."""

    number: int
    key: BlockKey
    nbytes: int
    space: int
    """Index into SPACES."""
    prompt: int

    @property
    def payload(self) -> bytes:
        return _payload(self.key, self.nbytes)


@cache
def _payload(key: BlockKey, nbytes: int) -> bytes:
    return payload_for(key, nbytes)


@cache
def all_blocks() -> tuple[Block, ...]:
    """All blocks, prompt by prompt."""
    blocks: list[Block] = []
    prompt = 0
    for number, (space, (prompts, length)) in enumerate(zip(SPACES, PROMPTS, strict=True)):
        for _ in range(prompts):
            tokens = [prompt * 1000 + at for at in range(length * BLOCK_TOKENS)]
            for key in space.keys(tokens):
                blocks.append(Block(len(blocks), key, space.layout.block_bytes, number, prompt))
            prompt += 1
    return tuple(blocks)


@cache
def prompts() -> tuple[tuple[Block, ...], ...]:
    """The blocks of each prompt, head first."""
    count = all_blocks()[-1].prompt + 1
    return tuple(
        tuple(block for block in all_blocks() if block.prompt == prompt) for prompt in range(count)
    )


@dataclass(frozen=True, slots=True)
class TierMix:
    """A combination of tiers and settings."""

    ssds: int
    ssd_segments: int
    """Segments of each drive."""
    ssd_mode: WriteModeName
    hdds: int
    hdd_segments: int
    hdd_mode: WriteModeName
    emulated: bool
    """True if the hard-drive tier has the speed of HARD_DRIVE."""
    fsync: FsyncName
    engine: EngineKind
    eviction: EvictionName
    dram_bytes: int

    @classmethod
    def draw(cls, chance: random.Random) -> "TierMix":
        ssds = chance.choice((1, 1, 2, 2, 2, 4))
        hdds = chance.choice((0, 0, 1, 2))
        modes: tuple[WriteModeName, ...] = ("write-back", "write-back", "write-through")
        below: tuple[WriteModeName, ...] = (*modes, "write-through-selective", "pass-through")
        syncs: tuple[FsyncName, ...] = ("flush", "flush", "always", "never")
        engines: tuple[EngineKind, ...] = ("auto", "auto", "threads", "python")
        evictions: tuple[EvictionName, ...] = ("default", "default", "lru", "fifo", "s3fifo")
        return cls(
            ssds=ssds,
            ssd_segments=chance.choice((4, 6, 10, 48)),
            ssd_mode=chance.choice((*modes, "write-through-selective")),
            hdds=hdds,
            hdd_segments=chance.choice((4, 24)),
            hdd_mode=chance.choice(below),
            emulated=hdds > 0 and chance.random() < 0.15,
            fsync=chance.choice(syncs),
            engine=chance.choice(engines),
            eviction=chance.choice(evictions),
            dram_bytes=chance.choice((384 << 10, 1 << 20)),
        )

    @property
    def words(self) -> str:
        """The mix as text."""
        lower = f"{self.ssds} ssd ({self.ssd_segments} segments each, {self.ssd_mode})"
        if self.hdds:
            kind = "emulated hdd" if self.emulated else "hdd"
            lower += f", {self.hdds} {kind} ({self.hdd_segments} segments each, {self.hdd_mode})"
        return f"dram, {lower}; fsync {self.fsync}, {self.engine} engine, {self.eviction} eviction"


@dataclass(slots=True)
class World:
    """A folder with drives, and their number and size."""

    folder: Path
    mix: TierMix
    ssds: list[int] = field(default_factory=list)
    """Numbers of the drives that the store is opened with."""
    ssd_segments: int = 0
    object: dict[str, Any] | None = None
    """Settings of the tier that nodes share, if there is one."""
    bucket: Bucket | None = None
    """The way to it."""

    def __post_init__(self) -> None:
        self.ssds = self.ssds or list(range(self.mix.ssds))
        self.ssd_segments = self.ssd_segments or self.mix.ssd_segments

    @property
    def stacks_path(self) -> Path:
        """The file for the stacks of a process that hangs."""
        return self.folder.with_name("stacks.txt")

    def write_stacks(self, about: str) -> None:
        """Write the stacks of all threads of this process."""
        with self.stacks_path.open("a") as file:
            file.write(f"{about}\n")
            file.flush()
            faulthandler.dump_traceback(file)

    def make_folders(self) -> None:
        for path in (*self.ssd_paths, *self.hdd_paths):
            path.parent.mkdir(mode=0o700, exist_ok=True)

    def ssd_path(self, number: int) -> Path:
        """The path of a drive, in a folder of its own that can be taken away like a mount."""
        return self._mount(number) / "kv"

    def take_away(self, number: int) -> None:
        """Simulate pulling a drive."""
        self._mount(number).rename(self.folder / f"away-{number}")

    def may_lose_one(self, met: set[int]) -> bool:
        """True if no drive is away and all have the same metadata."""
        return len(self.ssds) > 1 and set(self.ssds) <= met and not self.away()

    def bring_back(self) -> None:
        """Return all drives that were taken away."""
        for path in self.folder.glob("away-*"):
            path.rename(self._mount(int(path.name.removeprefix("away-"))))

    def away(self) -> set[int]:
        return {int(path.name.removeprefix("away-")) for path in self.folder.glob("away-*")}

    def _mount(self, number: int) -> Path:
        return self.folder / f"ssd-{number}"

    @property
    def ssd_paths(self) -> list[Path]:
        return [self.ssd_path(number) for number in self.ssds]

    @property
    def hdd_paths(self) -> list[Path]:
        return [self.folder / f"hdd-{number}" / "kv" for number in range(self.mix.hdds)]

    @property
    def ssd_bytes(self) -> int:
        return len(self.ssds) * self.ssd_segments * SEGMENT_BYTES

    def have_room_for_all(self) -> None:
        """Set the capacity of the next opening to at least what any SSD takes on disk.

        No drive may be open. A drive that is being shrunk has too many segments until blocks have
        moved, and may start another one before the end. Opened with less room, it drops the oldest.
        """
        drives = [*self.folder.glob("ssd-*/kv"), *self.folder.glob("away-*/kv")]
        segments = (len(list(drive.glob("segment-*.kvs"))) for drive in drives)
        self.ssd_segments = max([self.ssd_segments, *segments])

    def tree(self) -> dict[str, Any]:
        """The settings of the store."""
        mix = self.mix
        shared = {
            "fsync": mix.fsync,
            "eviction": mix.eviction,
            "read_timeout": LIMIT_S,
            "write_timeout": LIMIT_S,
            "profile": "never",
        }
        ssd = {
            **shared,
            "path": [str(path) for path in self.ssd_paths],
            "capacity": self.ssd_bytes,
            "segment": SEGMENT_BYTES,
            "write_mode": mix.ssd_mode,
        }
        tree: dict[str, Any] = {
            "dram": {"capacity": mix.dram_bytes, "huge_pages": "never", "prefault": False},
            "ssd": ssd,
            "writeback": {"staging": 1 << 20, "put_timeout": LIMIT_S},
            "sessions": {"pinned_share": 0.5},
        }
        if mix.hdds:
            tree["hdd"] = {
                **shared,
                "path": [str(path) for path in self.hdd_paths],
                "capacity": mix.hdds * mix.hdd_segments * 2 * SEGMENT_BYTES,
                "segment": 2 * SEGMENT_BYTES,
                "run": 2 * SEGMENT_BYTES,
                "write_mode": mix.hdd_mode,
            }
        if self.object is not None:
            tree["object"] = self.object
        return tree

    def open(self, files: Files | None = None, mode: Literal["rw", "r"] = "rw") -> Store:
        if files is None and self.mix.emulated:
            slow = dict.fromkeys(map(str, self.hdd_paths), HARD_DRIVE)
            files = EmulatedFiles(slow.get, self.mix.engine)
        elif files is None:
            files = Files(self.mix.engine, timeout_s=LIMIT_S)
        store = assemble(load(overrides=self.tree()), mode=mode, files=files, bucket=self.bucket)
        for space in SPACES:
            store.namespace(space)
        return store


def keys_of(blocks: Iterable[Block]) -> list[BlockKey]:
    return [block.key for block in blocks]


def residents(store: Store) -> list[int]:
    """Numbers of the blocks that the index has on a file tier. Takes the store's lock."""
    view = store.inspect()
    with view.state.lock:
        rows = view.catalog.rows(keys_of(all_blocks()))
        lower = view.state.lower_tiers
        return [
            block.number
            for block, row in zip(all_blocks(), rows, strict=True)
            if row >= 0 and any(tier.copies.ready(row) for tier in lower)
        ]


def read_blocks(store: Depot, blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """Get blocks. Returns the hits with right bytes and the hits with wrong bytes."""
    right: list[Block] = []
    wrong: list[Block] = []
    for start in range(0, len(blocks), 8):
        part = blocks[start : start + 8]
        buffers = [bytearray(block.nbytes) for block in part]
        answers = store.get_many(keys_of(part), buffers, timeout_s=LIMIT_S)
        for block, buffer, answer in zip(part, buffers, answers, strict=True):
            if answer:
                (right if buffer == block.payload else wrong).append(block)
    return right, wrong
