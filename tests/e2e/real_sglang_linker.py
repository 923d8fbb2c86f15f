"""SGLang's own tree, device pools and linker code on a depot. Used by real_sglang.py.

The radix tree, its linker wrapper, the allocator and the pools are SGLang's, made by their
constructors. A request is a plain object with what the tree looks at, and no model runs: pools are
filled with random bytes, and read layer by layer as attention does.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

PAGE, TOKENS, LAYERS, HEADS, DIM = 16, 4096, 4, 2, 64
LIMIT_S = 60.0
ON = SimpleNamespace(device="cpu")
"""Where the pools are; "cuda" where there is such a device."""


def publish_arguments() -> Any:
    """SGLang's arguments, which its tree reads from a global place."""
    from sglang.srt.runtime_context import get_context  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    arguments = ServerArgs(model_path="dummy", device=ON.device)
    get_context().set_server_args(arguments)
    return arguments


def device_pool(kind: str, seed: int) -> Any:
    """One of SGLang's device pools, full of random bytes."""
    from sglang.srt.mem_cache.memory_pool import (  # type: ignore[import-not-found]
        MHATokenToKVPool,
        MLATokenToKVPool,
    )

    common = {"layer_num": LAYERS, "device": ON.device, "enable_memory_saver": False}
    if kind == "mla":
        pool = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 96, 32, **common)
        buffers = pool.kv_buffer
    else:
        hnd = {"SGLANG_USE_HND_KVCACHE": "1"} if kind == "hnd" else {}
        with mock.patch.dict(os.environ, hnd):
            pool = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, HEADS, DIM, **common)
        assert pool.kv_cache_layout == ("hnd" if hnd else "nhd")
        buffers = [*pool.k_buffer, *pool.v_buffer]
    chance = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        flat = buffer.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=chance, dtype=torch.uint8))
    return pool


