"""Onboarding: blocks from the depot into vLLM's pages, in threads besides the engine's.

A load never raises into the engine: what could not be had, for whatever reason, is a failed block,
which vLLM recomputes.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvdepot.adapters.tensors import BlockMover, KVTensors, Pieces
from kvdepot.adapters.tensors.cores import use_all_cores
from kvdepot.adapters.vllm.complaints import Complaints
from kvdepot.adapters.vllm.messages import Load, LoadEnd, TierTime
from kvdepot.adapters.vllm.stats import Tally
from kvdepot.core.block import BlockKey, Got
from kvdepot.store.read.request import Arrival, Sink
from kvdepot.store.store import Store

_GROUP_BYTES: Final = 128 << 20
"""Handed to the mover at a time: the bus starts on the first ones while the rest is prepared."""


@dataclass(frozen=True, slots=True)
class Target:
    """A worker's pages, and how blocks get there."""

    tensors: KVTensors
    mover: BlockMover
    pages_per_block: int


@dataclass(frozen=True, slots=True)
class Landed:
    """A load that is over."""

    load: Load
    end: LoadEnd
    failed_pages: frozenset[int]


@dataclass(slots=True)
class _Delivery:
    """What has come of one load so far."""

    started: float = field(default_factory=time.monotonic)
    came: dict[int, float] = field(default_factory=dict)
    """When each block was in its pages, in seconds after the start."""

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        now = time.monotonic() - self.started
        self.came.update((one.index, now) for one in arrivals)


class Loader:
    """Loads under way. `submit` and `take` belong to the engine's thread."""

    def __init__(self, store: Store, target: Target, tally: Tally, threads: int) -> None:
        self._store = store
        self._target = target
        self._tally = tally
        self._complaints = Complaints()
        self._threads = ThreadPoolExecutor(threads, "kvdepot-load", initializer=use_all_cores)
        self._block_bytes = target.tensors.pages([0]).nbytes * target.pages_per_block
        self._under_way: dict[str, tuple[Load, Future[LoadEnd]]] = {}
        self._landed = threading.Event()
        self._lines = threading.local()
        self._before: Any = None

    def __len__(self) -> int:
        return len(self._under_way)

    def mark(self) -> None:
        """Loads from now on come after what the current stream has been given so far.

        Steps that were scheduled before their pages were handed out may still write to these.
        """
        device = self._target.mover.device
        if device.type == "cuda":
            self._before = torch.cuda.current_stream(device).record_event()

    def submit(self, load: Load, keys: Sequence[BlockKey]) -> None:
        """Start a load; `keys` are this shard's."""
        future = self._threads.submit(self._run, load, keys, self._before)
        self._under_way[load.request_id] = load, future
        future.add_done_callback(lambda _: self._landed.set())

    def take(self, wait_s: float = 0.0) -> list[Landed]:
        """The loads that are over. Waits a little for the first if there are any under way."""
        if not self._under_way:
            return []
        if wait_s:
            self._landed.wait(wait_s)
        self._landed.clear()
        over = [name for name, (_, future) in self._under_way.items() if future.done()]
        return [self._end(*self._under_way.pop(name)) for name in over]

    def close(self) -> None:
        """Wait for what is under way, each of which has a deadline."""
        self._threads.shutdown()

    def _end(self, load: Load, future: "Future[LoadEnd]") -> Landed:
        error = future.exception()
        if error is not None:
            self._complaints.say("a load failed, its blocks are recomputed", error)
            self._tally.missed(["error"] * len(load.keys[0]))
            return self._landing(load, LoadEnd(load.request_id, load.first_block))
        return self._landing(load, future.result())

    def _landing(self, load: Load, end: LoadEnd) -> Landed:
        if end.failed_block is None:
            return Landed(load, end, frozenset())
        start = (end.failed_block - load.first_block) * self._target.pages_per_block
        return Landed(load, end, frozenset(load.pages[max(start, load.present_pages) :]))

    @torch.no_grad()
    def _run(self, load: Load, keys: Sequence[BlockKey], before: Any) -> LoadEnd:
        delivery = _Delivery()
        # To check what lies in memory takes the processor longer than the bus takes to move it.
        verify = False if self._target.mover.device.type == "cuda" else None
        with self._behind(before), self._store.lease(keys) as lease:
            sink = self._sink(load, delivery)
            got = lease.deliver(sink, verify=verify, timeout_s=load.timeout_s)
        answers = [*got, *[Got(None, "absent")] * (len(keys) - len(got))]
        times = _times(answers, delivery, self._block_bytes)
        self._tally.loaded(times)
        self._tally.missed(answer.reason for answer in answers if not answer)
        failed = next((at for at, answer in enumerate(answers) if not answer), None)
        block = None if failed is None else load.first_block + failed
        late = sum(answer.reason == "late" for answer in answers)
        seconds = time.monotonic() - delivery.started
        return LoadEnd(load.request_id, block, times, late, seconds)

    def _sink(self, load: Load, delivery: _Delivery) -> Sink:
        """Scatters arrivals. The first block may have pages that are left alone."""
        tensors, mover, ratio = (
            self._target.tensors,
            self._target.mover,
            self._target.pages_per_block,
        )

        def scatter(arrivals: list[Arrival]) -> None:
            if not load.pages:
                delivery.arrived(arrivals)
                return
            moves = []
            whole = [one for one in arrivals if one.index or not load.present_pages]
            for part in self._groups(whole):
                views = [one.view for one in part]
                starts = [one.index * ratio for one in part]
                pieces = [tensors.pages(load.pages[start : start + ratio]) for start in starts]
                layers = tensors.layer_count
                moves.append(mover.onboard(views, pieces, layers_per_step=layers))
            for one in arrivals:
                if load.present_pages and not one.index:
                    rest = tensors.pages(load.pages[load.present_pages : ratio])
                    moves.append(mover.onboard(*_tail_of_layers(one.view, rest)))
            for move in moves:
                move.synchronize()
            delivery.arrived(arrivals)

        return scatter

    def _groups(self, arrivals: Sequence[Arrival]) -> Iterator[Sequence[Arrival]]:
        size = max(1, _GROUP_BYTES // self._block_bytes)
        for start in range(0, len(arrivals), size):
            yield arrivals[start : start + size]

    @contextmanager
    def _behind(self, before: Any) -> Iterator[None]:
        """On CUDA a stream of this thread's own is current, and goes on after `before`.

        The engine's stream would put a load behind steps that have nothing to do with it.
        """
        if before is None:
            yield
            return
        device = self._target.mover.device
        if not hasattr(self._lines, "stream"):
            self._lines.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._lines.stream):
            self._lines.stream.wait_event(before)
            yield


def _tail_of_layers(view: memoryview, rest: Pieces) -> tuple[list[memoryview], list[Pieces]]:
    """For each layer the end of its payload, and the pages that it fills."""
    layer_bytes = len(view) // rest.layer_count
    ends = [layer_bytes * (layer + 1) for layer in range(rest.layer_count)]
    views = [view[end - rest.layer_bytes : end] for end in ends]
    return views, [rest.layers(layer, layer + 1) for layer in range(rest.layer_count)]


def _times(answers: Sequence[Got], delivery: _Delivery, block_bytes: int) -> tuple[TierTime, ...]:
    """What each tier gave, and when the last of it was there."""
    times = []
    for tier in sorted({answer.tier for answer in answers if answer.tier is not None}):
        came = [delivery.came[at] for at, answer in enumerate(answers) if answer.tier == tier]
        times.append(TierTime(tier, len(came), block_bytes * len(came), max(came)))
    return tuple(times)
