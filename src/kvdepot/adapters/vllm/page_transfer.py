"""Copying blocks between the depot and vLLM's pages: loads, saves, and pages as plain bytes.

Loads run in threads. A load never raises into the engine: a block that could not be loaded, for
any reason, is a failed block, which vLLM recomputes. A save reserves slots, copies the pages,
and seals the slots in a thread. It never waits for room: blocks that do not fit are offered again
later.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import KVTensors, OffloadTicket, OnboardTicket, Pieces, TensorMover
from kvdepot.adapters.vllm.messages import DRIVES, GroupFacts, LoadEnd, LoadJob, SaveJob, TierTime
from kvdepot.adapters.vllm.metrics import Counts, warn
from kvdepot.adapters.vllm.shards import HeadPart, fill_heads
from kvdepot.adapters.vllm.shared_depot import use_all_cores
from kvdepot.core.block import MISS, BlockKey, GetResult, PutResult
from kvdepot.core.depot import Arrival, Reservation
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.memory.memory import populate
from kvdepot.policy.fetching.fetch_or_recompute import worth_waiting_s

_ONBOARD_BYTES: Final = 128 << 20
"""Given to the mover at a time: the bus starts on the first blocks while the rest is prepared."""
_TOUCHED_BYTES: Final = 256 << 20
"""This much of the pages that vLLM gives out first is touched before the first load."""
_DRIVE_LOAD_BYTES: Final = 512 << 20
"""This much, or one load, is loaded from drives at a time: it keeps a drive busy. With more, all
loads would end as late as the last."""
_PAGE_AXES: Final = 3
"""Axes inside a page, as described to `KVTensors`."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """A worker's pages of one KV group, and the mover that copies them."""

    facts: GroupFacts
    tensors: KVTensors
    mover: TensorMover
    grain: int
    """Tokens of a block of a request."""

    def request_block(self, number: int) -> int:
        """The block of the request in which a block of the group lies."""
        return number * self.facts.layout.block_tokens // self.grain


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """A block of a load, and where it goes."""

    key: BlockKey | None
    """None: it is not known, so the load fails."""
    cache: PagedCache
    request_block: int
    pages: Sequence[int]
    """The last pages of the block, if the first ones are present. Empty: it is only read."""
    part: HeadPart | None = None
    """The heads that are copied, if another number of shards has saved the block."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLoad:
    """A requested load."""

    job: LoadJob
    targets: Sequence[BlockTarget]
    deadline: float
    start_after: Any


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A load that has ended."""

    job: LoadJob
    end: LoadEnd
    failed_pages: frozenset[int]
    counts: Counts

    @classmethod
    def of(
        cls,
        load: QueuedLoad,
        answers: Sequence[GetResult],
        seconds: float = 0.0,
        times: Sequence[TierTime] = (),
        learnt: Sequence[TierTime] = (),
    ) -> "FinishedLoad":
        """`answers` are for the leading targets, the others are absent. `times` are counted,
        `learnt` is what the scheduler learns from."""
        counts: Counts = defaultdict(float)
        failed: list[int] = []
        late: set[int] = set()
        padding = [MISS] * (len(load.targets) - len(answers))
        for index, answer in enumerate([*answers, *padding]):
            target = load.targets[index]
            if answer:
                counts[f"loaded_blocks:{answer.tier}"] += 1
                counts[f"loaded_bytes:{answer.tier}"] += target.cache.facts.layout.block_bytes
                continue
            counts[f"missed_blocks:{answer.reason}"] += 1
            failed.append(index)
            if answer.reason == "late":
                late.add(target.request_block)
        for tier_time in times:
            counts[f"load_seconds:{tier_time.tier}"] += tier_time.seconds
        first = min((load.targets[index].request_block for index in failed), default=None)
        behind = load.targets[failed[0] :] if failed else ()
        pages = frozenset(page for target in behind for page in target.pages)
        end = LoadEnd(load.job.request_id, first, tuple(learnt), len(late), seconds)
        return cls(load.job, end, pages, counts)


