"""Scenarios on a real vLLM and a real model, each in a process of its own. Run by vLLM's Python.

    python tests/support/real_vllm.py SCENARIO --model DIR --depot DIR [--reference FILE] --out FILE

Writes one JSON object with what was seen; judging is `e2e.py`'s. Not imported by pytest.
With `--serve` it reads such arguments from its input instead, a JSON list a line, and forks a
process for each, which need not import vLLM again; it answers with how the process ended.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
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

from tests.support.throttled import throttled

PAGE = 32
TOPICS = ("the sea", "old maps", "a clock tower", "bread", "two foxes", "winter trains")
SAID = (
    "Once upon a time there was a story about {0}. People told it in many ways, and each time "
    "someone asked what it meant, the answer about {0} changed a little, for {1} reasons. "
)


def engine_arguments(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """An LLM with kvdepot; `extra=None` leaves it out."""
    extra = more.pop("extra", {})
    role = more.pop("role", "kv_both")
    found: dict[str, Any] = {
        "model": args.model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "block_size": PAGE,
        "seed": 0,
        "disable_log_stats": False,
        **more,
    }
    if extra is not None:
        found["kv_transfer_config"] = {
            "kv_connector": "KVDepotConnector",
            "kv_connector_module_path": "kvdepot.adapters.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra_config(args, extra),
        }
    return found


def extra_config(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything is fetched, unless a scenario is about the decision."""
    disk = {"path": args.depot, "capacity": "2GiB"}
    speeds = f"{args.depot}.speeds"
    return {"dram": "512MiB", "ssd": disk, "decide": False, "speeds": speeds, **extra}


