"""vLLM's releases: what of the interface is needed, and where releases differ.

No other file knows of a release. Supported are those that `./dev e2e --release` runs; any other one
is served if it has all that is needed, and else refused before anything starts.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import StepPlan
from kvdepot.adapters.vllm.worker import ConnectorWorker, FinishedTransfers
from kvdepot.errors import ConfigError, ModelError

SUPPORTED: Final = ("0.29", "0.31", "0.32")

Modules = Callable[[str], Any]
"""Finds a module by its name, as `import_module` does."""

_V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE: Final = f"{_V1}.base"
_HIT_SOURCES: Final = "vllm.v1.metrics.cache_hit_source"

HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "register_kv_caches": ("kv_caches",),
    "get_handshake_metadata": (),
    "bind_connector_metadata": ("connector_metadata",),
    "handle_preemptions": ("kv_connector_metadata",),
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "build_connector_worker_meta": (),
    "get_kv_connector_stats": (),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "reset_cache": (),
    "shutdown": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": (
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ),
}
"""What vLLM calls of a connector, with the arguments that it passes."""

LATER_HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "get_transfer_results": ("finished_req_ids",),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
}
"""Since 0.31, and since 0.32."""

ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_BASE}:KVConnectorBase_V1": ("role", "requires_kv_delivery", "_get_connector_metadata"),
    f"{_BASE}:SupportsHMA": ("request_finished_all_groups",),
    f"{_BASE}:KVConnectorRole": ("SCHEDULER",),
    f"{_BASE}:KVConnectorMetadata": ("register",),
    f"{_BASE}:KVConnectorHandshakeMetadata": ("register",),
    f"{_BASE}:KVConnectorWorkerMetadata": ("register", "aggregate"),
    f"{_V1}.metrics:KVConnectorStats": ("data", "reset", "aggregate", "reduce", "is_empty"),
    f"{_V1}.metrics:KVConnectorPromMetrics": (
        "observe",
        "_counter_cls",
        "_gauge_cls",
        "per_engine_labelvalues",
    ),
    "vllm.distributed.parallel_state:get_pp_group": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size": (),
    "vllm.lora.worker_manager:WorkerLoRAManager": (),
    "vllm.v1.core.block_pool:BlockPool": ("reset_prefix_cache",),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.executor.abstract:Executor": ("get_class", "collective_rpc"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "kv_connector_block_state",
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("boundary_state_offloads",),
    "vllm.v1.outputs:KVConnectorOutput": (
        "finished_sending",
        "finished_recving",
        "invalid_block_ids",
        "kv_connector_worker_meta",
    ),
    "vllm.v1.request:Request": (
        "request_id",
        "all_token_ids",
        "num_tokens",
        "num_prompt_tokens",
        "num_computed_tokens",
        "skip_reading_prefix_cache",
        "kv_transfer_params",
        "lora_request",
        "mm_features",
        "cache_salt",
        "prompt_embeds",
        "resumable",
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        "num_blocks",
        "kv_cache_groups",
        "kv_cache_layout",
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        "layer_names",
        "kv_cache_spec",
        "enable_kv_transfer",
    ),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("first_spec",),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size", "prefix_cacheable"),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window", "extra_retained_tokens"),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "vllm.v1.kv_cache_interface:MambaSpec": ("mamba_cache_mode",),
    "vllm.config:VllmConfig": (
        "kv_transfer_config",
        "parallel_config",
        "scheduler_config",
        "cache_config",
        "model_config",
        "load_config",
        "lora_config",
        "compilation_config",
    ),
    "vllm.config:KVTransferConfig": (
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "is_kv_producer",
        "is_kv_consumer",
    ),
    "vllm.config:ParallelConfig": (
        "data_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "distributed_executor_backend",
    ),
    "vllm.config:SchedulerConfig": ("max_num_batched_tokens",),
    "vllm.config:CacheConfig": (
        "enable_prefix_caching",
        "cache_dtype",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
    ),
    "vllm.config:ModelConfig": (
        "model",
        "hf_config",
        "dtype",
        "quantization",
        "seed",
        "max_model_len",
        "disable_sliding_window",
        "model_impl",
        "mm_processor_kwargs",
    ),
    "vllm.config:LoadConfig": ("load_format",),
    "vllm.config:LoRAConfig": ("lora_dtype",),
    "vllm.config:CompilationConfig": ("static_forward_context",),
}
"""What is used of vLLM's classes, and what a model's identity is made of."""

ALTERNATIVES: Final = (
    (
        f"{_BASE}:KVConnectorTransferResults.failed_recving",
        f"{_BASE}:KVConnectorBase_V1.get_block_ids_with_load_errors",
    ),
    (
        "vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids",
        "vllm.v1.core.sched.output:KVConnectorBlockState.block_ids",
    ),
)
"""Of each pair one is needed; releases differ in which."""

_logger = logging.getLogger("vllm.kvdepot")


def check_release(modules: Modules = import_module) -> None:
    """ConfigError, logged in one line, if this vLLM lacks something that is needed."""
    lacking = list(missing(modules))
    if not lacking:
        return
    shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if lacking[3:] else "")
    error = ConfigError(
        f"vllm {version_of(modules)}",
        f"cannot be served: it lacks {shown}",
        hint=f"supported are vllm {', '.join(SUPPORTED)}",
    )
    _logger.log(logging.ERROR, "kvdepot: %s; hint: %s", error, error.hint)
    raise error


def version_of(modules: Modules = import_module) -> str:
    try:
        return str(modules("vllm.version").__version__)
    except (ImportError, AttributeError):
        return "of an unknown version"


def missing(modules: Modules = import_module) -> Iterator[str]:
    """What is needed and not there, or there in another form."""
    base = _find(modules, f"{_BASE}:KVConnectorBase_V1")
    for name, wanted in {**HOOKS, **LATER_HOOKS}.items():
        hook = getattr(base, name, None)
        if hook is None and name in HOOKS:
            yield f"KVConnectorBase_V1.{name}"
        elif hook is not None and parameters(hook) != wanted:
            yield f"KVConnectorBase_V1.{name}({', '.join(wanted)})"
    for name in sorted(getattr(base, "__abstractmethods__", ())):
        if name not in HOOKS:
            yield f"a KVConnectorBase_V1 that can do without {name}"
    for place, names in ATTRIBUTES.items():
        found = _find(modules, place)
        if found is None:
            yield place.replace(":", ".")
            continue
        short = place.partition(":")[2]
        yield from (f"{short}.{name}" for name in names if not _has(found, name))
    for places in ALTERNATIVES:
        split = [place.rpartition(".") for place in places]
        if not any(_has(_find(modules, place), name) for place, _, name in split):
            yield " or ".join(place.partition(":")[2] for place in places)


def parameters(call: Any) -> tuple[str, ...]:
    """The names of what is passed, without what a call gives in any number."""
    loose = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(call).parameters.values()
    return tuple(each.name for each in found if each.name != "self" and each.kind not in loose)


def _find(modules: Modules, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(modules(module), name, None)
    except ImportError:
        return None


def _has(owner: Any, name: str) -> bool:
    """As an attribute, as a field, or as something that its instances are given when made."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {}):
        return True
    makers = (base.__dict__.get("__init__") for base in getattr(owner, "__mro__", ()))
    return any(name in getattr(maker, "__code__", _NO_CODE).co_names for maker in makers)


