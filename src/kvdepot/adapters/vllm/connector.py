"""The class that vLLM loads. Needs vLLM; everything else is in `scheduler` and `worker`."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # type: ignore[import-not-found]
from vllm.version import __version__  # type: ignore[import-not-found]

from kvdepot.adapters.vllm import config
from kvdepot.adapters.vllm.depot import open_depot
from kvdepot.adapters.vllm.identity import Seat, check_engine, check_groups
from kvdepot.adapters.vllm.messages import ShardFacts, StepPlan, StepReport
from kvdepot.adapters.vllm.metrics import DepotMetrics, DepotStats
from kvdepot.adapters.vllm.scheduler import EngineFacts, Scheduler
from kvdepot.adapters.vllm.worker import Worker
from kvdepot.errors import KVDepotError

_logger = logging.getLogger("vllm.kvdepot")
_IN_MEMORY = ("dram", "cxl")

KVConnectorMetadata.register(StepPlan)
KVConnectorHandshakeMetadata.register(ShardFacts)
KVConnectorWorkerMetadata.register(StepReport)


@contextmanager
def _telling() -> Iterator[None]:
    """Say in one line what is wrong: vLLM buries it under the traces of its processes."""
    try:
        yield
    except KVDepotError as error:
        hint = f"; hint: {error.hint}" if error.hint else ""
        _logger.log(logging.ERROR, "kvdepot: %s%s", error, hint)
        raise


class KVDepotConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Connects one vLLM engine, as its scheduler or as one of its workers, to a depot."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        with _telling():
            self._start(vllm_config, kv_cache_config)

    def _start(self, engine: Any, cache: Any) -> None:
        transfer = engine.kv_transfer_config
        settings = config.read(transfer.kv_connector_extra_config)
        check_engine(engine)
        group = check_groups(cache)
        config.pages_per_block(settings.block_tokens, group.kv_cache_spec.block_size)
        parallel = engine.parallel_config
        alone = parallel.data_parallel_size == 1
        one_process = alone and parallel.distributed_executor_backend == "uni"
        depot = open_depot(settings, one_process=one_process)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if self.role == KVConnectorRole.SCHEDULER:
            loads, saves = transfer.is_kv_consumer, transfer.is_kv_producer
            facts = EngineFacts(
                chunk_tokens=engine.scheduler_config.max_num_batched_tokens,
                shares_pages=bool(engine.cache_config.enable_prefix_caching),
            )
            self._scheduler = Scheduler(settings, depot, facts, loads=loads, saves=saves)
        else:
            self._worker = Worker(engine, cache, settings, depot)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost is a miss later."""
        return False

    @property
    def _side(self) -> Scheduler:
        assert self._scheduler is not None, "called on a worker"
        return self._scheduler

    @property
    def _hands(self) -> Worker:
        assert self._worker is not None, "called on the scheduler"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata()
        return plan

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        from vllm.distributed.parallel_state import (  # type: ignore[import-not-found]
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        seat = Seat(
            get_tensor_model_parallel_rank(),
            get_tensor_model_parallel_world_size(),
            f"vllm {__version__}",
        )
        with _telling():
            self._hands.register(kv_caches, seat)

    def get_handshake_metadata(self) -> ShardFacts:
        return self._hands.facts

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._hands.begin(self._plan)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._hands.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started with the step; vLLM calls this after its computation."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        self._hands.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        over = self._hands.finished(self._plan)
        return KVConnectorTransferResults(over.sent, over.received, over.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._hands.take_invalid()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self._hands.take_report()

    def get_kv_connector_stats(self) -> DepotStats | None:
        part = self._worker or self._scheduler
        assert part is not None
        figures = part.figures()
        return DepotStats(data=figures) if figures else None

    def on_new_request(self, request: Any) -> None:
        self._side.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._side.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            pages = blocks.get_block_ids()[0]
            self._side.allocated(request.request_id, pages, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        counts: Counter[Any] = Counter()
        for tier, tokens in self._side.sources(request.request_id, num_external_tokens).items():
            counts[CacheHitSource.HOST if tier in _IN_MEMORY else CacheHitSource.DISK] += tokens
        return dict(counts)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._side.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._side.learn(connector_output.kv_connector_worker_meta)
        self._side.received(connector_output.finished_recving or ())
        self._side.sent(connector_output.finished_sending or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side.finish(request, block_ids), None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], ShardFacts]
    ) -> None:
        self._side.meet(metadata.values())

    def reset_cache(self) -> bool:
        return self._side.reset()

    def shutdown(self) -> None:
        part = self._worker or self._scheduler
        if part is not None:
            part.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DepotStats:
        return DepotStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> DepotMetrics:
        return DepotMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
