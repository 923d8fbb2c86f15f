"""One copy of the model with its tiers: how a request is served.

A request is admitted when GPU memory has room for it. Its blocks in GPU memory stay there. Of the
next blocks that a tier has, `decide_jointly` decides how many are fetched, while other requests are
computed; the rest is computed. Then its blocks are kept, and it is answered.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from kvdepot.index.table import Rows
from kvdepot.policy.fetching.fetch_or_recompute import (
    PromptLengths,
    TierRun,
)
from kvdepot.policy.fetching.queue_plan import (
    WAITING_MAX,
    Company,
    FetchingPrompt,
    MatchedPrompt,
    decide_jointly,
)
from kvdepot.policy.fetching.speed_models import TierPace
from kvdepot.sim.drives import Pipe
from kvdepot.sim.event_queue import EventQueue
from kvdepot.sim.gpu import GpuPace, PrefillJob, SimulatedGpu
from kvdepot.sim.results import ServedRequest
from kvdepot.sim.tiers import (
    NOWHERE,
    BlockIndex,
    SimulatedTier,
    TimedTier,
    WriteMode,
    fastest_tier,
    leading,
    write_blocks,
)
from kvdepot.sim.workload import PromptRequest

HBM: Final = "hbm"


@dataclass(frozen=True, slots=True)
class WorkerRules:
    pace: GpuPace
    block_tokens: int
    reuse: bool = True
    """False: all blocks are computed, and none is kept."""
    keeps_memory: bool = True
    """True: GPU memory also keeps blocks that no running request uses."""
    decides: bool = True
    """True: blocks are computed if fetching is slower. False: all are fetched."""
    considers: bool = True
    """True: decisions consider the other requests too."""


@dataclass(slots=True)
class RunningRequest:
    served: ServedRequest
    rows: Rows
    done: Callable[[ServedRequest], None]
    local: int = 0
    """Number of blocks that were in GPU memory."""
    hit: int = 0
    """Number of blocks that are not computed."""
    reserved: int = 0
    """GPU memory, in blocks, for blocks that have not arrived."""


@dataclass(slots=True)
class ModelWorker:
    """A copy of the model. The first of `indexes` is that of GPU memory and the node's tiers."""

    events: EventQueue
    rules: WorkerRules
    gpu: SimulatedGpu
    memory: SimulatedTier
    tiers: list[TimedTier]
    """Fastest first: the node's own, then the shared ones."""
    write_mode: WriteMode
    indexes: list[BlockIndex]
    link: Pipe
    refused: int = 0
    blocks_asked: int = 0
    _waiting: deque[RunningRequest] = field(default_factory=deque)
    _loads: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Requests that fetch: the end of the fetch, and the prefill after it."""
    _reserved: int = 0

    @property
    def load_tokens(self) -> int:
        waiting = sum(running.served.input_tokens for running in self._waiting)
        return self.gpu.waiting_tokens + waiting

    @property
    def _keeps(self) -> bool:
        return self.rules.reuse and self.rules.keeps_memory

    def matched(self, rows: Rows) -> int:
        """The number of leading blocks in GPU memory or in the node's own tiers."""
        here = self.memory.has(rows)
        for tier in self.tiers:
            if tier.index is self.indexes[0]:
                here |= tier.has(rows)
        return leading(here)

    def arrive(
        self, request: PromptRequest, served: ServedRequest, done: Callable[[ServedRequest], None]
    ) -> None:
        """Accept a request; `done` is called after its answer."""
        self.blocks_asked += len(request.blocks)
        running = RunningRequest(served, request.blocks, done)
        if self._places(running) > self.memory.capacity_blocks:
            self.refused += 1
            return
        self._waiting.append(running)
        self._admit()

    def _places(self, running: RunningRequest) -> int:
        tokens = running.served.input_tokens + running.served.output_tokens
        return max(-(-tokens // self.rules.block_tokens), len(running.rows))

    def _admit(self) -> None:
        """Start waiting requests in order while there is room."""
        while self._waiting:
            running = self._waiting[0]
            local = leading(self.memory.has(running.rows)) if self._keeps else 0
            kept = running.rows[:local].tolist()
            self.memory.leaves.hold_all(kept)
            need = self._places(running) - local
            if not self.memory.shrink(self.memory.capacity_blocks - self._reserved - need):
                self.memory.leaves.release_all(kept)
                return
            self._waiting.popleft()
            running.local, running.reserved = local, need
            self._reserved += need
            self._begin(running)

    def _begin(self, running: RunningRequest) -> None:
        served, now_s = running.served, self.events.now_s
        served.admitted_s = served.fetched_s = now_s
        running.hit = running.local
        if self.rules.reuse:
            self._fetch(running)
            self._use(running.rows[: running.hit].tolist(), hit=True)
        context = sum(served.hits.values())
        job = PrefillJob(
            served.input_tokens - context,
            context,
            served.output_tokens,
            lambda: self._first(running),
            lambda: self._last(running),
        )

        def fetched() -> None:
            self._loads.pop(served.number, None)
            self.gpu.add(job)

        self.events.at(served.fetched_s, fetched)

    def _fetch(self, running: RunningRequest) -> None:
        served, now_s = running.served, self.events.now_s
        where = fastest_tier(self.tiers, running.rows[running.local :])
        where = where[: leading(where != NOWHERE)]
        wanted = self._wanted(running, where) if len(where) else 0
        running.hit = running.local + wanted
        self._count(served, HBM, 0, running.local)
        copied_s = read_s = 0.0
        for number in np.unique(where[:wanted]).tolist():
            at = np.flatnonzero(where[:wanted] == number)
            tier = self.tiers[number]
            for start, stop in _runs(at + running.local):
                self._count(served, tier.name, start, stop)
            took_s = tier.fetch(now_s, len(at)) - now_s
            if tier.memory:
                copied_s += took_s
            else:
                read_s = max(read_s, took_s)
        served.fetched_s = now_s + copied_s + read_s
        if wanted:
            nbytes = wanted * self.tiers[0].block_bytes
            served.fetched_s = max(served.fetched_s, self.link.push(now_s, nbytes))

    def _count(self, served: ServedRequest, tier: str, start: int, stop: int) -> None:
        """Count blocks start..stop as hits of a tier, without the last token, which is computed."""
        size, most = self.rules.block_tokens, served.input_tokens - 1
        tokens = max(0, min(stop * size, most) - min(start * size, most))
        if tokens:
            served.hits[tier] = served.hits.get(tier, 0) + tokens

    def _wanted(self, running: RunningRequest, where: Rows) -> int:
        if not self.rules.decides:
            return len(where)
        now_s, pace, paces = self.events.now_s, self.rules.pace, dict[str, TierPace | None]()
        for tier in self.tiers:
            rate = min(tier.drives.rate_bytes_per_s(tier.block_bytes), self.link.bytes_per_s)
            wait_s = max(tier.drives.wait_s(now_s), self.link.wait_s(now_s))
            paces[tier.name] = TierPace(wait_s, 1.0 / rate, 0.0)
        queue, chunk_tokens = self.gpu.queue(), pace.chunk_tokens
        company = self._company if self.rules.considers else Company
        prompt = self._matched(running, where)
        decision = decide_jointly(prompt, pace.prefill, paces, queue, chunk_tokens, company)
        self._loads[running.served.number] = now_s + decision.fetch_s, decision.backoff_s
        return decision.cut_blocks

    def _matched(self, running: RunningRequest, where: Rows) -> MatchedPrompt:
        """A prompt whose blocks after the local ones are in these tiers."""
        size = self.rules.block_tokens
        starts = np.flatnonzero(np.diff(where, prepend=-2))
        counts = np.diff(np.append(starts, len(where))).tolist()
        sources = [self.tiers[number] for number in where[starts].tolist()]
        runs = [
            TierRun(tier.name, count, int(count * tier.block_bytes))
            for tier, count in zip(sources, counts, strict=True)
        ]
        lengths = PromptLengths(running.served.input_tokens, size, running.local * size)
        return MatchedPrompt(lengths, runs)

    def _company(self) -> Company:
        """Running fetches, requests that wait for GPU memory, and the number of running answers."""
        now_s = self.events.now_s
        loads = [FetchingPrompt(end_s - now_s, work_s) for end_s, work_s in self._loads.values()]
        waiting = []
        for other in islice(self._waiting, WAITING_MAX):
            other.local = leading(self.memory.has(other.rows)) if self._keeps else 0
            where = fastest_tier(self.tiers, other.rows[other.local :])
            waiting.append(self._matched(other, where[: leading(where != NOWHERE)]))
        behind = len(self._waiting) - len(waiting)
        return Company(tuple(loads), tuple(waiting), self.gpu.answers, behind)

    def _first(self, running: RunningRequest) -> None:
        """The prompt is computed: its blocks are in GPU memory, and are written to the tiers."""
        now_s, rows = self.events.now_s, running.rows
        running.served.first_s = now_s
        if not self.rules.reuse:
            return
        if self._keeps:
            self.memory.leaves.hold_all(rows[running.local :].tolist())
            self._reserved -= running.reserved
            running.reserved = max(0, running.reserved - self.memory.insert(rows))
            self._reserved += running.reserved
        prompt = rows.tolist()
        for tier in self.tiers:
            tier.leaves.hold_all(prompt)
        write_blocks(self.tiers, self.write_mode, now_s, rows)
        self._use(prompt[running.hit :], hit=False)
        for tier in self.tiers:
            tier.leaves.release_all(prompt)

    def _last(self, running: RunningRequest) -> None:
        running.served.last_s = self.events.now_s
        self._reserved -= running.reserved
        if self._keeps:
            self.memory.leaves.release_all(running.rows.tolist())
        running.done(running.served)
        self._admit()

    def _use(self, rows: list[int], *, hit: bool) -> None:
        if not rows:
            return
        for index in self.indexes:
            index.tree.use(rows, hit=hit)
        for tier in (self.memory, *self.tiers):
            tier.leaves.used(rows, hit=hit)


def _runs(at: Rows) -> list[tuple[int, int]]:
    """Ascending numbers as ranges start..stop."""
    starts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
    stops = np.append(starts[1:], len(at))
    return [(int(at[a]), int(at[b - 1]) + 1) for a, b in zip(starts, stops, strict=True)]
