"""The identity of a model in vLLM: everything that makes its pages useless to another vLLM.

Taken from vLLM's configuration, from the weight files, and from the layers themselves, which know
the backend and the instruction set that were chosen. What cannot be served is refused here, at
start.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

import kvdepot
from kvdepot.adapters.tensors.kvtensors import DTYPES, KVTensors
from kvdepot.adapters.vllm.config import SETTING, ConnectorConfig
from kvdepot.adapters.vllm.groups import EngineGroup, block_tokens, grain_tokens, pages_per_block
from kvdepot.adapters.vllm.messages import START, Generation, GroupFacts, ShardFacts, WorkerRank
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.weights import WeightsDigest, digest_of, weight_files
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace, fingerprint
from kvdepot.errors import ConfigError, ModelError

MODEL_SETTINGS: Final = (
    "max_model_len",
    "disable_sliding_window",
    "model_impl",
    "mm_processor_kwargs",
    "override_attention_dtype",
)
"""Of vLLM's model config, what changes K or V beside the model's own; see docs/guides/vllm.md."""


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """A KV group as one worker has it."""

    group: EngineGroup
    tensors: KVTensors
    shard: WorkerShard


def check_engine(engine: Any) -> None:
    """Refuse what would be served wrong, or not at all, with the reason."""
    transfer, parallel = engine.kv_transfer_config, engine.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_transfer_config.kv_load_failure_policy",
            f"is {transfer.kv_load_failure_policy!r}: a block that cannot be read would fail its "
            "request",
            hint='"kv_load_failure_policy": "recompute"',
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(name, "must be 1 with kvdepot: tokens would be divided")
    check_scales(engine)


def check_scales(engine: Any) -> None:
    """Refuse KV that is scaled by what the first request happened to be."""
    if getattr(engine.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales", "makes KV depend on the first request: it cannot be kept"
        )


def shard_facts(
    engine: Any,
    cache: Any,
    groups: Sequence[ServedGroup],
    config: ConnectorConfig,
    place: WorkerRank,
) -> ShardFacts:
    """What the namespaces of this worker's blocks are made of."""
    grain = grain_tokens([each.group.rule for each in groups], config)
    model = engine.model_config
    path = Path(model.model)
    weights, weights_folder = weights_of(engine, config.revision, SETTING)
    draft, draft_folder = draft_of(engine, config.revision)
    facts = []
    alone = len(groups) == 1 and place.stages == 1
    for each in groups:
        extra = _extra(engine, cache, each.group, each.tensors, alone=alone)
        extra["engine"] = place.engine
        layout = _layout(each.group, each.tensors, grain).description()
        pairs = tuple(sorted(extra.items()))
        facts.append(GroupFacts(each.group.rule, layout, pairs, each.shard))
    return ShardFacts(
        model=config.model or (path.name if path.is_dir() else str(model.model)),
        config=fingerprint({"config": plain(model.hf_config.to_dict())}),
        weights=weights,
        weights_folder=weights_folder,
        place=place,
        groups=tuple(facts),
        grain=grain,
        saves_settle_at_once=groups[0].tensors.device.type == "cpu",
        draft=draft,
        draft_folder=draft_folder,
    )


def producer_of(facts: ShardFacts) -> str:
    """What computes the blocks, for people."""
    extra = dict(facts.groups[0].extra)
    parts = (
        facts.place.engine,
        f"torch {torch.__version__}",
        f"kvdepot {kvdepot.__version__}",
        f"attention {extra['backend']}",
        f"cache {extra['cache_dtype']} of {extra['model_dtype']}",
        f"weights {(facts.weights or facts.weights_folder)[-40:]}",
    )
    return ", ".join(parts)


def _layout(group: EngineGroup, tensors: KVTensors, grain: int) -> KVLayout:
    tokens = block_tokens(group.rule, grain)
    pages = pages_per_block(group.rule, grain)
    dtype = DTYPES.get(tensors.tensors[0].dtype, "uint8")
    nbytes = tensors.pages([0]).nbytes * pages
    return KVLayout.opaque(nbytes, tokens, tensors.layer_count, dtype=dtype)


def namespaces_of(
    facts: ShardFacts, config: ConnectorConfig, adapter: str, generation: Generation = START
) -> list[Namespace]:
    """The namespaces of a worker's blocks under one adapter, one for each group. ModelError while
    the weights are not known."""
    places = [[(each.shard.rank, each.shard.size)] for each in facts.groups]
    return [spaces[0] for spaces in _namespaces(facts, config, (adapter, generation), places)]