_NO_CODE: Final = (lambda: None).__code__


class EngineRelease:
    """The vLLM of this process, where releases differ."""

    def __init__(self, modules: Modules = import_module) -> None:
        self.version = version_of(modules)
        self._results = _find(modules, f"{_BASE}:KVConnectorTransferResults")
        self._sources = _find(modules, f"{_HIT_SOURCES}:CacheHitSource")
        self._tables: dict[str, tuple[list[int], ...]] = {}
        if ".".join(self.version.split(".")[:2]) not in SUPPORTED:
            _logger.warning(
                "kvdepot: vllm %s has not been tried, but has the interface; tried were %s",
                self.version,
                ", ".join(SUPPORTED),
            )

    def check_groups(self, rules: Sequence[GroupRule], tables: int) -> None:
        """ModelError for what this release cannot recompute when a load fails: before 0.31 vLLM is
        told of pages, not of requests, and takes them for pages of full attention."""
        if self._results is None and (tables > 1 or [rule.kind for rule in rules] != ["full"]):
            raise ModelError(
                f"vllm {self.version} cannot recompute a failed load of a model with several KV "
                "groups, windows or states",
                hint="vllm 0.31 or newer; or, for windows, --disable-hybrid-kv-cache-manager",
            )

    def transfer_results(self, over: FinishedTransfers) -> Any:
        """For `get_transfer_results`, which is called since 0.31."""
        assert self._results is not None
        return self._results(over.sent, over.received, over.failed)

    def hit_sources(self, tiers: Mapping[str, int]) -> dict[Any, int]:
        """Tokens by vLLM's names for where they come from, which it asks for since 0.32."""
        assert self._sources is not None
        counts: Counter[Any] = Counter()
        for tier, tokens in tiers.items():
            in_memory = tier in ("dram", "cxl")
            counts[self._sources.HOST if in_memory else self._sources.DISK] += tokens
        return dict(counts)

    def step_output(self, output: Any) -> Any:
        """The scheduler's output, whose block state knows the pages of all requests of the step.

        Before 0.31 it has them of requests that got new ones; all others have the same as before.
        """
        state = output.kv_connector_block_state
        if state is None or hasattr(state, "get_block_ids"):
            return output
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
        self._tables.update(state.block_ids)
        return _StepWithTables(output, self._tables)


def finish_step(worker: ConnectorWorker, plan: StepPlan) -> tuple[set[str], set[str]]:
    """For `get_finished`, which is called before 0.31: there `wait_for_save` is not called in steps
    that compute nothing."""
    if plan.idle:
        worker.save(plan)
    over = worker.finished(plan)
    return over.sent, over.received


class _StepWithTables:
    """A SchedulerOutput, and its own block state, of a release before 0.31."""

    def __init__(self, output: Any, tables: Mapping[str, tuple[list[int], ...]]) -> None:
        self._output = output
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    @property
    def kv_connector_block_state(self) -> "_StepWithTables":
        return self

    @property
    def boundary_state_offloads(self) -> Any:
        return self._output.kv_connector_block_state.boundary_state_offloads

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self._tables[request_id]
