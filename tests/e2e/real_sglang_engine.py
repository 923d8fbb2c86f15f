"""A whole SGLang engine on a CPU with the linker. Run by a Python that has SGLang.

    python tests/e2e/real_sglang_engine.py --model DIR --depot DIR --out FILE [--socket FILE]
        [--other DIR [--plain]]

Asks two prompts that share a beginning, and the first again after SGLang has emptied its cache;
with the socket of a daemon the first many times, each hit audited; with the folder of another model
the first under its weights too, which are loaded in place. `--plain`: without a linker.
Writes what was answered as JSON; then the engine's processes are killed, as SGLang ends them.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

PAGE, TOKENS, NEW = 16, 400, 8
QUIET_S = 3.0
HITS = 8
"""Of an audited engine."""


def prompts() -> tuple[list[int], list[int]]:
    long = [(number * 7919 + 13) % 40000 + 100 for number in range(TOKENS)]
    return long, [*long[:200], *long[:57]]


def ask(engine: Any, tokens: list[int]) -> dict[str, Any]:
    settings = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    got = engine.generate(input_ids=tokens, sampling_params=settings, return_logprob=True)
    facts = got["meta_info"]
    return {
        "tokens": got["output_ids"],
        "cached": facts["cached_tokens"],
        "logprobs": [one[0] for one in facts["output_token_logprobs"]],
    }


def wait_until_written(folder: Path) -> None:
    """Until the drive's files take no more room for a while."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S or not seen:
        now = sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


def empty(engine: Any) -> None:
    """SGLang does not empty its cache before all of a request is done with."""
    while not engine.flush_cache().success:
        time.sleep(0.1)


def served(engine: Any) -> dict[str, Any]:
    long, other = prompts()
    seen = {"long": ask(engine, long), "other": ask(engine, other)}
    empty(engine)
    return {**seen, "again": ask(engine, long)}


def audited(engine: Any) -> dict[str, Any]:
    """The same prompt, each time from the depot."""
    answers = []
    for _ in range(HITS + 1):
        answers.append(ask(engine, prompts()[0]))
        empty(engine)
    return {"answers": answers}


def updated(engine: Any, model: Path, other: Path) -> dict[str, Any]:
    """The same prompt under weights that are loaded in place, from disk and from tensors."""
    from safetensors.torch import load_file

    long = prompts()[0]

    def done(result: Any) -> None:
        succeeded, *_ = result if isinstance(result, tuple) else (result.success,)
        assert succeeded, result

    def from_disk(folder: Path) -> None:
        empty(engine)  # the update fails while SGLang waits for offloads
        done(engine.update_weights_from_disk(str(folder)))

    def from_tensors(folder: Path) -> None:
        empty(engine)
        done(engine.begin_weight_update())
        for path in folder.glob("*.safetensors"):
            tensors = list(load_file(path).items())
            done(engine.update_weights_from_tensor(tensors, flush_cache=False))
        done(engine.end_weight_update())

    seen = {"first": ask(engine, long)}
    from_disk(other)
    seen["other"] = ask(engine, long)
    empty(engine)
    seen["other again"] = ask(engine, long)
    from_disk(model)
    seen["first again"] = ask(engine, long)
    from_tensors(other)
    seen["other from tensors"] = ask(engine, long)
    from_tensors(model)
    seen["first from tensors"] = ask(engine, long)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--depot", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--socket", type=Path, help="of a daemon; every hit is audited")
    parser.add_argument("--other", type=Path, help="another model's folder, for updates in place")
    parser.add_argument("--plain", action="store_true", help="without a linker")
    args = parser.parse_args()
    import sglang  # type: ignore[import-not-found]

    depot: dict[str, Any] = {
        "dram": "256MiB",
        "ssd": {"path": str(args.depot), "capacity": "1GiB", "segment": "16MiB"},
    }
    if args.socket:
        depot = {"socket": str(args.socket), "audit": {"share": 1, "under_load": True}}
    depot |= {"revision": "smollm2", "load_timeout": "60s"}
    linker = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KVDepotLinker",
            "linker_module_path": "kvdepot.adapters.sglang",
            "linker_extra_config": depot,
        },
    }
    engine = sglang.Engine(
        model_path=str(args.model),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.5,  # max_total_tokens is the limit
        max_total_tokens=4096,
        page_size=PAGE,
        **({} if args.plain else linker),
    )
    if args.other:
        seen = updated(engine, args.model, args.other)
    else:
        seen = audited(engine) if args.socket else served(engine)
    if not args.plain:
        wait_until_written(args.depot)
    args.out.write_text(json.dumps(seen))
    engine.shutdown()


if __name__ == "__main__":
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    main()
