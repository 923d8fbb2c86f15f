"""Copying blocks between the depot and vLLM's pages: loads, saves, and pages as plain bytes.

Loads run in threads beside the engine's. A load never raises into the engine: a block that could
not be loaded, for whatever reason, is a failed block, which vLLM recomputes. For a save the
engine's thread reserves slots and starts the copies; checksums and bookkeeping run in one thread
here. A save never waits for room: what does not fit is offered again later.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import KVTensors, OffloadTicket, OnboardTicket, Pieces, TensorMover
from kvdepot.adapters.vllm.messages import DRIVES, LoadEnd, LoadJob, SaveJob, TierTime
from kvdepot.adapters.vllm.metrics import ConnectorCounts, RateLimitedWarnings
from kvdepot.adapters.vllm.shards import HeadAxis, HeadPart, fill_heads
from kvdepot.adapters.vllm.shared_depot import use_all_cores
from kvdepot.core.block import BlockKey, GetResult, PutResult
from kvdepot.core.depot import Arrival, Depot, Reservation
from kvdepot.core.layout import KVLayout
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.memory.memory import populate
from kvdepot.policy.fetching.fetch_or_recompute import worth_waiting_s

_GROUP_BYTES: Final = 128 << 20
"""Given to the mover at a time: the bus starts on the first ones while the rest is prepared."""
_WARM_BYTES: Final = 256 << 20
"""Of the pages that vLLM gives out first, so much is touched before the first load."""
_TURN_BYTES: Final = 512 << 20
"""Of loads from drives so much is under way side by side, or one: that keeps a drive busy. With
more of them all would be over as late as the last."""
_PAGE_AXES: Final = 3
"""Axes inside a page, as `KVTensors` is told of it."""


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A worker's pages of one KV group, and the mover that copies them."""

    tensors: KVTensors
    mover: TensorMover
    pages_per_block: int
    layout: KVLayout
    axis: HeadAxis | None = None
    """Where the heads are in a page, if blocks of other shards can be read."""

    @property
    def block_bytes(self) -> int:
        return self.tensors.pages([0]).nbytes * self.pages_per_block

    def block(self, pages: Sequence[int], number: int) -> Pieces:
        """The pieces of the block `number` of those that fill `pages`."""
        start = number * self.pages_per_block
        return self.tensors.pages(pages[start : start + self.pages_per_block])


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    job: LoadJob
    end: LoadEnd
    failed_pages: frozenset[int]


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """A load, from when it was asked for."""

    job: LoadJob
    keys: Sequence[BlockKey]
    parts: Sequence[HeadPart]
    deadline: float
    start_after: Any
    nbytes: int
    end: "Future[LoadEnd]" = field(default_factory=Future)


