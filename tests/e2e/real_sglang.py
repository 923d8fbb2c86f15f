"""SGLang's own cache controller and host pools on a depot. Run by a Python that has SGLang.

    python tests/e2e/real_sglang.py --depot DIR --out FILE

Page backup, hit query and page transfer are SGLang's, on its host pools of every layout. There is
no device: host pools and controller are made without their constructors, which want one. The linker
is in real_sglang_linker.py. SGLang imports torchvision for models of images; an empty module stands
in for it. Writes one JSON object.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers  # looks for torchvision before there is a stand-in
import transformers.models.auto.processing_auto
from real_sglang_linker import (  # type: ignore[import-not-found]
    ON,
    daemon,
    linker_cases,
    publish_arguments,
)

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 4, 2, 64, 400
BATCHES = 300
"""Pages of a prompt: more than SGLang moves at once."""
SHAPES: dict[str, tuple[int, ...]] = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}
LATENT: dict[str, tuple[int, ...]] = {
    "layer_first": (LAYERS, PAGES * PAGE, 1, DIM),
    "page_first": (PAGES * PAGE, LAYERS, 1, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, 1, DIM),
    "page_first_kv_split": (PAGES, LAYERS, PAGE, 1, DIM),
}
ROPE = 32
INDEX_LAYERS, INDEX_DIM = 3, 16
"""Split pages have the rotary part, and the keys and scales of an indexer, in buffers of their own.
SGLang uses them on Ascend."""


class StandIn(types.ModuleType):
    """Has a class for every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_sglang() -> None:
    assert transformers.models.auto.processing_auto is not None
    for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io"):
        sys.modules.setdefault(f"torchvision{name}", StandIn(f"torchvision{name}"))


def host_pool(layout: str, dtype: torch.dtype, seed: int, *, latent: bool = False) -> Any:
    """One of SGLang's pools, full of random bytes."""
    from sglang.srt.mem_cache.pool_host.mha import (  # type: ignore[import-not-found]
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import (  # type: ignore[import-not-found]
        MLATokenToKVPoolHost,
    )

    pool = object.__new__(MLATokenToKVPoolHost if latent else MHATokenToKVPoolHost)
    shape = (LATENT if latent else SHAPES)[layout]
    chance = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    filled = torch.randint(0, 256, (nbytes,), generator=chance, dtype=torch.uint8)
    facts: dict[str, Any] = {
        "layout": layout,
        "dtype": dtype,
        "page_size": PAGE,
        "layer_num": LAYERS,
        "head_num": HEADS,
        "head_dim": DIM,
        "v_head_dim": DIM,
        "kv_cache_dim": DIM,
        "size": PAGES * PAGE,
        "page_num": PAGES,
        "device": "cpu",
        "pin_memory": False,
        "dcp_size": 1,
        "dcp_rank": 0,
        "kv_buffer": filled.view(dtype).view(shape),
    }
    for name, value in facts.items():
        setattr(pool, name, value)
    if layout == "page_first_kv_split":
        split(pool, chance)
    return pool


def split(pool: Any, chance: torch.Generator) -> None:
    """The buffers that a pool of split pages has beside the latents."""
    pool.k_buffer, pool.qk_rope_head_dim, pool.kv_lora_rank = pool.kv_buffer, ROPE, DIM
    widths = {
        "v_buffer": (LAYERS, ROPE, pool.dtype),
        "index_k_buffer": (INDEX_LAYERS, INDEX_DIM, pool.dtype),
        "index_k_scale_buffer": (INDEX_LAYERS, 1, torch.float32),
    }
    for name, (layers, width, dtype) in widths.items():
        nbytes = PAGES * layers * PAGE * width * dtype.itemsize
        filled = torch.randint(0, 256, (nbytes,), generator=chance, dtype=torch.uint8)
        setattr(pool, name, filled.view(dtype).view(PAGES, layers, PAGE, 1, width))


class Controller:
    """SGLang's cache controller on one pool and one backend."""

    def __init__(self, folder: Path, pool: Any, extra: dict[str, Any], latent: bool) -> None:
        from sglang.srt.managers.cache_controller import (  # type: ignore[import-not-found]
            HiCacheController,
        )
        from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
            HiCacheStorageConfig,
        )
        from sglang.srt.mem_cache.storage import (  # type: ignore[import-not-found]
            StorageBackendFactory,
        )

        disk = {"path": str(folder), "capacity": "256MiB", "segment": "8MiB"}
        settings = {
            "backend_name": "kvdepot",
            "module_path": "kvdepot.adapters.sglang",
            "class_name": "KVDepotStorage",
            "dram": {"capacity": "32MiB", "prefault": False, "huge_pages": "never"},
            "ssd": disk,
            "writeback": {"staging": "16MiB"},
            "revision": "r1",
            **extra,
        }
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=latent,
            enable_storage_metrics=True,
            is_page_first_layout=pool.layout == "page_first",
            model_name="m",
            extra_config=settings,
        )
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        backend.register_mem_pool_host(pool)
        self.backend = backend
        made = object.__new__(HiCacheController)
        made.storage_backend = backend
        made.storage_host_pool = made.mem_pool_host = pool
        made.page_size = PAGE
        made.prefetch_sync_queue = queue.Queue()
        fast = bool(extra.get("interface_v1"))
        made.page_get_func = made._page_get_zero_copy if fast else made._generic_page_get
        made.page_set_func = made._page_set_zero_copy if fast else made._generic_page_set
        self._made = made

    def backup(self, tokens: list[int], indices: Any, prefix: list[str] | None) -> int:
        """Completed tokens of a backup, in SGLang's batches."""
        from sglang.srt.managers.cache_controller import StorageOperation

        operation = StorageOperation(indices, tokens, None, hashes(tokens), prefix)
        self._made._page_backup(operation)
        return int(operation.completed_tokens)

    def prefetch(self, tokens: list[int], indices: Any, prefix: list[str] | None) -> int:
        """Pages that a hit query finds and a transfer brings."""
        from sglang.srt.managers.cache_controller import PrefetchOperation

        operation = PrefetchOperation("r", tokens, None, prefix)
        operation.hash_value, _ = self._made._storage_hit_query(operation)
        operation.host_indices = indices[: len(operation.hash_value) * PAGE]
        return int(self._made._page_transfer(operation))