class Loader:
    """Loads in progress. `submit` and `take` belong to the engine's thread. Loads from drives begin
    in order, in separate threads, so that loads from memory do not wait for them."""

    def __init__(
        self, store: Depot, caches: Sequence[PagedCache], counts: Counts, threads: int
    ) -> None:
        self._store = store
        self._caches = caches
        self._counts = counts
        self._device = caches[0].mover.device
        self._threads, self._drive_threads = (
            ThreadPoolExecutor(threads, name, initializer=use_all_cores)
            for name in ("kvdepot-load", "kvdepot-drive-load")
        )
        self._drive_turn = threading.Condition()
        self._waiting: deque[QueuedLoad] = deque()
        """Loads from drives that have not begun; guarded by `_drive_turn`, as is the next."""
        self._drive_bytes = 0
        """Bytes of the loads from drives that have begun."""
        self._under_way = 0
        self._ended: SimpleQueue[FinishedLoad] = SimpleQueue()
        self._thread_local = threading.local()
        self._start_after: Any = None
        self._threads.submit(self._touch_pages)

    def __len__(self) -> int:
        return self._under_way

    def _touch_pages(self) -> None:
        """Touch the first pages of each layer, without changing them. On a processor the kernel has
        not allocated vLLM's cache yet, which took longer than the first load itself."""
        layers = {}
        for tensor in (each for cache in self._caches for each in cache.tensors.tensors):
            if tensor.device.type == "cpu":
                before = tensor.storage_offset() * tensor.element_size()
                layers[tensor.data_ptr()] = int(tensor.untyped_storage().nbytes() - before)
        for address, nbytes in layers.items():
            populate(address, min(nbytes, _TOUCHED_BYTES // len(layers)))

    def start_after_stream(self) -> None:
        """Loads from now on come after what the current stream was given so far: steps that were
        scheduled before their pages were handed out may still write to these."""
        if self._device.type == "cuda":
            self._start_after = torch.cuda.current_stream(self._device).record_event()

    def submit(self, job: LoadJob, targets: Sequence[BlockTarget]) -> None:
        """Start a load. Its time runs from now on, also while it waits for a thread."""
        load = QueuedLoad(job, targets, time.monotonic() + job.timeout_s, self._start_after)
        self._under_way += 1
        done: Future[FinishedLoad | None]
        if job.next_queued:
            with self._drive_turn:
                self._waiting.append(load)
            done = self._drive_threads.submit(self._load_in_turn, load)
        else:
            done = self._threads.submit(self._load, load)
        done.add_done_callback(partial(self._over, load))

    def _over(self, load: QueuedLoad, done: "Future[FinishedLoad | None]") -> None:
        error = done.exception()
        if error is not None:
            warn("a load failed, its blocks are recomputed", error)
            answers = [GetResult(None, "error")] * len(load.targets)
            self._ended.put(FinishedLoad.of(load, answers))
        elif (finished := done.result()) is not None:
            self._ended.put(finished)

    def take(self, wait_s: float = 0.0) -> list[FinishedLoad]:
        """The loads that have ended. Waits up to `wait_s` for the first, if any is in progress."""
        ended: list[FinishedLoad] = []
        if self._waiting:
            self._give_up_overdue()
        with suppress(Empty):
            if self._under_way and wait_s:
                ended.append(self._ended.get(timeout=wait_s))
            while len(ended) < self._under_way:
                ended.append(self._ended.get_nowait())
        self._under_way -= len(ended)
        for load in ended:
            for name, count in load.counts.items():
                self._counts[name] += count
        return ended

    def _give_up_overdue(self) -> None:
        """End loads from drives whose time has passed before they began."""
        now = time.monotonic()
        with self._drive_turn:
            overdue = [load for load in self._waiting if load.deadline <= now]
            for load in overdue:
                self._waiting.remove(load)
            self._drive_turn.notify_all()
        for load in overdue:
            late = [GetResult(None, "late")] * len(load.targets)
            self._ended.put(FinishedLoad.of(load, late, load.job.timeout_s))

    def close(self) -> None:
        """Wait for the loads that have begun; each has a deadline. The others are dropped."""
        with self._drive_turn:
            self._waiting.clear()
            self._drive_turn.notify_all()
        self._threads.shutdown()
        self._drive_threads.shutdown()

    def _load_in_turn(self, load: QueuedLoad) -> FinishedLoad | None:
        """Load from drives, once the loads before it have begun and fewer than _DRIVE_LOAD_BYTES
        are being loaded. None if it was given up before."""
        nbytes = sum(target.cache.facts.layout.block_bytes for target in load.targets)

        def is_settled() -> bool:
            fits = not self._drive_bytes or self._drive_bytes + nbytes <= _DRIVE_LOAD_BYTES
            return load not in self._waiting or (self._waiting[0] is load and fits)

        with self._drive_turn:
            self._drive_turn.wait_for(is_settled)
            if load not in self._waiting:
                return None
            self._waiting.popleft()
            self._drive_bytes += nbytes
            self._drive_turn.notify_all()
        try:
            return self._load(load)
        finally:
            with self._drive_turn:
                self._drive_bytes -= nbytes
                self._drive_turn.notify_all()

    @torch.no_grad()
    def _load(self, load: QueuedLoad) -> FinishedLoad | None:
        started = time.monotonic()
        waited_s = started - load.deadline + load.job.timeout_s
        arrived_s: dict[int, float] = {}
        tickets: list[OnboardTicket] = []
        latest: list[Arrival] = []

        def sink(arrivals: list[Arrival]) -> None:
            nonlocal latest
            latest = arrivals
            tickets.extend(_copy([(load.targets[each.index], each.view) for each in arrivals]))
            # Blocks whose memory stays until the lease ends are copied while the next are read.
            settle(wait=not all(arrival.lasting for arrival in arrivals))

        def settle(*, wait: bool) -> None:
            while wait and tickets:
                tickets.pop(0).synchronize()
            now = time.monotonic() - started
            arrived_s.update((arrival.index, now) for arrival in latest)

        def deliver(start: int, timeout_s: float) -> list[GetResult]:
            try:
                return lease.deliver(
                    sink, start=start, verify_concurrently=True, timeout_s=timeout_s
                )
            finally:
                settle(wait=True)

        def times() -> list[TierTime]:
            """The blocks from each tier and the time until the last one, which for drives includes
            the wait before the load began."""
            came: defaultdict[str, list[int]] = defaultdict(list)
            for index, answer in enumerate(answers):
                if answer.tier is not None:
                    came[answer.tier].append(index)
            return [
                TierTime(
                    tier,
                    len({load.targets[index].request_block for index in indices}),
                    max(arrived_s[at] for at in indices) + (waited_s if tier in DRIVES else 0.0),
                )
                for tier, indices in sorted(came.items())
            ]

        # Other threads verify blocks while they are copied; only then is a block a success.
        keys = [target.key for target in load.targets if target.key is not None]
        if len(keys) < len(load.targets):
            return FinishedLoad.of(load, ())
        if load.start_after is not None:
            self._go_on_after(load.start_after)
        with self._store.lease(keys) as lease:
            answers = deliver(0, max(0.0, load.deadline - time.monotonic()))
            # What parts of blocks take says nothing about whole blocks.
            learnt = times() if all(target.part is None for target in load.targets) else []
            late = [index for index, answer in enumerate(answers) if answer.reason == "late"]
            came, elapsed_s = sum(map(bool, answers)), time.monotonic() - started
            more_s = worth_waiting_s(came, len(late), elapsed_s, load.job.recompute_s)
            if more_s:
                # What comes now was read before, so its time is not learnt as the tier's.
                answers = [*answers[: late[0]], *deliver(late[0], more_s)]
        seconds = time.monotonic() - started + waited_s
        return FinishedLoad.of(load, answers, seconds, times(), learnt)

    def _go_on_after(self, mark: Any) -> None:
        """Give this thread a separate CUDA stream, which continues after `mark`: on the engine's
        stream, loads would wait for unrelated steps."""
        if not hasattr(self._thread_local, "stream"):
            torch.cuda.set_device(self._device)
            self._thread_local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._thread_local.stream)
        self._thread_local.stream.wait_event(mark)


def _copy(arrivals: Sequence[tuple[BlockTarget, memoryview]]) -> list[OnboardTicket]:
    """Start to copy blocks into their pages."""
    tickets: list[OnboardTicket] = []
    resharded_on: set[torch.device] = set()
    whole: defaultdict[PagedCache, list[tuple[memoryview, Pieces]]] = defaultdict(list)
    for target, view in arrivals:
        cache, pages, part = target.cache, target.pages, target.part
        if not pages:
            continue
        if part is not None:
            assert cache.facts.shard.axis is not None
            fill_heads(cache.tensors, cache.facts.shard.axis, view, pages, part)
            resharded_on.add(cache.mover.device)
        elif len(pages) == cache.facts.pages_per_block:
            whole[cache].append((view, cache.tensors.pages(pages)))
        else:
            # The last pages of a block are the end of the payload of each layer.
            rest = cache.tensors.pages(pages)
            size, each = len(view) // rest.layer_count, range(rest.layer_count)
            ends = [view[size * (at + 1) - rest.layer_bytes : size * (at + 1)] for at in each]
            tickets.append(cache.mover.onboard(ends, [rest.layers(at, at + 1) for at in each]))
    for cache, blocks in whole.items():
        count = max(1, _ONBOARD_BYTES // cache.facts.layout.block_bytes)
        layers = cache.tensors.layer_count
        for start in range(0, len(blocks), count):
            views, pieces = zip(*blocks[start : start + count], strict=True)
            tickets.append(cache.mover.onboard(views, pieces, layers_per_step=layers))
    for device in resharded_on:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return tickets


@dataclass(frozen=True, slots=True)
class StartedSave:
    """A save whose slots are reserved and whose copies, if any, have started."""

    unsaved: int | None = None
    """The first block of the group that found no room."""
    counts: Counts = field(default_factory=lambda: defaultdict(float))
    slots: Reservation | None = None
    fresh: Sequence[int] = ()
    """The slots that are being filled."""
    ticket: OffloadTicket | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A requested save."""

    job: SaveJob
    started: "Future[StartedSave]"
    ended: "Future[StartedSave]"
    """Done when no page is read any more, and the blocks are in the depot."""


class Saver:
    """Saves and audits in progress. The public methods belong to the engine's thread. On a device,
    a thread reserves slots, which takes tens of milliseconds, while the engine continues; on a
    processor a save has read its pages when `save` returns."""

    def __init__(
        self,
        store: Depot,
        caches: Sequence[PagedCache],
        counts: Counts,
        auditor: BlockAuditor,
    ) -> None:
        self._store = store
        self._caches = caches
        self._counts = counts
        self._auditor = auditor
        self._starting = ThreadPoolExecutor(1, "kvdepot-save", initializer=use_all_cores)
        self._sealing = ThreadPoolExecutor(1, "kvdepot-seal", initializer=use_all_cores)
        self._starts: list[Save] = []
        """Saves whose start was not reported."""
        self._saves: list[Save] = []
        """Saves that may still read pages."""

    def save(self, job: SaveJob, keys: Sequence[BlockKey]) -> None:
        """Save blocks, or compare one with what the depot has. `keys` are this shard's."""
        mark = self._caches[job.blocks.group].mover.mark()
        started = self._starting.submit(self._start, job, keys, mark)
        save = Save(job, started, self._sealing.submit(self._seal, job, keys, started))
        self._starts.append(save)
        self._saves.append(save)
        if mark is None:
            wait([started])

    def take_unsaved(self) -> list[tuple[SaveJob, int]]:
        """The saves started since the last call that found no room for all blocks, each with the
        first block of the group that is not saved. Forgets saves that have ended."""
        unsaved = []
        for save in [save for save in self._starts if save.started.done()]:
            self._starts.remove(save)
            first: int | None = save.job.blocks.first_block
            if save.started.exception() is None:
                first = save.started.result().unsaved
            if first is not None and not save.job.is_audit:
                unsaved.append((save.job, first))
        for save in [save for save in self._saves if save.ended.done()]:
            self._saves.remove(save)
            error = save.ended.exception()
            if error is not None:
                audits = save.job.is_audit
                warn("a block could not be audited" if audits else "a save failed", error)
                self._counts["failed_saves"] += not audits
            if save.started.exception() is None:
                for name, count in save.started.result().counts.items():
                    self._counts[name] += count
        return unsaved

    def reading_requests(self) -> set[str]:
        """The requests whose pages may still be read."""
        return {save.job.request_id for save in self._saves}

    def order_stream_after_reads(self) -> None:
        """Order the current stream after the page reads of all saves so far."""
        for save in self._saves:
            ticket = save.started.result().ticket if save.started.exception() is None else None
            if ticket is not None:
                ticket.wait_read()

    def wait(self) -> None:
        """Return when no page is read any more."""
        wait([save.ended for save in self._saves])

    def close(self) -> None:
        self._starting.shutdown()
        self._sealing.shutdown()

    @torch.no_grad()
    def _start(self, job: SaveJob, keys: Sequence[BlockKey], mark: Any) -> StartedSave:
        """Find room, and start the copies of the blocks that the depot lacks."""
        counts: Counts = defaultdict(float)
        first, cache = job.blocks.first_block, self._caches[job.blocks.group]
        tokens = np.frombuffer(job.tokens, "<u4") if job.tokens else None
        try:
            if job.is_audit:
                slots = self._auditor.scratch(keys[0])
            else:
                slots = self._store.reserve(keys, timeout_s=0.0, token_ids=tokens)
        except KVDepotError as error:
            warn("the depot accepts no blocks", error)
            counts["depot_errors:reserve"] += 1
            return StartedSave(first, counts)
        outcomes = slots.outcomes
        fits = next((index for index, put in enumerate(outcomes) if not put), len(outcomes))
        fresh = [index for index in range(fits) if outcomes[index] is PutResult.STORED]
        if not job.is_audit:
            for put in outcomes[:fits]:
                counts[f"saved_blocks:{put.value}"] += 1
            if fits < len(outcomes):
                counts[f"saved_blocks:{outcomes[fits].value}"] += len(outcomes) - fits
        unsaved = first + fits if fits < len(keys) else None
        if not fresh:
            slots.close()
            return StartedSave(unsaved, counts)
        try:
            pages, ratio = job.blocks.pages, cache.facts.pages_per_block
            pieces = [cache.tensors.pages(pages[at * ratio : (at + 1) * ratio]) for at in fresh]
            views = [slots.view(index) for index in fresh]
            ticket = cache.mover.offload(pieces, views, after=mark)
        except (KVDepotError, RuntimeError):
            # After a daemon's restart, until the mover has locked the new daemon's memory.
            slots.close()
            raise
        return StartedSave(unsaved, counts, slots, fresh, ticket)

    def _seal(
        self, job: SaveJob, keys: Sequence[BlockKey], starting: "Future[StartedSave]"
    ) -> StartedSave:
        """Make the copied blocks blocks of the depot, or compare the audited one."""
        started = starting.result()
        if started.slots is None or started.ticket is None:
            return started
        with started.slots as slots:
            started.ticket.wait()
            if not job.is_audit:
                slots.seal(started.fresh)
                return started
            layout = self._caches[job.blocks.group].facts.layout
            same = self._auditor.check(keys[0], slots.view(0), layout)
        outcome = "unknown" if same is None else "same" if same else "different"
        started.counts[f"audited_blocks:{outcome}"] += 1
        return started


def page_tensors(
    caches: Mapping[str, object], layer_names: Sequence[str], page_count: int
) -> list[tuple[tuple[str, ...], KVTensors]]:
    """The KV caches of these layers, those of one shape together. ModelError if one has no pages.

    Only the first axis, of pages, is relied on. The inside of a page is up to the backend (on a
    processor keys are transposed), so a page is taken as it lies in memory. If the backend works on
    parts of vLLM's blocks, the first axis counts these.
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
        raise ModelError(f"a KV cache with strides {tensor.stride()} has no contiguous pages")
    joined = [(1, 1)] * (_PAGE_AXES - len(joined)) + joined
    sizes = [tensor.shape[0], *(size for _, size in joined)]
    return tensor.as_strided(sizes, [tensor.stride(0), *(step for step, _ in joined)])
