"""Offloading: complete blocks of a cache into the depot, in the background.

A job refers to the cache's tensors as they are after a step. Those of a dynamic cache are never
written to again where they are filled, so the model goes on meanwhile. Only so many jobs wait at a
time; one more is dropped and counted, since a later one saves what it would have saved.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvdepot.adapters.hf.caches import KV, DepotSlidingLayer
from kvdepot.adapters.hf.groups import ORDER, Group
from kvdepot.adapters.hf.onboarder import AXES
from kvdepot.adapters.hf.prompts import Tokens
from kvdepot.adapters.hf.served import Counters
from kvdepot.adapters.tensors import BlockMover, KVTensors
from kvdepot.core.block import BlockKey, Put
from kvdepot.core.depot import Depot

JOBS_MAX: Final = 4
_WAVE_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Shelf:
    """A group's layers at one moment."""

    parts: list[list[KV]]
    """Of each layer the tensors that follow one another in time."""
    first: int
    """The column of the first part's first token."""
    loose: bool
    """The parts are as the model computed them, with any strides."""

    def joined(self) -> list[KV]:
        """Each layer in one piece."""
        return [_join(layer) if self.loose else layer[0] for layer in self.parts]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One sequence in a cache."""

    tokens: Tokens
    """Those whose K and V are in the cache."""
    pad: int
    batch: int
    windows_from: int = 0
    """The first token from which on windows are complete on the shelf."""


@dataclass(frozen=True, slots=True)
class Job:
    """Sequences whose complete blocks are to be stored."""

    rows: list[JobRow]
    shelves: list[Shelf]
    """One for each group."""
    ready: torch.cuda.Event | None = None
    """When the tensors are filled; None: they are."""
    first: Callable[[], None] | None = None
    """Done before anything else, once they are."""


class Offloader:
    """Stores blocks of caches. Thread-safe; its thread lives as long as there is work."""

    def __init__(
        self, store: Depot, groups: Sequence[Group], mover: BlockMover, counters: Counters
    ) -> None:
        self._store = store
        self._groups = groups
        self._mover = mover
        self._counters = counters
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: set[Future[None]] = set()
        self.last_error: BaseException | None = None

    def submit(self, job: Job) -> "Future[None] | None":
        """Store a job's blocks some time soon; None if too much is waiting already."""
        with self._lock:
            if len(self._jobs) >= JOBS_MAX:
                self._counters.offloaded(skipped=1)
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
            self._counters.offloaded(failed=1)
        with self._lock:
            self._jobs.discard(future)
            if not self._jobs and self._thread is not None:
                self._thread.shutdown(wait=False)
                self._thread = None

    @torch.no_grad()
    def _run(self, job: Job) -> None:
        if job.ready is not None:
            job.ready.synchronize()
        if job.first is not None:
            job.first()
        for group, shelf in zip(self._groups, job.shelves, strict=True):
            layers: KVTensors | None = None
            for row in job.rows:
                keys = group.keys(row.tokens)
                blocks = self._missing(group, shelf, row, keys)
                if not blocks:
                    continue
                if layers is None:
                    layers = KVTensors(shelf.joined(), AXES, order=ORDER)
                self._store_blocks(group, layers, (keys, blocks), (row.pad - shelf.first, row))

    def _missing(self, group: Group, shelf: Shelf, row: JobRow, keys: Sequence[BlockKey]) -> range:
        """The blocks to offer: those behind what is there, or all that the shelf has."""
        if not shelf.parts[0]:
            return range(0)
        if group.window is None:
            return range(len(self._store.match(keys)), len(keys))
        first = max(row.windows_from, shelf.first - row.pad)
        return range(-(-first // group.block_tokens), len(keys))

    def _store_blocks(
        self,
        group: Group,
        layers: KVTensors,
        chosen: tuple[Sequence[BlockKey], range],
        place: tuple[int, JobRow],
    ) -> None:
        """Gather blocks into slots of the depot, wave by wave, head first."""
        (keys, blocks), (offset, row) = chosen, place
        size = group.block_tokens
        wave = max(1, _WAVE_BYTES // group.space.block_bytes)
        while blocks:
            part = blocks[:wave]
            with self._store.reserve([keys[block] for block in part]) as slots:
                mine = [at for at, put in enumerate(slots.outcomes) if put is Put.STORED]
                starts = [part[at] * size + offset for at in mine]
                if mine:
                    pieces = [layers.span(start, start + size, row.batch) for start in starts]
                    self._mover.offload(pieces, [slots.view(at) for at in mine]).wait()
                    slots.seal(mine)
                done = sum(put is not Put.THROTTLED for put in slots.outcomes)
            self._counters.offloaded(stored=len(mine))
            if not done:
                self._counters.offloaded(throttled=len(blocks))
                return
            blocks = blocks[done:]


def take_down(groups: Sequence[Group], layers: Sequence[Any]) -> list[Shelf]:
    """The layers of a cache as they are now, by groups."""
    shelves = []
    for group in groups:
        members = [layers[index] for index in group.layers]
        sliding = [layer for layer in members if isinstance(layer, DepotSlidingLayer)]
        if sliding:
            kept = [list(layer.kept) for layer in sliding]
            shelves.append(Shelf(kept, sliding[0].kept_from, loose=True))
        else:
            pairs = [[(layer.keys, layer.values)] for layer in members]
            shelves.append(Shelf(pairs, 0, loose=False))
    return shelves


def _join(parts: Sequence[KV]) -> KV:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