@contextmanager
def controller(folder: Path, pool: Any, latent: bool = False, **extra: Any) -> Iterator[Controller]:
    made = Controller(folder, pool, extra, latent)
    try:
        yield made
    finally:
        inner = getattr(made.backend, "_backend", made.backend)
        inner.close()


def hashes(tokens: list[int]) -> list[str]:
    from sglang.srt.managers.cache_controller import (
        get_storage_hash_str,
    )

    return list(get_storage_hash_str(tokens, None, page_size=PAGE))


def prompt(pages: int, seed: int) -> list[int]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30000, (pages * PAGE,), generator=chance).tolist()


def page_indices(pages: int, seed: int) -> Any:
    """Pages at random places of the pool."""
    chance = torch.Generator().manual_seed(seed)
    first = torch.randperm(PAGES, generator=chance)[:pages] * PAGE
    return (first[:, None] + torch.arange(PAGE)).reshape(-1)


def page_bytes(pool: Any, at: int) -> list[Any]:
    """The bytes of the page that begins at this token."""
    if pool.layout != "page_first_kv_split":
        return [pool.get_data_page(at, flat=True).view(torch.uint8)]
    names = ("k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")
    return [getattr(pool, name)[at // PAGE].reshape(-1).view(torch.uint8) for name in names]


def same(pool: Any, there: Any, other: Any, here: Any) -> bool:
    """Whether pages of two pools have the same bytes."""
    return all(
        all(map(torch.equal, page_bytes(pool, int(a)), page_bytes(other, int(b))))
        for a, b in zip(there[::PAGE], here[::PAGE], strict=True)
    )


def round_trip(layout: str, way: str, latent: bool, dtype: Any, folder: Path) -> None:
    """Written and read in many batches, in this process and after a new attach."""
    extra: dict[str, Any] = {} if way == "generic" else {"interface_v1": 1}
    prefix: list[str] | None = None
    if way == "v1 chained":
        extra, prefix = {**extra, "prefix_chain": True}, []
    source = host_pool(layout, dtype, 1, latent=latent)
    tokens, there = prompt(BATCHES, 1), page_indices(BATCHES, 1)
    with controller(folder, source, latent, **extra) as one:
        assert one.prefetch(tokens, page_indices(BATCHES, 2), prefix) == 0
        assert one.backup(tokens, there, prefix) == BATCHES * PAGE
        assert one.backend.depot.flush(60.0)
    target = host_pool(layout, dtype, 2, latent=latent)
    here = page_indices(BATCHES, 3)
    with controller(folder, target, latent, **extra) as one:
        assert one.prefetch(tokens, here, prefix) == BATCHES
        assert same(source, there, target, here), "wrong bytes"
        stats = one.backend.get_stats()
        assert sum(stats.prefetch_pgs) == BATCHES and min(stats.prefetch_bandwidth) > 0
        assert one.prefetch(prompt(3, 9), page_indices(3, 4), prefix) == 0
    with controller(folder, target, latent, **{**extra, "revision": "r2"}) as one:
        assert one.prefetch(tokens, here, prefix) == 0, "another model's"


def other_dtype(folder: Path) -> None:
    tokens, there = prompt(4, 1), page_indices(4, 1)
    with controller(folder, host_pool("page_first", torch.bfloat16, 1), interface_v1=1) as one:
        assert one.backup(tokens, there, None) == 4 * PAGE
        assert one.backend.depot.flush(60.0)
    for layout, dtype in (("page_first", torch.float16), ("page_head", torch.bfloat16)):
        with controller(folder, host_pool(layout, dtype, 1), interface_v1=1) as one:
            assert one.prefetch(tokens, there, None) == 0, "other bytes under the same hash"


def faults(folder: Path) -> None:
    """Behind SGLang's random delays and failures: pages that arrive are right."""
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.005"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    try:
        source = host_pool("page_first", torch.bfloat16, 1)
        target = host_pool("page_first", torch.bfloat16, 2)
        tokens, there, here = prompt(BATCHES, 1), page_indices(BATCHES, 1), page_indices(BATCHES, 3)
        came = set()
        with controller(folder, source, interface_v1=1) as one:
            assert type(one.backend).__name__ == "HiCacheStorageFailureInjector"
            for _ in range(8):
                one.backup(tokens, there, None)
            one.backend.register_mem_pool_host(target)
            one._made.storage_host_pool = target
            for _ in range(12):
                pages = one.prefetch(tokens, here, None)
                assert same(source, there[: pages * PAGE], target, here[: pages * PAGE])
                came.add(pages)
        assert max(came) > 0, came
    finally:
        for name in ("DELAY", "FAILURE"):
            del os.environ[f"SGLANG_TEST_HICACHE_BACKEND_RANDOM_{name}"]


def more_pools(folder: Path) -> None:
    """v2: pools beside the KV, whole and at the end of a prefix."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pools = {name: host_pool("page_first", torch.bfloat16, 5) for name in ("kv", "indexer", "swa")}
    keys, at = hashes(prompt(20, 1)), page_indices(20, 1)
    with controller(folder, pools["kv"], interface_v1=1) as one:
        backend = one.backend
        for name in (PoolName.INDEXER, PoolName.SWA):
            backend.register_mem_host_pool_v2(pools[str(name)], name)
        backend.on_host_pools_registered()
        assert all(backend.batch_set_v1(keys, at))
        wanted = [
            PoolTransfer(PoolName.INDEXER, host_indices=at, keys=keys),
            PoolTransfer(
                PoolName.SWA,
                host_indices=at[10 * PAGE : 12 * PAGE],
                keys=keys[10:12],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]
        done = backend.batch_set_v2(wanted)
        assert all(done[PoolName.INDEXER]) and all(done[PoolName.SWA])
        found = backend.batch_exists_v2(keys, wanted)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (12, [12]), found
        assert backend.batch_exists_v2(keys, wanted[:1]).kv_hit_pages == 20
        before = {name: pool.kv_buffer.clone() for name, pool in pools.items()}
        for pool in pools.values():
            pool.kv_buffer.zero_()
        got = backend.batch_get_v2(wanted)
        assert all(got[PoolName.INDEXER]) and all(got[PoolName.SWA])
        tail = at[10 * PAGE : 12 * PAGE]
        for name, places in (("swa", tail), ("indexer", at)):
            loaded, stored = pools[name].kv_buffer[:, places], before[name][:, places]
            assert torch.equal(loaded.view(torch.uint8), stored.view(torch.uint8)), name
        backend.clear()
        assert backend.batch_exists(keys) == 0 and not any(backend.batch_get_v2(wanted)["swa"])


def bare_controller(pool: Any, mode: str = "cache") -> Any:
    """SGLang's controller without a storage, as at its start, with a mode of its host memory."""
    from sglang.srt.managers.cache_controller import HiCacheController

    made = object.__new__(HiCacheController)
    facts: dict[str, Any] = {
        "enable_storage": False,
        "enable_storage_metrics": True,
        "storage_stop_event": threading.Event(),
        "host_memory_mode": mode,
        "host_write_staged_tokens_fn": None,
        "storage_host_pool": pool,
        "mem_pool_host": pool,
        "mem_pool_device": None,
        "page_size": PAGE,
        "prefetch_hits_sync_groups": [],
        "prefetch_completion_sync_groups": [],
        **dict.fromkeys(("tp_group", "attn_cp_group", "attn_tp_group", "pp_group")),
    }
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def attach(made: Any, rank: int, size: int, **extra: Any) -> None:
    """As SGLang does at run time, with its own threads, and its own naming of ranks."""
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    publish_arguments()
    settings = {
        "backend_name": "kvdepot",
        "module_path": "kvdepot.adapters.sglang",
        "class_name": "KVDepotStorage",
        "interface_v1": 1,
        "revision": "r1",
        **extra,
    }
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "pp_rank": 0, "attn_dcp_rank": 0}
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), size)
    with get_parallel().override(**ranks, **sizes):
        made.attach_storage_backend("dynamic", 256, "m", settings)


