"""One vLLM in a process of its own, told what to do line by line. Started by `vllm_gpu.py`.

Reads one JSON list a line, [what, {arguments}], and answers each with one JSON object. What vLLM
prints goes to standard error.
"""

import gc
import json
import os
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
}
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
_SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 16384,
}
_MAMBA = {"head_dim": 64, "n_groups": 1, "conv_kernel": 4, "chunk_size": 128}
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "head_dim": 64,
            "sliding_window": 512,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_MAMBA,
            "hybrid_override_pattern": "M-M*-M-*",
            "num_hidden_layers": 8,
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "mlp_hidden_act": "relu2",
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
    ),
    "deepseek": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
}
"""Models with several kinds of KV: configuration class, architecture, shape. All are small."""
STATEFUL = {"nemotron_h", "falcon_h1"}
_CONV_SPREAD = 0.5
_BESIDE_ATTENTION = 0.05
_MAMBA_VECTORS = {"A": -0.05, "dt_bias": -3.0, "D": 0.1}
"""A: minus the decay in a unit of time; dt_bias: of such a unit a token takes about 0.05."""
SHAPES: dict[str, tuple[dict[str, Any], float]] = {"tiny": (TINY, 0.1), "8b": (LARGE, 0.03)}
"""Shape, and the spread of the random weights: enough for the KV to decide on the tokens."""
CONNECTORS: dict[str, dict[str, Any]] = {
    "kvdepot": {
        "kv_connector": "KVDepotConnector",
        "kv_connector_module_path": "kvdepot.adapters.vllm",
        "kv_load_failure_policy": "recompute",
    },
    "vllm": {"kv_connector": "OffloadingConnector"},
}


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 30000), k=tokens)


def _hybrid(shape: str) -> dict[str, Any]:
    import transformers

    kind, architecture, size = HYBRIDS[shape]
    config = getattr(transformers, kind)(**{**_SMALL, **size}).to_dict()
    return {**config, "architectures": [architecture], "torch_dtype": "bfloat16"}


def randomise(model: Any, spread: float) -> None:
    """Weights with which the KV decides on the tokens; vLLM's dummy weights are so small that it
    hardly matters.

    Mamba2: a state that fades over hundreds of tokens and outweighs what the layer sees of the
    token itself.
    """
    import torch

    chance = torch.Generator(device=next(iter(model.parameters())).device)
    chance.manual_seed(1)
    gemma = type(model).__name__.startswith("Gemma")
    for name, weights in model.named_parameters():
        last = name.rpartition(".")[2]
        if "conv1d" in name and weights.dim() > 1:
            weights.data.normal_(0, _CONV_SPREAD, generator=chance)
        elif weights.dim() > 1:
            weights.data.normal_(0, spread, generator=chance)
            if name.endswith("mamba.out_proj.weight"):  # Falcon-H1: it would drown the attention
                weights.data.mul_(_BESIDE_ATTENTION)
        elif last in _MAMBA_VECTORS:
            weights.data.fill_(_MAMBA_VECTORS[last])
        else:  # of a norm; Gemma's are added to one
            weights.data.fill_(0 if gemma or last == "bias" else 1)


