"""The connector in vLLM's worker: carries out step plans on its pages, and times steps."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import TensorMover, open_mover
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import EngineGroup, layer_groups, pages_per_block
from kvdepot.adapters.vllm.identity import (
    ServedGroup,
    known_weights,
    namespaces_at,
    namespaces_of,
    producer_of,
    shard_facts,
)
from kvdepot.adapters.vllm.messages import (
    START,
    Generation,
    LoadEnd,
    LoadJob,
    SaveJob,
    ShardFacts,
    StepPlan,
    StepReport,
    StepTime,
    TierTime,
    TransferJob,
    WorkerRank,
)
from kvdepot.adapters.vllm.metrics import ConnectorCounts, RateLimitedWarnings
from kvdepot.adapters.vllm.page_transfer import (
    FinishedLoad,
    Loader,
    PagedCache,
    Saver,
    page_tensors,
)
from kvdepot.adapters.vllm.shards import HeadPart, find_shard, interleaved, parts_of
from kvdepot.adapters.vllm.shared_depot import SharedDepot
from kvdepot.adapters.vllm.weights import LoadedAdapters
from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.core.units import format_bytes
from kvdepot.errors import KVDepotError, ModelError

_logger = logging.getLogger("vllm.kvdepot")
_IDLE_WAIT_S: Final = 0.005
"""How long a step without work waits for a load: vLLM would only ask again at once."""


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """Requests by what is over for them."""

    sent: set[str]
    """Their pages are not read any more."""
    received: set[str] = field(default_factory=set)
    """Their loads are over."""
    failed: set[str] = field(default_factory=set)
    """Of these the ones that have nothing of their loads."""


class ConnectorWorker:
    """Carries out step plans. Belongs to the engine's thread."""

    def __init__(
        self, engine: Any, cache: Any, config: ConnectorConfig, depot: SharedDepot
    ) -> None:
        self._layer_groups = layer_groups(cache)
        self._engine = engine
        self._cache = cache
        self._config = config
        self._depot = depot
        self.counts = ConnectorCounts()
        self._warnings = RateLimitedWarnings()
        self._tags: dict[tuple[str, Generation, int], list[list[bytes]]] = {}
        """Of the namespaces in use, for each adapter, generation and number of shards (0: as here):
        for each group those of its shards, or only this worker's."""
        self.loaded = LoadedAdapters()
        self._facts: ShardFacts | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._timer: StepTimer | None = None
        self._mover: TensorMover | None = None
        self._drops_pages = False
        self._parts: dict[str, list[FinishedLoad]] = {}
        """Of loads of several groups those that are over."""
        self._invalid: set[int] = set()
        self._awaited: set[str] = set()
        self._report = StepReport()

    @property
    def facts(self) -> ShardFacts:
        if self._facts is None:
            raise ModelError("vLLM has not registered its KV caches")
        return self._facts

    def register(self, caches: Mapping[str, object], place: WorkerRank) -> None:
        """Use these pages. ModelError or ConfigError if they cannot be served."""
        groups = self._served_groups(caches, place)
        self._facts = shard_facts(self._engine, self._cache, groups, self._config, place)
        store = self._depot.store
        if known_weights(self._facts, self._config):
            self._use("", START)
        device = groups[0].tensors.device
        mover = self._mover = open_mover(lambda: store.memory, device)
        self._drops_pages = any(each.group.rule.kind != "full" for each in groups)
        grain = self._facts.grain
        pages = [
            PagedCache(
                each.tensors,
                mover,
                pages_per_block(each.group.rule, grain),
                KVLayout.from_description(facts.layout),
                each.shard.axis,
            )
            for each, facts in zip(groups, self._facts.groups, strict=True)
        ]
        self._loader = Loader(store, pages, self.counts, self._config.load_threads)
        auditor = BlockAuditor(store, self._config.audit, producer_of(self._facts), _logger)
        self._saver = Saver(store, pages, self.counts, auditor)
        if not place.rank and not place.stage:
            self._timer = StepTimer(device, place.stages)

    def _served_groups(self, caches: Mapping[str, object], place: WorkerRank) -> list[ServedGroup]:
        """The groups with pages on this worker, each with its shard."""
        pages, found = self._cache.num_blocks, []
        layout = str(getattr(self._cache, "kv_cache_layout", ""))
        where = (place.rank, place.ranks, pages)
        for group in self._layer_groups:
            for names, tensors in page_tensors(caches, group.layer_names, pages):
                first: Any = caches[names[0]]
                spec = group.layer_specs[names[0]]
                shard, reason = find_shard(self._engine, layout, spec, first, where)
                if reason:
                    _logger.info(
                        "kvdepot: layer %s is read at this tensor-parallel size only: %s",
                        names[0],
                        reason,
                    )
                found.append(
                    ServedGroup(EngineGroup(group.rule, names, group.spec), tensors, shard)
                )
        if not found:
            raise ModelError("a pipeline stage has no layer with a KV cache that could be kept")
        return found

    def preempt(self, plan: StepPlan) -> None:
        """Before anything of the step: pages that vLLM has taken back may be written to in it.

        vLLM waits for `awaited` ones itself, but not for those of preempted requests, nor for those
        that fell out of a window or hold an earlier state.
        """
        if self._saver is not None and (plan.preempted or self._drops_pages):
            self._saver.order_stream_after_reads()

    def begin(self, plan: StepPlan) -> None:
        """Before the step's computation: start its loads and probes, which go on beside it."""
        assert self._loader is not None
        if plan.loads:
            self._loader.start_after_stream()
        for job in (*plan.loads, *plan.probes):
            self._loader.submit(job, self._keys(job, job.shards), self._parts_of(job))
        if self._timer is not None and plan.new_tokens:
            self._timer.start()

    def save(self, plan: StepPlan) -> None:
        """After the step's computation: its complete blocks go to the depot."""
        assert self._saver is not None
        if self._timer is not None:
            self._timer.stop(plan.new_tokens, plan.attention)
            self._report.steps += self._timer.take()
        for job in plan.saves:
            keys = self._keys(job)
            if job.audit:
                for key in keys:
                    self._saver.audit(job, key)
                continue
            if keys:
                self._saver.save(job, keys)
            else:
                self._unsaved(job, job.first_block)
        for job, block in self._saver.take_unsaved():
            self._unsaved(job, block)
        self._awaited.update(plan.awaited)

    def _unsaved(self, job: SaveJob, group_block: int) -> None:
        """Blocks of a request from this one of a group on are not in the depot."""
        block = self._request_block(job.group, group_block)
        first = self._report.unsaved.get(job.request_id, block)
        self._report.unsaved[job.request_id] = min(first, block)

    def finished(self, plan: StepPlan) -> FinishedTransfers:
        """What is over since the last step."""
        assert self._loader is not None
        assert self._saver is not None
        reading = self._saver.reading_requests()
        if self.facts.saves_settle_at_once:
            reading = set()
        finished = FinishedTransfers(self._awaited - reading)
        self._awaited &= reading
        for one in self._loader.take(_IDLE_WAIT_S if plan.idle else 0.0):
            if one.job.generation != plan.generation:
                one = _failed(one)
            parts = self._parts.setdefault(one.job.request_id, [])
            parts.append(one)
            if len(parts) == one.job.jobs:
                self._load_over(self._parts.pop(one.job.request_id), finished)
        return finished

    def _load_over(self, parts: list[FinishedLoad], finished: FinishedTransfers) -> None:
        """All groups of a load are over."""
        job = parts[0].job
        self._report.loads.append(self._joined(parts))
        if not job.pages:
            return
        finished.received.add(job.request_id)
        failed_pages = frozenset[int]().union(*(one.failed_pages for one in parts))
        if job.whole and failed_pages:
            finished.failed.add(job.request_id)
        else:
            self._invalid |= failed_pages

    def _joined(self, parts: list[FinishedLoad]) -> LoadEnd:
        """The ends of a load's jobs as one. Blocks are counted as the first group has them."""
        parts.sort(key=lambda one: one.job.group)
        ends = [one.end for one in parts]
        failed = [
            self._request_block(one.job.group, one.end.failed_block)
            for one in parts
            if one.end.failed_block is not None
        ]
        times: dict[str, TierTime] = {}
        for each in (each for end in ends for each in end.times):
            known = times.get(each.tier, TierTime(each.tier, each.blocks, 0, 0.0))
            nbytes, seconds = known.nbytes + each.nbytes, max(known.seconds, each.seconds)
            times[each.tier] = TierTime(each.tier, known.blocks, nbytes, seconds)
        late = next((end.late_blocks for end in ends if end.late_blocks), 0)
        seconds = max(end.seconds for end in ends)
        first = min(failed, default=None)
        return LoadEnd(ends[0].request_id, first, tuple(times.values()), late, seconds)

    def _request_block(self, group: int, block: int) -> int:
        """The block of the request that a group's block lies in."""
        tokens = KVLayout.from_description(self.facts.groups[group].layout).block_tokens
        return block * tokens // self.facts.grain

    def metrics(self) -> dict[str, float] | None:
        return self.counts.take()

    def take_invalid(self) -> set[int]:
        """Pages that were to be loaded and are not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        report.adapters = self.loaded.take_fresh()
        return report or None

    def close(self) -> None:
        """Finish what is under way and let go of the depot."""
        for part in (self._loader, self._saver, self._mover):
            if part is not None:
                part.close()
        self._depot.close()

    def _use(self, adapter: str, generation: Generation, shards: int = 0) -> None:
        """Register namespaces that are new: this worker's, or of so many shards."""
        store, facts, config = self._depot.store, self.facts, self._config
        if shards:
            groups = namespaces_at(facts, config, adapter, shards, generation)
        else:
            groups = [[space] for space in namespaces_of(facts, config, adapter, generation)]
        handles = [[store.register(space) for space in spaces] for spaces in groups]
        if not shards:
            number = store.audits.producer(producer_of(self.facts))
            for (space,) in handles:
                space.made_by(number)
        self._tags[adapter, generation, shards] = [
            [space.tag for space in spaces] for spaces in handles
        ]
        for space in (space for spaces in handles for space in spaces):
            _logger.info(
                "kvdepot: blocks of %d tokens, %s each, namespace %s; the depot has %d blocks",
                space.layout.block_tokens,
                format_bytes(space.block_bytes),
                space.tag.hex(),
                store.stats().get("blocks", 0),
            )

    def _parts_of(self, job: LoadJob) -> list[HeadPart]:
        """Where the blocks of a load go in the pages; none: they fill them."""
        shard = self.facts.groups[job.group].shard
        return parts_of(shard, job.shards) if job.shards and not shard.whole else []

    def _keys(self, job: TransferJob, shards: int = 0) -> Sequence[BlockKey]:
        """This worker's keys; of several shards those of a block one after another. Registers the
        namespaces of their adapter if they are new.

        None where that fails, or where vLLM has loaded another LoRA since the keys were made: then
        loads and saves fail one by one.
        """
        try:
            if job.adapter and not self.loaded.has(job.adapter.rpartition(" ")[2]):
                raise ModelError("vLLM has loaded other weights as this LoRA")
            if (job.adapter, job.generation, shards) not in self._tags:
                self._use(job.adapter, job.generation, shards)
            return self._pick(job, shards)
        except KVDepotError as error:
            self._warnings.warn("an adapter has no place in the depot", error)
            self.counts.add("depot_errors", 1, "register")
            return ()

    def _pick(self, job: TransferJob, shards: int) -> Sequence[BlockKey]:
        """Of a job's keys those that this worker needs, by their namespaces."""
        by_tag = {keys[0][:TAG_BYTES]: keys for keys in job.keys if keys}
        tags = self._tags[job.adapter, job.generation, shards][job.group]
        if len(tags) > 1:
            parts = parts_of(self.facts.groups[job.group].shard, shards)
            tags = [tags[part.rank] for part in parts]
        if any(tag not in by_tag for tag in tags):
            raise ModelError("the scheduler has other namespaces than this worker")
        lists = [by_tag[tag] for tag in tags]
        return lists[0] if len(lists) == 1 else list(interleaved(lists))


