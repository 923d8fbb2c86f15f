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
from kvdepot.adapters.vllm_tier.chunks import (
    ChunkJob,
    ChunkTransfers,
    FinishedJob,
    RequestChunks,
    keys_of,
)
from kvdepot.adapters.vllm_tier.config import read
from kvdepot.adapters.vllm_tier.identity import engine_config, identify
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import KVDepotError

_logger = logging.getLogger("vllm.kvdepot")
_SPIN_S: Final = 0.004
"""Steps that follow each other sooner run no model: the engine waits for chunks, and spins."""
_YIELD_S: Final = 0.0002
_POLICIES = {"chunk": OffloadPolicy.CHUNK_LEVEL, "request": OffloadPolicy.REQUEST_LEVEL}


class KVDepotTier(SecondaryTierManager):  # type: ignore[misc]
    """SSDs, hard drives and object storage below vLLM's CPU tier.

    Lookups are answered from the depot's index; what moves bytes runs in threads.
    """

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
        try:
            self._settings = read(settings)
            engine = engine_config(VllmConfig)
            self._identity = identify(
                offloading_spec,
                engine,
                self._settings,
                self.block_size_bytes,
                __version__,
            )
            self._identity.known_weights(self._settings)  # begins to read them
            self._depot = kvdepot.open(self._settings.depot)
        except KVDepotError as error:
            # One line: vLLM buries it under the traces of its processes.
            hint = f"; hint: {error.hint}" if error.hint else ""
            _logger.log(logging.ERROR, "kvdepot: %s%s", error, hint)
            raise
        rows = np.asarray(primary_kv_view)
        self._rows: Any = rows.reshape(len(rows), -1).view(np.uint8)
        self.locality = Locality(self._settings.locality) if self._settings.locality else None
        self._chunk_tokens = {group: tokens for group, tokens, _ in self._identity.groups}
        self._spaces: dict[int, NamespaceHandle] = {}
        self._weights = WatchedWeights()
        self._requests: set[str] = set()
        self._emptied = False
        """vLLM has emptied its CPU tier, and no request has come since."""
        self._used = False
        """Requests may have left something in it since it was emptied while there were none."""
        self._stale = False
        """It may have what other weights computed."""
        if engine is not None:
            self._weights.watch(Executor.get_class(engine), engine.parallel_config)
        self._transfers = ChunkTransfers(
            self._depot, self._settings.load_timeout, self._settings.load_threads
        )
        self._stepped_s = 0.0
        self._failed: dict[str, set[bytes]] = {}
        """Chunks that could not be loaded, by request: it computes them."""
        announces = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = (
            [] if self._settings.enable_kv_events and announces else None
        )

    @property
    def depot(self) -> kvdepot.Depot:
        return self._depot

    def on_new_request(self, req_context: Any) -> Any:
        self._settle()
        self._requests.add(req_context.req_id)
        self._used, self._emptied = True, False
        return RequestOffloadingContext(policy=_POLICIES[self._settings.policy])

    def lookup(self, key: Any, req_context: Any) -> Any:
        if not self._ready() or key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        keys = self._keys([key], req_context)
        return LookupResult.HIT if keys and len(self._depot.match(keys)) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._transfers.store(self._job(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        self._transfers.load(self._job(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        return [self._result(ended) for ended in self._transfers.take()]

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        if self._ready():
            self._depot.touch(self._keys(list(keys), req_context))

    def on_schedule_end(self, context: Any) -> None:
        """Leave the interpreter to the loads for a moment where the engine only waits for them.

        A step that spins keeps it from every thread for 5 ms at a time.
        """
        if self._transfers.loads and time.monotonic() - self._stepped_s < _SPIN_S:
            time.sleep(_YIELD_S)
        self._stepped_s = time.monotonic()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        self._requests.discard(req_context.req_id)
        self._begin_anew()

    def take_events(self) -> Iterable[Any]:
        if self._events:
            events, self._events = self._events, []
            yield from events

    def drain_jobs(self) -> None:
        """vLLM empties its CPU tier: it calls this before, and at no other time."""
        self._transfers.drain()
        self._emptied = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        """If nothing is left of what was computed before: no chunk, and no request."""
        if self._emptied and not self._requests:
            self._used = self._stale = False

    def shutdown(self) -> None:
        """Write down what waits, and let go of vLLM's memory. May be called twice."""
        self._transfers.close()
        self._transfers.take()
        self._rows = None
        self._depot.close()

    def _settle(self) -> None:
        """Take the weights that are loaded for those of the chunks that come."""
        if not self._weights.in_question:
            return
        before = self._weights.name
        if self._weights.settle() == before:
            return
        self._spaces.clear()
        self._stale = self._used
        if self._stale:
            _logger.warning(
                "kvdepot: nothing is served or saved before reset_prefix_cache(reset_connector="
                "True): vLLM's CPU tier may have what other weights computed"
            )

    def _ready(self) -> bool:
        """Whether the weights are known, and so the namespaces."""
        self._settle()
        if self._stale or self._weights.name is None:
            return False
        if not self._spaces:
            weights = self._weights.name or self._identity.known_weights(self._settings)
            if weights:
                spaces = self._identity.namespaces(self._settings, weights)
                self._spaces = {group: self._depot.register(one) for group, one in spaces.items()}
        return bool(self._spaces)

    def _keys(self, chunks: list[bytes], context: Any) -> list[Any]:
        places = context.get_state(RequestChunks)
        if places is None:
            places = RequestChunks(self._chunk_tokens)
            context.set_state(places)
        ends: Mapping[bytes, int] = context._offload_key_positions
        parents = [places.parent(chunk, ends) for chunk in chunks]
        return keys_of(self._spaces, chunks, parents)

    def _job(self, job: Any) -> ChunkJob:
        chunks = list(job.keys)
        numbers = job.chunk_ids.tolist()
        inside = all(0 <= number < len(self._rows) for number in numbers)
        rows = [self._rows[number] for number in numbers] if inside else []
        keys = self._keys(chunks, job.req_context) if inside and self._ready() else []
        return ChunkJob(job.job_id, job.req_context.req_id, chunks, keys, rows, job.is_promotion)

    def _result(self, ended: FinishedJob) -> Any:
        job = ended.job
        if job.is_load and not ended.complete:
            lost = set(job.chunks) - set(ended.done)
            self._failed.setdefault(job.request, set()).update(lost)
        if not job.is_load and ended.done and self._events is not None:
            stored = list(ended.done)
            self._events.append(OffloadingEvent(stored, self.medium, False, self.locality))
        return JobResult(
            job_id=job.number,
            success=ended.complete,
            successful_keys=tuple(ended.done) or None if job.is_load else None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )
