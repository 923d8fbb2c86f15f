"""kvdepot as a tier below vLLM's own CPU tier, in a real vLLM. Run by vLLM's Python.

    python tests/e2e/real_vllm_tier.py SCENARIO --model DIR --depot DIR --out FILE

`contract` drives vLLM's own tiering manager, without a model, through what its filesystem tier
promises and more; `ask` runs a model. On a CPU vLLM's worker is `cpu_tiering_spec.py`'s. Writes one
JSON object with what was seen; `tests/e2e/vllm_tiers.py` judges it.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

CHUNK_TOKENS = 16
CHUNK_BYTES = 64 << 10
CHUNKS = 24
WAIT_S = 60.0
OURS = {"type": "KVDepotTier", "module_path": "kvdepot.adapters.vllm_tier"}


def tier_settings(folder: Path, **more: Any) -> dict[str, Any]:
    disk = {"path": str(folder), "capacity": "64MiB", "segment": "1MiB"}
    small = {"capacity": "8MiB", "prefault": False, "huge_pages": "never"}
    settings = {"dram": small, "ssd": disk, "writeback": {"staging": "2MiB"}, "revision": "r1"}
    return {**OURS, **settings, **more}


class World:
    """vLLM's tiering manager with one tier below its CPU tier, and requests for it."""

    def __init__(
        self,
        tier: dict[str, Any],
        events: bool = False,
        workers: int = 1,
        *,
        replicated: bool = False,
    ) -> None:
        from vllm.v1.kv_offload.base import OffloadingSpec  # type: ignore[import-not-found]
        from vllm.v1.kv_offload.config import (  # type: ignore[import-not-found]
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.cpu.shared_offload_region import (  # type: ignore[import-not-found]
            SharedOffloadRegion,
        )
        from vllm.v1.kv_offload.tiering.factory import (  # type: ignore[import-not-found]
            SecondaryTierFactory,
        )
        from vllm.v1.kv_offload.tiering.manager import (  # type: ignore[import-not-found]
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        class Spec(OffloadingSpec):  # type: ignore[misc]
            def get_manager(self) -> Any: ...
            def get_worker(self, kv_caches: Any) -> Any: ...

        spec = Spec(
            OffloadingConfig(
                groups=(
                    OffloadingGroupConfig(CHUNK_TOKENS, ("layer.0",), 0),
                    OffloadingGroupConfig(CHUNK_TOKENS, ("layer.1",), 1),
                ),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=events,
                extra_config={},
                engine_id="test",
                model=OffloadingModelConfig("test-model", "float32"),
                cache=OffloadingCacheConfig(CHUNK_TOKENS, 1),
                parallel=OffloadingParallelConfig(
                    0, workers, workers, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False
                ),
                replicated_layout=replicated,
            )
        )
        region = SharedOffloadRegion(
            engine_id=f"kvdepot-{uuid.uuid4().hex}",
            num_chunks=CHUNKS,
            rank=None,
            kv_bytes_per_chunk=CHUNK_BYTES,
            cpu_page_size=CHUNK_BYTES,
        )
        self._region = region
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        view = self.primary.get_kv_memoryview()
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(tier, view, spec)
        except BaseException:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self._count = 0

    def row(self, number: int) -> Any:
        return self._region.base_tensor.view(CHUNKS, -1)[number].numpy()

    def request(self, name: str, keys: list[bytes] | None = None) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(req_id=f"{name} {self._count}")
        self._count += 1
        for at, key in enumerate(keys or ()):
            context.set_offload_key_position(key, (at + 1) * CHUNK_TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Until vLLM has no transfer under way."""
        limit = time.monotonic() + WAIT_S
        while True:
            self.step()
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < limit, "transfers do not end"
            time.sleep(0.001)

    def offload(self, keys: list[bytes], name: str = "offload") -> None:
        """As the engine does: into the CPU tier, and from there down."""
        context = self.request(name, keys)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        ids = prepared.store_spec.chunk_ids
        for key, number in zip(prepared.keys_to_store, ids, strict=True):
            self.row(number)[:] = content(key)
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.settle()
        self.manager.on_request_finished(context)

    def onboard(self, keys: list[bytes], chain: list[bytes] | None = None) -> list[str]:
        """Look up until it is settled; loaded chunks have the right bytes."""
        from vllm.v1.kv_offload.base import LookupResult

        context = self.request("onboard", chain or keys)
        limit = time.monotonic() + WAIT_S
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            assert time.monotonic() < limit, "lookups do not settle"
            time.sleep(0.001)
        hits = [key for key, one in zip(keys, found, strict=True) if one is LookupResult.HIT]
        if hits:
            loaded = self.manager.prepare_load(hits, context)
            for key, number in zip(hits, loaded.chunk_ids, strict=True):
                assert np.array_equal(self.row(number), content(key)), "wrong bytes"
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return [one.name for one in found]

    def forget(self) -> None:
        """Empty vLLM's CPU tier."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33: no worker copies any more
            self.manager.on_reset_flushed()

    def close(self) -> None:
        self.manager.shutdown()


@contextmanager
def world(tier: dict[str, Any], **more: Any) -> Iterator[World]:
    made = World(tier, **more)
    try:
        yield made
    finally:
        made.close()


def chain(number: int, count: int, group: int = 0) -> list[bytes]:
    """vLLM's keys of a prompt's chunks."""
    chance = random.Random(number)
    return [chance.randbytes(32) + group.to_bytes(4, "big") for _ in range(count)]


def content(key: bytes) -> Any:
    return np.random.default_rng(list(key)).integers(-128, 128, CHUNK_BYTES, np.int8)


def damage(folder: Path, keys: list[bytes]) -> None:
    """Change one byte in each of these chunks on disk."""
    for path in folder.glob("segment-*"):
        text = bytearray(path.read_bytes())
        for key in keys:
            at = text.find(content(key)[:64].tobytes())
            if at >= 0:
                text[at + 1000] ^= 1
        path.write_bytes(text)


def round_trip(folder: Path) -> None:
    keys = chain(1, 5) + chain(1, 3, group=1)
    with world(tier_settings(folder)) as seen:
        assert seen.onboard(keys) == ["MISS"] * 8, "nothing is there yet"
        seen.offload(keys)
        assert seen.onboard(keys) == ["HIT"] * 8
        for _ in range(3):
            seen.forget()
            assert seen.onboard(keys) == ["HIT"] * 8
        assert seen.onboard(chain(1, 5, group=1)[3:], chain(1, 5, group=1)) == ["MISS"] * 2


def restart(folder: Path) -> None:
    keys = chain(2, 8)
    with world(tier_settings(folder)) as seen:
        seen.offload(keys)
    with world(tier_settings(folder)) as seen:
        assert seen.onboard([*keys, *chain(9, 1)]) == ["HIT"] * 8 + ["MISS"]
    with world(tier_settings(folder, revision="r2")) as seen:
        assert seen.onboard(keys) == ["MISS"] * 8, "another model's"
    secret = {"tenants": {"a": {"secret_file": str(folder) + ".secret"}}, "tenant": "a"}
    Path(str(folder) + ".secret").write_bytes(os.urandom(32))
    Path(str(folder) + ".secret").chmod(0o600)
    with world(tier_settings(folder, **secret)) as seen:
        assert seen.onboard(keys) == ["MISS"] * 8, "another tenant's"


def other_weights(folder: Path) -> None:
    """Weights that change in place: nothing before vLLM's CPU tier is emptied, then their own
    chunks; the first weights find theirs again."""
    keys, loaded = chain(7, 6), ["first"]
    with world(tier_settings(folder)) as seen:

        def load(weights: str) -> None:
            seen.tier._weights.about_to_call("reload_weights", None, lambda _: list(loaded))
            loaded[0] = weights

        def blocks() -> int:
            count: int = seen.tier.depot.stats()["blocks"]
            return count

        seen.offload(keys[:4])
        load("second")
        seen.offload(keys[4:])  # the CPU tier has chunks of the first weights
        assert blocks() == 4, "nothing is saved meanwhile"
        running = seen.request("running")
        seen.forget()
        assert seen.onboard(keys[:4]) == ["MISS"] * 4, "one that began before still runs"
        seen.manager.on_request_finished(running)
        seen.forget()
        assert seen.onboard(keys[:4]) == ["MISS"] * 4, "the first weights' chunks"
        seen.offload(keys)
        assert blocks() == 10
        seen.forget()
        assert seen.onboard(keys) == ["HIT"] * 6
        load("first")
        seen.forget()
        assert seen.onboard(keys) == ["HIT"] * 4 + ["MISS"] * 2


def damaged(folder: Path) -> None:
    """If a chunk fails its checksum, the chunks before it are hits; it and the rest are misses."""
    for first in (3, 0):
        place, keys = folder.with_name(f"damaged-{first}"), chain(3, 6)
        with world(tier_settings(place)) as seen:
            seen.offload(keys)
        damage(place, keys[first : first + 1])
        with world(tier_settings(place)) as seen:
            found = seen.onboard(keys)
            assert found == ["HIT"] * first + ["MISS"] * (6 - first), found
            seen.offload(keys[first:], "again")
            seen.forget()
        with world(tier_settings(place)) as seen:
            assert seen.onboard(keys)[:first] == ["HIT"] * first


def absent_load(folder: Path) -> None:
    """A promotion of what is not there fails, and so does one to no row of the CPU tier."""
    from vllm.v1.kv_offload.tiering.base import TransferJob  # type: ignore[import-not-found]

    keys = chain(5, 2)
    with world(tier_settings(folder)) as seen:
        context = seen.request("absent", keys)
        rows = (np.array([0, 1]), np.array([0, CHUNKS]))
        for number, numbers in enumerate(rows):
            seen.tier.submit_load(TransferJob(number, keys, numbers, True, context))
        seen.tier.submit_store(TransferJob(7, keys, rows[1], False, context))
        seen.tier.submit_store(TransferJob(8, [], np.array([], np.int64), False, context))
        seen.tier.drain_jobs()
        ended = {one.job_id: one.success for one in seen.tier.get_finished_jobs()}
        assert ended == {0: False, 1: False, 7: False, 8: True}, ended


def capacity(folder: Path) -> None:
    """Four times what fits: the tier stays within its size, and the beginnings of prompts outlive
    their ends."""
    disk = {"path": str(folder), "capacity": "8MiB", "segment": "1MiB"}
    with world(tier_settings(folder, ssd=disk)) as seen:
        for number in range(30):
            seen.offload(chain(100 + number, 16))
            seen.forget()
        assert seen.tier.depot.flush(WAIT_S)
        used = sum(path.stat().st_size for path in folder.glob("segment-*"))
        assert used <= 8 << 20, used
        kept, whole = 0, 0
        for number in range(30):
            found = seen.onboard(chain(100 + number, 16))
            kept += found.count("HIT")
            whole += found == ["HIT"] * 16
            seen.forget()
        assert 16 <= kept <= 30 * 16 // 2, kept


def policies(folder: Path) -> None:
    """With `policy` request, chunks that the CPU tier has are offered again."""
    for policy, found in (("chunk", "MISS"), ("request", "HIT")):
        keys = chain(6, 4)
        with world(tier_settings(folder.with_name(f"policy-{policy}"), policy=policy)) as seen:
            seen.offload(keys)
            context = seen.request("removed", keys)
            seen.tier.depot.remove(seen.tier._keys(keys, context))
            seen.offload(keys)
            seen.forget()
            assert seen.onboard(keys) == [found] * 4


def events(folder: Path) -> None:
    keys = chain(7, 3)
    announcing = tier_settings(folder, enable_kv_events=True, locality="REMOTE")
    with world(announcing, events=True) as seen:
        seen.offload(keys)
        (event,) = seen.tier.take_events()
        assert list(event.keys) == keys and event.locality.name == "REMOTE" and not event.removed
        assert not list(seen.tier.take_events())
    with world(announcing, events=False) as seen:
        seen.offload(chain(8, 2))
        assert not list(seen.tier.take_events())


def slow_drive(folder: Path) -> None:
    """A late load is given up at its deadline; the scheduler never waits for it."""
    from kvdepot.core.block import GetResult

    keys = chain(9, 4)
    with world(tier_settings(folder)) as seen:
        seen.offload(keys)
        seen.forget()

        def late(keys: list[Any], intos: list[Any], **_: Any) -> list[GetResult]:
            time.sleep(0.5)
            return [GetResult(None, "late") for _ in keys]

        seen.tier.depot.get_many = late
        context = seen.request("late", keys)
        longest, limit = 0.0, time.monotonic() + WAIT_S
        while True:
            started = time.thread_time()
            found = [seen.manager.lookup(key, context).name for key in keys]
            seen.step()
            longest = max(longest, time.thread_time() - started)
            if "HIT_PENDING" not in found:
                break
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert found == ["MISS"] * 4, found
        assert longest < 0.2, longest


def jobs(folder: Path) -> None:
    """Jobs of any size, each by itself, to other rows than they came from; loads remove nothing."""
    with world(tier_settings(folder, enable_kv_events=True), events=True) as seen:
        keys = chain(10, 8)
        context = seen.request("jobs", keys)
        parts = [keys[:0], keys[:1], keys[1:3], keys[3:8]]
        stored: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            stored[number] = [keys.index(key) for key in part]
            for key, row in zip(part, stored[number], strict=True):
                seen.row(row)[:] = content(key)
            seen.tier.submit_store(job(number, part, stored[number], context))
        assert ended(seen) == dict.fromkeys(range(4), True)
        announced = [key for event in seen.tier.take_events() for key in event.keys]
        assert sorted(announced) == sorted(keys), "an event for each chunk that was stored"
        for turn in range(2):
            for row in range(CHUNKS):
                seen.row(row)[:] = 0
            for number, part in enumerate(parts):
                rows = [CHUNKS - 1 - row for row in stored[number]]
                seen.tier.submit_load(job(number, part, rows, context, load=True))
            assert ended(seen) == dict.fromkeys(range(4), True), turn
            for at, key in enumerate(keys):
                assert np.array_equal(seen.row(CHUNKS - 1 - at), content(key)), "wrong bytes"
            assert [seen.tier.lookup(key, context).name for key in keys] == ["HIT"] * 8
        assert not list(seen.tier.take_events()), "a load is no event"


def job(number: int, keys: list[bytes], rows: list[int], context: Any, load: bool = False) -> Any:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(number, keys, np.array(rows, np.int64), load, context)


def ended(seen: World) -> dict[int, bool]:
    """How the jobs under way end, by number."""
    seen.tier.drain_jobs()
    return {one.job_id: one.success for one in seen.tier.get_finished_jobs()}


def failed_store(folder: Path) -> None:
    """A failed store is reported by its job and by no event, and does not affect the next one."""
    from kvdepot.errors import KVDepotError

    with world(tier_settings(folder, enable_kv_events=True), events=True) as seen:
        keys = chain(11, 4)
        context = seen.request("failed", keys)
        put = seen.tier.depot.put_many

        def failing(names: list[Any], rows: list[Any], **more: Any) -> Any:
            if len(names) == 2:
                raise KVDepotError("no room")
            return put(names, rows, **more)

        seen.tier.depot.put_many = failing
        seen.tier.submit_store(job(1, keys[:2], [0, 1], context))
        seen.tier.submit_store(job(2, keys[2:3], [2], context))
        assert ended(seen) == {1: False, 2: True}
        assert [list(event.keys) for event in seen.tier.take_events()] == [keys[2:3]]


def passing_fault(folder: Path) -> None:
    """A read that fails once fails its job; the data on disk is kept."""
    from kvdepot.errors import KVDepotError

    keys = chain(12, 3)
    with world(tier_settings(folder)) as seen:
        seen.offload(keys)
        get = seen.tier.depot.get_many

        def failing(*_: Any, **__: Any) -> Any:
            raise KVDepotError("a passing fault")

        seen.tier.depot.get_many = failing
        seen.forget()
        assert seen.onboard(keys) == ["MISS"] * 3
        seen.tier.depot.get_many = get
        assert seen.onboard(keys) == ["HIT"] * 3, "another request finds them"


def pending_at_shutdown(folder: Path) -> None:
    """Stores that have not begun are dropped; nothing uses vLLM's memory afterwards."""
    keys = chain(13, 16)
    with world(tier_settings(folder)) as seen:
        context = seen.request("pending", keys)
        for number, key in enumerate(keys):
            seen.tier.submit_store(job(number, [key], [number], context))
        seen.tier.shutdown()
        assert len({one.job_id for one in seen.tier.get_finished_jobs()}) <= len(keys)


def other_workers(folder: Path) -> None:
    """Chunks that are the same for any number of workers are found by another; others are not."""
    keys = chain(14, 4)
    for replicated, found in ((True, "HIT"), (False, "MISS")):
        place = folder.with_name(f"workers-{replicated}")
        with world(tier_settings(place), workers=2, replicated=replicated) as seen:
            seen.offload(keys)
        with world(tier_settings(place), workers=4, replicated=replicated) as seen:
            assert seen.onboard(keys) == [found] * 4


def refused(folder: Path) -> None:
    from kvdepot.errors import ConfigError, KVDepotError

    cases: tuple[dict[str, Any], ...] = (
        {"revision": None},
        {"sdd": {}},
        {"ssd": None},
        {"locality": "local"},
        {"policy": "some"},
        {"ssd": {"path": "/dev/null/kv", "capacity": "64MiB"}},
    )
    for wrong in cases:
        try:
            World(tier_settings(folder, **wrong))
        except ConfigError as error:
            assert str(error).startswith(("secondary_tiers.KVDepotTier.", "ssd.path")), error
        except KVDepotError:
            assert "ssd" in wrong
        else:
            raise AssertionError(f"{wrong} was taken")


CONTRACT: tuple[Callable[[Path], None], ...] = (
    round_trip,
    restart,
    other_weights,
    damaged,
    absent_load,
    capacity,
    policies,
    events,
    slow_drive,
    jobs,
    failed_store,
    passing_fault,
    pending_at_shutdown,
    other_workers,
    refused,
)


def contract(args: argparse.Namespace) -> dict[str, Any]:
    """Each promise, and what broke it."""
    import traceback

    seen: dict[str, Any] = {}
    for part in CONTRACT:
        started = time.monotonic()
        said = ""
        try:
            part(Path(args.depot) / part.__name__)
        except Exception:  # what went wrong is the result
            said = traceback.format_exc(limit=4)[-1500:]
        seconds = round(time.monotonic() - started, 2)
        seen[part.__name__.replace("_", " ")] = {"error": said, "seconds": seconds}
    return seen


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Ask a model: what it answers, what was cached, how long it took; then end or be killed."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    tiers: dict[str, list[dict[str, Any]]] = {
        "kvdepot": [{**OURS, "ssd": {"path": args.depot, "capacity": "2GiB"}}],
        "fs": [{"type": "fs", "root_dir": args.depot}],
    }
    more: dict[str, Any] = {}
    if args.tier != "none":
        more["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.e2e.cpu_tiering_spec",
                "cpu_bytes_to_use": args.cpu_bytes,
                "secondary_tiers": tiers[args.tier],
            },
        }
    llm = LLM(
        model=args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(4096, args.tokens + args.answer),
        block_size=args.page,
        seed=0,
        disable_log_stats=False,
        **more,
    )
    tier: Any = None
    if args.tier != "none":
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        (tier,) = connector.connector_scheduler.manager.secondary_tiers
    if args.tier == "kvdepot":
        limit = time.monotonic() + WAIT_S
        while not tier._ready() and time.monotonic() < limit:
            time.sleep(0.05)
    greedy = SamplingParams(temperature=0, max_tokens=args.answer, logprobs=1, ignore_eos=True)
    answers = []
    llm.generate([{"prompt_token_ids": list(range(300, 340))}], greedy, use_tqdm=False)
    for number in range(args.prompts):
        chance = random.Random(f"{args.seed} {number}")
        ids = [chance.randrange(1000, 40000) for _ in range(args.tokens)]
        started = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        seconds = time.perf_counter() - started
        first = output.outputs[0]
        answers.append(
            {
                "seconds": seconds,
                "cached": output.num_cached_tokens,
                "tokens": list(first.token_ids),
                "logprobs": [
                    chosen[token].logprob
                    for chosen, token in zip(first.logprobs, first.token_ids, strict=True)
                ],
            }
        )
    if tier is not None:
        for number in range(2):  # steps in which what was stored goes down
            short = [{"prompt_token_ids": list(range(400 + number, 440 + number))}]
            llm.generate(short, greedy, use_tqdm=False)
        tier.drain_jobs()
    if args.tier == "kvdepot":
        assert tier.depot.flush(WAIT_S)
    return {"answers": answers}


SCENARIOS = {"contract": contract, "ask": ask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--model", default="")
    parser.add_argument("--depot", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tier", choices=("none", "kvdepot", "fs"), default="none")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--page", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-bytes", type=int, default=400_000_000)
    parser.add_argument("--killed", action="store_true", help="end by kill -9")
    args = parser.parse_args()
    seen = SCENARIOS[args.scenario](args)
    Path(args.out).write_text(json.dumps(seen))
    if args.killed:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