def move(made: Any, tokens: list[int], indices: Any, *, load: bool) -> int:
    """Pages that the attached storage has taken or brought."""
    from sglang.srt.managers.cache_controller import PrefetchOperation, StorageOperation

    if not load:
        operation = StorageOperation(indices, tokens, None, hashes(tokens), None)
        made._page_backup(operation)
        return int(operation.completed_tokens) // PAGE
    wanted = PrefetchOperation("r", tokens, None, None)
    wanted.hash_value, _ = made._storage_hit_query(wanted)
    wanted.host_indices = indices[: len(wanted.hash_value) * PAGE]
    return int(made._page_transfer(wanted))


def attach_and_detach(folder: Path) -> None:
    """At run time, through SGLang's controller: what was stored is there after each attach."""
    disk = {"path": str(folder), "capacity": "256MiB", "segment": "8MiB"}
    memory = {"capacity": "32MiB", "prefault": False, "huge_pages": "never"}
    parts: dict[str, Any] = {"dram": memory, "ssd": disk, "writeback": {"staging": "16MiB"}}
    source = host_pool("page_first", torch.bfloat16, 1)
    made = bare_controller(source)
    tokens, there = prompt(40, 1), page_indices(40, 1)
    for wrong in ({"dramm": 1}, {"revision": ""}):
        try:
            attach(made, 0, 1, **parts, **wrong)
        except ValueError as error:
            assert "hicache-storage-backend-extra-config" in str(error), error
        assert not made.enable_storage and made.storage_backend is None
    for number in range(3):
        attach(made, 0, 1, **parts)
        assert made.prefetch_thread.is_alive() and made.backup_thread.is_alive()
        backend, here = made.storage_backend, page_indices(40, 2 + number)
        if not number:
            assert move(made, tokens, there, load=False) == 40
            assert sum(backend.get_stats().backup_pgs) == 40
        else:
            assert move(made, tokens, here, load=True) == 40
            assert same(source, there, made.storage_host_pool, here), "wrong bytes"
            assert sum(backend.get_stats().prefetch_pgs) == 40
        made.detach_storage_backend()
        made.detach_storage_backend()
        assert not made.enable_storage and not made.prefetch_thread.is_alive()
        assert backend.batch_exists(hashes(tokens)) == 0, "a detached storage answers"
        made.storage_host_pool = made.mem_pool_host = host_pool("page_first", torch.bfloat16, 2)


