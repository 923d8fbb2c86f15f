"""What the demo plays: users whose prompts share a beginning, a crash, a damaged file.

A block's bytes follow from its key, so whoever has the key can tell whether the bytes are right.
"""

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import BlockKey, Got
from kvdepot.core.keys import digest_of
from kvdepot.core.layout import KVLayout
from kvdepot.store.opening import open_store
from kvdepot.store.space import Space
from kvdepot.store.store import Store

MIB: Final = 1 << 20
BLOCK_TOKENS: Final = 16
SYSTEM_BLOCKS: Final = 8
TURN_BLOCKS: Final = 6
USERS: Final = 8
TURNS: Final = 4
DRAM_BYTES: Final = 96 * MIB
SSD_BYTES: Final = 1536 * MIB
ACKNOWLEDGED_BLOCKS: Final = 24
"""The writing process is killed soon after it has acknowledged this many."""

WRITER_BATCH: Final = 3
WAIT_S: Final = 60.0
PAGE: Final = 4096
KEY_AT: Final = 16
"""Where a record's head has the key."""

LAYOUT: Final = KVLayout.gqa(
    layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=BLOCK_TOKENS
)
"""Llama-3.1-8B, but 16 tokens to a block instead of 256, to be quick."""

Bytes = npt.NDArray[np.uint8]
Tell = Callable[[int], None]


