"""`bench store`, disk: put and get through a store whose memory is too small to hide the disk."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from kvdepot.bench.bars import DEGRADATION, disk_bar
from kvdepot.bench.prompts import WAIT_S, FlushedStore, StoreUnderTest, fill_index
from kvdepot.bench.raw import MIB, RawFile, raw_file
from kvdepot.bench.rounds import Result, SpeedRow, Timings, Work, change, compare, fastest_way
from kvdepot.core.block import GetResult
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

BATCH_BYTES: Final = 128 * MIB
_CAPACITY: Final = 3
"""Size of the disk tier, in sets of blocks."""
BLOCKS_MIN: Final = 32
"""In a set, so that a part of them can be in memory and most cannot."""


class DiskStore(FlushedStore):
    def get_set(self) -> float:
        """Get the last set back. Its prompts come in turn, so memory never has the next one."""
        got = []
        started = time.perf_counter()
        for keys in self.current:
            got += self.store.get_many(keys, self.targets, timeout_s=WAIT_S)
        taken = time.perf_counter() - started
        _check_origin(got)
        return taken

    def deliver_set(self) -> float:
        """Get the last set where it lies: read and verified, not copied."""
        got = []
        started = time.perf_counter()
        for keys in self.current:
            with self.store.lease(keys) as lease:
                got += lease.deliver(lambda _: None, timeout_s=WAIT_S)
        taken = time.perf_counter() - started
        _check_origin(got)
        return taken

    def forget_set(self) -> None:
        """Remove the last set: having been read, it would outlive sets that come later."""
        for keys in self.current:
            self.store.remove(keys)
        self.current = []

    def verify(self) -> None:
        """The last prompt got is what was put, byte for byte."""
        for source, target in zip(self.prompts.sources, self.targets, strict=True):
            if not np.array_equal(source, target):
                raise StateError("a get has delivered wrong bytes")


def _check_origin(got: list[GetResult]) -> None:
    strays = {answer.tier or answer.reason for answer in got} - {"ssd"}
    if strays:
        raise StateError(f"blocks came from {sorted(strays)} instead of the disk")


@contextmanager
def disk_store(directory: Path, block_bytes: int, set_bytes: int) -> Iterator[DiskStore]:
    """A new store for sets of `set_bytes`, a quarter of which fits in its memory."""
    set_bytes = max(set_bytes, BLOCKS_MIN * block_bytes)
    batch_bytes = min(BATCH_BYTES, set_bytes // 8)
    dram_bytes = max(set_bytes // 4, MIB)
    capacity_bytes = _CAPACITY * set_bytes
    segment_bytes = max(MIB, min(256 * MIB, capacity_bytes // 8)) // MIB * MIB
    ssd: dict[str, Any] = {"path": directory, "capacity": capacity_bytes, "segment": segment_bytes}
    try:
        # The least recently used leave first: a set that is read in turn is never in memory.
        dram = {"capacity": dram_bytes, "eviction": "lru"}
        with open_store(dram=dram, ssd=ssd) as store:
            store.inspect().wait_for_prefault()
            yield DiskStore.of(store, block_bytes, batch_bytes, set_bytes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def beside_raw(
    directory: Path, block_bytes: int, set_bytes: int
) -> Iterator[tuple[DiskStore, RawFile]]:
    """A new store, and a raw file of as many bytes as one of its sets."""
    with ExitStack() as scope:
        subject = scope.enter_context(disk_store(directory / "store", block_bytes, set_bytes))
        blocks = subject.set_bytes // block_bytes
        yield subject, scope.enter_context(raw_file(directory, block_bytes, blocks))


def measure_disk(directory: Path, block_bytes: int, set_bytes: int, rounds: int) -> list[Result]:
    """First writes, writes over old segments, and reads, each beside the raw device."""
    with beside_raw(directory, block_bytes, set_bytes) as (subject, raw):
        first = {"first put": subject.put_set}
        speeds = compare(raw.first_writes(), first, min(rounds, _CAPACITY - 1))
        subject.put_set()
        speeds |= compare(raw.writes(), {"put": subject.put_set}, rounds)
        gets = {"get": subject.get_set, "deliver": subject.deliver_set}
        speeds |= compare(raw.reads(), gets, rounds)
        subject.verify()
    return [
        speed.row("ssd", op, block_bytes, subject.set_bytes, _bar(op, block_bytes))
        for op, speed in speeds.items()
    ]


def _bar(op: str, block_bytes: int) -> float | None:
    return None if op == "first put" else disk_bar(op, block_bytes)


def degrade_disk(
    directory: Path, block_bytes: int, set_bytes: int, rounds: int, indexes: tuple[int, int]
) -> list[Result]:
    """Put and get before and after the index of one and the same store has grown."""
    with beside_raw(directory, block_bytes, set_bytes) as (subject, raw):
        limits = fastest_way(raw.writes()), fastest_way(raw.reads())
        for _ in range(_CAPACITY):
            subject.put_set()
        works = {"put": subject.put_set}, {"get": subject.get_set}
        pairs = tuple(zip(limits, works, strict=True))
        return grow_index("ssd", subject, pairs, rounds, indexes, subject.forget_set)


def grow_index(
    tier: str,
    subject: StoreUnderTest,
    pairs: Sequence[tuple[Mapping[str, Work], Mapping[str, Work]]],
    rounds: int,
    indexes: tuple[int, int],
    after_round: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Works, each beside its limit, with a small index and then with a large one."""
    small, large = indexes
    assert isinstance(subject.store, Store)
    speeds: list[dict[str, Timings]] = []
    for more in (small, large - small):
        fill_index(subject.store, subject.prompts.space, more, seed=more)
        taken: dict[str, Timings] = {}
        for limit, works in pairs:
            taken |= compare(limit, works, rounds)
        speeds.append(taken)
        after_round()
    before, after = speeds
    size, nbytes = subject.prompts.space.block_bytes, subject.set_bytes
    return [
        changed_row(tier, f"{op}, {large} blocks", size, nbytes, before[op], after[op])
        for op in before
    ]


def changed_row(
    tier: str, op: str, block_bytes: int, nbytes: int, before: Timings, after: Timings
) -> SpeedRow:
    """Shares of the limit with a large index over those with a small one.

    The row's speeds are those of the store, large index and small index. They are from different
    minutes; the ratio, for which each was taken beside the raw limit, is not their quotient.
    """
    return replace(
        change(before, after).row(tier, op, block_bytes, nbytes, DEGRADATION),
        bytes_per_s=nbytes / median(after.seconds),
        limit_bytes_per_s=nbytes / median(before.seconds),
    )
