"""Tries the architectures that vLLM has, small and with random weights. Run by vLLM's Python.

    python tests/e2e/tried_models.py RESULTS [ARCHITECTURE ...]

Each one runs in a process of its own, forked from one that has vLLM imported, first with kvdepot,
and, where that fails, without. RESULTS is a JSON file, written after each; what is in it is not
tried again. A row is `served`, `refused` by kvdepot with its reason, `failed` (vLLM alone runs
it), or `not run` with what vLLM said.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.real_vllm_groups import with_latent_prefixes, without_inner_checkpoints
from tests.e2e.vllm_bench import Bench, compare, dense_bytes, garbled

LIMIT_S = 150.0
PROMPT_TOKENS = 500
LONGEST_LAYERS = 12
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim"), 32),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 2048),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 2048),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 32),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": 1,
    "mamba_d_ssm": 256,
    "sliding_window": 64,
    "attention_chunk_size": 128,
    "word_embed_dim": 128,
}
"""Settings of a configuration, if it has them; counts of layers may come out larger."""
SPECIAL: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "num_hidden_layers": 8,
        "hybrid_override_pattern": "M-M*-M-*",
        "mlp_hidden_act": "relu2",
        "chunk_size": 128,
    },
    "MambaForCausalLM": {"intermediate_size": 256, "time_step_rank": 8},
    "FalconMambaForCausalLM": {"intermediate_size": 256, "time_step_rank": 8},
    "Mamba2ForCausalLM": {"head_dim": 32, "num_heads": 8, "n_groups": 1},
    "DeepseekForCausalLM": {"num_key_value_heads": 4},
    "DeepseekV2ForCausalLM": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 4,
    },
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4, "q_lora_rank": 64},
    "JambaForCausalLM": {"mamba_dt_rank": 8},
}


class CannotBeMadeError(Exception):
    """There is no small configuration of an architecture here."""


def architectures() -> list[str]:
    """Decoders that vLLM has a model for."""
    from vllm.model_executor.models import registry  # type: ignore[import-not-found]

    found: list[str] = list(registry._TEXT_GENERATION_MODELS)
    return found


def config_class(architecture: str) -> Any:
    """That of transformers or vLLM, by the model that it belongs to or by its name."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.transformers_utils import config as own  # type: ignore[import-not-found]

    types = [
        kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture
    ]
    for model_type in sorted(types, key=lambda kind: not kind.endswith("_text")):
        if model_type in CONFIG_MAPPING:
            return CONFIG_MAPPING[model_type]
    stem = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    for model_type in own._CONFIG_REGISTRY:
        if model_type.replace("_", "").lower() == stem.replace("_", "").lower():
            return own._CONFIG_REGISTRY[model_type]
    found = getattr(transformers, f"{stem}Config", None)
    if found is None:
        raise CannotBeMadeError("its configuration is code of its own, not of transformers or vLLM")
    return found