@dataclass(slots=True)
class Scene:
    """One line of the demo's table."""

    step: str
    blocks: int = 0
    from_dram: int = 0
    from_ssd: int = 0
    missed: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What should not have happened."""

    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def gb_per_s(self) -> float:
        moved = self.blocks - self.missed
        return moved * LAYOUT.block_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def count(self, answers: Sequence[Got]) -> None:
        self.blocks += len(answers)
        self.from_dram += sum(answer.tier == "dram" for answer in answers)
        self.from_ssd += sum(answer.tier == "ssd" for answer in answers)
        self.missed += sum(not answer for answer in answers)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


def contents(key: BlockKey) -> Bytes:
    """The bytes that belong to a key."""
    seed = int.from_bytes(digest_of(key), "little")
    words = np.random.Generator(np.random.SFC64(seed)).integers(
        0, 1 << 64, LAYOUT.block_bytes // 8, dtype=np.uint64
    )
    return words.view(np.uint8)


def conversation(space: Space, user: int) -> list[BlockKey]:
    """Keys of all a user has said and heard: everybody's system prompt, then the user's turns."""
    system = np.arange(SYSTEM_BLOCKS * BLOCK_TOKENS)
    turns = 1000 * (user + 1) + np.arange(TURNS * TURN_BLOCKS * BLOCK_TOKENS)
    return space.keys(np.concatenate([system, turns]))


def open_demo(path: Path) -> tuple[Store, Space]:
    ssd = {"path": path, "capacity": SSD_BYTES, "segment": 64 * MIB}
    store = open_store(dram=DRAM_BYTES, ssd=ssd)
    return store, store.namespace(model="llama-3.1-8b", layout=LAYOUT, tenant="demo")


def offload(store: Store, space: Space, tell: Tell) -> list[Scene]:
    """Users take turns; each turn puts the blocks that are new."""
    put = Scene(f"{USERS} users chat, new blocks are put")
    shared = Scene("shared beginnings, not put again")
    for turn in range(TURNS):
        for user in range(USERS):
            stop = SYSTEM_BLOCKS + (turn + 1) * TURN_BLOCKS
            keys = conversation(space, user)[:stop]
            known = len(store.match(keys))
            shared.blocks += known
            new = keys[known:]
            buffers = [contents(key) for key in new]
            started = time.perf_counter()
            answers = store.put_many(new, buffers, timeout_s=WAIT_S)
            put.seconds += time.perf_counter() - started
            put.blocks += len(new)
            put.expect(all(answers), f"turn {turn} of user {user} was not stored")
            tell(len(new))
    started = time.perf_counter()
    put.expect(bool(store.flush(WAIT_S)), "not everything was written to disk")
    put.seconds += time.perf_counter() - started
    expected = SYSTEM_BLOCKS + USERS * TURNS * TURN_BLOCKS
    put.expect(put.blocks == expected, f"{put.blocks} blocks were new instead of {expected}")
    put.note = "on disk, and the newest in memory too"
    shared.note = "found by their tokens"
    return [put, shared]


def fetch(store: Store, keys: Sequence[BlockKey], scene: Scene, tell: Tell) -> None:
    """Get blocks and compare every byte with what was put."""
    targets = [np.ones(LAYOUT.block_bytes, np.uint8) for _ in keys]  # touched
    started = time.perf_counter()
    answers = store.get_many(keys, targets, timeout_s=WAIT_S)
    scene.seconds += time.perf_counter() - started
    scene.count(answers)
    for key, target, answer in zip(keys, targets, answers, strict=True):
        right = not answer or np.array_equal(target, contents(key))
        scene.expect(right, f"wrong bytes in block {key.hex()}")
    tell(len(keys))


def return_users(store: Store, space: Space, tell: Tell) -> list[Scene]:
    """The last user comes back at once, and then everybody else."""
    soon = Scene("the last user returns at once", note="still in memory")
    latest = conversation(space, USERS - 1)[-TURN_BLOCKS:]
    fetch(store, latest, soon, tell)
    soon.expect(soon.from_dram == soon.blocks, "its last turn was not in memory")
    later = Scene("all others return later", note="memory is too small: read from disk")
    for user in range(USERS - 1):
        fetch(store, conversation(space, user)[SYSTEM_BLOCKS:], later, tell)
    later.expect(not later.missed, "blocks are missing")
    later.expect(later.from_ssd > 0, "nothing came from disk")
    return [soon, later]


def writer(connection: Connection, path: Path) -> None:
    """The other process: puts and flushes until it is killed, and tells what has been flushed."""
    store, space = open_demo(path)
    for number in range(1 << 20):
        tokens = (
            (1 << 20)
            + number * WRITER_BATCH * BLOCK_TOKENS
            + np.arange(WRITER_BATCH * BLOCK_TOKENS)
        )
        keys = space.keys(tokens)
        connection.send(("putting", keys))
        stored = store.put_many(keys, [contents(key) for key in keys], timeout_s=WAIT_S)
        if all(stored) and store.flush(WAIT_S):
            connection.send(("flushed", keys))


@dataclass(frozen=True, slots=True)
class Killed:
    """What a process had done when it was killed."""

    scene: Scene
    acknowledged: list[BlockKey]
    unfinished: list[BlockKey]
    """Put, but not yet flushed."""


def kill_writer(path: Path, delay_s: float, tell: Tell) -> Killed:
    """Start a process that writes, and end it with SIGKILL while it does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=writer, args=(theirs, path), daemon=True)
    process.start()
    theirs.close()
    scene = Scene("another process puts, and is killed")
    said: dict[str, list[BlockKey]] = {"putting": [], "flushed": []}
    try:
        while len(said["flushed"]) < ACKNOWLEDGED_BLOCKS and _listen(ours, said):
            tell(0)
        time.sleep(delay_s)
    finally:
        process.kill()
        process.join()
    while _listen(ours, said):
        pass
    ours.close()
    unfinished = [key for key in said["putting"] if key not in set(said["flushed"])]
    scene.blocks = len(said["putting"])
    scene.note = f"SIGKILL after {len(said['flushed'])} blocks were flushed"
    scene.expect(process.exitcode == -9, f"the process ended by itself: {process.exitcode}")
    return Killed(scene, said["flushed"], unfinished)


def _listen(connection: Connection, said: dict[str, list[BlockKey]]) -> bool:
    """Note one message of the writer. False: there are no more."""
    try:
        word, keys = connection.recv()
    except EOFError:
        return False
    said[word] += keys
    return True


