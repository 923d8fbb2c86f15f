"""The class that SGLang loads as its external linker: between device pools and a depot, without
SGLang's host memory. Needs SGLang.

SGLang aborts a request whose load fails after it has begun. If `load` returns False, the pages are
computed instead. So `load` brings all pages of the request to memory, verified and leased, within
`load_timeout`, and all ranks agree on the answer. Afterwards pages are only copied to the device.
"""

import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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

from kvdepot.adapters.sglang.config import LINKER_SETTING, read_linker
from kvdepot.adapters.sglang.device_pages import DevicePages, LeasedPages
from kvdepot.adapters.sglang.identity import identify
from kvdepot.adapters.sglang.load_decision import LoadDecider
from kvdepot.adapters.sglang.loaded_weights import LOG, WEIGHTS
from kvdepot.adapters.sglang.pages import usable_lengths
from kvdepot.adapters.sglang.storage import tail_pages
from kvdepot.adapters.tensors import open_mover
from kvdepot.adapters.tensors.slices import COPY_BYTES_MIN
from kvdepot.adapters.vllm.metrics import errors_logged
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import MEMORY_TIERS
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError, ModelError
from kvdepot.policy.fetching.advisor import Probe
from kvdepot.policy.fetching.speed_models import drive_profiles

_FAILURES: Final = (KVDepotError, RuntimeError, ValueError)
"""Errors of a depot, of a device, and of SGLang's pools for indices that are no pages."""
_SEEN_MAX: Final = 4096
_CHUNK_TOKENS: Final = 1 << 20
"""Without chunked prefill SGLang computes any prompt in one step."""


@dataclass(slots=True)
class LinkerCounts:
    """Counters since the start."""

    lookups: int = 0
    hit_pages: int = 0
    loads: int = 0
    loaded_pages: int = 0
    passed_pages: int = 0
    """Pages that were found and are computed: that was expected to be faster."""
    refused_loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    stored_pages: int = 0
    failed_offloads: int = 0


class KVDepotLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Pages of SGLang's device pools in a depot. SGLang's thread calls `load` and `lookup`."""

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
        with errors_logged(LOG):
            self._settings = read_linker(extra_config or {})
            if (getattr(server_args, "dcp_size", None) or 1) > 1:
                raise ModelError("a linker does not serve decode context parallelism")
            self._group = device_pools(params, components)
            self._ranks = _rank_groups(params)
            storage = _storage_config(server_args, params, self._group.rank_replicated)
            found = identify(storage, server_args, self._settings, __version__, LINKER_SETTING)
            self._identity = replace(found, producer=f"{found.producer}, linker")
            self._identity.known_weights(self._settings)  # starts to read them
            WEIGHTS.begin()
            self._depot = self._settings.open(_processes(), LINKER_SETTING)
        self._offloads_here = not self._group.rank_replicated or storage.tp_rank == 0
        self.pools = self._group.entry_map
        self._device = torch.device(self._group.entries[0].kv_buffer[0].device)
        try:
            self._mover = open_mover(lambda: self._depot.memory, self._device)
            self._pages = {
                name: DevicePages(self._depot, entry, self._mover)
                for name, entry in self.pools.items()
            }
            self._decider = self._new_decider(server_args) if self._settings.decide else None
        except KVDepotError:
            self._depot.close()
            raise
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[LeasedPages]] = {}
        self._seen: OrderedDict[str, str] = OrderedDict()
        """Requests that had a hit, and for each the first page that it computes nevertheless."""
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loading = ThreadPoolExecutor(1, "kvdepot-load")
        self._offloading = ThreadPoolExecutor(1, "kvdepot-offload")
        self._counts = LinkerCounts()
        self._closed = False

    @property
    def depot(self) -> Depot:
        return self._depot

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return asdict(self._counts)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The lengths of the prefix, in pages, that can be loaded. Other pages than those in memory
        are prefetched."""
        wanted = self._group.resolve_transfers(transfers)
        hashes = next((each.keys for each in transfers if each.name == PoolName.KV), None)
        self._counts.lookups += 1
        if not wanted or not hashes or not self._ready():
            return []
        lengths = set(range(1, len(hashes) + 1))
        tiers: tuple[str, ...] = ()
        try:
            for each in sorted(wanted, key=lambda each: tail_pages(each) is not None):
                keys = self._pages[each.name].keys(hashes[: max(lengths, default=0)])
                if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                    match = self._depot.match(keys)
                    lengths &= set(range(1, len(match) + 1))
                    tiers = match.tiers if each.name == PoolName.KV else tiers
                else:
                    there = [len(self._depot.match([key])) for key in keys]
                    lengths &= usable_lengths(there, tail_pages(each))
            if lengths:
                is_new = rid not in self._seen
                lengths = self._served(rid, hashes, lengths, tiers)
                if is_new and lengths:
                    self._hint(wanted, hashes[: max(lengths)])
        except _FAILURES as error:
            LOG.warning("kvdepot: a lookup failed: %s", error)
            return []
        self._counts.hit_pages += max(lengths, default=0)
        if self._decider is not None:
            self._decider.looked_up(rid, hashes[0])
        return sorted(lengths)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Bring the pages of a request to memory. False, on all ranks: SGLang computes them."""
        wanted = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not wanted:
            return False
        held: list[LeasedPages] = []
        hashes = _kv_hashes(wanted)
        waits = self._decider is not None and self._is_below_memory(hashes)
        begun_s = time.monotonic()
        ready = self._lease(wanted, held)
        agreed = self._agreed(ready)
        timed_out = time.monotonic() - begun_s >= self._settings.load_timeout
        if self._decider is not None and hashes:
            waited = waits and (ready or timed_out)
            self._decider.load_ended(rid, hashes[0], there=agreed, waited=waited)
        if not agreed:
            for pages in held:
                pages.release()
            self._counts.refused_loads += 1
            return False
        self._queued[rid] = held
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        held = self._queued.pop(rid, None)
        for pages in held or ():
            pages.release()
        return held is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        held = [pages for request in self._queued.values() for pages in request]
        self._counts.loads += len(self._queued)
        self._queued = {}
        index = int(self.layer_done_counter.update_producer())
        self._loading.submit(self._copy_layers, index, held, self._written())
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        wanted = self._group.resolve_transfers(transfers, allow_partial=True)
        if not wanted:
            return False
        # SGLang pairs the answers of all ranks by their order: each rank answers every call.
        if self._offloads_here:
            self._offloading.submit(self._store, wanted, self._written())
        else:
            self._offloading.submit(self._results.put, True)
        return True

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    def reset(self) -> None:
        """Wait for all copies, and drop queued loads. The depot keeps its pages."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for thread in (self._loading, self._offloading):
            thread.submit(lambda: None).result()
        while self._results.qsize():
            self._results.get_nowait()
        self._seen.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Write waiting blocks, and release SGLang's memory. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        self._loading.shutdown()
        self._offloading.shutdown()
        self._mover.close()
        self._depot.close()
        LOG.info("kvdepot: linker closed after %s", self.stats())

    def _new_decider(self, server_args: Any) -> LoadDecider:
        chunk_tokens = getattr(server_args, "chunked_prefill_size", None) or 0
        pages = self._pages[PoolName.KV]
        return LoadDecider(
            pages.page_tokens,
            pages.page_bytes,
            chunk_tokens if chunk_tokens > 0 else _CHUNK_TOKENS,
            drive_profiles(self._depot.stats()),
        )

    def _ready(self) -> bool:
        identity, settings = self._identity, self._settings
        pools = self._pages.items()
        return all(pages.ready(identity, settings, str(name)) for name, pages in pools)

    def _served(
        self, rid: str, hashes: Sequence[str], found: set[int], tiers: Sequence[str]
    ) -> set[int]:
        """The lengths to offer: without pages that are computed sooner, and without the last page
        if that is audited. Decided once per request: SGLang repeats lookups while it waits."""
        if rid not in self._seen:
            last = max(found)
            count = self._worth(rid, hashes, tiers[:last]) if tiers else last
            self._counts.passed_pages += last - count
            if count == last and (last == 1 or last - 1 in found):
                pages = self._pages[PoolName.KV]
                count = pages.served_pages(pages.keys(hashes[:last]))
            self._seen[rid] = hashes[count] if count < last else ""
            while len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
        computed = self._seen[rid]
        limit = hashes.index(computed) if computed in hashes else len(hashes)
        return {length for length in found if length <= limit}

    def _worth(self, rid: str, hashes: Sequence[str], tiers: Sequence[str]) -> int:
        """Returns how many of the pages in these tiers to load."""
        if self._decider is None:
            return len(tiers)
        count, probe = self._decider.pages_worth(rid, tiers, len(hashes))
        if probe is not None:
            measured = hashes[probe.start : probe.start + probe.blocks]
            keys = self._pages[PoolName.KV].keys(measured)
            self._offloading.submit(self._probe, probe, keys)
        return count

    def _probe(self, probe: Probe, keys: Sequence[BlockKey]) -> None:
        """Read pages that are being computed, to measure the speed of their tier."""
        assert self._decider is not None
        begun_s = time.monotonic()
        try:
            with self._depot.lease(keys) as lease:
                came = lease.deliver(lambda _: None, timeout_s=self._settings.load_timeout)
        except _FAILURES as error:
            LOG.warning("kvdepot: the speed of a tier could not be measured: %s", error)
            return
        if len(came) == len(keys) and all(came):
            self._decider.probed(probe, time.monotonic() - begun_s)

    def _is_below_memory(self, hashes: Sequence[str]) -> bool:
        """Returns True if a page is only in a tier below memory."""
        try:
            if not self._ready():
                return False
            tiers = self._depot.match(self._pages[PoolName.KV].keys(hashes)).tiers
            return not set(tiers) <= set(MEMORY_TIERS)
        except _FAILURES:
            return False

    def _hint(self, wanted: Sequence[Any], hashes: Sequence[str]) -> None:
        for each in wanted:
            tail = tail_pages(each)
            keys = self._pages[each.name].keys(hashes if tail is None else hashes[-tail:])
            self._depot.prefetch(keys, self._settings.load_timeout)

    def _lease(self, wanted: Sequence[Any], held: list[LeasedPages]) -> bool:
        """Bring all pages to memory within `load_timeout`. False if one is missing."""
        deadline_s = time.monotonic() + self._settings.load_timeout
        try:
            if not self._ready():
                return False
            with self._own_stream(self._written()):
                for each in wanted:
                    pages = self._pages[each.name]
                    left_s = max(0.0, deadline_s - time.monotonic())
                    leased = pages.lease(pages.keys(each.keys), each.host_indices, left_s)
                    if leased is None:
                        return False
                    held.append(leased)
        except _FAILURES as error:
            LOG.warning("kvdepot: pages could not be loaded and are computed: %s", error)
            return False
        return True

    def _agreed(self, ready: bool) -> bool:
        """Returns True if all ranks are ready."""
        verdict = torch.tensor([int(ready)], dtype=torch.int)
        for group in self._ranks:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    def _copy_layers(self, index: int, held: Sequence[LeasedPages], events: Sequence[Any]) -> None:
        """Copy the pages of a batch layer by layer, and report each layer that is complete."""
        done = self.layer_done_counter

        def complete(layers: range, tickets: Sequence[Any]) -> None:
            for ticket in tickets:
                ticket.synchronize()
            for layer in layers:
                done.complete(index, layer)

        try:
            with self._own_stream(events):
                started: list[tuple[range, list[Any]]] = []
                for layers in self._steps(held):
                    tickets = [
                        ticket
                        for leased in held
                        for ticket in leased.pages.onboard(layers, leased.rows, leased.views)
                    ]
                    started.append((layers, tickets))
                    if len(started) > 1:  # the bus has work while a step is waited for
                        complete(*started.pop(0))
                complete(*started.pop())
            self._counts.loaded_pages += sum(len(leased.lease) for leased in held)
        except _FAILURES as error:
            self._counts.failed_loads += 1
            LOG.log(logging.ERROR, "kvdepot: pages could not be copied: %s", error)
            done.fail(index, error)
        finally:
            for leased in held:
                leased.release()

    def _steps(self, held: Sequence[LeasedPages]) -> Iterator[range]:
        """Ranges of layers that are copied together, each large enough to be worth its start."""
        start, nbytes, count = 0, 0, self._group.num_layers
        enough = COPY_BYTES_MIN if self._device.type == "cuda" else 1
        for layer in range(count):
            nbytes += sum(leased.pages.layer_bytes(layer) * len(leased.rows) for leased in held)
            if nbytes >= enough or layer == count - 1:
                yield range(start, layer + 1)
                start, nbytes = layer + 1, 0

    def _store(self, wanted: Sequence[Any], events: Sequence[Any]) -> None:
        """Store pages. The result is whether the depot has all of them."""
        self._counts.offloads += 1
        stored = False
        try:
            if self._decider is not None:
                for event in events:
                    event.synchronize()
                self._decider.computed(_kv_hashes(wanted))
            if self._ready():
                with self._own_stream(events):
                    stored = all(map(self._store_pool, wanted))
        except _FAILURES as error:
            self._counts.failed_offloads += 1
            LOG.warning("kvdepot: pages could not be stored: %s", error)
        finally:
            self._results.put(stored)

    def _store_pool(self, transfer: Any) -> bool:
        pages = self._pages[transfer.name]
        done = pages.store(pages.keys(transfer.keys), transfer.host_indices)
        self._counts.stored_pages += sum(done)
        self._counts.failed_offloads += not all(done)
        return all(done)

    def _written(self) -> list[Any]:
        """Events of the engine's streams that must come before pages are read or written."""
        if self._device.type != "cuda":
            return []
        events: list[Any] = self.record_offload_ready()
        return events

    @contextmanager
    def _own_stream(self, events: Sequence[Any]) -> Iterator[None]:
        """A scope with a separate current CUDA stream, which continues after `events`."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for event in events:
                stream.wait_event(event)
            yield


def device_pools(params: Any, components: Any) -> Any:
    """SGLang's device pools with their layers; ModelError for a model that is not served.

    SGLang itself names those of hybrid models only. Plain K and V, and plain latents, are named
    here.
    """
    kvcache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    kind = type(kvcache)
    if params.pp_size > 1:
        raise ModelError("SGLang does not synchronize a linker's pipeline stages")
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
        raise ModelError("a linker does not serve KV of draft models or scaled KV")
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
    return next((each.keys for each in wanted if each.name == PoolName.KV), ())


def _rank_groups(params: Any) -> list[Any]:
    """The groups of ranks that answer together, as in SGLang's tree."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    groups = (params.attn_cp_cache_group, params.attn_tp_cache_group)
    found = [group for group in groups if _size_of(group) > 1]
    return found or [group for group in (params.tp_cache_group,) if _size_of(group) > 1]


def _size_of(group: Any) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group=group)


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def _storage_config(server_args: Any, params: Any, replicated: bool) -> Any:
    """The ranks, in the form that SGLang has for a storage."""
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
