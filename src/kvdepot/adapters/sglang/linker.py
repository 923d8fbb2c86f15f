"""The class that SGLang loads as its external linker: between device pools and a depot, without
SGLang's host memory. Needs SGLang.

SGLang aborts a request whose load fails once it has begun. So `load`, where a refusal only means
that the pages are computed, brings all pages of the request to memory, verified and leased, within
`load_timeout`; all ranks agree on the answer. What is left after that are copies to the device.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
)
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (  # type: ignore[import-not-found]
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import (  # type: ignore[import-not-found]
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # type: ignore[import-not-found]
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.version import __version__  # type: ignore[import-not-found]

import kvdepot
from kvdepot.adapters.sglang.config import LINKER_SETTING, read_linker
from kvdepot.adapters.sglang.device_pages import DevicePages, LeasedPages
from kvdepot.adapters.sglang.identity import identify
from kvdepot.adapters.sglang.load_decision import LoadDecider
from kvdepot.adapters.sglang.loaded_weights import WEIGHTS
from kvdepot.adapters.sglang.pages import usable_lengths
from kvdepot.adapters.sglang.storage import tail_pages
from kvdepot.adapters.tensors import open_mover
from kvdepot.adapters.tensors.slices import COPY_BYTES_MIN
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import MEMORY_TIERS, Depot
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.policy.fetching.advisor import Probe
from kvdepot.policy.fetching.speed_models import drive_profiles

_logger = logging.getLogger("sglang.kvdepot")
_FAILURES: Final = (KVDepotError, RuntimeError, ValueError)
"""Of a depot, of a device, and of SGLang's pools for indices that are no pages."""
_SEEN_MAX: Final = 4096
_CHUNK_TOKENS: Final = 1 << 20
"""SGLang computes any prompt in one step."""
_Job = Callable[[], None]


@dataclass(slots=True)
class LinkerCounts:
    """What was asked for and done so far."""

    lookups: int = 0
    hit_pages: int = 0
    loads: int = 0
    loaded_pages: int = 0
    passed_pages: int = 0
    """Found, and computed all the same: that was expected to be faster."""
    refused_loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    stored_pages: int = 0
    failed_offloads: int = 0


class KVDepotLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Pages of SGLang's device pools in a depot. `load` and `lookup` belong to SGLang's thread."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        try:
            self._settings = read_linker(extra_config or {})
            if (getattr(server_args, "dcp_size", None) or 1) > 1:
                raise ModelError("a linker does not serve decode context parallelism")
            self._group = device_pools(params, components)
            self._groups = _groups(params)
            storage = _storage_config(server_args, params, self._group.rank_replicated)
            self._identity = identify(
                storage, server_args, self._settings, __version__, LINKER_SETTING
            )
            self._identity.known_weights(self._settings)  # begins to read them
            WEIGHTS.begin()
            self._depot = self._settings.open(_processes(), LINKER_SETTING)
        except KVDepotError as error:
            hint = f"; hint: {error.hint}" if error.hint else ""
            _logger.log(logging.ERROR, "kvdepot: %s%s", error, hint)
            raise
        self._offloads_here = not self._group.rank_replicated or storage.tp_rank == 0
        self.pools = self._group.entry_map
        self._device = torch.device(self._group.entries[0].kv_buffer[0].device)
        try:
            self._mover = open_mover(lambda: self._depot.memory, self._device)
            self._pages = {
                name: DevicePages(self._depot, entry, self._mover)
                for name, entry in self.pools.items()
            }
            self._decider = self._make_decider(server_args) if self._settings.decide else None
        except KVDepotError:
            self._depot.close()
            raise
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[LeasedPages]] = {}
        self._seen: OrderedDict[str, str] = OrderedDict()
        """Requests that had a hit, and of each the page that it is to compute all the same."""
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loading, self._offloading = Worker("kvdepot-load"), Worker("kvdepot-offload")
        self._counts = LinkerCounts()
        self._beginning = threading.Lock()
        self._audited = False
        """The pools know their producer, and whether their hits are audited."""
        self._closed = False

    @property
    def depot(self) -> Depot:
        return self._depot

    def stats(self) -> dict[str, int]:
        """What was asked for and done so far."""
        return asdict(self._counts)

    def _make_decider(self, server_args: Any) -> LoadDecider:
        chunk_tokens = getattr(server_args, "chunked_prefill_size", None) or 0
        drives = drive_profiles(self._depot.stats())
        pages = self._pages[PoolName.KV]
        return LoadDecider(
            pages.page_tokens,
            pages.page_bytes,
            chunk_tokens if chunk_tokens > 0 else _CHUNK_TOKENS,
            drives,
        )

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths of the prefix, in pages, that can be loaded. What is not in memory begins to come
        there."""
        wanted = self._group.resolve_transfers(transfers)
        hashes = next((one.keys for one in transfers if one.name == PoolName.KV), None)
        self._counts.lookups += 1
        if not wanted or not hashes or not self._ready():
            return []
        found = set(range(1, len(hashes) + 1))
        tiers: tuple[str, ...] = ()
        try:
            for one in sorted(wanted, key=lambda one: tail_pages(one) is not None):
                pages = self._pages[one.name]
                keys = pages.keys(hashes[: max(found, default=0)], None, chained=False)
                if one.hit_policy == PoolHitPolicy.ALL_PAGES:
                    match = self._depot.match(keys)
                    found &= set(range(1, len(match) + 1))
                    tiers = match.tiers if one.name == PoolName.KV else tiers
                else:
                    there = [len(self._depot.match([key])) for key in keys]
                    found &= usable_lengths(there, tail_pages(one))
            if found:
                first = rid not in self._seen
                found = self._served(rid, hashes, found, tiers)
                if first and found:
                    self._hint(wanted, hashes[: max(found)])
        except _FAILURES as error:
            _logger.warning("kvdepot: a lookup failed: %s", error)
            return []
        self._counts.hit_pages += max(found, default=0)
        if self._decider is not None:
            self._decider.looked_up(rid, hashes[0])
        return sorted(found)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Bring the pages of a request to memory. False, on all ranks: it computes them."""
        wanted = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not wanted:
            return False
        held: list[LeasedPages] = []
        waited = self._decider is not None and self._is_below_memory(_kv_hashes(wanted))
        begun_s = time.monotonic()
        ready = self._lease(wanted, held)
        agreed = self._agreed(ready)
        timed_out = time.monotonic() - begun_s >= self._settings.load_timeout
        self._learn(rid, wanted, there=agreed, waited=waited and (ready or timed_out))
        if not agreed:
            for one in held:
                one.release()
            self._counts.refused_loads += 1
            return False
        self._queued[rid] = held
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        held = self._queued.pop(rid, None)
        for one in held or ():
            one.release()
        return held is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        held = [one for request in self._queued.values() for one in request]
        self._counts.loads += len(self._queued)
        self._queued = {}
        index = int(self.layer_done_counter.update_producer())
        events = self._written()
        self._loading.submit(lambda: self._copy_layers(index, held, events))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        wanted = self._group.resolve_transfers(transfers, allow_partial=True)
        if not wanted:
            return False
        # The answers of all ranks are paired by their order: each has one for every call.
        if self._offloads_here:
            events = self._written()
            self._offloading.submit(lambda: self._results.put(self._store(wanted, events)))
        else:
            self._offloading.submit(lambda: self._results.put(True))
        return True

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    def reset(self) -> None:
        """Wait for all copies and forget what is queued. The depot keeps its pages."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._loading.wait()
        self._offloading.wait()
        while self._results.qsize():
            self._results.get_nowait()
        self._seen.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Write down what waits, and let go of SGLang's memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        self._loading.close()
        self._offloading.close()
        self._mover.close()
        self._depot.close()
        _logger.info("kvdepot: linker closed after %s", self.stats())

    def _ready(self) -> bool:
        """Whether all namespaces are known; not as long as the weights are being read."""
        pools, settings = self._pages.items(), self._settings
        with self._beginning:
            if not all(one.ready(self._identity, settings, str(name)) for name, one in pools):
                return False
            for name, pages in pools if not self._audited else ():
                producer = f"SGLang {__version__}, kvdepot {kvdepot.__version__}, pool {name}"
                share = settings.audit if name == PoolName.KV else AuditConfig()
                pages.audit(share, f"{producer}, linker", _logger)
            self._audited = True
        return True

    def _served(
        self, rid: str, hashes: Sequence[str], found: set[int], tiers: Sequence[str]
    ) -> set[int]:
        """The lengths to tell SGLang of: without what is computed sooner, and without the last page
        where that is to be audited. Decided once for each request: SGLang looks it up again as long
        as it waits."""
        if rid not in self._seen:
            last = max(found)
            count = self._worth(rid, hashes, tiers[:last]) if tiers else last
            self._counts.passed_pages += last - count
            if count == last and (last == 1 or last - 1 in found):
                pages = self._pages[PoolName.KV]
                count = pages.served(pages.keys(hashes[:last], None, chained=False))
            self._seen[rid] = hashes[count] if count < last else ""
            while len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
        audited = self._seen[rid]
        limit = hashes.index(audited) if audited in hashes else len(hashes)
        return {length for length in found if length <= limit}

    def _worth(self, rid: str, hashes: Sequence[str], tiers: Sequence[str]) -> int:
        """How many of the pages that lie in these tiers to load."""
        if self._decider is None:
            return len(tiers)
        count, probe = self._decider.pages_worth(rid, tiers, len(hashes))
        if probe is not None:
            read = hashes[probe.start : probe.start + probe.blocks]
            keys = self._pages[PoolName.KV].keys(read, None, chained=False)
            self._offloading.submit(lambda: self._probe(probe, keys))
        return count

    def _probe(self, probe: Probe, keys: Sequence[BlockKey]) -> None:
        """Read pages that are being computed, to see how fast their tier is now."""
        assert self._decider is not None
        begun_s = time.monotonic()
        try:
            with self._depot.lease(keys) as lease:
                came = lease.deliver(lambda _: None, timeout_s=self._settings.load_timeout)
        except _FAILURES as error:
            _logger.warning("kvdepot: a tier could not be measured: %s", error)
            return
        if len(came) == len(keys) and all(came):
            self._decider.probed(probe, time.monotonic() - begun_s)

    def _learn(self, rid: str, wanted: Sequence[Any], *, there: bool, waited: bool) -> None:
        """The pages of a request have come, or not; `waited`: for a tier below memory."""
        hashes = _kv_hashes(wanted)
        if self._decider is not None and hashes:
            self._decider.load_ended(rid, hashes[0], there=there, waited=waited)

    def _is_below_memory(self, hashes: Sequence[str]) -> bool:
        """Whether a page has to be waited for."""
        try:
            if not self._ready():
                return False
            keys = self._pages[PoolName.KV].keys(hashes, None, chained=False)
            return not set(self._depot.match(keys).tiers) <= set(MEMORY_TIERS)
        except _FAILURES:
            return False

    def _hint(self, wanted: Sequence[Any], hashes: Sequence[str]) -> None:
        """Once for each request."""
        for one in wanted:
            tail = tail_pages(one)
            needed = hashes if tail is None else hashes[-tail:]
            keys = self._pages[one.name].keys(needed, None, chained=False)
            self._depot.hint(keys, self._settings.load_timeout)

    def _lease(self, wanted: Sequence[Any], held: list[LeasedPages]) -> bool:
        """Whether all pages are in memory, at the end of `load_timeout` at the latest."""
        deadline = time.monotonic() + self._settings.load_timeout
        try:
            if not self._ready():
                return False
            with self._own_stream(self._written()):
                for one in wanted:
                    pages = self._pages[one.name]
                    keys = pages.keys(one.keys, None, chained=False)
                    left_s = max(0.0, deadline - time.monotonic())
                    leased = pages.lease(keys, one.host_indices, left_s)
                    if leased is None:
                        return False
                    held.append(leased)
        except _FAILURES as error:
            _logger.warning("kvdepot: pages could not be loaded, they are computed: %s", error)
            return False
        return True

    def _agreed(self, ready: bool) -> bool:
        """What all ranks say together."""
        verdict = torch.tensor([int(ready)], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    def _copy_layers(self, index: int, held: Sequence[LeasedPages], events: Sequence[Any]) -> None:
        """Copy the pages of a batch, layer by layer, and say so of each layer that is there."""
        done = self.layer_done_counter
        try:
            with self._own_stream(events):
                under_way: list[tuple[range, list[Any]]] = []
                for layers in self._steps(held):
                    tickets = [
                        ticket
                        for one in held
                        for ticket in one.pages.onboard(layers, one.rows, one.views)
                    ]
                    under_way.append((layers, tickets))
                    if len(under_way) > 1:  # the bus has work while a step is waited for
                        self._complete(index, *under_way.pop(0))
                self._complete(index, *under_way.pop())
            self._counts.loaded_pages += sum(len(one.lease) for one in held)
        except _FAILURES as error:
            self._counts.failed_loads += 1
            _logger.log(logging.ERROR, "kvdepot: pages could not be copied: %s", error)
            done.fail(index, error)
        finally:
            for one in held:
                one.release()

    def _complete(self, index: int, layers: range, tickets: Sequence[Any]) -> None:
        for ticket in tickets:
            ticket.synchronize()
        for layer in layers:
            self.layer_done_counter.complete(index, layer)

    def _steps(self, held: Sequence[LeasedPages]) -> Iterator[range]:
        """Layers that are copied together: so many that a copy is worth its start."""
        start, nbytes, count = 0, 0, self._group.num_layers
        enough = COPY_BYTES_MIN if self._device.type == "cuda" else 1
        for layer in range(count):
            nbytes += sum(one.pages.layer_bytes(layer) * len(one.rows) for one in held)
            if nbytes >= enough or layer == count - 1:
                yield range(start, layer + 1)
                start, nbytes = layer + 1, 0

    def _store(self, wanted: Sequence[Any], events: Sequence[Any]) -> bool:
        """Whether the depot has all these pages now."""
        self._counts.offloads += 1
        if self._decider is not None:
            for event in events:
                event.synchronize()
            self._decider.computed(_kv_hashes(wanted))
        try:
            if not self._ready():
                return False
            with self._own_stream(events):
                for one in wanted:
                    pages = self._pages[one.name]
                    keys = pages.keys(one.keys, None, chained=False)
                    done = pages.store(keys, one.host_indices)
                    self._counts.stored_pages += sum(done)
                    if not all(done):
                        self._counts.failed_offloads += 1
                        return False
        except _FAILURES as error:
            self._counts.failed_offloads += 1
            _logger.warning("kvdepot: pages could not be stored: %s", error)
            return False
        return True

    def _written(self) -> list[Any]:
        """What has to be over before pages are read or written: the engine's streams up to here."""
        if self._device.type != "cuda":
            return []
        events: list[Any] = self.record_offload_ready()
        return events

    @contextmanager
    def _own_stream(self, events: Sequence[Any]) -> Iterator[None]:
        """On CUDA another stream than the engine's is current, and goes on after `events`."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for event in events:
                stream.wait_event(event)
            yield


class Worker:
    """A thread that does one job after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when all jobs so far are done."""
        self._jobs.join()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()


def device_pools(params: Any, components: Any) -> Any:
    """SGLang's device pools with the layers they have; ModelError for a model that is not served.

    SGLang itself names those of hybrid models only: plain K and V, and plain latents, are named
    here.
    """
    kvcache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    kind = type(kvcache)
    if params.pp_size > 1:
        raise ModelError("SGLang does not keep a linker's pipeline stages in step")
    if kind not in (MHATokenToKVPool, MLATokenToKVPool):
        try:
            return resolve_hybrid_device_pool_group(
                kvcache=kvcache, page_size=page_size, params=params, components=components
            )
        except (ValueError, AssertionError) as error:
            raise ModelError(f"{kind.__name__}: {error}") from error
    drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    scaled = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if drafts or any(getattr(kvcache, name, None) is not None for name in scaled):
        raise ModelError("KV of draft models and scaled KV are not served by a linker")
    latent = kind is MLATokenToKVPool
    buffers = [kvcache.kv_buffer] if latent else [kvcache.k_buffer, kvcache.v_buffer]
    rows, slots = buffers[0][0].shape[0], kvcache.size + page_size
    if rows not in (slots, slots // page_size):
        raise ModelError(
            f"KV in the layout {getattr(kvcache, 'kv_cache_layout', None)} is not served"
        )
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=kvcache,
        components=buffers,
        layer_mapping={layer: layer for layer in range(kvcache.layer_num)},
        page_size=page_size,
        rows_are_pages=rows != slots,
    )
    return DevicePoolGroup([entry], kvcache.layer_num, page_size, rank_replicated=latent)


def _kv_hashes(wanted: Sequence[Any]) -> Sequence[str]:
    return next((one.keys for one in wanted if one.name == PoolName.KV), ())


def _groups(params: Any) -> list[Any]:
    """The groups of ranks that answer as one, as SGLang's tree has them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    found = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and torch.distributed.get_world_size(group=group) > 1
    ]
    whole = params.tp_cache_group
    if not found and whole is not None and torch.distributed.get_world_size(group=whole) > 1:
        found = [whole]
    return found


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def _storage_config(server_args: Any, params: Any, replicated: bool) -> Any:
    """What tells the ranks apart, in the form that SGLang has for a storage."""
    rank, size = 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    if _processes() > 1 and group is not None:
        rank = torch.distributed.get_rank(group=group)
        size = torch.distributed.get_world_size(group=group)
    path = getattr(server_args, "model_path", None)
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=getattr(server_args, "served_model_name", None) or path,
        extra_config={},
    )
