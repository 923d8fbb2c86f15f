"""What it costs to evict one block, among few blocks and among many.

Timers are put around the two places that evict, in an open store: `Room.slot` for memory and
`Reclaimer.reclaim` for the disk. They count processor time of the evicting thread, so that waiting
for the disk or for a neighbour's work does not look like a cost of having many blocks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvdepot.bench.bars import EVICTION_GROWTH
from kvdepot.bench.prompts import Prompts, prompts_for
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import Figure, Result
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

_PAYLOAD_BYTES: Final = 4096
_RECORD_BYTES: Final = 8192
_PROMPT_BLOCKS: Final = 64
_SEGMENT_BYTES: Final = 4 * MIB
_FEW_BLOCKS: Final = 10**4
"""With fewer, a store does not have enough segments to choose among."""
_ROUND_BLOCKS: Final = 2048
_ROUND_LIMIT_S: Final = 5.0
"""A round ends early where evicting is so slow that it would take longer."""
_WAIT_S: Final = 120.0
_MEMORY_SHARE: Final = 3
"""At most one in so many available bytes of memory is used for blocks."""


@dataclass(slots=True)
class Meter:
    """Processor seconds spent in one method."""

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
        for _ in range(blocks // _PROMPT_BLOCKS // len(self.prompts)):
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
        if not self.store.flush(_WAIT_S):
            raise StateError("flush did not write everything down")


@contextmanager
def full_disk(directory: Path, blocks: int) -> Iterator[FullStore]:
    capacity = max(4, blocks * _RECORD_BYTES // _SEGMENT_BYTES + 2) * _SEGMENT_BYTES
    ssd = {"path": directory / f"full-{blocks}", "capacity": capacity, "segment": _SEGMENT_BYTES}
    with open_store(dram=64 * MIB, ssd=ssd) as store:
        prompts = prompts_for(store, _PAYLOAD_BYTES, _PROMPT_BLOCKS * _PAYLOAD_BYTES)
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
        prompts = [prompts_for(store, size, _PROMPT_BLOCKS * size) for size in payloads]
        meter = Meter()
        meter.install(store.inspect().slots, "allocate")
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
    many = max(few, min(many, available_bytes() // _MEMORY_SHARE // (2 * _RECORD_BYTES)))
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
    results: list[Result] = []
    for blocks, taken in costs.items():
        what = f"eviction from {where}, {blocks} blocks"
        results.append(Figure(what, median(taken), "us/block", min(taken), max(taken)))
    growth = [b / a for a, b in zip(costs[few], costs[many], strict=True)]
    what = f"eviction from {where}, {many} over {few} blocks"
    bar = EVICTION_GROWTH if few >= _FEW_BLOCKS else None
    results.append(Figure(what, median(growth), "×", min(growth), max(growth), bar))
    return results


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
