"""`bench scale`: a store of very many real blocks. What its index weighs, how fast it opens again.

Filling and opening happen in processes of their own, because some of them are killed, and because
memory is only comparable between fresh processes.
"""

import gc
import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from kvdepot.bench.bars import INDEX_BYTES, REOPEN_CLEAN_S, REOPEN_CRASH_S, SCALE_BLOCKS
from kvdepot.bench.eviction import measure_disk_eviction, measure_memory_eviction
from kvdepot.bench.prompts import prompts_for
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import BenchPart, Figure, Result, spread
from kvdepot.core.config import Config, load
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

PAYLOAD_BYTES: Final = 4096
RECORD_BYTES: Final = 8192
_PROMPT_BLOCKS: Final = 512
_MORE_BLOCKS: Final = 4096
_WAIT_S: Final = 120.0
_ROOM: Final = 1.25
_WEIGHABLE_BLOCKS: Final = 10**5


@dataclass(slots=True)
class ScalePlan:
    """What `bench scale` shall measure. Parts build on each other: run them in order."""

    directory: Path
    blocks: int
    rounds: int

    def parts(self) -> Iterator[BenchPart]:
        yield BenchPart(f"putting {self.blocks} blocks", self._fill)
        yield BenchPart("reopening after a kill", self._reopen_killed)
        yield BenchPart("reopening after a clean stop", self._reopen_clean)
        few = max(10**3, min(10**4, self.blocks // 10))
        disk = partial(measure_disk_eviction, self.directory, (few, self.blocks), self.rounds)
        yield BenchPart("evicting from disk", disk)
        memory = partial(measure_memory_eviction, (few, self.blocks), self.rounds)
        yield BenchPart("evicting from memory", memory)

    def _config(self, path: Path) -> Config:
        capacity = max(64 * MIB, int(_ROOM * (self.blocks + 16 * _MORE_BLOCKS) * RECORD_BYTES))
        overrides = {
            # Shared memory is not part of the heap that is measured here.
            "dram": {"capacity": 256 * MIB, "prefault": False, "shared": True},
            "ssd": {"path": path, "capacity": capacity},
        }
        return load(overrides=overrides)

    @property
    def _path(self) -> Path:
        return self.directory / "many"

    def _fill(self) -> list[Result]:
        """Put all blocks in a process that is then killed."""
        with child(filler, self._config(self._path), self.blocks) as process:
            facts = process.answer()
        blocks = facts["blocks"]
        heap = facts["heap_bytes"] / blocks
        return [
            _single("put and written down", blocks / facts["seconds"], "blocks/s"),
            _single(
                f"index, by its own count, {blocks} blocks", facts["index_bytes"] / blocks, "B"
            ),
            _single(f"heap grown by putting {blocks} blocks", heap, "B", self._heap_bar()),
        ]

    def _reopen_killed(self) -> list[Result]:
        opened = [self._open_and_kill() for _ in range(self.rounds)]
        self._check_count(opened)
        seconds = [facts["seconds"] for facts in opened]
        return [spread("reopen after a kill", seconds, "s", self._bar(REOPEN_CRASH_S))]

    def _open_and_kill(self) -> dict[str, Any]:
        with child(opener, self._config(self._path), _MORE_BLOCKS) as process:
            return process.answer()

    def _reopen_clean(self) -> list[Result]:
        self._open_and_close(self._path)
        opened = [self._open_and_close(self._path) for _ in range(self.rounds)]
        self._check_count(opened)
        empty = self._open_and_close(self.directory / "empty")
        seconds = [facts["seconds"] for facts in opened]
        blocks = opened[0]["blocks"]
        heap = [(facts["heap_bytes"] - empty["heap_bytes"]) / blocks for facts in opened]
        return [
            spread("reopen after a clean stop", seconds, "s", self._bar(REOPEN_CLEAN_S)),
            spread(f"heap of a process that opened {blocks} blocks", heap, "B", self._heap_bar()),
        ]

    def _open_and_close(self, path: Path) -> dict[str, Any]:
        with child(opener, self._config(path), 0) as process:
            facts = process.answer()
            process.finish()
        return facts

    def _check_count(self, opened: list[dict[str, Any]]) -> None:
        if min(facts["blocks"] for facts in opened) < self.blocks:
            raise StateError("blocks that were flushed are gone after reopening")

    def _heap_bar(self) -> float | None:
        """A process has fixed costs, which would hide what few blocks weigh."""
        return INDEX_BYTES if self.blocks >= _WEIGHABLE_BLOCKS else None

    def _bar(self, seconds: float) -> float | None:
        return seconds if self.blocks <= SCALE_BLOCKS else None


def _single(what: str, value: float, unit: str, bar: float | None = None) -> Figure:
    return Figure(what, value, unit, value, value, bar)


@dataclass(slots=True)
class Child:
    """A process at work in another store. Killed at the end of its scope unless it has finished."""

    process: Any
    connection: Connection

    def answer(self) -> dict[str, Any]:
        """What it reports. EOFError when it dies first."""
        facts: dict[str, Any] = self.connection.recv()
        return facts

    def finish(self) -> None:
        """Let it close its store and end."""
        self.connection.send("finish")
        self.process.join()


@contextmanager
def child(work: Any, config: Config, blocks: int) -> Iterator[Child]:
    """Run `work` in a fresh process; at the end it gets SIGKILL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, config, blocks), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def filler(connection: Connection, config: Config, blocks: int) -> None:
    """Child: put `blocks` blocks, tell, and wait for the end."""
    with open_store(config) as store:
        put_prompts(store, _PROMPT_BLOCKS)
        before = heap_bytes()
        started = time.perf_counter()
        put_prompts(store, blocks - _PROMPT_BLOCKS, seed=1)
        seconds = time.perf_counter() - started
        stats = store.stats()
        gc.collect()
        facts = {
            "seconds": seconds,
            "heap_bytes": heap_bytes() - before,
            "blocks": stats["blocks"],
            "index_bytes": stats["index_bytes"],
        }
        connection.send(facts)
        connection.recv()


def opener(connection: Connection, config: Config, more: int) -> None:
    """Child: open a store, tell how long it took, put `more` blocks, and wait for the end."""
    before = heap_bytes()
    started = time.perf_counter()
    with open_store(config) as store:
        seconds = time.perf_counter() - started
        gc.collect()
        facts = {"seconds": seconds, "heap_bytes": heap_bytes() - before}
        facts["blocks"] = store.stats()["blocks"]
        if more:
            put_prompts(store, more, seed=time.time_ns())
        connection.send(facts)
        connection.recv()


def put_prompts(store: Store, blocks: int, seed: int = 0) -> None:
    """Put fresh prompts of 512 small blocks each until at least `blocks` are on disk."""
    prompts = prompts_for(store, PAYLOAD_BYTES, _PROMPT_BLOCKS * PAYLOAD_BYTES)
    prompts.reseed(seed)
    for _ in range(-(-blocks // _PROMPT_BLOCKS)):
        (keys,) = prompts.fresh(1)
        if not all(store.put_many(keys, prompts.sources, timeout_s=_WAIT_S)):
            raise StateError("a put was refused although there is room")
    if not store.flush(_WAIT_S):
        raise StateError("flush did not write everything down")


def heap_bytes() -> int:
    """Private memory of this process; the arena is shared memory and not in it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0
