"""A store of very many real blocks: what its index weighs, how fast it opens again, evicting.

    python benchmarks/scale.py [--blocks N] [--rounds N] [--quick] [--path DIR] [--json] [--strict]

Filling and opening happen in processes of their own, because some of them are killed, and because
memory is only comparable between fresh processes.

What it costs to evict one block is measured among few blocks and among many. Timers are put around
the two places that evict, in an open store. They count processor time of the evicting thread, so
that waiting for the disk or for other processes does not look like a cost of having many blocks.
"""

import gc
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from kvdepot.bench.prompts import Prompts, prompts_for
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import BenchPart, Figure, Result, spread
from kvdepot.cli.bench import measure
from kvdepot.cli.command import count
from kvdepot.cli.main import Parser, exit_status, show
from kvdepot.config.settings import Config, load
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

BLOCKS, QUICK_BLOCKS = 10**6, 10**4
INDEX_BYTES: Final = 200.0
"""The most memory we want for each block."""
REOPEN_CLEAN_S: Final = 3.0
REOPEN_CRASH_S: Final = 10.0
REOPEN_BLOCKS: Final = 10**6
"""The number of blocks up to which the bars on reopening hold."""
EVICTION_GROWTH: Final = 1.25
"""Cost of an eviction among 10^6 blocks, of that among 10^4: the same, but for noise and caches."""
PAYLOAD_BYTES: Final = 4096
RECORD_BYTES: Final = 8192
_PROMPT_BLOCKS: Final = 512
_MORE_BLOCKS: Final = 4096
_WAIT_S: Final = 120.0
_ROOM: Final = 1.25
_WEIGHABLE_BLOCKS: Final = 10**5
_EVICTED_PROMPT_BLOCKS: Final = 64
_SEGMENT_BYTES: Final = 4 * MIB
_FEW_BLOCKS: Final = 10**4
"""With fewer, a store does not have enough segments to choose among."""
_ROUND_BLOCKS: Final = 2048
_ROUND_LIMIT_S: Final = 5.0
"""A round ends early where evicting is so slow that it would take longer."""
_MEMORY_SHARE: Final = 3
"""At most one in so many available bytes of memory is used for blocks."""


@dataclass(slots=True)
class ScalePlan:
    """What this script shall measure. Parts build on each other: run them in order."""

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
        return seconds if self.blocks <= REOPEN_BLOCKS else None


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
    if not store.flush(_WAIT_S).complete:
        raise StateError("flush did not write everything down")


