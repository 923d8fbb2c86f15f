"""The class that SGLang loads as its storage. Needs SGLang."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import (  # type: ignore[import-not-found]
    StorageMetrics,
)
from sglang.srt.runtime_context import get_server_args  # type: ignore[import-not-found]
from sglang.version import __version__  # type: ignore[import-not-found]

from kvdepot.adapters.sglang.config import read
from kvdepot.adapters.sglang.identity import KV, identify
from kvdepot.adapters.sglang.loaded_weights import LOG, WEIGHTS
from kvdepot.adapters.sglang.pages import HostPages, usable_lengths
from kvdepot.adapters.vllm.metrics import errors_logged
from kvdepot.core.block import BlockKey
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError


class KVDepotStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's host memory in a depot. A failure of a drive is a miss."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        with errors_logged(LOG):
            self._settings = read(extra)
            self._identity = identify(storage_config, _arguments(), self._settings, __version__)
            self._identity.known_weights(self._settings)  # starts to read them
            WEIGHTS.begin()
            sizes = (storage_config.tp_size, storage_config.pp_size, storage_config.attn_cp_size)
            self._depot = self._settings.open(math.prod(sizes))
        self._pieces = bool(extra.get("interface_v1"))
        self._rank = f"{storage_config.tp_rank} of {storage_config.tp_size}"
        self._pools: dict[str, HostPages] = {}
        self._metrics = StorageMetrics()

    @property
    def depot(self) -> Depot:
        return self._depot

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[KV] = HostPages(self._depot, mem_pool_host, pieces=self._pieces)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._pools[str(host_pool_name)] = HostPages(self._depot, host_pool, pieces=False)

    def exists(self, key: str) -> bool:
        return self._resident(KV, [key], None) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return self._resident(KV, keys, extra_info, audit=True)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        targets, limit_s = list(target_locations or ()), self._settings.load_timeout

        def get(pages: HostPages, blocks: list[BlockKey]) -> list[bool]:
            return pages.get(blocks, targets, limit_s)

        found = self._transfer(KV, keys, None, get, is_load=True)
        return [target if there else None for target, there in zip(targets, found, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        tensors = [value.contiguous() for value in values]
        return all(self._transfer(KV, keys, None, lambda pages, to: pages.put(to, tensors)))

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(KV, keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._store(KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, Any]:
        return {
            each.name: self._load(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, Any]:
        return {
            each.name: self._store(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        kv_pages = self._resident(KV, keys, extra_info)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            there = [self._resident(str(transfer.name), [key], None) for key in keys[:kv_pages]]
            usable = usable_lengths(there, tail_pages(transfer))
            if usable:
                hits[transfer.name] = max(usable)
            restorable &= usable
        pages = sorted(restorable)
        return PoolTransferResult(pages[-1] if pages else 0, hits, pages)

    def clear(self) -> bool:
        """Remove the pages of this model, of all pools, for every engine that shares the depot.
        False: pages may be left, because the depot does not answer or the weights are not known.
        """
        ready = [self._ready(name) for name in self._pools]
        try:
            for pages in ready:
                if pages is not None:
                    self._depot.remove(namespace=pages.space)
            self._depot.audits.list()  # a daemon that is away removes nothing, without an error
        except KVDepotError as error:
            LOG.warning("kvdepot: pages could not be removed: %s", str(error))
            return False
        return None not in ready

    def close(self) -> None:
        """Write waiting blocks, and release SGLang's memory. May be called again."""
        self._pools.clear()
        self._depot.close()

    def get_stats(self) -> Any:
        """Pages and GB/s of each transfer since the last call."""
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _load(self, pool: str, keys: Sequence[str], indices: Any, extra: Any) -> list[bool]:
        limit_s = self._settings.load_timeout
        return self._transfer(
            pool, keys, extra, lambda pages, to: pages.load(to, indices, limit_s), is_load=True
        )

    def _store(self, pool: str, keys: Sequence[str], indices: Any, extra: Any) -> list[bool]:
        return self._transfer(pool, keys, extra, lambda pages, to: pages.store(to, indices))

    def _transfer(
        self,
        pool: str,
        keys: Sequence[str],
        extra: Any,
        transfer: Callable[[HostPages, list[BlockKey]], list[bool]],
        *,
        is_load: bool = False,
    ) -> list[bool]:
        """One transfer. If it fails, all pages are missing."""
        pages = self._ready(pool)
        if pages is None:
            return [False] * len(keys)
        started_s = time.perf_counter()
        try:
            done = transfer(pages, self._keys(pages, pool, keys, extra))
        except (KVDepotError, ValueError) as error:
            LOG.warning("kvdepot: a transfer of %d pages failed: %s", len(keys), error)
            return [False] * len(keys)
        seconds, counts = max(time.perf_counter() - started_s, 1e-9), self._metrics
        (counts.prefetch_pgs if is_load else counts.backup_pgs).append(sum(done))
        speeds = counts.prefetch_bandwidth if is_load else counts.backup_bandwidth
        speeds.append(sum(done) * pages.page_bytes / 1e9 / seconds)
        return done

    def _resident(self, pool: str, keys: Sequence[str], extra: Any, *, audit: bool = False) -> int:
        """Leading pages that SGLang may load. `audit`: the last one may be left out, so that SGLang
        computes it."""
        pages = self._ready(pool)
        if pages is None:
            return 0
        try:
            blocks = self._keys(pages, pool, keys, extra)
            found = blocks[: len(self._depot.match(blocks))]
            return pages.served_pages(found) if audit else len(found)
        except KVDepotError as error:
            LOG.warning("kvdepot: a lookup failed: %s", error)
            return 0

    def _keys(self, pages: HostPages, pool: str, keys: Sequence[str], extra: Any) -> list[BlockKey]:
        before = getattr(extra, "prefix_keys", None)
        chained = self._settings.prefix_chain and pool == KV
        return pages.keys(keys, before[-1] if before else None, chained=chained)

    def _ready(self, pool: str) -> HostPages | None:
        pages = self._pools.get(pool)
        # State of a pool may be divided although the KV is not.
        rank = "" if pool == KV else self._rank
        if pages is None or not pages.ready(self._identity, self._settings, pool, rank):
            return None
        return pages


def tail_pages(transfer: Any) -> int | None:
    """Returns how many pages at the end of a prefix a pool needs; None: all of them."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return None
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    raise ValueError(f"kvdepot does not serve pools of policy {transfer.hit_policy}")


def _arguments() -> Any:
    """SGLang's arguments; None if it was not started as a server."""
    try:
        return get_server_args()
    except (AttributeError, RuntimeError, ValueError, LookupError, AssertionError):
        return None
