"""A whole SGLang engine on a GPU with the linker. Run by a Python that has SGLang and its kernels.

    python tests/e2e/real_sglang_gpu.py --model DIR --depot DIR --out FILE [--forgetful FILE]

Asks long prompts: computed or loaded from the drive, found by SGLang's own tree, loaded from
memory. Makes the model when it is missing: half the layers of Llama 3's 8B with random weights, as
no weights can be brought there. Writes what was answered as JSON; then the engine's processes are
killed, as SGLang ends them.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from real_sglang_engine import NEW, wait_until_written  # type: ignore[import-not-found]

PAGE, TOKENS, PROMPTS = 64, 16_384, 4
WARM_UP = 9
"""The number of a prompt that nothing is said of: kernels are compiled with it."""
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, WORDS = 16, 4096, 14_336, 32, 8, 128, 32_000
STD = 0.03
"""So that attention looks at some tokens and not at all alike: other KV is another answer."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": WORDS,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    start = f"model.layers.{layer}"
    for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield f"{start}.self_attn.{name}_proj.weight", (rows * DIM, HIDDEN)
    yield f"{start}.self_attn.o_proj.weight", (HIDDEN, HEADS * DIM)
    for name in ("gate", "up"):
        yield f"{start}.mlp.{name}_proj.weight", (INNER, HIDDEN)
    yield f"{start}.mlp.down_proj.weight", (HIDDEN, INNER)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{start}.{name}.weight", (HIDDEN,)


def make_model(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    chance = torch.Generator(device="cuda").manual_seed(1)
    around = [("model.embed_tokens.weight", (WORDS, HIDDEN)), ("lm_head.weight", (WORDS, HIDDEN))]
    parts = [[*around, ("model.norm.weight", (HIDDEN,))], *(list(shapes(n)) for n in range(LAYERS))]
    names: dict[str, str] = {}
    for number, part in enumerate(parts):
        tensors = {}
        for name, shape in part:
            made = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
            if len(shape) > 1:
                made.normal_(0, STD, generator=chance)
            tensors[name] = made.cpu()
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.cuda.empty_cache()


def prompt(number: int) -> list[int]:
    """Prompts begin differently, and have one token more than whole pages."""
    return [(at * 7919 + number * 104_729 + 13) % 31_000 + 100 for at in range(TOKENS + 1)]


def ask(engine: Any, number: int) -> dict[str, Any]:
    """The time to one token; and an answer from the KV that is on the device since then."""
    tokens: list[int] = []
    logprobs: list[float] = []
    first: dict[str, Any] = {}
    for new in (1, NEW):
        settings = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        began = time.perf_counter()
        got = engine.generate(
            input_ids=prompt(number), sampling_params=settings, return_logprob=True
        )
        took = time.perf_counter() - began
        facts = got["meta_info"]
        first = first or {"cached": facts["cached_tokens"], "seconds": round(took, 4)}
        tokens += got["output_ids"]
        logprobs += [one[0] for one in facts["output_token_logprobs"]]
    return {**first, "tokens": tokens, "logprobs": logprobs}


def ask_all(engine: Any, forgetful: Path | None) -> dict[str, Any]:
    """Each prompt in three rounds; in the first it is computed, or loaded from the drive.

    A fourth, in another order, is told of loads that leave what other prompts had in those pages.
    """
    ask(engine, WARM_UP)
    numbers, seen = range(PROMPTS), {}
    for name in ("first", "tree", "memory"):
        if name == "memory":
            engine.flush_cache()
        seen[name] = [ask(engine, number) for number in numbers]
    if forgetful:
        engine.flush_cache()
        forgetful.touch()
        seen["control"] = [ask(engine, number) for number in reversed(numbers)][::-1]
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--depot", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--forgetful", type=Path, help="with the linker that this file controls")
    args = parser.parse_args()
    linker = "kvdepot.adapters.sglang"
    if args.forgetful:
        linker = "forgetful_linker"
        os.environ["KVDEPOT_FORGETFUL"] = str(args.forgetful)
    if not (args.model / "config.json").exists():
        make_model(args.model)
    import sglang  # type: ignore[import-not-found]

    depot = {
        "dram": "12GiB",
        "ssd": {"path": str(args.depot), "capacity": "10GiB", "segment": "256MiB"},
        "revision": "r1",
        "load_timeout": "60s",
    }
    engine = sglang.Engine(
        model_path=str(args.model),
        device="cuda",
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.8,  # max_total_tokens is the limit
        max_total_tokens=2 * (PROMPTS + 2) * TOKENS,
        page_size=PAGE,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KVDepotLinker",
            "linker_module_path": linker,
            "linker_extra_config": depot,
        },
    )
    seen = ask_all(engine, args.forgetful)
    wait_until_written(args.depot)
    args.out.write_text(json.dumps(seen))
    engine.shutdown()


if __name__ == "__main__":
    main()
