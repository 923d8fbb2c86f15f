"""One copy of the model with the tiers it reaches: what becomes of a request.

A request is let in when GPU memory has room for it. What is in GPU memory stays there; of the
blocks behind it that a tier has, as many are fetched as `fetch_or_recompute` says, while others
are computed; the rest is computed. Then its blocks are kept, and it answers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.index.table import Bools, Rows
from kvdepot.policy.fetching.fetch_or_recompute import (
    EngineFeatures,
    PromptLengths,
    TierRun,
    decide,
)
from kvdepot.policy.fetching.speed_models import TierPace
from kvdepot.sim.drives import Pipe
from kvdepot.sim.event_queue import EventQueue
from kvdepot.sim.gpu import GpuPace, PrefillJob, SimulatedGpu
from kvdepot.sim.results import ServedRequest
from kvdepot.sim.tiers import NOWHERE, BlockIndex, SimulatedTier, TierStack
from kvdepot.sim.workload import PromptRequest

HBM: Final = "hbm"


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """What a worker does of its own."""

    pace: GpuPace
    block_tokens: int
    reuse: bool = True
    """False: everything is computed, nothing is kept."""

    keeps_memory: bool = True
    """Whether GPU memory keeps what no running request uses."""

    decides: bool = True
    """Whether it computes what comes sooner that way; otherwise it fetches all there is."""


@dataclass(slots=True)
class RunningRequest:
    """A request in this worker."""

    served: ServedRequest
    rows: Rows
    done: Callable[[ServedRequest], None]
    local: int = 0
    """Blocks that were in GPU memory."""

    hit: int = 0
    """Blocks that are not computed."""

    reserved: int = 0
    """Places in GPU memory kept for what is not there yet."""


@dataclass(slots=True)
class ModelWorker:
    """A copy of the model. The first of `indexes` is that of GPU memory and the node's tiers."""

    agenda: EventQueue
    habits: WorkerRules
    gpu: SimulatedGpu
    memory: SimulatedTier
    shelves: TierStack
    indexes: list[BlockIndex]
    link: Pipe
    refused: int = 0
    blocks_asked: int = 0
    _waiting: deque[RunningRequest] = field(default_factory=deque)
    _reserved: int = 0

    @property
    def load_tokens(self) -> int:
        """Prompt tokens that wait here."""
        waiting = sum(visit.served.input_tokens for visit in self._waiting)
        return self.gpu.waiting_tokens + waiting

    @property
    def _keeps(self) -> bool:
        return self.habits.reuse and self.habits.keeps_memory

    def matched(self, rows: Rows) -> int:
        """How many leading blocks are in GPU memory or in the node's own tiers."""
        here = self.memory.has(rows)
        for shelf in self.shelves.shelves:
            if shelf.index is self.indexes[0]:
                here |= shelf.tier.has(rows)
        return _leading(here)

    def arrive(
        self, request: PromptRequest, served: ServedRequest, done: Callable[[ServedRequest], None]
    ) -> None:
        """A request comes; `done` is called when it is answered."""
        self.blocks_asked += len(request.blocks)
        visit = RunningRequest(served, request.blocks, done)
        if self._places(visit) > self.memory.capacity_blocks:
            self.refused += 1
            return
        self._waiting.append(visit)
        self._let_in()

    def _places(self, visit: RunningRequest) -> int:
        tokens = visit.served.input_tokens + visit.served.output_tokens
        return max(-(-tokens // self.habits.block_tokens), len(visit.rows))

    def _let_in(self) -> None:
        """Let in those who wait, in order, as long as there is room."""
        while self._waiting:
            visit = self._waiting[0]
            local = _leading(self.memory.has(visit.rows)) if self._keeps else 0
            kept = visit.rows[:local].tolist()
            self.memory.leaves.hold_all(kept)
            need = self._places(visit) - local
            if not self.memory.shrink(self.memory.capacity_blocks - self._reserved - need):
                self.memory.leaves.release_all(kept)
                return
            self._waiting.popleft()
            visit.local, visit.reserved = local, need
            self._reserved += need
            self._begin(visit)

    def _begin(self, visit: RunningRequest) -> None:
        """Fetch what is worth it, then compute the rest."""
        served, now_s = visit.served, self.agenda.now_s
        served.admitted_s = served.fetched_s = now_s
        visit.hit = visit.local
        if self.habits.reuse:
            self._fetch(visit)
            self._use(visit.rows[: visit.hit].tolist(), hit=True)
        context = sum(served.hits.values())
        job = PrefillJob(
            served.input_tokens - context,
            context,
            served.output_tokens,
            lambda: self._first(visit),
            lambda: self._last(visit),
        )
        self.agenda.at(served.fetched_s, lambda: self.gpu.add(job))

    def _fetch(self, visit: RunningRequest) -> None:
        served, now_s = visit.served, self.agenda.now_s
        where = self.shelves.where(visit.rows[visit.local :])
        where = where[: _leading(where != NOWHERE)]
        wanted = self._wanted(visit, where) if len(where) else 0
        visit.hit = visit.local + wanted
        self._count(served, HBM, 0, visit.local)
        shelves, copied_s, read_s = self.shelves.shelves, 0.0, 0.0
        for number in np.unique(where[:wanted]).tolist():
            at = np.flatnonzero(where[:wanted] == number)
            for start, stop in _runs(at + visit.local):
                self._count(served, shelves[number].name, start, stop)
            took_s = shelves[number].fetch(now_s, len(at)) - now_s
            if shelves[number].memory:
                copied_s += took_s
            else:
                read_s = max(read_s, took_s)
        served.fetched_s = now_s + copied_s + read_s
        if wanted:
            nbytes = wanted * shelves[0].block_bytes
            served.fetched_s = max(served.fetched_s, self.link.push(now_s, nbytes))

    def _count(self, served: ServedRequest, tier: str, start: int, stop: int) -> None:
        """Blocks start..stop are hits of a tier, but for the last token: it is computed."""
        size, most = self.habits.block_tokens, served.input_tokens - 1
        tokens = max(0, min(stop * size, most) - min(start * size, most))
        if tokens:
            served.hits[tier] = served.hits.get(tier, 0) + tokens

    def _wanted(self, visit: RunningRequest, where: Rows) -> int:
        """How many of the blocks found are fetched."""
        if not self.habits.decides:
            return len(where)
        now_s, size = self.agenda.now_s, self.habits.block_tokens
        shelves = self.shelves.shelves
        starts = np.flatnonzero(np.diff(where, prepend=-2))
        counts = np.diff(np.append(starts, len(where))).tolist()
        runs = [
            TierRun(shelves[tier].name, count, int(count * shelves[tier].block_bytes))
            for tier, count in zip(where[starts].tolist(), counts, strict=True)
        ]
        paces: dict[str, TierPace | None] = {}
        for tier in set(where[starts].tolist()):
            shelf = shelves[tier]
            rate = min(shelf.drives.rate_bytes_per_s(shelf.block_bytes), self.link.bytes_per_s)
            wait_s = max(shelf.drives.wait_s(now_s), self.link.wait_s(now_s))
            paces[shelf.name] = TierPace(wait_s, 1.0 / rate, 0.0)
        prompt = PromptLengths(visit.served.input_tokens, size, visit.local * size)
        pace = self.habits.pace
        engine = EngineFeatures(chunk_tokens=pace.chunk_tokens)
        return decide(prompt, runs, pace.prefill, paces, self.gpu.queue(), engine).cut_blocks

    def _first(self, visit: RunningRequest) -> None:
        """The prompt is computed: its blocks are in GPU memory, and go to the tiers."""
        now_s, rows = self.agenda.now_s, visit.rows
        visit.served.first_s = now_s
        if not self.habits.reuse:
            return
        if self._keeps:
            self.memory.leaves.hold_all(rows[visit.local :].tolist())
            self._reserved -= visit.reserved
            visit.reserved = max(0, visit.reserved - self.memory.take_in(rows))
            self._reserved += visit.reserved
        everyone = rows.tolist()
        self.shelves.hold(everyone)
        self.shelves.keep(now_s, rows)
        self._use(everyone[visit.hit :], hit=False)
        self.shelves.release(everyone)

    def _last(self, visit: RunningRequest) -> None:
        """All is answered: whoever waits for room may come."""
        visit.served.last_s = self.agenda.now_s
        self._reserved -= visit.reserved
        if self._keeps:
            self.memory.leaves.release_all(visit.rows.tolist())
        visit.done(visit.served)
        self._let_in()

    def _use(self, rows: list[int], *, hit: bool) -> None:
        if not rows:
            return
        for index in self.indexes:
            index.tree.use(rows, hit=hit)
        self.memory.leaves.used(rows, hit=hit)
        self.shelves.use(rows, hit=hit)


def _leading(here: Bools) -> int:
    """How many are true before the first that is not."""
    return len(here) if here.all() else int(np.argmin(here))


def _runs(at: Rows) -> list[tuple[int, int]]:
    """Numbers in ascending order as stretches start..stop."""
    starts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
    stops = np.append(starts[1:], len(at))
    return [(int(at[a]), int(at[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]
