"""The class that vLLM loads, and its metrics. The only module here that needs vLLM.

Each call goes to `scheduler` or to `worker`, by the role that vLLM gives the connector.
"""

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.lora.worker_manager import WorkerLoRAManager  # type: ignore[import-not-found]
from vllm.v1.executor.abstract import Executor  # type: ignore[import-not-found]

from kvdepot.adapters.vllm import config
from kvdepot.adapters.vllm.groups import grain_tokens, layer_groups
from kvdepot.adapters.vllm.identity import check_engine, drafts_ahead
from kvdepot.adapters.vllm.loaded_weights import LoadedAdapters
from kvdepot.adapters.vllm.messages import ShardFacts, StepPlan, StepReport, WorkerRank
from kvdepot.adapters.vllm.metrics import COUNTERS, GAUGES, errors_logged, merged, summary
from kvdepot.adapters.vllm.releases import EngineRelease, finish_step
from kvdepot.adapters.vllm.scheduler import ConnectorScheduler, EngineFacts
from kvdepot.adapters.vllm.shared_depot import open_depot
from kvdepot.adapters.vllm.worker import ConnectorWorker

KVConnectorMetadata.register(StepPlan)
KVConnectorHandshakeMetadata.register(ShardFacts)
KVConnectorWorkerMetadata.register(StepReport)


class DepotStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one period; `data` is what `metrics` of a scheduler or a worker returns."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> "DepotStats":
        return DepotStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return dict(summary(self.data))

    def is_empty(self) -> bool:
        return not self.data


class DepotMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvdepot_…` counters and gauges on vLLM's metrics page."""

    def __init__(self, config: Any, types: Any, names: list[str], values: Any) -> None:
        super().__init__(config, types, names, values)
        self._metrics = {
            what: kind(
                name=f"vllm:kvdepot_{what}",
                documentation=f"kvdepot: {text}.",
                labelnames=[*names, label] if label else names,
            )
            for kind, table in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES))
            for what, (label, text) in table.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, kind = name.partition(":")
            metric = self._metrics[what].labels(*labels, *([kind] if kind else []))
            if what in GAUGES:
                metric.set(count)
            else:
                metric.inc(count)


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connects one vLLM engine, as its scheduler or as one of its workers, to a depot."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine, self._cache = vllm_config, kv_cache_config
        self._release = EngineRelease()
        self._loaded = LoadedAdapters()
        self._worker: ConnectorWorker | None = None
        self._scheduler: ConnectorScheduler | None = None
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        with errors_logged():
            self._settings = config.read(transfer.kv_connector_extra_config)
            check_engine(vllm_config)
            rules = [group.rule for group in layer_groups(kv_cache_config)]
            self._release.check_groups(rules, len(kv_cache_config.kv_cache_groups))
            grain_tokens(rules, self._settings)
            is_alone = parallel.data_parallel_size == 1
            one_process = is_alone and parallel.distributed_executor_backend == "uni"
            self._depot = open_depot(self._settings, one_process=one_process)
        if self.role == KVConnectorRole.SCHEDULER:
            facts = EngineFacts(
                chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                shares_pages=bool(vllm_config.cache_config.enable_prefix_caching),
                drafts_ahead=drafts_ahead(vllm_config),
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
            self._scheduler = ConnectorScheduler(self._settings, self._depot.store, facts)
            self._scheduler.weights.watch(Executor.get_class(vllm_config), parallel)
        elif getattr(vllm_config, "lora_config", None) is not None:
            self._loaded.watch(WorkerLoRAManager)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: the connector keeps views of the KV tensors, which sleep mode unmaps on a GPU, and
        this has not been tried there."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    @property
    def scheduler_side(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "called on a worker"
        return self._scheduler

    @property
    def worker_side(self) -> ConnectorWorker:
        assert self._worker is not None, "called on the scheduler, or before register_kv_caches"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata()
        return plan

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        from vllm.distributed.parallel_state import (  # type: ignore[import-not-found]
            get_pp_group,
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        place = WorkerRank(
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            f"vllm {self._release.version}",
            get_pp_group().rank_in_group,
            get_pp_group().world_size,
        )
        with errors_logged():
            self._worker = ConnectorWorker(
                self._engine,
                self._cache,
                self._settings,
                self._depot.store,
                self._loaded,
                kv_caches,
                place,
            )
            rules = [group.rule for group in self._worker.facts.groups]
            self._release.check_groups(rules, len(self._cache.kv_cache_groups))

    def get_handshake_metadata(self) -> ShardFacts:
        return self.worker_side.facts

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.begin(self._plan)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker_side.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started with the step; vLLM calls this after its computation."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        self.worker_side.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._release.transfer_results(self.worker_side.finished(self._plan))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return finish_step(self.worker_side, self._plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_invalid()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker_side.take_report()

    def get_kv_connector_stats(self) -> DepotStats | None:
        part = self._scheduler or self._worker
        counts = part.metrics() if part is not None else None
        return DepotStats(data=counts) if counts else None

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler_side.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tables = blocks.get_block_ids()
            self.scheduler_side.allocated(request.request_id, tables, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        tiers = self.scheduler_side.sources(request.request_id, num_external_tokens)
        return self._release.hit_sources(tiers)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self.scheduler_side.plan(self._release.step_output(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler_side.step_ended(
            connector_output.kv_connector_worker_meta,
            connector_output.finished_recving or (),
            connector_output.finished_sending or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finish(request, block_ids), None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], ShardFacts]
    ) -> None:
        self.scheduler_side.set_workers(metadata.values())

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Notice each reset of vLLM's own prefix cache, also if the connector is not reset."""
        reset = gpu_block_pool.reset_prefix_cache

        def reset_and_note() -> bool:
            done = bool(reset())
            if done:
                self.scheduler_side.weights.cache_was_emptied()
            return done

        gpu_block_pool.reset_prefix_cache = reset_and_note

    def reset_cache(self) -> bool:
        return self.scheduler_side.reset()

    def shutdown(self) -> None:
        part = self._scheduler or self._worker
        if part is not None:
            part.close()
        self._depot.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DepotStats:
        return DepotStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> DepotMetrics:
        return DepotMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