def heap_bytes() -> int:
    """Private memory of this process; the arena is shared memory and not in it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


@dataclass(slots=True)
class Meter:
    """Processor seconds spent in some methods that do not call each other."""

    seconds: float = 0.0

    def install(self, owner: object, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        setattr(owner, name, timed)


@dataclass(slots=True)
class FullStore:
    """A store in which every new block pushes an old one out."""

    store: Store
    prompts: list[Prompts]
    """One kind of prompt for each block size."""

    meter: Meter
    counter: str

    def fill(self, blocks: int) -> None:
        """Put until `blocks` more have been put, and then until something had to go."""
        for _ in range(blocks // _EVICTED_PROMPT_BLOCKS // len(self.prompts)):
            self._put()
        self._flush()
        while not self._evicted():
            self._put()
            self._flush()

    def cost_us(self) -> float:
        """Processor time for each eviction while a round of new blocks comes in."""
        evicted, seconds = self._evicted(), self.meter.seconds
        deadline = time.monotonic() + _ROUND_LIMIT_S
        gone = 0
        while not gone or (gone < _ROUND_BLOCKS and time.monotonic() < deadline):
            self._put()
            gone = self._evicted() - evicted
        self._flush()
        return (self.meter.seconds - seconds) / (self._evicted() - evicted) * 1e6

    def _evicted(self) -> int:
        return int(self.store.stats()["counters"][self.counter])

    def _put(self) -> None:
        """One new prompt of each kind."""
        for kind in self.prompts:
            (keys,) = kind.fresh(1)
            if not all(self.store.put_many(keys, kind.sources, timeout_s=_WAIT_S)):
                raise StateError("a put was refused although there is room")

    def _flush(self) -> None:
        if not self.store.flush(_WAIT_S).complete:
            raise StateError("flush did not write everything down")


@contextmanager
def full_disk(directory: Path, blocks: int) -> Iterator[FullStore]:
    capacity = max(4, blocks * RECORD_BYTES // _SEGMENT_BYTES + 2) * _SEGMENT_BYTES
    ssd = {"path": directory / f"full-{blocks}", "capacity": capacity, "segment": _SEGMENT_BYTES}
    with open_store(dram=64 * MIB, ssd=ssd) as store:
        prompts = prompts_for(store, PAYLOAD_BYTES, _EVICTED_PROMPT_BLOCKS * PAYLOAD_BYTES)
        meter = Meter()
        inspector = store.inspect()
        meter.install(inspector.drives.rooms[inspector.lower()].reclaimer, "reclaim")
        subject = FullStore(store, [prompts], meter, "evicted_ssd")
        subject.fill(blocks)
        yield subject


@contextmanager
def full_memory(payloads: tuple[int, ...], blocks: int) -> Iterator[FullStore]:
    mean_bytes = sum(4096 + payload for payload in payloads) // len(payloads)
    with open_store(dram=blocks * mean_bytes) as store:
        prompts = [prompts_for(store, size, _EVICTED_PROMPT_BLOCKS * size) for size in payloads]
        meter = Meter()
        for name in ("allocate", "allocate_more"):
            meter.install(store.inspect().slots, name)
        subject = FullStore(store, prompts, meter, "evicted_dram")
        subject.fill(blocks)
        yield subject


Opened = Callable[[int], Any]


def measure_disk_eviction(directory: Path, sizes: tuple[int, int], rounds: int) -> list[Result]:
    """Evictions from disk, small store and large store in turn."""
    return _growth("disk", partial(full_disk, directory), sizes, rounds)


def measure_memory_eviction(sizes: tuple[int, int], rounds: int) -> list[Result]:
    """Evictions from memory: blocks of one size, then of two sizes side by side."""
    few, many = sizes
    many = max(few, min(many, available_bytes() // _MEMORY_SHARE // (2 * RECORD_BYTES)))
    one = _growth("memory", partial(full_memory, (4096,)), (few, many), rounds)
    two = _growth("memory, two sizes", partial(full_memory, (4096, 12288)), (few, many), rounds)
    return one + two


def _growth(where: str, opened: Opened, sizes: tuple[int, int], rounds: int) -> list[Result]:
    few, many = sizes
    costs: dict[int, list[float]] = {few: [], many: []}
    with ExitStack() as scope:
        stores = {blocks: scope.enter_context(opened(blocks)) for blocks in costs}
        for _ in range(rounds):
            for blocks, store in stores.items():
                costs[blocks].append(store.cost_us())
    results: list[Result] = [
        spread(f"eviction from {where}, {blocks} blocks", taken, "us/block")
        for blocks, taken in costs.items()
    ]
    growth = [b / a for a, b in zip(costs[few], costs[many], strict=True)]
    bar = EVICTION_GROWTH if few >= _FEW_BLOCKS else None
    what = f"eviction from {where}, {many} over {few} blocks"
    return [*results, spread(what, growth, "×", bar)]


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=count, metavar="N", help="blocks (default: 1000000)")
    parser.add_argument("--path", type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--rounds", type=count, metavar="N", help="measurements of each thing")
    for name in ("--quick", "--strict", "--json"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    blocks = args.blocks or (QUICK_BLOCKS if args.quick else BLOCKS)
    needed_bytes = 2 * RECORD_BYTES * blocks

    def parts(directory: Path) -> Iterator[BenchPart]:
        return ScalePlan(directory, blocks, args.rounds or 3).parts()

    def run() -> int:
        return show(measure(args, needed_bytes, parts), as_json=args.json)

    sys.exit(exit_status(run, as_json=args.json))


if __name__ == "__main__":
    main()
