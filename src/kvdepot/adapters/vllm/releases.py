"""vLLM's releases: the parts of vLLM's interface that are used, and the differences of releases.

No other file depends on a release. `./dev e2e --release` runs the supported ones. Any other release
is served if it has all the parts, else it is refused before anything starts.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import StepPlan
from kvdepot.adapters.vllm.metrics import errors_logged
from kvdepot.adapters.vllm.worker import ConnectorWorker, FinishedTransfers
from kvdepot.errors import ConfigError, ModelError

SUPPORTED: Final = ("0.29", "0.31", "0.32", "0.33")
LATER_HOOKS: Final = (
    "get_transfer_results",
    "get_external_cache_hit_sources",
    "supports_sleep_mode",
)
"""Methods of the connector that vLLM calls since 0.31, since 0.32, and since 0.33."""
Modules = Callable[[str], Any]
"""Finds a module by its name, as `import_module` does."""

_V1: Final = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE: Final = f"{_V1}.base:KVConnectorBase_V1"
_RESULTS: Final = f"{_V1}.base:KVConnectorTransferResults"
_HIT_SOURCES: Final = "vllm.v1.metrics.cache_hit_source:CacheHitSource"
_STATE: Final = "vllm.v1.core.sched.output:KVConnectorBlockState"
NEEDED: Final = f"""
{BASE}: role requires_kv_delivery _get_connector_metadata
{_V1}.base:SupportsHMA: request_finished_all_groups
{_V1}.base:KVConnectorRole: SCHEDULER
{_V1}.base:KVConnectorMetadata: register
{_V1}.base:KVConnectorHandshakeMetadata: register
{_V1}.base:KVConnectorWorkerMetadata: register aggregate
{_V1}.metrics:KVConnectorStats: data reset aggregate reduce is_empty
{_V1}.metrics:KVConnectorPromMetrics: observe _counter_cls _gauge_cls per_engine_labelvalues
vllm.distributed.parallel_state:get_pp_group:
vllm.distributed.parallel_state:get_tensor_model_parallel_rank:
vllm.distributed.parallel_state:get_tensor_model_parallel_world_size:
vllm.lora.worker_manager:WorkerLoRAManager:
vllm.v1.core.block_pool:BlockPool: reset_prefix_cache
vllm.v1.core.kv_cache_manager:KVCacheBlocks: get_block_ids
vllm.v1.executor.abstract:Executor: get_class collective_rpc
vllm.v1.core.sched.output:SchedulerOutput: num_scheduled_tokens finished_req_ids \
    preempted_req_ids kv_connector_block_state
{_STATE}: boundary_state_offloads
vllm.v1.outputs:KVConnectorOutput: finished_sending finished_recving invalid_block_ids \
    kv_connector_worker_meta
vllm.v1.request:Request: request_id all_token_ids num_tokens num_prompt_tokens num_computed_tokens \
    skip_reading_prefix_cache kv_transfer_params lora_request mm_features cache_salt prompt_embeds \
    resumable
vllm.v1.kv_cache_interface:KVCacheConfig: num_blocks kv_cache_groups kv_cache_layout
vllm.v1.kv_cache_interface:KVCacheGroupSpec: layer_names kv_cache_spec enable_kv_transfer
vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs: first_spec
vllm.v1.kv_cache_interface:FullAttentionSpec: block_size prefix_cacheable
vllm.v1.kv_cache_interface:SlidingWindowSpec: sliding_window extra_retained_tokens
vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec: attention_chunk_size
vllm.v1.kv_cache_interface:MambaSpec: mamba_cache_mode
vllm.config:VllmConfig: kv_transfer_config parallel_config scheduler_config cache_config \
    model_config load_config lora_config compilation_config
vllm.config:KVTransferConfig: kv_connector_extra_config kv_load_failure_policy is_kv_producer \
    is_kv_consumer
vllm.config:ParallelConfig: data_parallel_size pipeline_parallel_size \
    decode_context_parallel_size distributed_executor_backend
vllm.config:SchedulerConfig: max_num_batched_tokens
vllm.config:CacheConfig: enable_prefix_caching cache_dtype mamba_cache_dtype mamba_ssm_cache_dtype
vllm.config:ModelConfig: model hf_config dtype quantization seed max_model_len \
    disable_sliding_window model_impl mm_processor_kwargs
