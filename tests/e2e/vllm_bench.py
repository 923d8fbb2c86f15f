"""One vLLM in this process, with or without kvdepot, and what scenarios ask of it."""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
        while not self.side.is_ready() and time.monotonic() < limit_s:
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
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import (  # type: ignore[import-not-found]
            get_kv_transfer_group,
        )

        return get_kv_transfer_group().worker_side

    @property
    def store(self) -> Any:
        return self.side._store

    def use(self, *, loads: bool = True, saves: bool = True) -> None:
        """Have the connector load and save, or not, from now on."""
        self.side.engine = replace(self.side.engine, loads=loads, saves=saves)

    def spaces(self) -> list[Any]:
        """The namespaces of all groups and shards, without a LoRA."""
        from kvdepot.adapters.vllm.messages import BlockOrigin

        names = self.side.names
        groups = names.spaces(BlockOrigin(generation=names.generation))
        return [space for group in groups for space in group]

    def prompts(self, count: int = 6, longest: int = 1200) -> list[list[int]]:
        """Token ids of prompts that share beginnings and differ in length."""
        found = []
        for number in range(count):
            sentences = [SAID.format(TOPICS[(at // 3) % 6], at) for at in range(60)]
            sentences[3 + 2 * number :] = [
                SAID.format(TOPICS[(at + number) % 6], number * at) for at in range(60)
            ]
            ids = self.llm.get_tokenizer().encode(" ".join(sentences))
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
        spaces = self.spaces()
        with state.lock:
            for space in spaces:
                rows = state.catalog.rows(space.keys(ids)[kept:])
                for row in reversed(rows):
                    if row >= 0 and state.catalog.memory.ready(row):
                        state.memory_tiers[0].drop(row)

    def figures(self) -> dict[str, float]:
        """The connector's counts since the last call, as far as vLLM has not taken them."""
        from kvdepot.adapters.vllm.metrics import merged, take_counts

        worker, scheduler = (take_counts(part.counts) or {} for part in (self.worker, self.side))
        return merged(worker, scheduler)

    def count(self) -> None:
        """Keep the counts for `figures`: vLLM would take them at every step."""
        from kvdepot.adapters.vllm.connector import KVDepotConnector

        KVDepotConnector.get_kv_connector_stats = lambda self: None  # type: ignore[method-assign]


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


@contextmanager
def copies_changed(change: Callable[[Any, memoryview], memoryview]) -> Iterator[None]:
    """Loads bring what `change` makes of the target and the content of each block."""
    from kvdepot.adapters.vllm import page_transfer

    copy = page_transfer._copy

    def changed(arrivals: Any) -> Any:
        return copy([(target, change(target, view)) for target, view in arrivals])

    page_transfer._copy = changed
    try:
        yield
    finally:
        page_transfer._copy = copy


@contextmanager
def garbled(kind: str = "") -> Iterator[None]:
    """Loads bring something else than what was saved; `kind`: to KV groups of that kind only."""

    def shifted(target: Any, view: memoryview) -> memoryview:
        if kind not in ("", target.cache.facts.rule.kind):
            return view
        kept = min(4096, len(view) // 2)
        return memoryview(bytes(len(view) - kept) + bytes(view[:kept]))

    with copies_changed(shifted):
        yield


def dense_bytes(bench: Bench) -> float:
    """Bytes of KV a token if every page of every layer were kept."""
    return float(
        sum(
            facts.layout.block_bytes / facts.pages_per_block / facts.rule.page_tokens
            for facts in bench.worker.facts.groups
        )
    )


@contextmanager
def squeezed(bench: Bench, others: int = 1) -> Iterator[list[str]]:
    """As soon as a request and this many others are being answered there is no more KV space,
    until vLLM has preempted one for a page: it is in the list. One by itself preempts itself."""
    scheduler = bench.core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    preempted: list[str] = []
    held: list[Any] = []

    def watched(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **more)

    def scheduled(*rest: Any, **more: Any) -> Any:
        running = scheduler.running
        if not preempted and len(running) > others and running[-1].num_output_tokens:
            held.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        elif held:
            give_back()
        return schedule(*rest, **more)

    def give_back() -> None:
        pool.free_blocks(held)
        held.clear()

    scheduler._preempt_request, scheduler.schedule = watched, scheduled
    try:
        yield preempted
    finally:
        del scheduler._preempt_request, scheduler.schedule
        give_back()


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
    bench.worker.saver.wait()
    return counts


def write(args: argparse.Namespace, seen: dict[str, Any]) -> None:
    Path(args.out).write_text(json.dumps(seen))