def namespaces_at(
    facts: ShardFacts,
    config: ConnectorConfig,
    adapter: str,
    size: int,
    generation: Generation = START,
) -> list[list[Namespace]]:
    """The namespaces of all shards where there are `size` of them, for each group."""
    places = [
        [(0, 1)] if each.shard.whole else [(rank, size) for rank in range(size)]
        for each in facts.groups
    ]
    return _namespaces(facts, config, (adapter, generation), places)


def _namespaces(
    facts: ShardFacts,
    config: ConnectorConfig,
    model: tuple[str, Generation],
    places: Sequence[Sequence[tuple[int, int]]],
) -> list[list[Namespace]]:
    """For each group the namespaces of these shards, each given by its rank and their number."""
    adapter, generation = model
    weights = known_weights(facts, config, generation)
    if not weights:
        raise ModelError(f"the weights are not known: {_reason(facts, config)}")
    tenant = config.tenants.get(config.tenant)
    secret = tenant.secret() if tenant is not None else b""
    computed_with = fingerprint({"config": facts.config}, weights)

    def space(group: GroupFacts, rank: int, size: int) -> Namespace:
        layout, extra = _resized(group, size)
        return Namespace(
            model=facts.model,
            layout=layout,
            fingerprint=computed_with,
            shard_rank=rank,
            shard_size=size,
            adapter=adapter,
            tenant=config.tenant,
            secret=secret,
            extra=extra,
        )

    return [
        [space(group, rank, size) for rank, size in shards]
        for group, shards in zip(facts.groups, places, strict=True)
    ]


