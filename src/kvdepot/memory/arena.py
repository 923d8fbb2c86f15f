"""Allocates slots for blocks in memory, by size class.

The memory is cut into chunks of 64 KiB. A slab is a run of chunks cut into slots of one class;
a class is an exact size in pages, since a model's blocks are all of one size. A slab whose slots
are all free gives its chunks back. Each slot remembers its owner (a row number), so that a slab
can be emptied for another class.

Not thread-safe; the store's lock guards it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.config.settings import CxlConfig
from kvdepot.errors import ConfigError
from kvdepot.format.record import PAGE, round_up
from kvdepot.memory.cxl import check_node, open_device
from kvdepot.memory.memory import HUGE_BYTES, HugePages, Memory

CHUNK: Final = 64 << 10
_SLAB_MIN: Final = 1 << 20
_SLAB_SLOTS_MAX: Final = 64
_WASTE_MAX: Final = 0.02
UNOWNED: Final = -1


@dataclass(slots=True, eq=False)
class Slab:
    """A run of chunks cut into slots of one size."""

    start: int
    chunks: int
    slot_bytes: int
    owners: list[int]
    free: list[int] = field(default_factory=list)


def slab_chunks(slot_bytes: int, chunks_max: int) -> int:
    """The number of chunks of a slab of this class: small, with little unused memory."""
    first = max(-(-slot_bytes // CHUNK), _SLAB_MIN // CHUNK)
    best, best_waste = 0, 1.0
    for chunks in range(first, min(chunks_max, first * _SLAB_SLOTS_MAX) + 1):
        waste = (chunks * CHUNK) % slot_bytes / (chunks * CHUNK)
        if waste < best_waste:
            best, best_waste = chunks, waste
        if best_waste <= _WASTE_MAX:
            break
    return best or (-(-slot_bytes // CHUNK) if slot_bytes <= chunks_max * CHUNK else 0)


class Arena:
    """Slots for blocks."""

    def __init__(
        self,
        capacity_bytes: int,
        huge_pages: HugePages = "auto",
        *,
        shared: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """Uses `memory` if given, else allocates its own."""
        self.memory = memory or Memory(capacity_bytes, huge_pages, shared=shared)
        self.address = self.memory.address
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.chunk_count = capacity_bytes // CHUNK
        self._taken = np.zeros(self.chunk_count, dtype=bool)
        self._free_chunks = self.chunk_count
        self._free_slots: Counter[int] = Counter()
        self._slab_at: dict[int, Slab] = {}
        self._slab_of_chunk = np.full(self.chunk_count, -1, dtype=np.int32)
        self._slab_starts: memoryview = self._slab_of_chunk.data
        """The same as a memoryview, which is faster for single values."""
        self._open: dict[int, list[Slab]] = {}
        self._sizes: dict[int, int] = {}
        self._slab_counts: Counter[int] = Counter()
        self._hint = 0
        self._no_run_of = self.chunk_count + 1
        """No run of at least this length has been free since a slab was last freed."""

    def image(self, location: int, nbytes: int) -> memoryview:
        return self.memory.view[location : location + nbytes]

    def slot_bytes(self, nbytes: int) -> int:
        """The size class for `nbytes`: exact, in pages."""
        return -(-nbytes // PAGE) * PAGE

    def allocate(self, nbytes: int, owner: int) -> int | None:
        """Allocate a slot. Returns its location; None if there is neither a slot nor room for a
        slab.
        """
        slot_bytes = -(-nbytes // PAGE) * PAGE
        slabs = self._open.get(slot_bytes)
        if not slabs:
            slab = self._new_slab(slot_bytes)
            if slab is None:
                return None
            slabs = self._open.setdefault(slot_bytes, [])
            slabs.append(slab)
        slab = slabs[-1]
        slot = slab.free.pop()
        self._free_slots[slot_bytes] -= 1
        slab.owners[slot] = owner
        if not slab.free:
            slabs.pop()
        self.used_bytes += slot_bytes
        return slab.start * CHUNK + slot * slot_bytes

    def allocate_all(self, nbytes: int, owners: Sequence[int]) -> list[int]:
        """Allocate slots of one size. Returns slots for the first of the owners, as many as fit."""
        slot_bytes = -(-nbytes // PAGE) * PAGE
        slabs = self._open.setdefault(slot_bytes, [])
        found: list[int] = []
        while len(found) < len(owners):
            slab = slabs[-1] if slabs else self._new_slab(slot_bytes)
            if slab is None:
                break
            if not slabs:
                slabs.append(slab)
            some = slab.free[: -1 - len(owners) + len(found) : -1]
            del slab.free[-len(some) :]
            if not slab.free:
                slabs.pop()
            for slot, owner in zip(some, owners[len(found) :], strict=False):
                slab.owners[slot] = owner
            base = slab.start * CHUNK
            found += [base + slot * slot_bytes for slot in some]
        self._free_slots[slot_bytes] -= len(found)
        self.used_bytes += len(found) * slot_bytes
        return found

    def allocate_many(self, sizes: Sequence[int], owner: int) -> list[int]:
        """`allocate` for each size; -1 if there is no room."""
        found = (self.allocate(nbytes, owner) for nbytes in sizes)
        return [-1 if location is None else location for location in found]

    def free(self, location: int) -> None:
        slab = self._slab(location)
        slot = (location - slab.start * CHUNK) // slab.slot_bytes
        slab.owners[slot] = UNOWNED
        slab.free.append(slot)
        self._free_slots[slab.slot_bytes] += 1
        self.used_bytes -= slab.slot_bytes
        if len(slab.free) == 1:
            self._open.setdefault(slab.slot_bytes, []).append(slab)
        if len(slab.free) == len(slab.owners):
            self._retire(slab)

    def room(self, nbytes: int) -> int:
        """Estimate of the free bytes for this size class, without a search."""
        slot_bytes = self.slot_bytes(nbytes)
        slots = self._free_slots[slot_bytes]
        chunks = -(-slot_bytes // CHUNK)
        if chunks < self._no_run_of:
            slots += self._free_chunks // chunks * (chunks * CHUNK // slot_bytes)
        return slots * slot_bytes

    def set_owner(self, location: int, owner: int) -> None:
        slab = self._slab_at[self._slab_starts[location // CHUNK]]
        slab.owners[(location - slab.start * CHUNK) // slab.slot_bytes] = owner

    def owner(self, location: int) -> int:
        slab = self._slab(location)
        return slab.owners[(location - slab.start * CHUNK) // slab.slot_bytes]

    def has_others(self, nbytes: int) -> bool:
        """True if another size class has slabs."""
        return any(slot_bytes != self.slot_bytes(nbytes) for slot_bytes in self._slab_counts)

    def slabs(self) -> list[Slab]:
        return list(self._slab_at.values())

    def chunks_for(self, nbytes: int) -> int:
        """Number of chunks of a new slab of this class; 0 if the arena is too small for one."""
        slot_bytes = -(-nbytes // PAGE) * PAGE
        chunks = self._sizes.get(slot_bytes)
        if chunks is None:
            chunks = self._sizes[slot_bytes] = slab_chunks(slot_bytes, self.chunk_count)
        return chunks

    def slabs_in(self, start: int, chunks: int) -> list[Slab]:
        starts = np.unique(self._slab_of_chunk[start : start + chunks])
        return [self._slab_at[int(at)] for at in starts if at >= 0]

    def close(self) -> None:
        self.memory.close()

    def _slab(self, location: int) -> Slab:
        return self._slab_at[self._slab_starts[location // CHUNK]]

    def _new_slab(self, slot_bytes: int) -> Slab | None:
        if slot_bytes > self._no_run_of * CHUNK:
            return None
        chunks = self._sizes.get(slot_bytes) or self.chunks_for(slot_bytes)
        start = self._find(chunks) if chunks else None
        if start is None and chunks:
            chunks = -(-slot_bytes // CHUNK)
            start = self._find(chunks)
        if start is None:
            return None
        slots = chunks * CHUNK // slot_bytes
        slab = Slab(start, chunks, slot_bytes, [UNOWNED] * slots, list(range(slots - 1, -1, -1)))
        self._taken[start : start + chunks] = True
        self._free_chunks -= chunks
        self._free_slots[slot_bytes] += slots
        self._slab_of_chunk[start : start + chunks] = start
        self._slab_at[start] = slab
        self._slab_counts[slot_bytes] += 1
        self._hint = start + chunks
        return slab

    def _find(self, chunks: int) -> int | None:
        """Find a run of free chunks, beginning after the last one found."""
        if chunks >= self._no_run_of:
            return None
        fits = self._hint + chunks <= self.chunk_count
        if fits and not self._taken[self._hint : self._hint + chunks].any():
            return self._hint
        free = np.flatnonzero(np.diff(np.r_[True, self._taken, True].astype(np.int8)))
        starts, stops = free[::2], free[1::2]
        fitting = np.flatnonzero(stops - starts >= chunks)
        if not len(fitting):
            self._no_run_of = chunks
            return None
        return int(starts[fitting[0]])

    def _retire(self, slab: Slab) -> None:
        self._open[slab.slot_bytes].remove(slab)
        self._taken[slab.start : slab.start + slab.chunks] = False
        self._free_chunks += slab.chunks
        self._free_slots[slab.slot_bytes] -= len(slab.owners)
        self._slab_of_chunk[slab.start : slab.start + slab.chunks] = -1
        del self._slab_at[slab.start]
        self._slab_counts[slab.slot_bytes] -= 1
        if not self._slab_counts[slab.slot_bytes]:
            del self._slab_counts[slab.slot_bytes]
        self._no_run_of = self.chunk_count + 1


def open_arena(
    setting: str, nbytes: int, huge_pages: HugePages = "auto", *, shared: bool = False
) -> Arena:
    """An arena in ordinary memory. Raises ConfigError, which names the setting."""
    try:
        return Arena(nbytes, huge_pages, shared=shared)
    except OSError as error:
        raise ConfigError(setting, f"cannot get the memory: {error.strerror}") from error


def open_cxl_arena(config: CxlConfig, *, shared: bool) -> Arena:
    """An arena in the memory that the `cxl` settings name."""
    nbytes = config.capacity
    try:
        if config.node is not None:
            check_node("cxl.node", config.node, nbytes)
            return Arena(nbytes, memory=Memory.on_node(nbytes, config.node, shared=shared))
        if config.path is not None:
            whole = round_up(nbytes, HUGE_BYTES)
            fd = open_device("cxl.path", config.path, whole)
            return Arena(nbytes, memory=Memory.mapped((fd, whole)))
    except OSError as error:
        setting = "cxl.path" if config.path is not None else "cxl.node"
        raise ConfigError(setting, f"cannot map the memory: {error.strerror}") from error
    return open_arena("cxl.capacity", nbytes, shared=shared)