def recover(store: Store, killed: Killed, opened_s: float, tell: Tell) -> list[Scene]:
    """What is there after the kill: all that was flushed, and of the rest nothing wrong."""
    reopened = Scene("reopened: every flushed block")
    reopened.note = f"opened in {opened_s * 1000:.0f} ms"
    fetch(store, killed.acknowledged, reopened, tell)
    reopened.expect(not reopened.missed, f"{reopened.missed} flushed blocks are gone")
    rest = Scene("reopened: blocks caught by the kill", note="right or missing, both are fine")
    if killed.unfinished:
        fetch(store, killed.unfinished, rest, tell)
    checked = Scene("check reads every block")
    started = time.perf_counter()
    report = store.check()
    checked.seconds = time.perf_counter() - started
    checked.blocks = report.blocks
    checked.expect(report.ok, "; ".join(map(str, report.findings)))
    return [reopened, rest, checked]


def damage(store: Store, path: Path, key: BlockKey, others: list[BlockKey]) -> list[Scene]:
    """Flip one bit of one block in its file; it must be noticed, and only that block be lost."""
    places = [place for file in sorted(path.glob("*.kvs")) for place in find_record(file, key)]
    flipped = Scene("one bit is flipped in a file: check", blocks=1)
    for file, offset in places:
        flip_bit(file, offset + PAGE + LAYOUT.block_bytes // 2)
    flipped.note = ", ".join(file.name for file, _ in places)
    flipped.expect(bool(places), "the block's record was not found in any file")
    report = store.check()
    named = any(key.hex() in str(finding) for finding in report.findings)
    flipped.expect(named, "check did not find the damage")
    missed = Scene("… and get", note="")
    fetch(store, [key], missed, lambda amount: None)
    missed.expect(missed.missed == 1, "a damaged block was delivered")
    missed.note = "a miss, never a wrong byte"
    healthy = Scene("… and its neighbours", note="untouched")
    fetch(store, others, healthy, lambda amount: None)
    healthy.expect(not healthy.missed, "undamaged blocks are gone")
    return [flipped, missed, healthy]


def find_record(file: Path, key: BlockKey) -> Iterator[tuple[Path, int]]:
    """Where in a segment file the key's record starts: its head is at the start of a page."""
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as view:
        at = view.find(key)
        while at >= 0:
            if at % PAGE == KEY_AT:
                yield file, at - KEY_AT
            at = view.find(key, at + 1)


def flip_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        (byte,) = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte ^ 1]))
        handle.flush()
        os.fsync(handle.fileno())


@contextmanager
def opened_demo(path: Path) -> Iterator[tuple[Store, Space, float]]:
    """The demo's store, open, and how long opening it took."""
    started = time.perf_counter()
    store, space = open_demo(path)
    seconds = time.perf_counter() - started
    with store:
        yield store, space, seconds


def play(path: Path, delay_s: float, tell: Callable[[str, int], None]) -> Iterator[Scene]:
    """All scenes, in order, each when it is over. `tell` hears what is going on."""
    with opened_demo(path) as (store, space, _):
        yield from offload(store, space, lambda amount: tell("users chat", amount))
        yield from return_users(store, space, lambda amount: tell("users return", amount))
    killed = kill_writer(path, delay_s, lambda amount: tell("another process writes", amount))
    yield killed.scene
    with opened_demo(path) as (store, space, seconds):
        yield from recover(store, killed, seconds, lambda amount: tell("looking again", amount))
    with opened_demo(path) as (store, space, _):
        tell("damaging a file", 0)
        victim = conversation(space, 0)[-1]
        neighbours = conversation(space, 0)[SYSTEM_BLOCKS:-1]
        yield from damage(store, path, victim, neighbours)


Facts = dict[str, Any]


def as_facts(scene: Scene) -> Facts:
    return {
        "step": scene.step,
        "blocks": scene.blocks,
        "from_dram": scene.from_dram,
        "from_ssd": scene.from_ssd,
        "missed": scene.missed,
        "gb_per_s": round(scene.gb_per_s, 3),
        "ok": scene.ok,
        "wrong": scene.wrong,
        "note": scene.note,
    }