class Bench:
    """One vLLM in this process."""

    def __init__(self, args: argparse.Namespace, **more: Any) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self.llm = LLM(**engine_arguments(args, **more))
        self.answer_tokens = 24
        if self.connector is not None:
            self._await_weights()

    def _await_weights(self) -> None:
        """Requests that come before the weights are read are left to vLLM; these here are not to
        be among them.
        """
        limit_s = time.monotonic() + 60
        while not self.connector.scheduler_side._is_ready() and time.monotonic() < limit_s:
            time.sleep(0.05)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def store(self) -> Any:
        return self.connector.scheduler_side._depot.store

    def prompts(self, count: int = 6, longest: int = 1200) -> list[list[int]]:
        """Token ids of prompts that share beginnings and differ in length."""
        found = []
        for number in range(count):
            told = [SAID.format(TOPICS[(at // 3) % 6], at) for at in range(60)]
            told[3 + 2 * number :] = [
                SAID.format(TOPICS[(at + number) % 6], number * at) for at in range(60)
            ]
            ids = self.llm.get_tokenizer().encode(" ".join(told))
            found.append(ids[: 200 + (longest - 200) * (number + 1) // count])
        return found

    def ask(
        self, prompts: list[list[int]], tokens: int = 0, salt: str = "", lora: Any = None
    ) -> list[dict[str, Any]]:
        """Greedy answers with their log-probabilities, all prompts at once."""
        from vllm import SamplingParams

        count = tokens or self.answer_tokens
        greedy = SamplingParams(temperature=0, max_tokens=count, logprobs=1, ignore_eos=True)
        salted = {"cache_salt": salt} if salt else {}
        asked = [{"prompt_token_ids": ids, **salted} for ids in prompts]
        answers = self.llm.generate(asked, greedy, use_tqdm=False, lora_request=lora)
        return [said(one) for one in answers]

    def ask_in_turn(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        """The same one by one."""
        return [self.ask([ids], **more)[0] for ids in prompts]

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, when all saves have read their pages."""
        for _ in range(1000):
            if self.llm.reset_prefix_cache():
                return
            self.core.step()
        raise AssertionError("pages are never given back")

    def evict(self, ids: list[int], kept: int = 0) -> None:
        """Leave the blocks of a prompt, but for the first ones, on disk only."""
        assert self.store.flush(60.0)
        state = self.store.inspect().state
        spaces = self.connector.scheduler_side._spaces_of("")
        with state.lock:
            for space in spaces:
                rows = state.catalog.rows(space.keys(ids)[kept:])
                for row in reversed(rows):
                    if row >= 0 and state.catalog.memory.ready(row):
                        state.memory_tiers[0].drop(row)

    def figures(self) -> dict[str, float]:
        """What the connector has counted since the last call, and was not taken by vLLM."""
        counts: dict[str, float] = {}
        for part in (worker_of(self), self.connector.scheduler_side):
            for name, count in (part.counts.take() or {}).items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def count(self) -> None:
        """Keep the counts for `figures`: vLLM would take them at every step."""
        from kvdepot.adapters.vllm.connector import KVDepotConnector

        KVDepotConnector.get_kv_connector_stats = lambda self: None  # type: ignore[method-assign]


def worker_of(bench: Bench) -> Any:
    from vllm.distributed.kv_transfer import (  # type: ignore[import-not-found]
        get_kv_transfer_group,
    )

    return get_kv_transfer_group().worker_side


def said(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "tokens": list(first.token_ids),
        "text": first.text,
        "logprobs": [
            chosen[token].logprob
            for chosen, token in zip(first.logprobs, first.token_ids, strict=True)
        ],
    }


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """Same tokens? By how much do log-probabilities differ? What was hit?"""
    pairs = [
        abs(one - other)
        for mine, theirs in zip(found, wanted, strict=True)
        for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=False)
    ]
    return {
        "same": all(a["tokens"] == b["tokens"] for a, b in zip(found, wanted, strict=True)),
        "worst": max(pairs),
        "cached": [one["cached"] for one in found],
        "prompt": [one["prompt"] for one in found],
    }


def full(prompts: list[list[int]]) -> list[int]:
    return [len(ids) // PAGE * PAGE for ids in prompts]


def reference(args: argparse.Namespace) -> dict[str, Any]:
    """Without kvdepot: what is right."""
    bench = Bench(args, extra=None)
    prompts = bench.prompts()
    answers = [bench.ask([ids])[0] for ids in prompts]
    turns = turns_of(prompts, answers)
    return {"answers": answers, "turns": [bench.ask([ids])[0] for ids in turns]}


def turns_of(prompts: list[list[int]], answers: list[dict[str, Any]]) -> list[list[int]]:
    """Second turns: the first prompts, what was answered, and something more."""
    return [prompts[at] + answers[at]["tokens"] + prompts[0][5:20] for at in range(2)]


def smoke_saved(args: argparse.Namespace) -> dict[str, Any]:
    """Two prompts cold and from memory; then killed without warning."""
    bench = Bench(args)
    prompts = bench.prompts(2, 500)
    cold = [bench.ask([ids], 16)[0] for ids in prompts]
    bench.forget()
    again = compare(bench.ask(prompts, 16), cold)
    seen = {"full": full(prompts), "cold": [cold[0]["cached"]], "from memory": again}
    bench.store.flush(60.0)
    write(args, {**seen, "answers": cold})
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def smoke_restored(args: argparse.Namespace) -> dict[str, Any]:
    """The same in a new process, from disk; then garbage."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args)
    prompts = bench.prompts(2, 500)
    seen = {"from disk": compare(bench.ask(prompts, 16), wanted)}
    bench.forget()
    with garbled(bench):
        seen["control"] = compare(bench.ask(prompts, 16), wanted)
    return seen


def warm(args: argparse.Namespace) -> dict[str, Any]:
    """Cold, from memory, second turns; then killed without warning, as far as written."""
    wanted = json.loads(Path(args.reference).read_text())
    bench = Bench(args, max_num_batched_tokens=256, extra={})
    bench.count()
    prompts = bench.prompts()
    seen: dict[str, Any] = {"full": full(prompts)}
    seen["cold, together, in chunks of 256"] = compare(bench.ask(prompts), wanted["answers"])
    bench.forget()
    seen["from memory, together"] = compare(bench.ask(prompts), wanted["answers"])
    seen["again, from vLLM's own"] = compare(bench.ask(prompts), wanted["answers"])
    bench.forget()
    answers = wanted["answers"]
    turns = turns_of(prompts, answers)
    seen["second turns"] = compare([bench.ask([ids])[0] for ids in turns], wanted["turns"])
    seen["second turns"]["answer_end"] = [
        (len(prompts[at]) + len(answers[at]["tokens"]) - 1) // PAGE * PAGE for at in range(2)
    ][:2]
    seen["figures"] = bench.figures()
    seen["identity"] = dict(worker_of(bench).facts.groups[0].extra)
    seen["flushed"] = bool(bench.store.flush(60.0))
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def disk(args: argparse.Namespace) -> dict[str, Any]:
    """A fresh process: everything comes from disk. Then, as a control, garbage."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args)
    bench.count()
    prompts = bench.prompts()
    seen: dict[str, Any] = {"full": full(prompts)}
    seen["from disk, together"] = compare(bench.ask(prompts), wanted)
    seen["figures"] = bench.figures()
    bench.forget()
    with garbled(bench):
        seen["control: garbage instead of blocks"] = compare(bench.ask(prompts), wanted)
    bench.core.scheduler.reset_prefix_cache(False, True)
    seen["after a reset"] = compare(bench.ask(prompts[:1]), wanted[:1])
    return seen


@contextmanager
def garbled(bench: Bench, kind: str = "") -> Iterator[None]:
    """Loads bring something else than what was saved; `kind`: to KV groups of that kind only."""
    from dataclasses import replace

    from kvdepot.adapters.vllm.page_transfer import Loader

    good = Loader._scatter
    kinds = [group.rule.kind for group in worker_of(bench).facts.groups]

    def garbage(loader: Any, job: Any, arrivals: Any) -> None:
        if kind in ("", kinds[job.group]):
            arrivals = [replace(one, view=wrong(one.view)) for one in arrivals]
        good(loader, job, arrivals)

    def wrong(view: memoryview) -> memoryview:
        kept = min(4096, len(view) // 2)
        return memoryview(bytes(len(view) - kept) + bytes(view[:kept]))

    Loader._scatter = garbage  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Loader._scatter = good  # type: ignore[method-assign]


def damaged(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes on disk were changed before the start: the text must not."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args)
    bench.count()
    prompts = bench.prompts()
    seen: dict[str, Any] = {"full": full(prompts)}
    seen["damaged on disk"] = compare(bench.ask(prompts), wanted)
    seen["figures"] = bench.figures()
    bench.forget()
    seen["healed"] = compare(bench.ask(prompts), wanted)
    return seen


def faults(args: argparse.Namespace) -> dict[str, Any]:
    """Errors, stalls and a full disk while serving; then the directory is deleted."""
    import errno

    from kvdepot.adapters.vllm import config, shared_depot
    from kvdepot.store.open import assemble
    from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall

    files = FaultyFiles()
    settings = config.read(extra_config(args, {"dram": "64MiB", "load_timeout": "1s"}))
    name = shared_depot.embedded_name(settings)
    held = shared_depot.hold(name, lambda: assemble(settings.depot, files=files))
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args, extra={"dram": "64MiB", "load_timeout": "1s"})
    bench.count()
    prompts = bench.prompts()
    seen: dict[str, Any] = {}
    effects: dict[str, Callable[[], Fault]] = {
        "read errors": lambda: Fault(Call.RUN_READ, Fail(errno.EIO), times=None),
        "stalled reads": lambda: Fault(Call.RUN_READ, Stall(), times=2),
        "write errors": lambda: Fault(Call.RUN_WRITE, Fail(errno.EIO), times=None),
        "no space": lambda: Fault(Call.RUN_WRITE, Fail(errno.ENOSPC), times=None),
    }
    for name, fault in effects.items():
        made = fault()
        files.add(made)
        if made.calls is Call.RUN_WRITE:
            bench.core.scheduler.reset_prefix_cache(False, True)  # everything is written anew
        started = time.monotonic()
        seen[name] = compare(bench.ask(prompts), wanted)
        seen[name]["seconds"] = round(time.monotonic() - started, 2)
        seen[name]["faults"] = made.hits
        seen[name]["figures"] = bench.figures()
        if isinstance(made.effect, Stall):
            made.effect.release()
        else:
            bench.store.flush(5.0)
        seen[name]["healthy"] = bench.store.stats()["tiers"]["ssd"]["healthy"]
        files.clear()
        bench.forget()
    shutil.rmtree(args.depot)
    seen["directory deleted"] = compare(bench.ask(prompts), wanted)
    seen["directory deleted"]["figures"] = bench.figures()
    held.close()
    return seen


def preempted(args: argparse.Namespace) -> dict[str, Any]:
    """So little KV space that requests are preempted, with kvdepot on."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args, num_gpu_blocks_override=60, max_model_len=1600)
    return crowded(bench, bench.prompts(), wanted)


def crowded(bench: Bench, prompts: list[list[int]], wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """All prompts at once, cold and warm, and how often a request was preempted."""
    bench.count()
    seen: dict[str, Any] = {}
    kept: list[int] = []
    scheduler = bench.core.scheduler
    before = type(scheduler)._preempt_request

    def counting(self: Any, request: Any, *rest: Any, **more: Any) -> None:
        kept.append(1)
        before(self, request, *rest, **more)

    type(scheduler)._preempt_request = counting
    seen["preempted"] = compare(bench.ask(prompts), wanted)
    bench.forget()
    seen["preempted, warm"] = compare(bench.ask(prompts), wanted)
    seen["preemptions"] = len(kept)
    seen["figures"] = bench.figures()
    return seen


def aborts(args: argparse.Namespace) -> dict[str, Any]:
    """Many requests, many of them aborted at random moments; then nothing may be left."""
    chance = random.Random(args.seed)
    # Without vLLM's own prefix cache every request is loaded from the depot.
    options = {"num_gpu_blocks_override": 200, "enable_prefix_caching": False}
    bench = Bench(args, **options, extra={"dram": "32MiB"})
    bench.count()
    prompts = bench.prompts(6, 500)
    wanted = dict(enumerate(bench.ask(prompts, 8)))
    bench.forget()
    rush(bench, prompts, wanted, chance, 48)  # all threads are there now
    before = leftovers(bench)
    counts = rush(bench, prompts, wanted, chance, args.requests)
    after = leftovers(bench)
    report = bench.store.check()
    return {
        **counts,
        "seed": args.seed,
        "before": before,
        "after": after,
        "check": {"ok": report.ok, "blocks": report.blocks},
        "figures": bench.figures(),
    }


def rush(
    bench: Bench, prompts: list[list[int]], wanted: Any, chance: random.Random, requests: int
) -> dict[str, int]:
    """So many requests, 16 at a time, some aborted at random moments, until all is quiet."""
    from vllm import SamplingParams

    counts = {"requests": 0, "aborted": 0, "wrong": 0, "over": 0}
    live: dict[str, int] = {}
    while counts["over"] < requests:
        while len(live) < 16 and counts["requests"] < requests:
            name, which = f"q{chance.random()}", chance.randrange(len(prompts))
            greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
            bench.engine.add_request(name, {"prompt_token_ids": prompts[which]}, greedy)
            live[name] = which
            counts["requests"] += 1
        if live and chance.random() < 0.5:
            name = chance.choice(list(live))
            bench.engine.abort_request([name])
            del live[name]
            counts["over"] += 1
            counts["aborted"] += 1
        for output in bench.engine.step():
            if output.finished and output.request_id in live:
                answer = compare([said(output)], [wanted[live.pop(output.request_id)]])
                counts["over"] += 1
                counts["wrong"] += answer["worst"] > 1e-3
    while bench.core.scheduler.has_requests():
        bench.core.step()
    worker_of(bench)._saver.wait()
    return counts


def leftovers(bench: Bench) -> dict[str, int]:
    bench.store.flush(60.0)
    pool = bench.core.scheduler.kv_cache_manager.block_pool
    stats = bench.store.stats()
    return {
        "leased": stats["leased"],
        "staging_bytes": stats["staging_bytes"],
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "pages_in_use": pool.num_gpu_blocks - pool.get_num_free_blocks(),
        "tracked": len(bench.connector.scheduler_side._tracked),
        "loading": len(worker_of(bench)._loader),
    }


def roundtrip(args: argparse.Namespace) -> dict[str, Any]:
    """One prompt, cold and from memory, with whatever model `--model` is."""
    bench = Bench(args, **json.loads(args.extra))
    bench.count()
    chance = random.Random(args.seed)
    ids = [chance.randrange(1000, 30000) for _ in range(1000)]
    cold = bench.ask([ids])
    bench.forget()
    seen = compare(bench.ask([ids]), cold)
    seen["cold"] = cold[0]["cached"]
    seen["figures"] = bench.figures()
    bench.forget()
    with garbled(bench):
        seen["control"] = compare(bench.ask([ids]), cold)["worst"]
    seen["identity"] = dict(worker_of(bench).facts.groups[0].extra)
    return seen


def resharded(args: argparse.Namespace) -> dict[str, Any]:
    """One worker reads what two have saved, and garbage; saves another prompt; then is killed."""
    from dataclasses import replace

    from kvdepot.adapters.vllm.page_transfer import Loader

    read, other = json.loads(args.extra)["prompts"]
    bench = Bench(args, block_size=128, max_model_len=4224)
    started = time.perf_counter()
    seen: dict[str, Any] = {"read": {**bench.ask([read], 16)[0]}}
    seen["read"]["seconds"] = time.perf_counter() - started
    bench.forget()
    fill = Loader._fill_heads

    def garbled_heads(loader: Any, job: Any, arrivals: Any, parts: Any) -> None:
        wrong = [replace(one, view=memoryview(bytes(one.view)[::-1])) for one in arrivals]
        fill(loader, job, wrong, parts)

    for space in bench.connector.scheduler_side._spaces_of(""):
        bench.store.remove_namespace(space)  # what was saved again
    Loader._fill_heads = garbled_heads  # type: ignore[method-assign,assignment]
    wrong = compare(bench.ask([read], 16), [seen["read"]])
    Loader._fill_heads = fill  # type: ignore[method-assign]
    seen["control"] = wrong["worst"]
    seen["cold"] = {**bench.ask([other], 16)[0], "seconds": 0.0}
    seen["flushed"] = bool(bench.store.flush(60.0))
    for one in (seen["read"], seen["cold"]):
        one["tokens"] = one["text"]
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def tiny_model(args: argparse.Namespace) -> dict[str, Any]:
    """Makes a small random model of the kind `--extra` at `--depot`; `--model` is a tokenizer's."""
    from tests.support.tiny_models import make

    make(args.extra, Path(args.model), Path(args.depot))
    return {}


def without_inner_checkpoints() -> None:
    """Mamba2 on a processor: its kernels give no states from inside a chunk, which vLLM 0.32 asks
    them for. Without that vLLM ends chunks where it keeps states."""
    from dataclasses import replace

    from vllm.model_executor.layers.mamba.mamba_mixer2 import (  # type: ignore[import-not-found]
        MambaMixer2,
    )

    before = MambaMixer2.get_kv_cache_spec

    def changed(self: Any, config: Any) -> Any:
        none = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
        return replace(before(self, config), **none)

    MambaMixer2.get_kv_cache_spec = changed


def group_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Prompts of random tokens; three share a beginning, of which two share more; three do not,
    unless `--quick`. Each answer begins a page of 32 tokens, and one of 96: it may be preempted."""
    chance = random.Random(5)

    def some(count: int) -> list[int]:
        return [chance.randrange(1000, 40000) for _ in range(count)]

    trunk = some(640)
    told = [trunk[:512] + some(246), trunk + some(310), trunk + some(22)]
    return told if args.quick else [*told, some(470), some(278), some(1046)]


def with_latent_prefixes() -> None:
    """Latent attention on a processor without AMX: vLLM 0.32 switches its prefix cache and chunks
    off, though the kernels have both. Without that there is no hit of its own to compare with."""
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    before = CpuPlatform.check_and_update_config.__func__

    def changed(cls: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes = cache.enable_prefix_caching
        before(cls, config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = kept
        cache.enable_prefix_caching = prefixes

    CpuPlatform.check_and_update_config = classmethod(changed)


def is_asked_in_turn(args: argparse.Namespace) -> bool:
    """Of latent attention on a processor answers depend on what is computed beside them, without
    kvdepot too (log-probabilities by 0.002, seen with vLLM 0.32)."""
    return "kv_lora_rank" in Path(args.model, "config.json").read_text()


def group_bench(args: argparse.Namespace, **more: Any) -> Bench:
    """A vLLM whose chunks are smaller than most prompts."""
    without_inner_checkpoints()
    with_latent_prefixes()
    more.setdefault("enable_prefix_caching", True)
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "max_model_len": 1200}
    bench = Bench(args, **sizes, **more)
    bench.answer_tokens = 8 if args.quick else bench.answer_tokens
    return bench


def groups_plain(args: argparse.Namespace) -> dict[str, Any]:
    """Without kvdepot: what is right, what vLLM's own prefix cache has, and how much KV fits."""
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
        get_max_concurrency_for_kv_cache_config,
    )

    bench = group_bench(args, extra=None)
    cache = bench.core.scheduler.kv_cache_config
    longest = get_max_concurrency_for_kv_cache_config(bench.core.vllm_config, cache)
    kinds = [type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups]
    pages = {"pages": cache.num_blocks, "pages_of_longest": cache.num_blocks / longest}
    return {**own_hits(bench, group_prompts(args)), **pages, "kinds": kinds}


def own_hits(bench: Bench, prompts: list[list[int]]) -> dict[str, Any]:
    """Each prompt computed, then answered with vLLM's own prefix cache."""
    cold, own = bench.ask_in_turn(prompts), bench.ask_in_turn(prompts)
    return {"answers": own, "cold": compare(cold, own)}


def groups_warm(args: argparse.Namespace) -> dict[str, Any]:
    """Cold and from memory, salted, as garbage; then killed without warning.

    Where no other vLLM was asked before, this one's own hits are the reference.
    """
    bench = group_bench(args)
    bench.count()
    prompts = group_prompts(args)
    seen: dict[str, Any] = {"pages": bench.core.scheduler.kv_cache_config.num_blocks}
    fresh = [token + 1 for token in prompts[-1]]
    bench.ask([fresh], 1)
    stored = bench.store.stats()["counters"]["put_bytes"]
    seen["bytes"] = {"a token": stored / len(fresh), "all": dense_bytes(bench)}
    if not Path(args.reference).exists():
        Path(args.reference).write_text(json.dumps(own_hits(bench, prompts)))
        worker_of(bench)._saver.wait()
        bench.core.scheduler.reset_prefix_cache(False, True)
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    ask = bench.ask_in_turn if is_asked_in_turn(args) else bench.ask
    seen["cold, together"] = compare(ask(prompts), wanted)
    bench.forget()
    seen["from memory, together"] = compare(ask(prompts), wanted)
    bench.forget()
    salted = [bench.ask(prompts[:1], salt=salt)[0] for salt in ("a", "b")]
    bench.forget()
    salted += bench.ask(prompts[:1], salt="a")
    seen["salted"] = compare(salted, wanted[:1] * 3)
    seen["figures"] = bench.figures()
    seen["flushed"] = bool(bench.store.flush(60.0))
    bench.connector.scheduler_side._saves = False  # nothing that is computed from garbage
    seen["control"] = {}
    for kind in sorted({group.rule.kind for group in worker_of(bench).facts.groups}):
        bench.forget()
        with garbled(bench, kind):
            seen["control"][kind] = compare(ask(prompts), wanted)["worst"]
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def dense_bytes(bench: Bench) -> float:
    """Bytes of KV a token if every page of every layer were kept."""
    worker, total = worker_of(bench), 0.0
    for cache, group in zip(worker._saver._caches, worker.facts.groups, strict=True):
        total += cache.block_bytes / cache.pages_per_block / group.rule.page_tokens
    return total


def groups_disk(args: argparse.Namespace) -> dict[str, Any]:
    """A new process: from disk one by one, then together; then aborts."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = group_bench(args)
    bench.count()
    prompts = group_prompts(args)
    answers = bench.ask_in_turn(prompts)
    seen: dict[str, Any] = {"from disk": compare(answers, wanted), "figures": bench.figures()}
    bench.forget()
    ask = bench.ask_in_turn if is_asked_in_turn(args) else bench.ask
    seen["together"] = compare(ask(prompts), wanted)
    bench.forget()
    counts = rush(bench, prompts, dict(enumerate(wanted)), random.Random(args.seed), 24)
    return {**seen, "aborts": counts, "leased": bench.store.stats()["leased"]}


def groups_preempted(args: argparse.Namespace) -> dict[str, Any]:
    """Room for hardly more than the longest prompt: requests are preempted."""
    plain = json.loads(Path(args.reference).read_text())
    pages = int(plain["pages_of_longest"] * 1.3) + 1
    return crowded(
        group_bench(args, num_gpu_blocks_override=pages), group_prompts(args), plain["answers"]
    )


def groups_lora(args: argparse.Namespace) -> dict[str, Any]:
    """Two adapters and none, each asked cold, by vLLM's own hit, and from the depot."""
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    bench = group_bench(args, enable_lora=True, max_lora_rank=8, max_loras=2)
    bench.answer_tokens = 8
    prompts = group_prompts(args)[:2]
    adapters = {
        f"lora {number}": LoRARequest(f"lora {number}", number, f"{args.model}/lora {number}")
        for number in (1, 2)
    }
    for lora in adapters.values():
        bench.ask([prompts[0][5:20]], 1, lora=lora)  # what vLLM has loaded is known after its use
    seen: dict[str, Any] = {}
    answers = {}
    for name, lora in {"none": None, **adapters}.items():
        cold = bench.ask_in_turn(prompts, lora=lora)
        answers[name] = bench.ask_in_turn(prompts, lora=lora)
        seen[f"{name}, cold"] = compare(cold, answers[name])
    for name, lora in {"none": None, **adapters}.items():
        bench.forget()
        found = bench.ask_in_turn(prompts, lora=lora)
        seen[name] = compare(found, answers[name])
        seen[name]["own"] = [answer["cached"] for answer in answers[name]]
        others = [each for other, each in answers.items() if other != name]
        seen[name]["unlike"] = min(compare(found, each)["worst"] for each in others)
    return seen


def drafts(args: argparse.Namespace) -> dict[str, Any]:
    """A draft model beside the model: what it proposes after vLLM's own hit, after the depot's,
    and with garbage in its own layers only. `--extra` is vLLM's speculative_config.
    """
    from tests.support.tried_models import prepare

    prepare()  # weights are random, and large enough that KV matters
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 1200}
    config = json.loads(args.extra)
    bench = Bench(
        args,
        **sizes,
        speculative_config=config,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=64 << 20,
    )
    scheduler = bench.connector.scheduler_side
    chance = random.Random(4)
    prompts = [[chance.randrange(10, 2000) for _ in range(500)] for _ in range(2)]
    proposed = watched_drafts(bench)

    def asked() -> tuple[list[dict[str, Any]], list[Any]]:
        proposed.clear()
        return bench.ask_in_turn(prompts, tokens=12), list(proposed)

    bench.ask_in_turn(prompts, tokens=12)
    scheduler._loads = False
    own, own_drafts = asked()
    scheduler._loads = True
    bench.forget()
    ours, drafted = asked()
    bench.forget()
    with garbled_drafts(bench):
        wrong, wrong_drafts = asked()
    # Another end after the same beginning: the last shared page was drafted with another token.
    parted = [ids[:448] + [7] * 40 for ids in prompts]
    bench.forget()
    scheduler._loads = False
    scheduler._saves = False
    bench.ask_in_turn(prompts, tokens=1)
    fresh = bench.ask_in_turn(parted, tokens=12)
    scheduler._loads = True
    bench.forget()
    return {
        "own": compare(ours, own),
        "cached": [one["cached"] for one in ours],
        "vllm_cached": [one["cached"] for one in own],
        "same_drafts": drafted == own_drafts,
        "drafts": len(drafted),
        "control_same_tokens": [a["tokens"] for a in wrong] == [a["tokens"] for a in own],
        "control_same_drafts": wrong_drafts == own_drafts,
        "parted": compare(bench.ask_in_turn(parted, tokens=12), fresh),
        "parted_vllm_cached": [one["cached"] for one in fresh],
        "draft_layers": sorted(draft_layers(bench)),
    }


def runner_of(bench: Bench) -> Any:
    return bench.core.model_executor.driver_worker.worker.model_runner


def draft_layers(bench: Bench) -> set[str]:
    names: set[str] = runner_of(bench).drafter._draft_attn_layer_names
    return names


def watched_drafts(bench: Bench) -> list[Any]:
    """The tokens that the draft model proposes, from now on."""
    drafter, found = runner_of(bench).drafter, []
    propose = drafter.propose

    def watched(*args: Any, **more: Any) -> Any:
        tokens = propose(*args, **more)
        found.append(tokens.tolist())
        return tokens

    drafter.propose = watched
    return found


@contextmanager
def garbled_drafts(bench: Bench) -> Iterator[None]:
    """Loads leave something else in the pages of the draft model's layers."""
    from kvdepot.adapters.vllm.page_transfer import Loader

    good = Loader._scatter
    layers = runner_of(bench).compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in draft_layers(bench)]

    def garbage(loader: Any, job: Any, arrivals: Any) -> None:
        good(loader, job, arrivals)
        for cache in caches:
            cache[list(job.pages)] = 3.0

    Loader._scatter = garbage  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Loader._scatter = good  # type: ignore[method-assign]


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of a prompt of 4,000, however it comes by its KV.

    Run a second time on the same depot, the prompt comes from disk.
    """
    options = {"block_size": 128, "max_num_batched_tokens": 4096, "max_model_len": 4224}
    bench = Bench(args, **options, extra={"decide": True})
    bench.count()
    bench.ask(bench.prompts(1, 300), 2)
    told = [SAID.format(TOPICS[at % 6], at) for at in range(120)]
    ids = bench.llm.get_tokenizer().encode(" ".join(told))[:4000]
    seen: dict[str, Any] = {"first": timed(bench, ids), "rounds": []}
    seen["flushed"] = bool(bench.store.flush(60.0))
    for _ in range(args.rounds):
        found = {"vllm": timed(bench, ids)}
        bench.forget()
        found["memory"] = timed(bench, ids)
        bench.forget()
        bench.evict(ids)
        found["disk"] = timed(bench, ids)
        seen["rounds"].append(found)
    bench.forget()
    bench.connector.scheduler_side._loads = False
    seen["recompute"] = timed(bench, ids)
    seen["figures"] = bench.figures()
    return seen


def timed(bench: Bench, ids: list[int]) -> dict[str, Any]:
    started = time.perf_counter()
    (answer,) = bench.ask([ids], 1)
    return {"seconds": time.perf_counter() - started, "cached": answer["cached"]}


def refused(args: argparse.Namespace) -> dict[str, Any]:
    """Starts that must fail; `--extra` is what is wrong with this one."""
    try:
        Bench(args, **json.loads(args.extra))
    except Exception as error:  # whatever vLLM makes of it is shown
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


SCENARIOS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        tiny_model,
        reference,
        smoke_saved,
        smoke_restored,
        warm,
        disk,
        damaged,
        faults,
        preempted,
        aborts,
        roundtrip,
        resharded,
        ttft,
        throttled,
        refused,
        groups_plain,
        groups_warm,
        groups_disk,
        groups_preempted,
        groups_lora,
        drafts,
    )
}


def write(args: argparse.Namespace, seen: dict[str, Any]) -> None:
    Path(args.out).write_text(json.dumps(seen))


def serve() -> None:
    """Carry out what the input asks for, each in a process forked from this one."""
    import vllm.entrypoints.llm  # type: ignore[import-not-found]  # noqa: F401

    for line in sys.stdin:
        argv, log = json.loads(line)
        child = os.fork()
        if not child:
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                run(argv)
            except BaseException:  # whatever it was belongs into the log
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--depot", required=True)
    parser.add_argument("--reference")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--quick", action="store_true", help="less of the groups_ scenarios")
    args = parser.parse_args(argv)
    write(args, SCENARIOS[args.scenario](args))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else run(sys.argv[1:])
