"""The class that vLLM loads as a secondary tier. The only module here that needs vLLM."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
from vllm.config import VllmConfig  # type: ignore[import-not-found]
from vllm.v1.executor.abstract import Executor  # type: ignore[import-not-found]
from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import (  # type: ignore[import-not-found]
    JobResult,
    SecondaryTierManager,
)
from vllm.version import __version__  # type: ignore[import-not-found]

import kvdepot
from kvdepot.adapters.vllm.loaded_weights import WatchedWeights
from kvdepot.adapters.vllm.metrics import errors_logged
from kvdepot.adapters.vllm_tier.chunks import ChunkJob, ChunkTransfers, RequestChunks, keys_of
from kvdepot.adapters.vllm_tier.config import read
from kvdepot.adapters.vllm_tier.identity import engine_config, identify
from kvdepot.core.depot import NamespaceHandle

_logger = logging.getLogger("vllm.kvdepot")
_SPIN_S: Final = 0.004
"""Steps that follow each other sooner than this run no model: the engine waits for chunks."""
_YIELD_S: Final = 0.0002
_POLICIES = {"chunk": OffloadPolicy.CHUNK_LEVEL, "request": OffloadPolicy.REQUEST_LEVEL}


class KVDepotTier(SecondaryTierManager):  # type: ignore[misc]
    """SSDs, hard drives and object storage below vLLM's CPU tier. Lookups are answered from the
    depot's index; bytes are moved in threads."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        engine = engine_config(VllmConfig)
        with errors_logged():
            self._settings = read(settings)
            size = self.block_size_bytes
            self._identity = identify(offloading_spec, engine, self._settings, size, __version__)
            self._identity.weights.known(self._settings.weights)  # begins to read them
            self.depot = kvdepot.open(self._settings.depot)
        rows = np.asarray(primary_kv_view)
        self._rows: Any = rows.reshape(len(rows), -1).view(np.uint8)
        self.locality = Locality(self._settings.locality) if self._settings.locality else None
        self._chunk_tokens = {group: tokens for group, tokens, _ in self._identity.groups}
        self._spaces: dict[int, NamespaceHandle] = {}
        self._weights = WatchedWeights()
        if engine is not None:
            self._weights.watch(Executor.get_class(engine), engine.parallel_config)
        self._requests: set[str] = set()
        self._emptied = False
        """vLLM has emptied its CPU tier, and no request has come since."""
        self._transfers = ChunkTransfers(
            self.depot, self._settings.load_timeout, self._settings.load_threads
        )
        self._stepped_s = 0.0
        self._failed: dict[str, set[bytes]] = {}
        """Chunks that could not be loaded and are computed, by request."""
        announces = offloading_spec.kv_events_config.enable_kv_cache_events
        self._announces = self._settings.enable_kv_events and announces
        self._events: list[Any] = []

    def on_new_request(self, req_context: Any) -> Any:
        self._settle()
        self._requests.add(req_context.req_id)
        self._weights.cache_used, self._emptied = True, False
        return RequestOffloadingContext(policy=_POLICIES[self._settings.policy])

    def lookup(self, key: Any, req_context: Any) -> Any:
        if not self._ready() or key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        keys = self._keys([key], req_context)
        return LookupResult.HIT if keys and len(self.depot.match(keys)) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin a store or a load: the job says which."""
        job = job_metadata
        chunks, numbers = list(job.keys), job.chunk_ids.tolist()
        keys, rows = [], []
        if all(0 <= number < len(self._rows) for number in numbers):
            rows = [self._rows[number] for number in numbers]
            keys = self._keys(chunks, job.req_context) if self._ready() else []
        request = job.req_context.req_id
        self._transfers.submit(ChunkJob(job.job_id, request, chunks, keys, rows, job.is_promotion))

    submit_load = submit_store

    def get_finished_jobs(self) -> Iterable[Any]:
        for ended in self._transfers.take():
            job = ended.job
            if job.is_load and not ended.complete:
                lost = set(job.chunks) - set(ended.done)
                self._failed.setdefault(job.request, set()).update(lost)
            if not job.is_load and ended.done and self._announces:
                stored = list(ended.done)
                self._events.append(OffloadingEvent(stored, self.medium, False, self.locality))
            yield JobResult(
                job_id=job.number,
                success=ended.complete,
                successful_keys=tuple(ended.done) or None if job.is_load else None,
                transfer_time=ended.seconds,
                transfer_bytes=ended.nbytes,
            )

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        if self._ready():
            self.depot.lease(self._keys(list(keys), req_context)).release()

    def on_schedule_end(self, context: Any) -> None:
        """Leave the interpreter to the loads for a moment, if the engine only waits for them: a
        step that spins keeps it from every thread for 5 ms at a time."""
        if self._transfers.loads and time.monotonic() - self._stepped_s < _SPIN_S:
            time.sleep(_YIELD_S)
        self._stepped_s = time.monotonic()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        self._requests.discard(req_context.req_id)
        self._begin_anew()

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        """vLLM calls this before it empties its CPU tier, and at no other time."""
        self._transfers.drain()
        self._emptied = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Start a new generation if no chunk and no request of the old one is left."""
        if self._emptied and not self._requests:
            self._weights.cache_was_emptied()

    def shutdown(self) -> None:
        """Write what waits to the drives, and release vLLM's memory. May be called twice."""
        self._transfers.close()
        self._transfers.take()
        self._rows = None
        self.depot.close()

    def _settle(self) -> None:
        """Find out which weights are loaded, if they may have changed."""
        if not (self._weights.in_question and self._weights.settle()):
            return
        self._spaces.clear()
        if self._weights.cache_stale:
            _logger.warning(
                "kvdepot: nothing is served or saved before reset_prefix_cache(reset_connector="
                "True): vLLM's CPU tier may have KV that other weights have computed"
            )

    def _ready(self) -> bool:
        """True if the weights are known, and so the namespaces."""
        self._settle()
        if self._weights.cache_stale or self._weights.name is None:
            return False
        if not self._spaces:
            settings = self._settings
            weights = self._weights.name or self._identity.weights.known(settings.weights)
            if weights:
                spaces = self._identity.namespaces(settings, weights)
                self._spaces = {group: self.depot.namespace(one) for group, one in spaces.items()}
        return bool(self._spaces)

    def _keys(self, chunks: list[bytes], context: Any) -> list[Any]:
        places = context.get_state(RequestChunks)
        if places is None:
            places = RequestChunks(self._chunk_tokens)
            context.set_state(places)
        ends: Mapping[bytes, int] = context._offload_key_positions
        parents = [places.parent(chunk, ends) for chunk in chunks]
        return keys_of(self._spaces, chunks, parents)
