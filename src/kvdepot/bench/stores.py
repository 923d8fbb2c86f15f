"""`bench store`: a real store beside the raw device and memcpy, and an index that grows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvdepot.bench.cxl import measure_cxl
from kvdepot.bench.disk import degrade_disk, measure_disk
from kvdepot.bench.engines import MEMORY_BLOCKS
from kvdepot.bench.lookups import measure_keys, measure_lookups
from kvdepot.bench.memory import degrade_memory, measure_memory
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import BenchPart

INDEXES: Final = (10**3, 10**5, 10**6)
_SET_BYTES_MAX: Final = 512 * MIB
_DEGRADE_BYTES: Final = (128 << 10, 4 * MIB)
_KEYS_CALLS: Final = 20


@dataclass(frozen=True, slots=True)
class StorePlan:
    directory: Path
    blocks_bytes: Sequence[int]
    total_bytes: int
    """Moved in each run."""
    rounds: int
    indexes: Sequence[int] = INDEXES
    """Sizes of the index, ascending."""

    def parts(self) -> Iterator[BenchPart]:
        memory_bytes = min(self.total_bytes, _SET_BYTES_MAX)
        for size in MEMORY_BLOCKS:
            if size <= memory_bytes // 4:
                run = partial(measure_memory, size, memory_bytes, self.rounds)
                yield BenchPart(f"dram, {size >> 20} MiB blocks", run)
        if memory_bytes >= 8 * MIB:
            run = partial(measure_cxl, MIB, memory_bytes, self.rounds)
            yield BenchPart("cxl, 1 MiB blocks", run)
        for size in self.blocks_bytes:
            run = partial(measure_disk, self.directory, size, self.total_bytes, self.rounds)
            yield BenchPart(f"ssd, {size >> 10} KiB blocks", run)
        yield BenchPart("keys", partial(measure_keys, _KEYS_CALLS))
        yield BenchPart("lookups", partial(measure_lookups, self.indexes, self.rounds))
        yield from self._degradation(memory_bytes)

    def _degradation(self, memory_bytes: int) -> Iterator[BenchPart]:
        extremes = (self.indexes[0], self.indexes[-1])
        run = partial(degrade_memory, MIB, memory_bytes, self.rounds, extremes)
        yield BenchPart("dram with a large index", run)
        for size in _DEGRADE_BYTES:
            if size in self.blocks_bytes:
                total_bytes = min(self.total_bytes, _SET_BYTES_MAX)
                run = partial(
                    degrade_disk, self.directory, size, total_bytes, self.rounds, extremes
                )
                yield BenchPart(f"ssd with a large index, {size >> 10} KiB blocks", run)
