"""Scenarios on a real vLLM and a real model, each in a process of its own. Run by vLLM's Python.

    python tests/e2e/real_vllm.py SCENARIO --model DIR --depot DIR [--reference FILE] --out FILE

Writes one JSON object with what was seen; `vllm_connector.py` judges it. Not imported by pytest.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.audited_vllm import AUDITED
from tests.e2e.real_vllm_groups import GROUP_SCENARIOS
from tests.e2e.real_vllm_weights import WEIGHTS
from tests.e2e.throttled import throttled
from tests.e2e.vllm_bench import (
    PAGE,
    SAID,
    TOPICS,
    Bench,
    compare,
    copies_changed,
    extra_config,
    full,
    garbled,
    rush,
    write,
)
from tests.support.waiting import eventually


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
    with garbled():
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
    seen["identity"] = dict(bench.worker.facts.groups[0].extra)
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
    with garbled():
        seen["control: garbage instead of blocks"] = compare(bench.ask(prompts), wanted)
    bench.core.scheduler.reset_prefix_cache(False, True)
    seen["after a reset"] = compare(bench.ask(prompts[:1]), wanted[:1])
    return seen


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
        if made.calls is Call.RUN_WRITE:  # a drive that fails is tried again now and then
            seen[name]["reported"] = eventually(lambda: has_trouble(bench))
        files.clear()
        bench.forget()
    shutil.rmtree(args.depot)
    seen["directory deleted"] = compare(bench.ask(prompts), wanted)
    seen["directory deleted"]["figures"] = bench.figures()
    held.close()
    return seen


def has_trouble(bench: Bench) -> bool:
    """Whether the SSD tier reports a failing or a full drive."""
    ssd = bench.store.stats()["tiers"]["ssd"]
    return not ssd["healthy"] or any(drive["full"] for drive in ssd["drives"])


def preempted(args: argparse.Namespace) -> dict[str, Any]:
    """So little KV space that requests are preempted, with kvdepot on."""
    wanted = json.loads(Path(args.reference).read_text())["answers"]
    bench = Bench(args, num_gpu_blocks_override=60, max_model_len=1600)
    bench.count()
    prompts = bench.prompts()
    scheduler = type(bench.core.scheduler)
    before, found = scheduler._preempt_request, []

    def counting(self: Any, request: Any, *rest: Any, **more: Any) -> None:
        found.append(request.request_id)
        before(self, request, *rest, **more)

    scheduler._preempt_request = counting
    seen: dict[str, Any] = {"preempted": compare(bench.ask(prompts), wanted)}
    bench.forget()
    seen["preempted, warm"] = compare(bench.ask(prompts), wanted)
    return {**seen, "preemptions": len(found), "figures": bench.figures()}


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
    report = bench.store.admin.check()
    return {
        **counts,
        "seed": args.seed,
        "before": before,
        "after": after,
        "check": {"ok": report.ok, "blocks": report.blocks},
        "figures": bench.figures(),
    }


def leftovers(bench: Bench) -> dict[str, int]:
    bench.store.flush(60.0)
    pool = bench.core.scheduler.kv_cache_manager.block_pool
    stats = bench.store.stats()
    # When the last of the four that verify starts is chance: they count as if all were there.
    verify = sum(one.name.startswith("kvdepot-check") for one in threading.enumerate())
    return {
        "leased": stats["leased"],
        "staging_bytes": stats["staging_bytes"],
        "threads": threading.active_count() - verify + max(verify, 4),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "pages_in_use": pool.num_gpu_blocks - pool.get_num_free_blocks(),
        "tracked": len(bench.side._tracked),
        "loading": len(bench.worker.loader),
    }


def roundtrip(args: argparse.Namespace) -> dict[str, Any]:
    """One prompt, cold and from memory, with any model."""
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
    with garbled():
        seen["control"] = compare(bench.ask([ids]), cold)["worst"]
    seen["identity"] = dict(bench.worker.facts.groups[0].extra)
    return seen


def resharded(args: argparse.Namespace) -> dict[str, Any]:
    """One worker reads what two have saved, and garbage; saves another prompt; then is killed."""
    read, other = json.loads(args.extra)["prompts"]
    bench = Bench(args, block_size=128, max_model_len=4224)
    started = time.perf_counter()
    seen: dict[str, Any] = {"read": {**bench.ask([read], 16)[0]}}
    seen["read"]["seconds"] = time.perf_counter() - started
    bench.forget()
    for space in bench.spaces():
        bench.store.remove(namespace=space)  # what was saved again
    with copies_changed(lambda target, view: memoryview(bytes(view)[::-1])):
        seen["control"] = compare(bench.ask([read], 16), [seen["read"]])["worst"]
    seen["cold"] = {**bench.ask([other], 16)[0], "seconds": 0.0}
    seen["flushed"] = bool(bench.store.flush(60.0))
    for one in (seen["read"], seen["cold"]):
        one["tokens"] = one["text"]
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def tiny_model(args: argparse.Namespace) -> dict[str, Any]:
    """Makes a small random model of the kind `--extra` at `--depot`; `--model` is a tokenizer's."""
    from tests.e2e.tiny_models import make

    make(args.extra, Path(args.model), Path(args.depot))
    return {}


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of a prompt of 4,000, however it comes by its KV.

    Run a second time on the same depot, the prompt comes from disk.
    """
    options = {"block_size": 128, "max_num_batched_tokens": 4096, "max_model_len": 4224}
    bench = Bench(args, **options, extra={"decide": True})
    bench.count()
    bench.ask(bench.prompts(1, 300), 2)
    sentences = [SAID.format(TOPICS[at % 6], at) for at in range(120)]
    ids = bench.llm.get_tokenizer().encode(" ".join(sentences))[:4000]
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
    bench.use(loads=False)
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
    except Exception as error:  # vLLM may raise anything: it is shown
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
        *AUDITED,
        *WEIGHTS,
    )
}
SCENARIOS |= GROUP_SCENARIOS


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
            except BaseException:  # any error belongs into the log
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