class Engine:
    """A scheduler's cache: tree, pools and linker."""

    def __init__(self, folder: Path, kind: str, seed: int, extra: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.allocator.paged import (  # type: ignore[import-not-found]
            PagedTokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.cache_init_params import (  # type: ignore[import-not-found]
            CacheInitParams,
        )
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import (  # type: ignore[import-not-found]
            ComponentType,
        )
        from sglang.srt.mem_cache.unified_cache.linker_factory import (  # type: ignore[import-not-found]
            create_unified_cache_linker,
        )
        from sglang.srt.mem_cache.unified_radix_cache import (  # type: ignore[import-not-found]
            UnifiedRadixCache,
        )

        arguments = publish_arguments()
        self.pool = device_pool(kind, seed)
        self._computed: list[tuple[list[int], Any]] = []
        self.slots = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, ON.device, self.pool, False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, TOKENS, ON.device, False),
            token_to_kv_pool_allocator=self.slots,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            **extra.pop("params", {}),
        )
        self.cache = UnifiedRadixCache(params)
        settings: dict[str, Any] = {
            "dram": {"capacity": "32MiB", "prefault": False, "huge_pages": "never"},
            "ssd": {"path": str(folder), "capacity": "256MiB", "segment": "8MiB"},
            "writeback": {"staging": "16MiB"},
            "revision": "r1",
            "load_timeout": "60s",
            **extra,
        }
        config = {
            "linker": "KVDepotLinker",
            "linker_module_path": "kvdepot.adapters.sglang",
            "linker_extra_config": {k: v for k, v in settings.items() if v is not None},
        }
        self.linker = create_unified_cache_linker(
            arguments,
            params,
            backend="dynamic",
            config=config,
            components=set(self.cache.components),
        )
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def compute(self, tokens: list[int]) -> list[torch.Tensor]:
        """A finished request joins the tree, which offloads what is new; the bytes of its KV."""
        from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found]
            InsertParams,
            MatchPrefixParams,
        )

        found = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        have = int(found.device_prefix_len)
        new = self.slots.alloc(len(tokens) - have)
        assert new is not None
        old = [at for known, at in self._computed if known[:have] == tokens[:have]]
        value = torch.cat([old[0][:have], new]) if have else new
        self._computed.append((tokens, value))
        self.cache.insert(InsertParams(key=key_of(tokens), value=value))
        deadline = time.monotonic() + LIMIT_S
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < deadline, "offloads do not end"
            self.cache.check_hicache_events()
            time.sleep(0.002)
        return self.bytes_at(value)

    def bytes_at(self, indices: Any) -> list[torch.Tensor]:
        """Layer by layer, as attention reads them: waits for each layer."""
        read = []
        for layer in range(LAYERS):
            key, value = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            paged = len(key) < TOKENS  # one row a page
            rows = indices[::PAGE] // PAGE if paged else indices
            key, value = key[rows], value[rows]
            read += [key.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)]
        return read

    def ask(self, tokens: list[int], rid: str) -> tuple[Any, int]:
        """A request comes: what it was matched with, and how many tokens are to be loaded."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

        request = SimpleNamespace(
            rid=rid,
            session=None,
            kv=None,
            last_node=None,
            swa_branching_seqlen=None,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens), req=request))
        request.last_node = found.last_device_node
        self.matched = int(found.host_hit_length)
        if not self.matched:
            return request, 0
        loaded, _ = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        return request, int(loaded)

    def start(self) -> None:
        """The batch is run from here on."""
        self.linker.layer_done_counter.set_consumer(self.cache.ready_to_load_host_cache())

    def loaded_bytes(self, request: Any) -> list[torch.Tensor]:
        return self.bytes_at(self.cache.linker.private_load_indices[request.rid])


def key_of(tokens: list[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey  # type: ignore[import-not-found]

    return RadixKey(array("q", tokens))


@contextmanager
def engine(folder: Path, kind: str = "mha", seed: int = 1, **extra: Any) -> Iterator[Engine]:
    made = Engine(folder, kind, seed, extra)
    try:
        yield made
    finally:
        made.linker.close()
        made.linker.close()


def prompt(pages: int, seed: int) -> list[int]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30000, (pages * PAGE,), generator=chance).tolist()


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def linker_round_trip(kind: str, folder: Path) -> None:
    """Prompts that share a beginning, over many nodes; loaded together into other pools."""
    shared = prompt(20, 1)
    prompts = [[*shared, *prompt(10 + number, 10 + number)] for number in range(5)]
    with engine(folder, kind) as one:
        wanted = [one.compute(tokens) for tokens in prompts]
        assert one.linker.stats()["stored_pages"] == sum(map(len, prompts)) // PAGE - 4 * 20
        assert one.linker.depot.flush(LIMIT_S)
        one.cache.reset()
        one.slots.clear()
        request, loaded = one.ask([*prompts[0], 7], "again")
        assert loaded == len(prompts[0]), "from memory, after the tree was emptied"
        one.start()
        assert same(one.loaded_bytes(request), wanted[0]), "wrong bytes"
        assert one.cache.finish_external_linker_loads([request]) == []
    with engine(folder, kind, seed=2) as one:
        asked = [one.ask([*tokens, 7], str(number)) for number, tokens in enumerate(prompts)]
        assert [loaded for _, loaded in asked] == [len(tokens) for tokens in prompts]
        one.start()
        for (request, _), bytes_ in zip(asked, wanted, strict=True):
            assert same(one.loaded_bytes(request), bytes_), "wrong bytes"
        assert one.cache.finish_external_linker_loads([request for request, _ in asked]) == []
        assert one.linker.stats()["failed_loads"] == 0
        assert one.ask(prompt(5, 99), "unknown")[1] == 0
        assert one.linker.depot.admin.check(), "no lease is left"
    with engine(folder, kind, seed=2, revision="r2") as one:
        assert one.ask([*prompts[0], 7], "other")[1] == 0, "another model's"


def linker_tail_only(folder: Path) -> None:
    """What the device has is not loaded again."""
    tokens = prompt(30, 1)
    with engine(folder) as one:
        wanted = one.compute(tokens)
    with engine(folder, seed=2) as one:
        one.pool.k_buffer[0].zero_()
        one.compute(tokens[: 12 * PAGE])
        request, loaded = one.ask([*tokens, 7], "r")
        assert loaded == 18 * PAGE, loaded
        one.start()
        assert same(one.loaded_bytes(request), [layer[12 * PAGE :] for layer in wanted])
        assert one.cache.finish_external_linker_loads([request]) == []


def linker_audit(folder: Path) -> None:
    """A hit is a page short; the page that is computed instead is compared when it is offloaded."""
    tokens, audit = prompt(20, 1), {"share": 1, "under_load": True}
    with engine(folder, audit=audit) as one:
        audits, buffers = one.linker.depot.audits, [*one.pool.k_buffer, *one.pool.v_buffer]
        for buffer in buffers:
            buffer.normal_()
        one.compute(tokens)
        for hit in range(6):
            one.cache.reset()
            one.slots.clear()
            assert one.ask([*tokens, 7], f"hit {hit}")[1] == 19 * PAGE
            one.cache.reset()
            one.slots.clear()  # so that the same places are given out again
            if hit == 5:
                buffers[0].normal_()  # another K in one layer
            one.compute(tokens)
            known = audits.known()
            assert (known["compared"], known["mismatched"]) == (hit + 1, hit == 5), known
        one.cache.reset()
        one.slots.clear()
        assert one.ask([*tokens, 7], "after")[1] == 0, "in quarantine"


def linker_decides(folder: Path) -> None:
    """Pages of a drive that is slower than computing are computed, until it is faster."""
    from kvdepot.policy.fetching.advisor import Probe

    tokens, new = prompt(20, 1), prompt(20, 2)
    with engine(folder) as one:
        wanted = one.compute(tokens)
        assert one.linker.depot.flush(LIMIT_S)
    with engine(folder, seed=2, decide=True) as one:
        decider, everything = one.linker._decider, Probe("ssd", 0, 20)
        assert one.ask([*new, 7], "new")[1] == 0
        assert decider.advisor.prefill.pace() is None
        one.compute(new)
        assert decider.advisor.prefill.pace() is not None, "computing was not timed"
        for _ in range(8):
            decider.probed(everything, 1000.0)
        assert one.ask([*tokens, 7], "slow")[1] == 0
        assert one.linker.stats()["passed_pages"] == 20
        assert one.ask([*tokens, 7], "slow")[1] == 0, "decided once"
        one.linker._offloading.submit(int).result()
        for _ in range(16):
            decider.probed(everything, 1e-6)
        request, loaded = one.ask([*tokens, 7], "fast")
        assert loaded == len(tokens), loaded
        one.start()
        assert same(one.loaded_bytes(request), wanted), "wrong bytes"
        assert one.cache.finish_external_linker_loads([request]) == []


Spoil = Callable[[Engine, list[torch.Tensor]], None]


def refused(folder: Path, spoil: Spoil, **extra: Any) -> None:
    """A load that cannot be had costs a recompute, not the request."""
    tokens = prompt(20, 1)
    with engine(folder) as one:
        wanted = one.compute(tokens)
        assert one.linker.depot.flush(LIMIT_S)
    with engine(folder, seed=2, **extra) as one:
        room = one.slots.available_size()
        spoil(one, wanted)
        request, loaded = one.ask([*tokens, 7], "r")
        assert loaded == 0, loaded
        assert one.slots.available_size() == room, "slots are lost"
        one.start()
        assert one.cache.finish_external_linker_loads([request]) == [], "aborted"
        assert one.linker.stats()["refused_loads"] == 1
        assert one.linker.depot.admin.check(deep=False), "no lease is left"


def linker_pages_gone(folder: Path) -> None:
    """Between the lookup and the load."""

    def spoil(one: Engine, wanted: list[torch.Tensor]) -> None:
        load = one.linker.load

        def late(rid: str, transfers: list[Any]) -> bool:
            (pages,) = one.linker._pages.values()
            one.linker.depot.remove(pages.keys(transfers[0].keys[3:4], None, chained=False))
            return bool(load(rid, transfers))

        one.linker.load = late

    refused(folder, spoil)


def linker_page_damaged(folder: Path) -> None:
    """One bit of what is on the drive is another."""

    def spoil(one: Engine, wanted: list[torch.Tensor]) -> None:
        page = wanted[0][3 * PAGE : 4 * PAGE].cpu().numpy().tobytes()
        (segment,) = (path for path in folder.glob("segment-*") if page in path.read_bytes())
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(page))
            file.write(bytes([page[0] ^ 1]))

    refused(folder, spoil)


def linker_deadline(folder: Path) -> None:
    """A drive that is too slow: the request is not held up for longer than load_timeout."""

    def spoil(one: Engine, wanted: list[torch.Tensor]) -> None:
        one.linker.depot.prefetch = lambda *_, **__: None  # what it brings would be in time

    refused(folder, spoil, load_timeout="1ns")


def linker_copy_fails(folder: Path) -> None:
    """A device that fails in the middle of a load: its requests are aborted, others are not."""
    tokens = prompt(20, 1)
    with engine(folder) as one:
        wanted = one.compute(tokens)
        one.cache.reset()
        one.slots.clear()
        mover, calls = one.linker._mover, []
        last = 3 if ON.device == "cpu" else 1  # small layers are copied to a GPU together

        class Broken:
            device = mover.device

            def onboard(self, *args: Any, **more: Any) -> Any:
                calls.append(args)
                if len(calls) == last:
                    raise RuntimeError("the device is gone")
                return mover.onboard(*args, **more)

        (pages,) = one.linker._pages.values()
        pages._mover = Broken()
        request, loaded = one.ask([*tokens, 7], "r")
        assert loaded == 20 * PAGE
        one.start()
        failed = one.cache.finish_external_linker_loads([request, SimpleNamespace(rid="other")])
        assert failed == [request] and request.skip_radix_cache_insert
        pages._mover = mover
        request, _ = one.ask([*tokens, 7], "again")
        one.start()
        assert same(one.loaded_bytes(request), wanted)
        assert one.cache.finish_external_linker_loads([request]) == []
        assert one.linker.depot.admin.check(), "no lease is left"


def linker_cancel(folder: Path) -> None:
    """A request that is given up while its load is queued, and a tree that is emptied."""
    tokens = prompt(20, 1)
    with engine(folder) as one:
        wanted = one.compute(tokens)
        one.cache.reset()
        one.slots.clear()
        for number in range(3):
            request, loaded = one.ask([*tokens, 7], str(number))
            assert loaded == 20 * PAGE
        keys = [buffer.view(torch.uint8) for buffer in one.pool.k_buffer]
        before = [buffer.clone() for buffer in keys]
        one.cache.linker.release_request("0")
        one.cache.reset()
        one.start()
        assert one.cache.finish_external_linker_loads([request]) == []
        assert all(map(torch.equal, before, keys)), "nothing was copied"
        one.slots.clear()
        request, _ = one.ask([*tokens, 7], "3")
        one.start()
        assert same(one.loaded_bytes(request), wanted)
        assert one.linker.depot.admin.check(), "no lease is left"


@contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    """A daemon's socket."""
    place = tempfile.TemporaryDirectory()  # the path of a socket is short
    socket, settings = Path(place.name) / "s", Path(place.name) / "kvdepot.toml"
    settings.write_text(
        'dram = { capacity = "64MiB", prefault = false, huge_pages = "never" }\n'
        f'ssd = {{ path = "{folder}", capacity = "256MiB", segment = "8MiB" }}\n'
    )
    command = [sys.executable, "-m", "kvdepot", "serve", "--config", str(settings)]
    process = subprocess.Popen([*command, "--socket", str(socket)])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < deadline, "no daemon"
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        place.cleanup()