def small_config(architecture: str) -> Any:
    """A configuration with few, narrow layers of all its kinds."""
    made = config_class(architecture)
    usual = made().to_dict()
    depth = next((usual[name] for name in ("num_hidden_layers", "n_layer") if usual.get(name)), 4)
    changes = {
        name: value for name, value in SMALL.items() if name in usual and usual[name] is not None
    }
    kinds = usual.get("layer_types") or []
    layers = max([4, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if layers > LONGEST_LAYERS:
        raise CannotBeMadeError(f"has a kind of layer only from layer {layers} on")
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if name in changes:
            changes[name] = layers
    for name, value in usual.items():
        if isinstance(value, list) and len(value) == depth and depth > layers:
            changes[name] = value[:layers]
    changes |= SPECIAL.get(architecture, {})
    config = made(**changes)
    config.architectures = [architecture]
    return config


def grown_weights(loader: Any, model: Any, config: Any) -> None:
    """Weights large enough that KV matters; states fade, and norms change nothing."""
    import torch

    chance = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            last = name.rpartition(".")[2]
            if not torch.is_floating_point(tensor):
                continue
            if last == "A":
                tensor.fill_(-0.01)
            elif tensor.dim() < 2:
                tensor.fill_(0.0 if "bias" in last or last == "A_log" else 1.0)
            else:
                values = torch.randn(tensor.shape, generator=chance)
                tensor.copy_((values * 1.5 / tensor.shape[-1] ** 0.5).to(tensor.dtype))


_NOT_INSPECTED: list[Exception] = []


def prepare() -> None:
    """Have dummy weights that matter, and no process started to look at a model's class."""
    from vllm.model_executor.model_loader import dummy_loader  # type: ignore[import-not-found]
    from vllm.model_executor.models import registry

    def inspect(this: Any) -> Any:
        try:
            return registry._ModelInfo.from_model_cls(this.load_model_cls())
        except Exception as error:  # vLLM logs it and says only that there was one
            _NOT_INSPECTED.append(error)
            raise

    dummy_loader.DummyModelLoader.load_weights = grown_weights
    registry._LazyRegisteredModel.inspect_model_cls = inspect
    without_inner_checkpoints()
    with_latent_prefixes()


def bench_of(folder: Path, dtype: str, *, with_depot: bool) -> Bench:
    args = argparse.Namespace(model=str(folder), depot=str(folder / "depot"))
    extra = {"dram": "256MiB", "ssd": None} if with_depot else None
    return Bench(
        args,
        extra=extra,
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
    )


def tried(architecture: str, folder: Path, dtype: str, *, with_depot: bool) -> dict[str, Any]:
    """The row of an architecture: its hits and vLLM's own, and the bytes that are saved."""
    small_config(architecture).save_pretrained(folder)
    bench = bench_of(folder, dtype, with_depot=with_depot)
    chance = random.Random(4)
    ids = [chance.randrange(10, 2000) for _ in range(PROMPT_TOKENS)]
    bench.ask([ids], 8)
    if not with_depot:
        return {"outcome": "runs"}
    stored = bench.store.stats()["counters"]["put_bytes"]
    bench.use(loads=False)
    own = bench.ask([ids], 8)
    bench.use()
    if any(math.isnan(each) for each in own[0]["logprobs"]):
        raise CannotBeMadeError("its log-probabilities are no numbers with random weights")
    if not own[0]["cached"]:
        raise CannotBeMadeError(f"vLLM itself has no hit on a prompt of {PROMPT_TOKENS} tokens")
    bench.forget()
    ours = compare(bench.ask([ids], 8), own)
    bench.forget()
    with garbled():
        control = compare(bench.ask([ids], 8), own)["worst"]
    groups = bench.side.names.groups.rules
    right = ours["same"] and ours["worst"] < 1e-3 and ours["cached"] == [own[0]["cached"]]
    return {
        "outcome": "served" if right else "failed",
        "dtype": dtype,
        "groups": [described(rule) for rule in groups],
        "cached": ours["cached"][0],
        "vllm_cached": own[0]["cached"],
        "worst": ours["worst"],
        "control": control,
        "bytes_a_token": round(stored / PROMPT_TOKENS),
        "bytes_a_token_of_all_layers": round(dense_bytes(bench)),
        "reason": "" if right else "an answer, or what was cached, is not that of vLLM's own hit",
    }


def described(rule: Any) -> str:
    return f"{rule.kind} {rule.span_tokens}" if rule.span_tokens else str(rule.kind)


def reason_of(error: BaseException) -> tuple[str, str]:
    """How a try ended, and why, in one line."""
    from kvdepot.errors import KVDepotError

    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    for one in chain:
        if isinstance(one, KVDepotError):
            return "refused", f"{one}; {one.hint}" if one.hint else str(one)
        if isinstance(one, CannotBeMadeError):
            return "not run", str(one)
    error = _NOT_INSPECTED[0] if _NOT_INSPECTED else error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "validation error for" not in line]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = [f"in {Path(frame.filename).name}, {frame.name}" for frame in last]
    return "not run", f"{type(error).__name__}: {[*lines, *where, ''][0]}"[:200]


def in_child(
    architecture: str, out: Path, limit_s: float, dtype: str, *, with_depot: bool
) -> dict[str, Any]:
    """One try in a forked process, ended after a while."""
    child = os.fork()
    if not child:
        log = os.open(out.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setsid()
        try:
            with tempfile.TemporaryDirectory(prefix="kvdepot-tried-") as folder:
                prepare()
                row = tried(architecture, Path(folder), dtype, with_depot=with_depot)
        except BaseException as error:  # vLLM may raise anything: it is the row
            traceback.print_exc()
            outcome, reason = reason_of(error)
            made = not isinstance(error, CannotBeMadeError)
            row = {"outcome": outcome, "reason": reason, "made": made}
        out.write_text(json.dumps(row))
        os._exit(0)
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return {"outcome": "not run", "reason": f"no end within {limit_s:g} s"}
    if not out.exists():
        return {"outcome": "not run", "reason": "the process was killed by a signal"}
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return found


def row_of(architecture: str, out: Path, limit_s: float) -> dict[str, Any]:
    started = time.monotonic()
    dtype = "float32"
    row = in_child(architecture, out, limit_s, dtype, with_depot=True)
    if "BF16" in row["reason"]:
        dtype = "bfloat16"
        row = in_child(architecture, out, limit_s, dtype, with_depot=True)
    if row["outcome"] == "not run" and row.get("made", True):
        place = out.with_name(f"{out.name}-alone")
        alone = in_child(architecture, place, limit_s, dtype, with_depot=False)
        if alone["outcome"] == "runs":
            row["outcome"] = "failed"
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("only", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--logs", type=Path, help="a folder for what vLLM says")
    parser.add_argument("--anew", action="store_true", help="forget what RESULTS has")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each try")
    args = parser.parse_args()
    import vllm.entrypoints.llm  # type: ignore[import-not-found]  # noqa: F401
    from vllm.version import __version__  # type: ignore[import-not-found]

    import kvdepot.adapters.vllm.connector  # noqa: F401

    seen: dict[str, Any] = {"rows": {}, "calls": 0}
    if args.results.exists() and not args.anew:
        seen = {"calls": 1, **json.loads(args.results.read_text())}
    seen["calls"] += 1
    seen |= {"release": __version__, "date": time.strftime("%Y-%m-%d")}
    seen["architectures"] = len(architectures())
    with tempfile.TemporaryDirectory(prefix="kvdepot-tried-") as folder:
        for architecture in args.only or architectures():
            if architecture in seen["rows"] and not args.only:
                continue
            row = row_of(architecture, (args.logs or Path(folder)) / architecture, args.limit)
            seen["rows"][architecture] = row
            args.results.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
            shown = {name: row.get(name) for name in ("outcome", "reason", "seconds")}
            print(architecture, shown, flush=True)


if __name__ == "__main__":
    main()