vllm.config:LoadConfig: load_format
vllm.config:LoRAConfig: lora_dtype
vllm.config:CompilationConfig: static_forward_context
"""
"""The parts of vLLM that are used, and on which the identity of a model depends."""
ALTERNATIVES: Final = (
    ((_RESULTS, "failed_recving"), (BASE, "get_block_ids_with_load_errors")),
    ((_STATE, "get_block_ids"), (_STATE, "block_ids")),
)
"""One of each pair is needed; releases differ in which."""

_logger = logging.getLogger("vllm.kvdepot")


def attributes() -> dict[str, list[str]]:
    """NEEDED by place."""
    lines = (line.rpartition(":") for line in NEEDED.strip().splitlines())
    return {place: names.split() for place, _, names in lines}


def refuse_without(lacking: Sequence[str], modules: Modules = import_module) -> None:
    """ConfigError, logged in one line, if this vLLM lacks something that is needed."""
    if not lacking:
        return
    shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if lacking[3:] else "")
    where, hint = f"vllm {version_of(modules)}", f"use vllm {', '.join(SUPPORTED)}"
    with errors_logged():
        raise ConfigError(where, f"cannot be served: it lacks {shown}", hint=hint)


def version_of(modules: Modules = import_module) -> str:
    try:
        return str(modules("vllm.version").__version__)
    except (ImportError, AttributeError):
        return "of an unknown version"


def missing(modules: Modules = import_module) -> Iterator[str]:
    """The parts of vLLM that are needed and missing."""
    for place, names in attributes().items():
        owner = _find(modules, place)
        if owner is None:
            yield place.replace(":", ".")
        else:
            short = place.partition(":")[2]
            yield from (f"{short}.{name}" for name in names if not _has(owner, name))
    for pair in ALTERNATIVES:
        if not any(_has(_find(modules, place), name) for place, name in pair):
            yield " or ".join(f"{place.partition(':')[2]}.{name}" for place, name in pair)


def missing_hooks(connector: type) -> Iterator[str]:
    """Methods of the connector that its bases lack, or pass other arguments to, and abstract
    methods that it does not implement."""
    for name, own in vars(connector).items():
        if name.startswith("_") or isinstance(own, property):
            continue
        bases = (base for base in connector.__mro__[1:] if name in vars(base))
        hook = next((getattr(base, name) for base in bases), None)
        wanted = _parameters(getattr(connector, name))
        if hook is None and name not in LATER_HOOKS:
            yield f"KVConnectorBase_V1.{name}"
        elif hook is not None and _parameters(hook) != wanted:
            yield f"KVConnectorBase_V1.{name}({', '.join(wanted)})"
    for name in sorted(getattr(connector, "__abstractmethods__", ())):
        yield f"a KVConnectorBase_V1 that can do without {name}"


def _parameters(call: Any) -> list[str]:
    """The names of the arguments, without `self`, `*args` and `**kwargs`."""
    loose = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    given = inspect.signature(call).parameters.values()
    return [each.name for each in given if each.name != "self" and each.kind not in loose]


def _find(modules: Modules, place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(modules(module), name, None)
    except ImportError:
        return None


def _has(owner: Any, name: str) -> bool:
    """True if it is an attribute, a field, or something that `__init__` sets."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {}):
        return True
    makers = (base.__dict__.get("__init__") for base in getattr(owner, "__mro__", ()))
    codes = (getattr(maker, "__code__", None) for maker in makers)
    return any(code is not None and name in code.co_names for code in codes)


class EngineRelease:
    """The vLLM of this process, in what its release differs from others."""

    def __init__(self, modules: Modules = import_module) -> None:
        self.version = version_of(modules)
        self._results = _find(modules, _RESULTS)
        self._sources = _find(modules, _HIT_SOURCES)
        self._tables: dict[str, tuple[list[int], ...]] = {}
        if ".".join(self.version.split(".")[:2]) not in SUPPORTED:
            _logger.warning(
                "kvdepot: vllm %s has not been tried, but has the interface; tried were %s",
                self.version,
                ", ".join(SUPPORTED),
            )

    def check_groups(self, rules: Sequence[GroupRule], tables: int) -> None:
        """ModelError if this release cannot recompute a failed load of these groups. Before 0.31
        the connector reports pages, not requests, and vLLM takes them for full attention."""
        if self._results is None and (tables > 1 or [rule.kind for rule in rules] != ["full"]):
            raise ModelError(
                f"vllm {self.version} cannot recompute a failed load of a model with several KV "
                "groups, windows or states",
                hint="use vllm 0.31 or newer; or, for windows, --disable-hybrid-kv-cache-manager",
            )

    def transfer_results(self, ended: FinishedTransfers) -> Any:
        """The result of `get_transfer_results`, which vLLM calls since 0.31."""
        assert self._results is not None
        return self._results(ended.sent, ended.received, ended.failed)

    def hit_sources(self, tiers: Mapping[str, int]) -> dict[Any, int]:
        """Tokens by vLLM's names of their sources, which it asks for since 0.32."""
        assert self._sources is not None
        counts: Counter[Any] = Counter()
        for tier, tokens in tiers.items():
            in_memory = tier in ("dram", "cxl")
            counts[self._sources.HOST if in_memory else self._sources.DISK] += tokens
        return dict(counts)

    def step_output(self, output: Any) -> Any:
        """The scheduler's output, with the pages of all requests of the step. Before 0.31 it has
        them for requests with new pages only; the others have the same as before."""
        state = output.kv_connector_block_state
        if state is None or hasattr(state, "get_block_ids"):
            return output
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
        self._tables.update(state.block_ids)
        return _StepWithTables(output, self._tables)


def finish_step(worker: ConnectorWorker, plan: StepPlan) -> tuple[set[str], set[str]]:
    """The result of `get_finished`, which vLLM calls before 0.31; it does not call `wait_for_save`
    in steps that compute nothing."""
    if plan.idle:
        worker.save(plan)
    ended = worker.finished(plan)
    return ended.sent, ended.received


class _StepWithTables:
    """A SchedulerOutput and its block state, of a release before 0.31."""

    def __init__(self, output: Any, tables: Mapping[str, tuple[list[int], ...]]) -> None:
        self._output = output
        self.get_block_ids = tables.__getitem__
        self.boundary_state_offloads = output.kv_connector_block_state.boundary_state_offloads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    @property
    def kv_connector_block_state(self) -> "_StepWithTables":
        return self
