"""Stores complete blocks of a cache in the depot, in the background.

A job refers to the state of the cache's tensors after a step. A dynamic cache does not write to its
filled part again, so the model continues meanwhile. At most JOBS_MAX jobs wait. Another one is
dropped and counted: a later job stores the same blocks.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.block_writes import store_blocks
from kvdepot.adapters.hf.binding import AXES, ORDER, LayerGroup
from kvdepot.adapters.hf.caches import KV, DepotSlidingLayer, join
from kvdepot.adapters.hf.calls import Tokens
from kvdepot.adapters.hf.stats import ModelCounters
from kvdepot.adapters.tensors import KVTensors, Pieces, TensorMover
from kvdepot.core.block import PutResult
from kvdepot.depot import Depot

JOBS_MAX: Final = 4


@dataclass(frozen=True)
class GroupSnapshot:
    """The layers of a group at one moment."""

    parts: list[list[KV]]
    """The tensors of each layer, in the order of their tokens."""
    first: int
    """The column of the first token."""
    joined: bool
    """A layer has one tensor each for K and V."""

    @classmethod
    def of(cls, group: LayerGroup, layers: Sequence[Any]) -> "GroupSnapshot":
        members = [layers[index] for index in group.layers]
        sliding = [layer for layer in members if isinstance(layer, DepotSlidingLayer)]
        if sliding:
            kept = [list(layer.kept) for layer in sliding]
            return cls(kept, sliding[0].kept_from, joined=False)
        return cls([[(layer.keys, layer.values)] for layer in members], 0, joined=True)

    @cached_property
    def tensors(self) -> KVTensors:
        layers = [layer[0] if self.joined else join(layer) for layer in self.parts]
        return KVTensors(layers, AXES, order=ORDER)


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One sequence in a cache."""

    tokens: Tokens
    """The tokens whose K and V are in the cache."""
    pad: int
    batch: int
    windows_from: int = 0
    """The first token from which the snapshot has all K and V of windows."""


@dataclass(frozen=True, slots=True)
class OffloadJob:
    rows: list[OffloadRow]
    snapshots: list[GroupSnapshot]
    """One for each group."""
    ready: torch.cuda.Event | None = None
    """The event after which the tensors are filled; None if they are."""
    first: Callable[[], None] | None = None
    """Called before anything else, once the tensors are filled."""


class Offloader:
    """Stores blocks of caches. Thread-safe. Its thread ends when no job is left."""

    def __init__(
        self,
        store: Depot,
        groups: Sequence[LayerGroup],
        mover: TensorMover,
        counters: ModelCounters,
        hits: AuditedHits,
    ) -> None:
        self._store = store
        self._groups = groups
        self._mover = mover
        self._counters = counters
        self._hits = hits
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: set[Future[None]] = set()
        self.last_error: BaseException | None = None

    def submit(self, job: OffloadJob) -> "Future[None] | None":
        """Store a job's blocks in the background; None if too many jobs wait."""
        with self._lock:
            if len(self._jobs) >= JOBS_MAX:
                self._counters.add(offload_skipped=1)
                return None
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvdepot-offload")
            future = self._thread.submit(self._run, job)
            self._jobs.add(future)
        future.add_done_callback(self._finish)
        return future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for all jobs submitted before. False if the time ran out."""
        with self._lock:
            jobs = list(self._jobs)
        return not wait(jobs, timeout_s).not_done

    def _finish(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self.last_error = error
            self._counters.add(offload_failed=1)
        with self._lock:
            self._jobs.discard(future)
            if not self._jobs and self._thread is not None:
                self._thread.shutdown(wait=False)
                self._thread = None

    @torch.no_grad()
    def _run(self, job: OffloadJob) -> None:
        if job.ready is not None:
            job.ready.synchronize()
        if job.first is not None:
            job.first()
        for group, snapshot in zip(self._groups, job.snapshots, strict=True):
            for row in job.rows if snapshot.parts[0] else ():
                self._save(group, snapshot, row)

    def _save(self, group: LayerGroup, snapshot: GroupSnapshot, row: OffloadRow) -> None:
        """Audit and store the blocks of one row and group, head first."""
        size, keys = group.block_tokens, group.keys(row.tokens)
        offset = row.pad - snapshot.first

        def piece(block: int) -> Pieces:
            start = block * size + offset
            return snapshot.tensors.span(start, start + size, row.batch)

        first = 0 if group.window is None else -(-max(row.windows_from, -offset) // size)
        for block in range(first, len(keys)):
            if self._hits.take_expected(keys[block]):
                with self._hits.scratch(keys[block]) as slot:
                    view = slot.view(0)
                    if view is not None:
                        self._mover.offload([piece(block)], [view]).wait()
                        self._hits.check(keys[block], view, group.space.layout)
        token_ids = None
        if group.window is None:
            # Blocks that are on a drive alone are offered again, to come to memory.
            first = self._store.match(keys).blocks_in_memory
            token_ids = row.tokens[first * size : len(keys) * size]

        def fill(blocks: Sequence[int], views: Sequence[memoryview]) -> None:
            self._mover.offload([piece(first + block) for block in blocks], views).wait()

        results = store_blocks(self._store, group.space, keys[first:], fill, token_ids=token_ids)
        stored, throttled = map(results.count, (PutResult.STORED, PutResult.THROTTLED))
        self._counters.add(offload_stored=stored, offload_throttled=throttled)
