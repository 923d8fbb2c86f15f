"""A real vLLM whose hits are audited: what is right, other weights under the same name, and blocks
that were put in the wrong place.
"""

import argparse
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.e2e.vllm_bench import Bench, compare, full, write
from tests.support.swapped_payloads import keys_in, swap_payloads
from tests.support.waiting import until

ROUNDS = 5
TOKENS = 8
NAMED: dict[str, Any] = {"model": "smollm2", "revision": "1"}
"""Whatever its weights are."""


def bench_of(args: argparse.Namespace) -> tuple[Bench, list[list[int]]]:
    """A vLLM, and what it is asked: prompts without a common beginning, which vLLM itself keeps."""
    bench = Bench(args, extra={**NAMED, "audit": {"share": 1}})
    bench.answer_tokens = TOKENS
    return bench, [ids[number:] for number, ids in enumerate(bench.prompts(3, 600))]


def wanted_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads(Path(args.reference).read_text())["answers"]
    return answers


def audits(bench: Bench, compared: int) -> dict[str, Any]:
    """The audits that are known once this many blocks were compared."""
    until(lambda: bench.store.audits.list()["compared"] >= compared)
    known: dict[str, Any] = bench.store.audits.list()
    return known


def audited_right(args: argparse.Namespace) -> dict[str, Any]:
    """Every hit is audited; then killed without warning."""
    bench, prompts = bench_of(args)
    wanted = bench.ask_in_turn(prompts)
    seen: dict[str, Any] = {"full": full(prompts), "answers": wanted, "rounds": []}
    for _ in range(ROUNDS):
        bench.forget()
        seen["rounds"].append(compare(bench.ask_in_turn(prompts), wanted))
    seen["audits"] = audits(bench, ROUNDS * len(prompts))
    assert bench.store.flush(60.0)
    write(args, seen)
    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def other_weights(model: Path, target: Path) -> None:
    """The same model, trained otherwise: each matrix of K and V has the other layers' content."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    for kind in ("k_proj.weight", "v_proj.weight"):
        names = sorted(name for name in weights if name.endswith(kind))
        moved = [weights[name].clone() for name in [*names[1:], names[0]]]
        weights.update(zip(names, moved, strict=True))
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def audited_other_weights(args: argparse.Namespace) -> dict[str, Any]:
    """Blocks of other weights are found at the first hit; then the model answers by itself."""
    target = Path(f"{args.depot} other weights")
    other_weights(Path(args.model), target)
    bench, prompts = bench_of(argparse.Namespace(**{**vars(args), "model": str(target)}))
    bench.use(loads=False, saves=False)
    wanted = bench.ask_in_turn(prompts)
    bench.use()
    bench.forget()
    seen = {"unlike": compare(wanted, wanted_of(args))["worst"]}
    seen["hit"] = bench.ask(prompts[-1:])[0]["cached"]
    seen["audits"] = audits(bench, 1)
    bench.forget()
    seen["after"] = compare(bench.ask_in_turn(prompts), wanted)
    return seen


def audited_again(args: argparse.Namespace) -> dict[str, Any]:
    """The quarantine outlives the process; purged, blocks are served again, and those in the wrong
    place are found.
    """
    (bench, prompts), wanted = bench_of(args), wanted_of(args)
    seen: dict[str, Any] = {"in quarantine": compare(bench.ask_in_turn(prompts), wanted)}
    (one,) = bench.store.audits.list()["quarantined"]
    seen["purged"] = bench.store.audits.purge(one["namespace"])
    bench.forget()
    bench.ask_in_turn(prompts)
    bench.forget()
    seen["hits again"] = compare(bench.ask_in_turn(prompts), wanted)
    before = audits(bench, len(prompts))
    seen["false alarms"] = before["mismatched"]
    seen["misplaced"] = swap_payloads(bench.store, keys_in(bench.store))
    bench.forget()
    seen["hit"] = bench.ask(prompts[-1:])[0]["cached"]
    seen["audits"] = audits(bench, before["compared"] + 1)
    bench.forget()
    seen["after"] = compare(bench.ask_in_turn(prompts), wanted)
    return seen


AUDITED = (audited_right, audited_other_weights, audited_again)