class Engine:
    """The commands. All times are of this process, with nothing else running in it."""

    def __init__(self) -> None:
        import torch
        import vllm  # type: ignore[import-not-found]

        self._torch, self._vllm = torch, vllm
        self._asked = 0

    def open(self, shape: str, place: str, connector: str = "", **settings: Any) -> dict[str, Any]:
        """Start vLLM: `connector` is "", "kvdepot" or "vllm", `extra` its settings."""
        started = time.monotonic()
        folder = Path(place) / f"model-{shape}"
        folder.mkdir(parents=True, exist_ok=True)
        if shape in HYBRIDS:
            size, spread = _hybrid(shape), 0.05
            if shape in STATEFUL:
                settings["mamba_cache_mode"] = "align"
        else:
            size, spread = SHAPES[shape]
            size = {**LLAMA, **size}
        (folder / "config.json").write_text(json.dumps(size, default=str))
        extra = settings.pop("extra", {})
        self._ours = connector == "kvdepot"
        if connector:
            transfer = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
            settings["kv_transfer_config"] = {**CONNECTORS[connector], **transfer}
        if not settings.get("enforce_eager"):
            settings["cudagraph_capture_sizes"] = [1, 2, 4, 8]
        self._llm = self._vllm.LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            dtype="bfloat16",
            seed=0,
            **settings,
        )
        self._llm.apply_model(lambda model: randomise(model, spread))
        if self._ours:
            self._keep_counts()
        return {"seconds": time.monotonic() - started}

    def ask(self, seed: int, tokens: int, answer: int = 1) -> dict[str, Any]:
        """A greedy answer to a prompt of random tokens, and how long it took."""
        ids = prompt(seed, tokens)
        greedy = self._vllm.SamplingParams(
            temperature=0, max_tokens=answer, logprobs=1, detokenize=False, ignore_eos=True
        )
        self._torch.cuda.synchronize()
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        seconds = time.perf_counter() - started
        first = output.outputs[0]
        return {
            "seconds": seconds,
            "cached": output.num_cached_tokens,
            "tokens": list(first.token_ids),
            "logprobs": [
                chosen[token].logprob
                for chosen, token in zip(first.logprobs, first.token_ids, strict=True)
            ],
        }

    def space(self) -> dict[str, Any]:
        """How many blocks vLLM has for KV, and its groups."""
        core = self._llm.llm_engine.engine_core.engine_core
        config = core.scheduler.kv_cache_config
        groups = [
            [type(one.kv_cache_spec).__name__, one.kv_cache_spec.block_size, len(one.layer_names)]
            for one in config.kv_cache_groups
        ]
        return {"blocks": config.num_blocks, "groups": groups}

    def decode(self, seed: int, sequences: int, tokens: int, answer: int) -> dict[str, Any]:
        """Several prompts at once; times the steps from the last first token to the end."""
        engine = self._llm.llm_engine
        greedy = self._vllm.SamplingParams(
            temperature=0, max_tokens=answer, detokenize=False, ignore_eos=True
        )
        for number in range(sequences):
            self._asked += 1
            ids = prompt(seed * 1000 + number, tokens)
            engine.add_request(f"decode-{self._asked}", {"prompt_token_ids": ids}, greedy)
        made: dict[str, int] = {}
        started = first = last = time.perf_counter()
        steps: list[float] = []
        begun = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
            if len(made) == sequences and not begun:
                first, begun = time.perf_counter(), sum(made.values())
            steps.append(-last + (last := time.perf_counter()))
        over = time.perf_counter()
        decoded = sum(made.values()) - begun
        return {
            "prefill_s": first - started,
            "decode_s": over - first,
            "decoded": decoded,
            "steps": steps[-answer:],
        }

    def serve(self, asked: list[list[list[int]]], in_flight: int, answer: int) -> dict[str, Any]:
        """Prompts in order, so many at a time, the next when one is answered.

        Each is given as pieces [seed, tokens]. Wall time, and for each prompt the time to its first
        token and the tokens that were not computed.
        """
        engine = self._llm.llm_engine
        greedy = self._vllm.SamplingParams(
            temperature=0, max_tokens=answer, detokenize=False, ignore_eos=True
        )
        prompts = [[token for piece in pieces for token in prompt(*piece)] for pieces in asked]
        begun: dict[str, float] = {}
        first_s: dict[str, float] = {}
        cached: dict[str, int] = {}
        started = time.perf_counter()
        over = 0
        while over < len(prompts):
            while len(begun) < len(prompts) and len(begun) - over < in_flight:
                self._asked += 1
                name, ids = f"serve-{self._asked}", prompts[len(begun)]
                begun[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": ids}, greedy)
            for output in engine.step():
                name = output.request_id
                if output.outputs[0].token_ids and name not in first_s:
                    first_s[name] = time.perf_counter() - begun[name]
                    cached[name] = output.num_cached_tokens or 0
                over += output.finished
        names = list(begun)
        return {
            "seconds": time.perf_counter() - started,
            "first_token_s": [first_s[name] for name in names],
            "cached": [cached[name] for name in names],
        }

    def forget(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache, when nothing reads its pages any more."""
        for _ in range(200):
            if self._llm.reset_prefix_cache():
                return {"forgot": True}
            self.ask(0, 5)
            time.sleep(0.02)
        return {"forgot": False}

    def flush(self) -> dict[str, Any]:
        """Have everything on disk."""
        self._worker.saver.wait()
        started = time.monotonic()
        report = self._store.flush(60.0)
        seconds = time.monotonic() - started
        left = {"waiting": report.waiting, "given_up": report.given_up}
        return {"flushed": bool(report), "seconds": seconds, **left}

    def saves(self, on: bool) -> dict[str, Any]:
        self._side.engine = replace(self._side.engine, saves=on)
        return {}

    def verify(self, on: bool) -> dict[str, Any]:
        """Whether hits in memory are verified (`dram.verify`), from now on."""
        object.__setattr__(self._store._state.config.dram, "verify", on)
        return {}

    def locked(self) -> dict[str, Any]:
        """What is page-locked by us, resident and mapped. The kernel does not count the first."""
        from kvdepot.adapters.tensors import pagelock

        gc.collect()
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        arenas = Path("/proc/self/maps").read_text().count("kvdepot-arena")
        locked = sum(nbytes for _, nbytes in pagelock._users)
        return {"locked": locked, "rss": int(resident.split()[1]), "arenas": arenas}

    def kinds(self) -> dict[str, Any]:
        """The kinds of KV groups that the model has."""
        return {"kinds": sorted({group.rule.kind for group in self._worker.facts.groups})}

    def garbage(self, kind: str = "") -> dict[str, Any]:
        """The control, from now on: pages of groups of this kind, or of all, get bytes from the
        end of the depot's memory, which are no block's or another's.
        """
        from kvdepot.adapters.vllm import page_transfer

        right = getattr(page_transfer, "right", None) or page_transfer._copy
        page_transfer.right = right  # type: ignore[attr-defined]
        memory: memoryview = self._store.memory[0]

        def end_of_memory(nbytes: int) -> memoryview:
            start = (len(memory) - nbytes) // 4096 * 4096
            return memory[start : start + nbytes]

        def wrong(arrivals: Any) -> Any:
            is_hit = [kind in ("", target.cache.facts.rule.kind) for target, _ in arrivals]
            return right(
                [
                    (target, end_of_memory(len(view)) if hit else view)
                    for (target, view), hit in zip(arrivals, is_hit, strict=True)
                ]
            )

        page_transfer._copy = wrong
        return {}

    def figures(self) -> dict[str, Any]:
        """What the connector has counted since the last call, and what it believes."""
        counts: dict[str, Any] = {}
        for part in (self._worker, self._side):
            for name, count in (part.metrics() or {}).items():
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def _side(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import (  # type: ignore[import-not-found]
            get_kv_transfer_group,
        )

        return get_kv_transfer_group().worker_side

    @property
    def _store(self) -> Any:
        return self._side._store

    def _keep_counts(self) -> None:
        """For `figures`: vLLM would take them at every step."""
        from kvdepot.adapters.vllm.connector import KVDepotConnector

        KVDepotConnector.get_kv_connector_stats = lambda self: None  # type: ignore[method-assign]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = getattr(engine, what)(**arguments)
        except Exception as error:  # the parent decides what to make of it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