def _resized(group: GroupFacts, size: int) -> tuple[KVLayout, tuple[tuple[str, str], ...]]:
    """What a group's blocks are, and depend on, where there are `size` shards."""
    layout = KVLayout.from_description(group.layout)
    axis = group.shard.axis
    if axis is None or size == group.shard.size:
        return layout, group.extra
    heads, mine = group.shard.heads_of(size), group.shard.heads_of(group.shard.size)
    shape = str((1, 1, axis.rows * heads * axis.head_bytes // axis.item_bytes))
    extra = dict(group.extra) | {"page_shape": shape}
    return replace(layout, state_bytes=layout.state_bytes // mine * heads), tuple(extra.items())


def check_workers(workers: Sequence[ShardFacts]) -> None:
    """ModelError if the workers, in the order of their places, do not make up one model."""
    ranks, stages = workers[0].place.ranks, workers[0].place.stages
    places = [(each.place.stage, each.place.rank) for each in workers]
    wanted = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    if places != wanted:
        lacking = sorted(set(wanted) - set(places))
        raise ModelError(f"workers have no pages: (stage, rank) {lacking or places}")
    for each in workers[1:]:
        _check_alike(workers[0], each, ("model", "config", "weights", "weights_folder", "grain"))
        rules = [[group.rule for group in one.groups] for one in (workers[0], each)]
        if rules[0] != rules[1]:
            raise ModelError(
                "pipeline stages have different KV groups",
                hint="divide the layers so that each stage has all kinds: VLLM_PP_LAYER_PARTITION",
            )
        first = workers[each.place.stage * ranks]
        for one, other in zip(first.groups, each.groups, strict=True):
            _check_alike(one, other, ("layout", "extra"))


def _check_alike(one: object, other: object, names: Iterable[str]) -> None:
    unlike = [name for name in names if getattr(one, name) != getattr(other, name)]
    if unlike:
        raise ModelError(f"workers differ in {', '.join(unlike)}")


def known_weights(
    facts: ShardFacts, config: ConnectorConfig, generation: Generation = START
) -> str:
    """What names the weights, the draft model's too, and a reset since; empty as long as they are
    being read. Does not wait."""
    if generation.weights:
        weights = f"{generation.weights}, {facts.draft}"
    else:
        weights = _weights_of_start(facts, config)
    return f"{weights}, reset {generation.reset}" if weights and generation.reset else weights


def _weights_of_start(facts: ShardFacts, config: ConnectorConfig) -> str:
    weights = facts.weights or _digest(facts, config).known()
    if not facts.draft or not weights:
        return weights
    drafted = "" if not facts.draft_folder else _draft_digest(facts, config).known()
    return f"{weights}, {facts.draft} {drafted}" if drafted or not facts.draft_folder else ""


def _digest(facts: ShardFacts, config: ConnectorConfig) -> WeightsDigest:
    return digest_of(Path(facts.weights_folder), config.weights.expanduser())


def _draft_digest(facts: ShardFacts, config: ConnectorConfig) -> WeightsDigest:
    return digest_of(Path(facts.draft_folder), config.weights.expanduser())


def _reason(facts: ShardFacts, config: ConnectorConfig) -> str:
    """Why the weights are not known."""
    own = "" if facts.weights else _digest(facts, config).reason
    return own or _draft_digest(facts, config).reason


def adapter_of(lora: Any, loaded: Mapping[int, str]) -> str:
    """A LoRA adapter's name and content, as `loaded` has it by vLLM's number; empty for none.

    ModelError while it is not known what vLLM has loaded, as before its first use.
    """
    if lora is None:
        return ""
    digest = loaded.get(lora.lora_int_id, "")
    if not digest:
        raise ModelError(f"vLLM has not said what it loads as LoRA {lora.lora_name}")
    return f"{lora.lora_name} {digest}"


def weights_of(engine: Any, revision: str, setting: str) -> tuple[str, str]:
    """What names the weights; or, where that has to be read, the folder that they are in."""
    model = engine.model_config
    if revision:
        return revision, ""
    load_format = str(getattr(engine.load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        return f"dummy {model.seed}", ""
    folder = Path(model.model)
    if folder.is_dir() and weight_files(folder):
        return "", str(folder.absolute())
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(
            f"{setting}.revision",
            f"missing: vLLM does not tell which weights of {model.model} it has loaded",
            hint='set it to whatever names them, such as "2026-11-01"',
        )
    return f"commit {commit}", ""


def draft_of(engine: Any, revision: str) -> tuple[str, str]:
    """What the KV of draft-model layers (EAGLE, MTP, a smaller model) depends on, and the folder
    of its weights where they have to be read; both empty where there are no such layers."""
    drafts: Any = getattr(engine, "speculative_config", None)
    model = getattr(drafts, "draft_model_config", None)
    if model is None or not (drafts.use_eagle() or drafts.method == "draft_model"):
        return "", ""
    config = fingerprint({"config": plain(model.hf_config.to_dict())})
    said = f"drafted by {drafts.method} {config}"
    if model.model == engine.model_config.model:
        return said, ""
    own = SimpleNamespace(model_config=model, load_config=engine.load_config)
    weights, folder = weights_of(own, revision, SETTING)
    return f"{said} {weights}".strip(), folder


def drafts_ahead(engine: Any) -> bool:
    """Whether the KV of draft layers depends on the next token too (EAGLE, MTP), and vLLM's own
    prefix hits leave out their last block for it."""
    drafts = getattr(engine, "speculative_config", None)
    if drafts is None or getattr(drafts, "disable_eagle_block_drop", False):
        return False
    return bool(drafts.use_eagle())


def _extra(
    engine: Any, cache: Any, group: EngineGroup, tensors: KVTensors, *, alone: bool
) -> dict[str, str]:
    """What the content of a page depends on besides the model; of which layers it is, where the
    model has others."""
    layers = getattr(engine.compilation_config, "static_forward_context", {})
    first = layers.get(group.layer_names[0])
    backend = getattr(first, "attn_backend", None)
    pairs = {
        "model_dtype": str(engine.model_config.dtype),
        "quantization": str(engine.model_config.quantization),
        "cache_dtype": str(engine.cache_config.cache_dtype),
        "page_tokens": str(group.rule.page_tokens),
        "page_shape": str(tuple(tensors.tensors[0].shape[1:])),
        "spec": group.spec,
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "backend": str(backend.get_name()) if backend is not None else "unknown",
        "instructions": "",
        "lora_dtype": str(getattr(getattr(engine, "lora_config", None), "lora_dtype", None)),
    }
    if not alone:
        pairs["layers"] = fingerprint({"layers": list(group.layer_names)})
    for name in MODEL_SETTINGS:
        pairs[name] = str(getattr(engine.model_config, name, None))
    if tensors.device.type == "cpu":
        isa = getattr(first, "isa", None) or getattr(getattr(first, "impl", None), "isa", None)
        capability = torch.backends.cpu.get_cpu_capability()
        pairs["instructions"] = f"{platform.machine()} {capability} {isa}"
    if group.rule.kind == "state":
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            pairs[name] = str(getattr(engine.cache_config, name, None))
    return pairs


def plain(value: Any) -> Any:
    """A config's content as JSON would have it."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