class Loader:
    """Loads under way. `submit` and `take` belong to the engine's thread.

    Those that read drives come in turn, in threads of their own: what is in memory does not wait
    for them.
    """

    def __init__(
        self,
        store: Depot,
        caches: Sequence[PagedCache],
        counts: ConnectorCounts,
        threads: int,
    ) -> None:
        self._store = store
        self._caches = caches
        self._counts = counts
        self._warnings = RateLimitedWarnings()
        self._threads = ThreadPoolExecutor(threads, "kvdepot-load", initializer=use_all_cores)
        self._drive_threads = ThreadPoolExecutor(
            threads, "kvdepot-drive-load", initializer=use_all_cores
        )
        self._turns = threading.Lock()
        self._in_turn: deque[QueuedLoad] = deque()
        """Loads from drives that have not begun; guarded by `_turns`, as is the next."""
        self._drive_bytes = 0
        """Of those that have begun."""
        self._under_way: dict[tuple[str, int], QueuedLoad] = {}
        """By request and group."""
        self._one_ended = threading.Event()
        self._thread_local = threading.local()
        self._start_after: Any = None
        self._threads.submit(self._warm_up)

    def __len__(self) -> int:
        return len(self._under_way)

    def _warm_up(self) -> None:
        """Touch the first pages of each layer, as they are.

        On a processor vLLM's cache is memory that the kernel has yet to find; that took longer
        than the first load itself.
        """
        layers = {}
        for tensor in (each for cache in self._caches for each in cache.tensors.tensors):
            if tensor.device.type == "cpu":
                before = tensor.storage_offset() * tensor.element_size()
                layers[tensor.data_ptr()] = int(tensor.untyped_storage().nbytes() - before)
        for address, nbytes in layers.items():
            populate(address, min(nbytes, _WARM_BYTES // len(layers)))

    def start_after_stream(self) -> None:
        """Loads from now on come after what the current stream has been given so far.

        Steps that were scheduled before their pages were handed out may still write to these.
        """
        device = self._caches[0].mover.device
        if device.type == "cuda":
            self._start_after = torch.cuda.current_stream(device).record_event()

    def submit(
        self, job: LoadJob, keys: Sequence[BlockKey], parts: Sequence[HeadPart] = ()
    ) -> None:
        """Start a load. `keys` are this shard's; without any it is a failed load. With `parts` they
        are, for each block, those of the shards that these parts of it come from.

        Its time runs from now on, also while it waits for a thread.
        """
        deadline = time.monotonic() + job.timeout_s
        nbytes = len(keys) * self._caches[job.group].block_bytes
        load = QueuedLoad(job, keys, parts, deadline, self._start_after, nbytes)
        self._under_way[job.request_id, job.group] = load
        load.end.add_done_callback(lambda _: self._one_ended.set())
        if not job.next_queued:
            self._threads.submit(self._load, load).add_done_callback(partial(_pass_on, load.end))
            return
        with self._turns:
            self._in_turn.append(load)
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin loads from drives whose turn has come."""
        begun: list[QueuedLoad] = []
        with self._turns:
            while self._in_turn:
                nbytes = self._in_turn[0].nbytes
                if self._drive_bytes and self._drive_bytes + nbytes > _TURN_BYTES:
                    break
                self._drive_bytes += nbytes
                begun.append(self._in_turn.popleft())
        # Without the lock: one that is over at once calls back in this thread.
        for load in begun:
            done = self._drive_threads.submit(self._load, load)
            done.add_done_callback(partial(self._turn_over, load))

    def _turn_over(self, load: QueuedLoad, done: "Future[LoadEnd]") -> None:
        _pass_on(load.end, done)
        with self._turns:
            self._drive_bytes -= load.nbytes
        self._begin_next()

    def _give_up_overdue(self) -> None:
        """End loads whose time is up before their turn has come."""
        now = time.monotonic()
        with self._turns:
            overdue = [load for load in self._in_turn if load.deadline <= now]
            for load in overdue:
                self._in_turn.remove(load)
        for load in overdue:
            job, late = load.job, len(load.job.keys[0])
            self._counts.missed(["late"] * late)
            load.end.set_result(LoadEnd(job.request_id, job.first_block, (), late, job.timeout_s))

    def take(self, wait_s: float = 0.0) -> list[FinishedLoad]:
        """The loads that are over. Waits up to `wait_s` for the first if any are under way."""
        if not self._under_way:
            return []
        if wait_s:
            self._one_ended.wait(wait_s)
        self._one_ended.clear()
        if self._in_turn:
            self._give_up_overdue()
        over = [name for name, load in self._under_way.items() if load.end.done()]
        return [self._finished(self._under_way.pop(name)) for name in over]

    def close(self) -> None:
        """Wait for what is under way; each load has a deadline."""
        with self._turns:
            self._in_turn.clear()
        self._threads.shutdown()
        self._drive_threads.shutdown()

    def _finished(self, load: QueuedLoad) -> FinishedLoad:
        job, future = load.job, load.end
        error = future.exception()
        if error is not None:
            self._warnings.warn("a load failed, its blocks are recomputed", error)
            self._counts.missed(["error"] * len(job.keys[0]))
        end = future.result() if error is None else LoadEnd(job.request_id, job.first_block)
        if end.failed_block is None:
            return FinishedLoad(job, end, frozenset())
        pages_per_block = self._caches[job.group].pages_per_block
        start = (end.failed_block - job.first_block) * pages_per_block
        return FinishedLoad(job, end, frozenset(job.pages[max(start, job.present_pages) :]))

    @torch.no_grad()
    def _load(self, load: QueuedLoad) -> LoadEnd:
        job, keys, parts = load.job, load.keys, load.parts
        started = time.monotonic()
        waited_s = started - load.deadline + job.timeout_s
        arrived_s: dict[int, float] = {}
        tickets: list[OnboardTicket] = []
        last: list[Arrival] = []

        def arrived(arrivals: list[Arrival]) -> None:
            now = time.monotonic() - started
            arrived_s.update((one.index, now) for one in arrivals)

        def sink(arrivals: list[Arrival]) -> None:
            nonlocal last
            if job.pages and parts:
                self._fill_heads(job, arrivals, parts)
            elif job.pages:
                tickets.extend(self._scatter(job, arrivals))
            # What stays where it is until the lease ends is on its way while the next is read.
            if not all(one.lasting for one in arrivals):
                _finish(tickets)
            last = arrivals
            arrived(arrivals)

        def deliver(start: int, timeout_s: float) -> list[GetResult]:
            try:
                return lease.deliver(sink, start=start, beside=True, timeout_s=timeout_s)
            finally:
                _finish(tickets)
                arrived(last)

        # Other threads verify blocks while they are copied; only then is a block a success.
        cache = self._caches[job.group]
        with self._own_stream(load.start_after), self._store.lease(keys) as lease:
            left_s = max(0.0, load.deadline - time.monotonic())
            got = deliver(0, left_s)
            times = _times(got, arrived_s, cache.block_bytes, waited_s)
            first, more_s = _nearly_there(got, time.monotonic() - started, job.recompute_s)
            if more_s:
                got = [*got[:first], *deliver(first, more_s)]
        answers = [*got, *[GetResult(None, "absent")] * (len(keys or job.keys[0]) - len(got))]
        self._counts.loaded(_times(got, arrived_s, cache.block_bytes, waited_s))
        self._counts.missed(answer.reason for answer in answers if not answer)
        failed = next((at for at, answer in enumerate(answers) if not answer), None)
        each = max(1, len(parts))
        block = None if failed is None else job.first_block + failed // each
        late = -(-sum(answer.reason == "late" for answer in answers) // each)
        # What parts of blocks take says nothing of whole ones.
        learnt = () if parts else tuple(times)
        return LoadEnd(job.request_id, block, learnt, late, time.monotonic() - started + waited_s)

    def _fill_heads(self, job: LoadJob, arrivals: list[Arrival], parts: Sequence[HeadPart]) -> None:
        """Copy parts of other shards' blocks into pages, but for those that are left alone."""
        cache = self._caches[job.group]
        assert cache.axis is not None
        for one in arrivals:
            number, part = divmod(one.index, len(parts))
            start = number * cache.pages_per_block
            pages = job.pages[max(start, job.present_pages) : start + cache.pages_per_block]
            fill_heads(cache.tensors, cache.axis, one.view, pages, parts[part])
        if cache.mover.device.type == "cuda":
            torch.cuda.current_stream(cache.mover.device).synchronize()

    def _scatter(self, job: LoadJob, arrivals: list[Arrival]) -> list[OnboardTicket]:
        """Start to copy blocks into their pages. The first block may have pages that are left
        alone."""
        cache = self._caches[job.group]
        tensors, mover = cache.tensors, cache.mover
        whole = [one for one in arrivals if one.index or not job.present_pages]
        size = max(1, _GROUP_BYTES // cache.block_bytes)
        tickets = [
            mover.onboard(
                [one.view for one in whole[start : start + size]],
                [cache.block(job.pages, one.index) for one in whole[start : start + size]],
                layers_per_step=tensors.layer_count,
            )
            for start in range(0, len(whole), size)
        ]
        for one in arrivals:
            if job.present_pages and not one.index:
                rest = tensors.pages(job.pages[job.present_pages : cache.pages_per_block])
                tickets.append(mover.onboard(*_tail_of_layers(one.view, rest)))
        return tickets

    @contextmanager
    def _own_stream(self, start_after: Any) -> Iterator[None]:
        """On CUDA a stream of this thread's own is current, and goes on after `start_after`.

        The engine's stream would put a load behind steps that have nothing to do with it.
        """
        if start_after is None:
            yield
            return
        device, local = self._caches[0].mover.device, self._thread_local
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(local.stream):
            local.stream.wait_event(start_after)
            yield


def _pass_on(asked: "Future[Any]", done: "Future[Any]") -> None:
    """What was asked for is over, as `done` is: with its error, if it has one."""
    error = done.exception()
    if error is not None:
        asked.set_exception(error)
    else:
        asked.set_result(done.result())


def _finish(tickets: list[OnboardTicket]) -> None:
    """Wait for copies, and forget them."""
    while tickets:
        tickets.pop(0).synchronize()


def _nearly_there(
    got: Sequence[GetResult], elapsed_s: float, recompute_s: float
) -> tuple[int, float]:
    """The first block that is late, and how much longer to wait for all that are; 0: give up.

    What they were read into by then is in memory, so they count as read from there if they come:
    how long that takes is not told as a time of the tier.
    """
    late = [at for at, answer in enumerate(got) if answer.reason == "late"]
    came = sum(1 for answer in got if answer)
    return (late[0] if late else 0), worth_waiting_s(came, len(late), elapsed_s, recompute_s)


def _times(
    got: Sequence[GetResult], arrived_s: Mapping[int, float], block_bytes: int, waited_s: float
) -> list[TierTime]:
    """What came of each tier, and how long after it was asked for the last of it was there.

    `waited_s`: for its turn, which only drives have.
    """
    times = []
    for tier in sorted({answer.tier for answer in got if answer.tier is not None}):
        came = [arrived_s[at] for at, answer in enumerate(got) if answer.tier == tier]
        seconds = max(came) + (waited_s if tier in DRIVES else 0.0)
        times.append(TierTime(tier, len(came), block_bytes * len(came), seconds))
    return times


def _tail_of_layers(view: memoryview, rest: Pieces) -> tuple[list[memoryview], list[Pieces]]:
    """For each layer the end of its payload, and the pages that it fills."""
    layer_bytes = len(view) // rest.layer_count
    ends = [layer_bytes * (layer + 1) for layer in range(rest.layer_count)]
    views = [view[end - rest.layer_bytes : end] for end in ends]
    return views, [rest.layers(layer, layer + 1) for layer in range(rest.layer_count)]


@dataclass(frozen=True, slots=True, eq=False)
class StartedSave:
    """A save, from when it was asked for."""

    request_id: str
    ticket: "Future[OffloadTicket | None]" = field(default_factory=Future)
    """Known when its copies were started; None: there are none."""
    over: "Future[None]" = field(default_factory=Future)
    """When it reads no page any more, and its blocks are in the depot."""

    def end(self) -> None:
        """There is nothing to copy."""
        self.ticket.set_result(None)
        self.over.set_result(None)


class Saver:
    """Saves under way. The methods without an underscore belong to the engine's thread.

    On a device they are started in a thread: to find room for many blocks and to start their copies
    takes tens of milliseconds, in which the engine goes on. On a processor a save has read its
    pages when `save` returns.
    """

    def __init__(
        self,
        store: Depot,
        caches: Sequence[PagedCache],
        counts: ConnectorCounts,
        auditor: BlockAuditor,
    ) -> None:
        self._store = store
        self._caches = caches
        self._counts = counts
        self._auditor = auditor
        self._warnings = RateLimitedWarnings()
        self._starting = ThreadPoolExecutor(1, "kvdepot-save", initializer=use_all_cores)
        self._sealing = ThreadPoolExecutor(1, "kvdepot-seal", initializer=use_all_cores)
        self._reading: list[StartedSave] = []
        """Those that may still read pages."""
        self._unsaved: deque[tuple[SaveJob, int]] = deque()

    def save(self, job: SaveJob, keys: Sequence[BlockKey]) -> None:
        """Save the blocks. `keys` are this shard's."""
        save = StartedSave(job.request_id)
        self._reading.append(save)
        mark = self._caches[job.group].mover.mark()
        if mark is None:
            self._started(save, job, self._begin(save, job, keys, None))
        else:
            begun = self._starting.submit(self._begin, save, job, keys, mark)
            begun.add_done_callback(partial(self._begun, save, job))

    def take_unsaved(self) -> list[tuple[SaveJob, int]]:
        """Of saves that were started since the last call, the first block of the group that found
        no room, where there is one."""
        return [self._unsaved.popleft() for _ in range(len(self._unsaved))]

    def _begun(self, save: StartedSave, job: SaveJob, begun: "Future[int | None]") -> None:
        error = begun.exception()
        if error is not None:
            self._warnings.warn("a save failed", error)
            self._counts.add("failed_saves")
        self._started(save, job, begun.result() if error is None else job.first_block)

    def _started(self, save: StartedSave, job: SaveJob, unsaved: int | None) -> None:
        if unsaved is not None:
            self._unsaved.append((job, unsaved))
        if not save.ticket.done():
            save.end()

    @torch.no_grad()
    def _begin(
        self, save: StartedSave, job: SaveJob, keys: Sequence[BlockKey], mark: Any
    ) -> int | None:
        """Find room and start the copies; returns the first block that is not saved, if any."""
        try:
            tokens = np.frombuffer(job.tokens, "<u4") if job.tokens else None
            slots = self._store.reserve(keys, timeout_s=0.0, token_ids=tokens)
        except KVDepotError as error:
            self._warnings.warn("the depot takes nothing", error)
            self._counts.add("depot_errors", 1, "reserve")
            return job.first_block
        outcomes = slots.outcomes
        fits = next((at for at, put in enumerate(outcomes) if not put), len(outcomes))
        for put in outcomes[:fits]:
            self._counts.add("saved_blocks", 1, put.value)
        if fits < len(outcomes):
            self._counts.add("saved_blocks", len(outcomes) - fits, outcomes[fits].value)
        fresh = [at for at in range(fits) if outcomes[at] is PutResult.STORED]
        if not fresh:
            slots.close()
        elif not self._copy(save, job, slots, fresh, mark):
            return job.first_block
        return job.first_block + fits if fits < len(keys) else None

    def audit(self, job: SaveJob, key: BlockKey) -> None:
        """Compare a block, which was computed again, with what the depot has."""
        cache, slots = self._caches[job.group], None
        try:
            slots = self._auditor.scratch(key)
            view = slots.view(0)
            if view is None:
                slots.close()
                return
            ticket = cache.mover.offload([cache.block(job.pages, 0)], [view])
        except (KVDepotError, RuntimeError) as error:
            if slots is not None:
                slots.close()
            self._warnings.warn("a block could not be audited", error)
            return
        over = self._sealing.submit(self._compare, ticket, slots, key, cache.layout)
        save = StartedSave(job.request_id, over=over)
        save.ticket.set_result(ticket)
        self._reading.append(save)

    def _compare(
        self, ticket: OffloadTicket, slots: Reservation, key: BlockKey, layout: KVLayout
    ) -> None:
        with slots:
            ticket.wait()
            view = slots.view(0)
            assert view is not None
            same = self._auditor.check(key, view, layout)
        outcome = "unknown" if same is None else "same" if same else "different"
        self._counts.add("audited_blocks", 1, outcome)

    def reading_requests(self) -> set[str]:
        """The requests whose pages saves may still read."""
        for save in [save for save in self._reading if save.over.done()]:
            self._finish(save)
        return {save.request_id for save in self._reading}

    def order_stream_after_reads(self) -> None:
        """What the current stream does next comes after all saves so far have read their pages."""
        for save in self._reading:
            ticket = save.ticket.result()
            if ticket is not None:
                ticket.wait_read()

    def wait(self) -> None:
        """Return when no page is read any more."""
        for save in list(self._reading):
            self._finish(save)

    def close(self) -> None:
        self.wait()
        self._starting.shutdown()
        self._sealing.shutdown()

    def _copy(
        self, save: StartedSave, job: SaveJob, slots: Reservation, fresh: list[int], mark: Any
    ) -> bool:
        """Start the copies. False: they cannot be made now, and the slots are given back.

        As after a daemon's restart, until the mover has locked the new daemon's memory.
        """
        cache = self._caches[job.group]
        pieces = [cache.block(job.pages, at) for at in fresh]
        try:
            views = [slots.view(at) for at in fresh]
            ticket = cache.mover.offload(pieces, views, after=mark)
        except (KVDepotError, RuntimeError) as error:
            slots.close()
            self._warnings.warn("a save could not be started", error)
            self._counts.add("failed_saves")
            return False
        save.ticket.set_result(ticket)
        sealed = self._sealing.submit(self._seal, ticket, slots, fresh)
        sealed.add_done_callback(partial(_pass_on, save.over))
        return True

    def _seal(self, ticket: OffloadTicket, slots: Reservation, fresh: list[int]) -> None:
        with slots:
            ticket.wait()
            slots.seal(fresh)

    def _finish(self, save: StartedSave) -> None:
        self._reading.remove(save)
        error = save.over.exception()
        if error is not None:
            self._warnings.warn("a save failed", error)
            self._counts.add("failed_saves")


def page_tensors(
    caches: Mapping[str, object], layer_names: Sequence[str], page_count: int
) -> list[tuple[tuple[str, ...], KVTensors]]:
    """The KV caches of these layers, those of one shape together; ModelError where it cannot be.

    Only the page axis, the first, is believed. What lies inside a page is up to the backend (on the
    processor keys are transposed), so a page is taken as it lies in memory. Where the backend works
    on parts of vLLM's blocks, the first axis counts these.
    """
    alike: dict[tuple[torch.Size, torch.dtype], dict[str, torch.Tensor]] = {}
    for name in layer_names:
        tensor = caches.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"layer {name}: vLLM registered {type(tensor).__name__}, not a tensor")
        shape = tuple(tensor.shape)
        if len(shape) < 2:
            raise ModelError(f"layer {name}: a KV cache of shape {shape} has no pages")
        if shape[0] % page_count:
            raise ModelError(
                f"layer {name}: its KV cache of shape {shape} does not begin with "
                f"the {page_count} blocks that vLLM has"
            )
        parts, stride = shape[0] // page_count, tensor.stride()
        whole = tensor.as_strided((page_count, parts, *shape[1:]), (stride[0] * parts, *stride))
        alike.setdefault((whole.shape, whole.dtype), {})[name] = in_memory_order(whole)
    return [
        (tuple(same), KVTensors(list(same.values()), "page token head dim", order="token head dim"))
        for same in alike.values()
    ]


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with the axes of a page in the order of their strides."""
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True), reverse=True)
    joined: list[tuple[int, int]] = []
    for step, size in inner:
        if size == 1:
            continue
        if joined and joined[-1][0] == step * size:
            joined[-1] = (step, joined[-1][1] * size)
        else:
            joined.append((step, size))
    if len(joined) > _PAGE_AXES:
        raise ModelError(f"a KV cache with strides {tensor.stride()} has no pages of plain bytes")
    joined = [(1, 1)] * (_PAGE_AXES - len(joined)) + joined
    sizes = [tensor.shape[0], *(size for _, size in joined)]
    return tensor.as_strided(sizes, [tensor.stride(0), *(step for step, _ in joined)])