def linker_ranks(kind: str, folder: Path) -> None:
    """Two processes with a group of theirs, which share a daemon: each has its own shard."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    with daemon(folder) as socket:
        ranks = [
            context.Process(target=_run_rank, args=(kind, rank, socket, said)) for rank in (0, 1)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(4 * LIMIT_S)
            if one.is_alive():
                one.kill()
    errors = [said.get() for _ in ranks if not said.empty()]
    assert errors == ["", ""], (errors, [one.exitcode for one in ranks])


def _run_rank(kind: str, rank: int, socket: Path, said: Any) -> None:
    try:
        torch.set_num_threads(1)  # the parent's threads are not there after a fork
        file = str(socket.with_name("ranks"))
        store = torch.distributed.FileStore(file, 2)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        _ask_as_rank(kind, rank, socket)
        said.put("")
    except Exception:  # what went wrong is the result
        said.put(traceback.format_exc(limit=5)[-1500:])


def _ask_as_rank(kind: str, rank: int, socket: Path) -> None:
    none = dict.fromkeys(("dram", "ssd", "writeback"))
    tokens = prompt(20, 1)
    seed = 1 if kind == "mla" else 1 + rank  # ranks have the same latents
    params = {"tp_cache_group": torch.distributed.group.WORLD}
    with engine(socket, kind, seed, socket=str(socket), params=params, **none) as one:
        wanted = one.compute(tokens)
        stored = 0 if kind == "mla" and rank else 20
        assert one.linker.stats()["stored_pages"] == stored, one.linker.stats()
        one.cache.reset()
        one.slots.clear()
        for buffer in one.pool.kv_buffer if kind == "mla" else one.pool.k_buffer:
            buffer.zero_()
        request, loaded = one.ask([*tokens, 7], "r")
        assert loaded == 20 * PAGE, loaded
        one.start()
        assert same(one.loaded_bytes(request), wanted), "another rank's bytes"
        assert one.cache.finish_external_linker_loads([request]) == []
        if kind == "mla":
            return
        one.cache.reset()
        one.slots.clear()
        if rank:
            one.linker._lease = lambda *_: False
        assert one.ask([*tokens, 7], "refused by one")[1] == 0, "ranks disagree"
        assert one.matched == 20 * PAGE


def linker_refuses_models(folder: Path) -> None:
    """What is not served is one clear error before anything is opened."""
    from kvdepot.errors import ConfigError, KVDepotError, ModelError

    for extra, kind, said in (
        ({"params": {"pp_size": 2}}, ModelError, "pipeline"),
        ({"revision": None}, ConfigError, "revision"),
        ({"dramm": 1}, ConfigError, "linker_extra_config.dramm"),
    ):
        try:
            with engine(folder, **extra):
                raise AssertionError(f"{extra} is taken")
        except KVDepotError as error:
            assert isinstance(error, kind) and said in str(error), error
    assert not folder.exists()


def linker_cases() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for kind in ("mha", "hnd", "mla"):
        yield f"linker {kind}", partial(linker_round_trip, kind)
    own = sys.modules[__name__]
    for name in (
        "tail_only",
        "audit",
        "decides",
        "pages_gone",
        "page_damaged",
        "deadline",
        "copy_fails",
        "cancel",
    ):
        yield f"linker {name.replace('_', ' ')}", getattr(own, f"linker_{name}")
    for kind in ("mha", "mla") if ON.device == "cpu" else ():  # a GPU does not outlive a fork
        yield f"linker {kind} two ranks", partial(linker_ranks, kind)
    yield "linker refuses models", linker_refuses_models
