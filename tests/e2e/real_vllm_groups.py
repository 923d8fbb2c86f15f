"""Scenarios of models with several KV groups on a real vLLM, and of draft models.

The models are small and random. `real_vllm.py` runs them.
"""

import argparse
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.vllm_bench import (
    Bench,
    compare,
    dense_bytes,
    garbled,
    rush,
    squeezed,
    write,
)


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
    unless `--quick`. Their answers begin a page of 32 tokens, of 96, most also one of 160: they may
    be preempted."""
    chance = random.Random(5)

    def some(count: int) -> list[int]:
        return [chance.randrange(1000, 40000) for _ in range(count)]

    trunk = some(640)
    found = [trunk[:512] + some(246), trunk + some(310), trunk + some(22)]
    return found if args.quick else [*found, some(278), some(470), some(950)]


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


def without_amx() -> None:
    """vLLM takes kernels for AMX where the processor announces it: those for latent attention take
    bfloat16 only, and a virtual machine may refuse what it announces. All machines go one way."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def is_asked_in_turn(args: argparse.Namespace) -> bool:
    """Answers of latent attention on a processor depend on what else a step computes, without
    kvdepot too (log-probabilities by 0.002, seen with vLLM 0.32)."""
    return "kv_lora_rank" in Path(args.model, "config.json").read_text()


def dtype_of(args: argparse.Namespace) -> str:
    """vLLM's kernels of gated delta nets on a processor take bfloat16 only."""
    config = Path(args.model, "config.json").read_text()
    return "bfloat16" if "linear_num_value_heads" in config else "float32"


def group_bench(args: argparse.Namespace, **more: Any) -> Bench:
    """A vLLM whose chunks are smaller than most prompts."""
    without_amx()
    without_inner_checkpoints()
    with_latent_prefixes()
    more = {"enable_prefix_caching": True, "dtype": dtype_of(args), **more}
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "max_model_len": 1200}
    bench = Bench(args, **sizes, **more)
    bench.answer_tokens = 8 if args.quick else 12
    return bench


def groups_plain(args: argparse.Namespace) -> dict[str, Any]:
    """Without kvdepot: what is right, what vLLM's own prefix cache has, and how much KV fits."""
    bench = group_bench(args, extra=None)
    cache = bench.core.scheduler.kv_cache_config
    kinds = [type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups]
    seen = {**own_hits(bench, group_prompts(args)), "pages": cache.num_blocks, "kinds": kinds}
    if dtype_of(args) != "float32":  # other chunks of a prompt are rounded otherwise
        bench.forget()
        with squeezed(bench) as preempted:
            seen["preempted"] = compare(bench.ask(group_prompts(args)), seen["answers"])
        seen["preempted"]["preempted"] = len(preempted)
    return seen


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
        empty(bench)
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
    bench.use(saves=False)  # nothing that is computed from garbage
    seen["control"] = {}
    for kind in sorted({group.rule.kind for group in bench.worker.facts.groups}):
        bench.forget()
        with garbled(kind):
            seen["control"][kind] = compare(ask(prompts), wanted)["worst"]
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def groups_disk(args: argparse.Namespace) -> dict[str, Any]:
    """A new process: from disk one by one, then together, then aborts; unless `--quick`, together
    with a request preempted, first with nothing in the depot."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = group_bench(args)
    next_queued = is_asked_in_turn(args)
    ask = bench.ask_in_turn if next_queued else bench.ask
    bench.count()
    prompts = group_prompts(args)
    answers = bench.ask_in_turn(prompts)
    seen: dict[str, Any] = {"from disk": compare(answers, wanted), "figures": bench.figures()}
    bench.forget()
    seen["together"] = compare(ask(prompts), wanted)
    if not args.quick:
        empty(bench)
        for name in ("preempted, cold", "preempted, warm"):
            with squeezed(bench, others=0 if next_queued else 1) as preempted:
                seen[name] = compare(ask(prompts), wanted)
            seen[name]["preempted"] = len(preempted)
            bench.forget()
    bench.forget()
    counts = rush(bench, prompts, dict(enumerate(wanted)), random.Random(args.seed), 24)
    return {**seen, "aborts": counts, "leased": bench.store.stats()["leased"]}


def empty(bench: Bench) -> None:
    """Leave nothing in vLLM's own prefix cache, nor in the depot."""
    bench.worker.saver.wait()
    bench.core.scheduler.reset_prefix_cache(False, True)


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
    """A draft model: its proposals after vLLM's own hit, after the depot's,
    and with garbage in its own layers only. `--extra` is vLLM's speculative_config.
    """
    from tests.e2e.tried_models import prepare

    prepare()  # weights are random, and large enough that KV matters
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 1200}
    config = json.loads(args.extra)
    bench = Bench(
        args,
        **sizes,
        dtype=dtype_of(args),
        speculative_config=config,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=64 << 20,
    )
    chance = random.Random(4)
    prompts = [[chance.randrange(10, 2000) for _ in range(500)] for _ in range(2)]
    proposed = watched_drafts(bench)

    def asked() -> tuple[list[dict[str, Any]], list[Any]]:
        proposed.clear()
        return bench.ask_in_turn(prompts, tokens=12), list(proposed)

    bench.ask_in_turn(prompts, tokens=12)
    bench.use(loads=False)
    own, own_drafts = asked()
    bench.use()
    bench.forget()
    ours, drafted = asked()
    bench.forget()
    with garbled_drafts(bench):
        wrong, wrong_drafts = asked()
    # Another end after the same beginning: the last shared page was drafted with another token.
    parted = [ids[:448] + [7] * 40 for ids in prompts]
    bench.forget()
    bench.use(loads=False, saves=False)
    bench.ask_in_turn(prompts, tokens=1)
    fresh = bench.ask_in_turn(parted, tokens=12)
    bench.use(saves=False)
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
    from kvdepot.adapters.vllm import page_transfer

    copy = page_transfer._copy
    layers = runner_of(bench).compilation_config.static_forward_context
    groups = bench.core.scheduler.kv_cache_config.kv_cache_groups

    def garbage(arrivals: Any) -> Any:
        tickets = copy(arrivals)
        for target, _ in arrivals:
            names = groups[target.cache.facts.rule.table].layer_names
            for name in draft_layers(bench).intersection(names):
                layers[name].kv_cache[list(target.pages)] = 3.0
        return tickets

    page_transfer._copy = garbage
    try:
        yield
    finally:
        page_transfer._copy = copy


GROUP_SCENARIOS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        groups_plain,
        groups_warm,
        groups_disk,
        groups_lora,
        drafts,
    )
}