def _failed(load: FinishedLoad) -> FinishedLoad:
    """A load that brought what other weights computed, or what was there before a reset: as if it
    had brought nothing."""
    job = load.job
    end = replace(load.end, failed_block=job.first_block)
    return replace(load, end=end, failed_pages=frozenset(job.pages[job.present_pages :]))


class StepTimer:
    """How long the model computes in a step, as the device sees it. On CUDA results come some
    steps later. Pipeline stages are taken to be alike: the first one's time is that of all."""

    def __init__(self, device: torch.device, stages: int = 1) -> None:
        self._stages = stages
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self._pending: list[tuple[Any, Any, int, float]] = []
        self._over: list[StepTime] = []

    def start(self) -> None:
        self._started = self._now()

    def stop(self, tokens: int, attention: float) -> None:
        """It ends, or has been handed to the device."""
        started, self._started = self._started, None
        if started is None or not tokens:
            return
        if self._cuda:
            self._pending.append((started, self._now(), tokens, attention))
        else:
            self._over.append(StepTime(tokens, attention, (self._now() - started) * self._stages))

    def take(self) -> list[StepTime]:
        """The steps that are over."""
        while self._pending and self._pending[0][1].query():
            started, ended, tokens, attention = self._pending.pop(0)
            seconds = started.elapsed_time(ended) / 1e3 * self._stages
            self._over.append(StepTime(tokens, attention, seconds))
        over, self._over = self._over, []
        return over

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
