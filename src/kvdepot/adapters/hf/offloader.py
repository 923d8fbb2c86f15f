"""Offloading: complete blocks of a cache into the depot, in the background.

A job refers to the cache's tensors as they are after a step. Those of a dynamic cache are never
written to again where they are filled, so the model goes on meanwhile. At most JOBS_MAX jobs wait;
one more is dropped and counted, since a later one saves what it would have saved.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.hf.binding import AXES, ORDER, LayerGroup
from kvdepot.adapters.hf.caches import KV, DepotSlidingLayer, join
from kvdepot.adapters.hf.calls import Tokens
from kvdepot.adapters.hf.stats import ModelCounters
from kvdepot.adapters.tensors import KVTensors, Pieces, TensorMover
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Depot

JOBS_MAX: Final = 4
_WAVE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A group's layers at one moment."""

    parts: list[list[KV]]
    """Of each layer the tensors that follow one another in time."""
    first: int
    """The column of the first part's first token."""
    separate: bool
    """The parts are as the model computed them, with any strides."""

    @classmethod
    def of(cls, group: LayerGroup, layers: Sequence[Any]) -> "GroupSnapshot":
        """The layers of a cache as they are now."""
        members = [layers[index] for index in group.layers]
        sliding = [layer for layer in members if isinstance(layer, DepotSlidingLayer)]
        if sliding:
            return cls([list(layer.kept) for layer in sliding], sliding[0].kept_from, separate=True)
        return cls([[(layer.keys, layer.values)] for layer in members], 0, separate=False)

    def tensors(self) -> KVTensors:
        layers = [join(layer) if self.separate else layer[0] for layer in self.parts]
        return KVTensors(layers, AXES, order=ORDER)


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One sequence in a cache."""

    tokens: Tokens
    """Those whose K and V are in the cache."""
    pad: int
    batch: int
    windows_from: int = 0
    """The first token from which on windows are complete in the snapshot."""


@dataclass(frozen=True, slots=True)
class OffloadJob:
    """Sequences whose complete blocks are to be stored."""

    rows: list[OffloadRow]
    snapshots: list[GroupSnapshot]
    """One for each group."""
    ready: torch.cuda.Event | None = None
    """When the tensors are filled; None: they are."""
    first: Callable[[], None] | None = None
    """Called before anything else, once they are."""


class Offloader:
    """Stores blocks of caches. Thread-safe; its thread lives as long as there is work."""

    def __init__(
        self,
        store: Depot,
        groups: Sequence[LayerGroup],
        mover: TensorMover,
        counters: ModelCounters,
        auditor: BlockAuditor,
    ) -> None:
        self._auditor = auditor
        self._store = store
        self._groups = groups
        self._mover = mover
        self._counters = counters
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: set[Future[None]] = set()
        self.last_error: BaseException | None = None

    def submit(self, job: OffloadJob) -> "Future[None] | None":
        """Store a job's blocks in the background; None if too many jobs are waiting already."""
        with self._lock:
            if len(self._jobs) >= JOBS_MAX:
                self._counters.add_offload(skipped=1)
                return None
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvdepot-offload")
            future = self._thread.submit(self._run, job)
            self._jobs.add(future)
        future.add_done_callback(self._finish)
        return future

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for all jobs submitted before. False: time ran out."""
        with self._lock:
            jobs = list(self._jobs)
        return not wait(jobs, timeout_s).not_done

    def _finish(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self.last_error = error
            self._counters.add_offload(failed=1)
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
            tensors: KVTensors | None = None
            for row in job.rows:
                keys = group.keys(row.tokens)
                first = row.pad - snapshot.first
                again = self._computed_again(group, snapshot, row, keys)
                if again:
                    tensors = tensors or snapshot.tensors()
                    for block in again:
                        start = block * group.block_tokens + first
                        piece = tensors.span(start, start + group.block_tokens, row.batch)
                        self._audit(group, keys[block], piece)
                blocks = self._missing(group, snapshot, row, keys)
                if blocks:
                    tensors = tensors or snapshot.tensors()
                    starts = [block * group.block_tokens + first for block in blocks]
                    run = BlockRun(
                        row.batch, starts, keys[blocks.start :], _ids(group, row, blocks)
                    )
                    self._store_blocks(group, tensors, run)

    def _computed_again(
        self, group: LayerGroup, snapshot: GroupSnapshot, row: OffloadRow, keys: Sequence[BlockKey]
    ) -> list[int]:
        """The blocks that are to be compared with what the depot has."""
        first = 0 if group.window is None else max(row.windows_from, snapshot.first - row.pad)
        if not snapshot.parts[0]:
            return []
        size = group.block_tokens
        blocks = range(-(-first // size), len(keys))
        return [block for block in blocks if self._auditor.expected(keys[block])]

    def _audit(self, group: LayerGroup, key: BlockKey, piece: Pieces) -> None:
        with self._auditor.scratch(key) as slot:
            view = slot.view(0)
            if view is not None:
                self._mover.offload([piece], [view]).wait()
                self._auditor.check(key, view, group.space.layout)

    def _missing(
        self, group: LayerGroup, snapshot: GroupSnapshot, row: OffloadRow, keys: Sequence[BlockKey]
    ) -> range:
        """The blocks to offer: those behind what is in memory, or all that the snapshot has."""
        if not snapshot.parts[0]:
            return range(0)
        if group.window is None:
            return range(self._store.match(keys).blocks_in_memory, len(keys))
        first = max(row.windows_from, snapshot.first - row.pad)
        return range(-(-first // group.block_tokens), len(keys))

    def _store_blocks(self, group: LayerGroup, tensors: KVTensors, run: "BlockRun") -> None:
        """Copy blocks into slots of the depot, in waves, head first."""
        size = group.block_tokens
        wave = max(1, _WAVE_BYTES // group.space.block_bytes)
        batch, starts, keys, ids = run.batch, run.starts, run.keys, run.token_ids
        while keys:
            part = keys[:wave]
            some = None if ids is None else ids[: size * len(part)]
            with self._store.reserve(part, token_ids=some) as slots:
                fresh = [at for at, put in enumerate(slots.outcomes) if put is PutResult.STORED]
                if fresh:
                    spans = [(starts[at], starts[at] + size) for at in fresh]
                    pieces = [tensors.span(*span, batch) for span in spans]
                    self._mover.offload(pieces, [slots.view(at) for at in fresh]).wait()
                    slots.seal(fresh)
                done = sum(put is not PutResult.THROTTLED for put in slots.outcomes)
            self._counters.add_offload(stored=len(fresh))
            if not done:
                self._counters.add_offload(throttled=len(keys))
                return
            starts, keys = starts[done:], keys[done:]
            ids = None if ids is None else ids[size * done :]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one row and group, head first."""

    batch: int
    starts: Sequence[int]
    """Where in the tensors each begins."""
    keys: Sequence[BlockKey]
    token_ids: Any
    """Of all of them; None for a window, whose keys do not name their parents."""


def _ids(group: LayerGroup, row: OffloadRow, blocks: range) -> Any:
    if group.window is not None:
        return None
    size = group.block_tokens
    return row.tokens[blocks.start * size : blocks.stop * size]