def buffer_only(folder: Path) -> None:
    """SGLang's host memory keeps nothing: eight prompts, each a quarter of it, come back from our
    memory tier, through SGLang's allocator, limit on fetches and beliefs of what is stored."""
    from sglang.srt.managers.cache_controller import PrefetchOperation
    from sglang.srt.mem_cache.buffer_mode.storage_existence_cache import (  # type: ignore[import-not-found]
        ChainPagesPolicy,
        PoolExistenceBeliefs,
    )

    pool = host_pool("page_first", torch.bfloat16, 1)
    pool.lock = threading.RLock()
    pool.clear()
    made = bare_controller(pool, "buffer_only")
    beliefs, policy = PoolExistenceBeliefs(), ChainPagesPolicy()
    memory = {"capacity": "64MiB", "prefault": False, "huge_pages": "never"}
    attach(made, 0, 1, dram=memory)
    count = PAGES // 4
    stored: list[list[Any]] = []
    for number in range(8):
        rows, keys = pool.alloc(count * PAGE), hashes(prompt(count, number))
        pool.kv_buffer[:, rows] = torch.randn(pool.kv_buffer[:, rows].shape).to(pool.dtype)
        stored.append([page_bytes(pool, int(at))[0].clone() for at in rows[::PAGE]])
        beliefs.track_inflight(keys)
        assert move(made, prompt(count, number), rows, load=False) == count
        beliefs.untrack_inflight(keys)
        beliefs.add(keys)
        pool.free(rows)
    assert pool.available_size() == pool.size, "the buffer keeps pages"
    pool.kv_buffer.zero_()
    for number in range(8):
        operation = PrefetchOperation("r", prompt(count, number), None, None)
        assert not made.prefetch_rate_limited() and beliefs.covered(hashes(prompt(count, number)))
        operation.hash_value, found = made._storage_hit_query(operation)
        assert found == count * PAGE, (number, found)
        rows = made.alloc_prefetch_host_buffers(operation, found)
        operation.host_indices = rows
        assert made._page_transfer(operation) == count
        came = (page_bytes(pool, int(at))[0] for at in rows[::PAGE])
        assert all(map(torch.equal, came, stored[number])), "wrong bytes"
        pool.free(rows)
    held = pool.alloc(pool.size)
    assert made.prefetch_rate_limited(), "a full buffer takes more"
    pool.free(held)
    made.storage_backend.clear()
    operation = PrefetchOperation("r", prompt(count, 3), None, None)
    operation.hash_value, found = made._storage_hit_query(operation)
    keys = hashes(prompt(count, 3))
    policy.heal_from_query(beliefs, keys, keys, found // PAGE, evidence=True)
    assert not found and not beliefs.covered(keys), "what is gone is written again"
    made.detach_storage_backend()


def two_ranks(folder: Path) -> None:
    """On one daemon: each rank finds its own shard, and a run with other ranks finds none."""
    tokens, there = prompt(40, 1), page_indices(40, 1)
    with daemon(folder) as socket:
        for written in (False, True):
            for rank in (0, 1):
                source = host_pool("page_first", torch.bfloat16, 1 + rank)
                made = bare_controller(host_pool("page_first", torch.bfloat16, 9))
                if not written:
                    made = bare_controller(source)
                attach(made, rank, 2, socket=str(socket))
                assert move(made, tokens, there, load=written) == 40
                assert same(source, there, made.storage_host_pool, there), "another rank's"
                made.detach_storage_backend()
        made = bare_controller(host_pool("page_first", torch.bfloat16, 9))
        attach(made, 0, 1, socket=str(socket))
        assert move(made, tokens, there, load=True) == 0, "a shard is no whole page"
        made.detach_storage_backend()


def heads_outlive_tails(folder: Path) -> None:
    """More prompts than fit: of each that is left in part, the beginning is left."""
    disk = {"path": str(folder), "capacity": "24MiB", "segment": "1MiB"}
    chain: dict[str, Any] = {"interface_v1": 1, "prefix_chain": True, "ssd": disk}
    chain["dram"] = {"capacity": "4MiB", "prefault": False, "huge_pages": "never"}
    pool = host_pool("page_first", torch.bfloat16, 1)
    with controller(folder, pool, **chain) as one:
        for number in range(20):
            one.backup(prompt(100, number), page_indices(100, number), [])
        assert one.backend.depot.flush(60.0)
        left = [one.prefetch(prompt(100, n), page_indices(100, n), []) for n in range(20)]
        held = [sum(resident(one.backend, hashes(prompt(100, n)))) for n in range(20)]
    assert 0 < sum(held) < 20 * 100, held
    assert sum(left) >= 0.9 * sum(held), (left, held)


def audited(folder: Path) -> None:
    """A hit query is a page short; what SGLang then backs up is compared with what is kept."""
    pool = host_pool("page_first", torch.bfloat16, 1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    kept, audit = pool.kv_buffer.clone(), {"share": 1, "under_load": True}
    tokens, there = prompt(40, 1), torch.arange(40 * PAGE)
    here = there + 100 * PAGE
    with controller(folder, pool, interface_v1=1, audit=audit) as one:
        assert one.backup(tokens, there, None) == 40 * PAGE
        for _ in range(20):
            assert one.prefetch(tokens, here, None) == 39
            pool.kv_buffer[:, there] = kept[:, there] * (1 + 0.02 * torch.rand(1).item())
            assert one.backup(tokens, there, None) == 40 * PAGE
        known = one.backend.depot.audits.list()
        assert (known["compared"], known["mismatched"]) == (20, 0), known
        assert one.prefetch(tokens, here, None) == 39
        pool.kv_buffer[:, there] = kept.flip(0)[:, there]  # K and V swapped
        one.backup(tokens, there, None)
        assert len(one.backend.depot.audits.list()["quarantined"]) == 1
        assert one.prefetch(tokens, here, None) == 0, "in quarantine"


def resident(backend: Any, keys: list[str]) -> list[int]:
    """Of each page by itself whether the depot has it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    found = (HiCacheStorageExtraInfo(prefix_keys=keys[:at]) for at in range(len(keys)))
    return [backend.batch_exists([key], extra) for key, extra in zip(keys, found, strict=True)]


def cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for layout, way in product(SHAPES, ("generic", "v1", "v1 chained")):
        yield f"mha {layout} {way}", partial(round_trip, layout, way, False, torch.bfloat16)
    for layout, way in product(LATENT, ("generic", "v1 chained")):
        if (layout, way) == ("page_first_kv_split", "generic"):
            continue  # SGLang itself has no flat pages of this layout
        yield f"mla {layout} {way}", partial(round_trip, layout, way, True, torch.float16)
    parts = (
        other_dtype,
        faults,
        more_pools,
        attach_and_detach,
        buffer_only,
        two_ranks,
        heads_outlive_tails,
        audited,
    )
    for part in parts:
        yield part.__name__.replace("_", " "), part
    yield from linker_cases()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depot", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: linker")
    args = parser.parse_args()
    ON.device = args.device
    import_sglang()
    seen: dict[str, Any] = {}
    for name, case in cases() if args.device == "cpu" else linker_cases():
        if args.only not in name:
            continue
        started, said = time.monotonic(), ""
        try:
            case(args.depot / name.replace(" ", "-"))
        except Exception:  # what went wrong is the result
            said = traceback.format_exc(limit=5)[-1500:]
        seen[name] = {"error": said, "seconds": round(time.monotonic() - started, 2)}
    args.out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
