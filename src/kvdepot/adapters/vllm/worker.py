"""The connector in vLLM's worker: carries out step plans on its pages, and times steps."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kvdepot.adapters.audit import BlockAuditor
from kvdepot.adapters.tensors import open_mover
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import EngineGroup, layer_groups
from kvdepot.adapters.vllm.identity import ServedGroup, producer_of, shard_facts
from kvdepot.adapters.vllm.loaded_weights import LoadedAdapters
from kvdepot.adapters.vllm.messages import (
    BlockOrigin,
    GroupBlocks,
    SaveJob,
    StepPlan,
    StepReport,
    StepTime,
    WorkerRank,
)
from kvdepot.adapters.vllm.metrics import Counts, take_counts, warn
from kvdepot.adapters.vllm.namespaces import known_weights, namespaces
from kvdepot.adapters.vllm.page_transfer import (
    BlockTarget,
    Loader,
    PagedCache,
    Saver,
    page_tensors,
)
from kvdepot.adapters.vllm.shards import HeadPart, find_shard, parts_of
from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.units import format_bytes
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError, ModelError

_logger = logging.getLogger("vllm.kvdepot")
_IDLE_WAIT_S: Final = 0.005
"""A step without work waits this long for a load: vLLM would only ask again at once."""


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """Requests by which of their transfers have ended."""

    sent: set[str]
    """No save reads their pages any more."""
    received: set[str] = field(default_factory=set)
    """Their loads have ended."""
    failed: set[str] = field(default_factory=set)
    """The requests among `received` whose loads failed entirely."""


class ConnectorWorker:
    """Carries out step plans. Belongs to the engine's thread."""

    def __init__(
        self,
        engine: Any,
        cache: Any,
        config: ConnectorConfig,
        store: Depot,
        loaded: LoadedAdapters,
        caches: Mapping[str, object],
        place: WorkerRank,
    ) -> None:
        """`cache`: vLLM's KVCacheConfig. `caches`: the pages of each layer. ModelError or
        ConfigError if they cannot be served."""
        self._config = config
        self._store = store
        self._loaded = loaded
        self.counts: Counts = defaultdict(float)
        groups = _served_groups(engine, cache, caches, place)
        self.facts = facts = shard_facts(engine, cache, groups, config, place)
        self._tags: dict[BlockOrigin, list[list[bytes]]] = {}
        """Tags of the namespaces in use, by origin and group."""
        if known_weights(facts, config):
            self._register(BlockOrigin())
        device = groups[0][1].device
        self.mover = open_mover(lambda: store.memory, device)
        self._drops_pages = any(group.rule.kind != "full" for group in facts.groups)
        self.caches = [
            PagedCache(of_group, tensors, self.mover, facts.grain)
            for of_group, (_, tensors, _) in zip(facts.groups, groups, strict=True)
        ]
        auditor = BlockAuditor(store, config.audit, producer_of(facts), _logger)
        self.loader = Loader(store, self.caches, self.counts, config.load_threads)
        self.saver = Saver(store, self.caches, self.counts, auditor)
        is_first = not place.rank and not place.stage
        self._timer = StepTimer(device, place.stages) if is_first else None
        self._invalid: set[int] = set()
        self._awaited: set[str] = set()
        self._report = StepReport()

    def preempt(self, plan: StepPlan) -> None:
        """Order saves before the step, which may write to pages that vLLM has taken back; call
        first. vLLM waits for `awaited` pages itself, but not for those of preempted requests, nor
        for those that fell out of a window or hold an earlier state."""
        if plan.preempted or self._drops_pages:
            self.saver.order_stream_after_reads()

    def begin(self, plan: StepPlan) -> None:
        """Start the loads and probes of the step; call before its computation."""
        if plan.loads:
            self.loader.start_after_stream()
        for job in (*plan.loads, *plan.probes):
            self.loader.submit(
                job,
                [target for blocks in job.groups for target in self._targets(job.origin, blocks)],
            )
        if self._timer is not None and plan.new_tokens:
            self._timer.start()

    def save(self, plan: StepPlan) -> None:
        """Save the complete blocks of the step; call after its computation."""
        if self._timer is not None:
            self._timer.stop(plan.new_tokens, plan.attention)
            self._report.steps += self._timer.take()
        for job in plan.saves:
            keys = self._keys(job.origin, job.blocks)
            if keys:
                self.saver.save(job, keys)
            elif not job.is_audit:
                self._unsaved(job, job.blocks.first_block)
        self._awaited.update(plan.awaited)

    def _unsaved(self, job: SaveJob, group_block: int) -> None:
        """Blocks from this one of a group on are not in the depot."""
        block = self.caches[job.blocks.group].request_block(group_block)
        first = self._report.unsaved.get(job.request_id, block)
        self._report.unsaved[job.request_id] = min(first, block)

    def finished(self, plan: StepPlan) -> FinishedTransfers:
        """The transfers that have ended since the last step."""
        for job, block in self.saver.take_unsaved():
            self._unsaved(job, block)
        reading = set() if self.facts.saves_settle_at_once else self.saver.reading_requests()
        finished = FinishedTransfers(self._awaited - reading)
        self._awaited &= reading
        for load in self.loader.take(_IDLE_WAIT_S if plan.idle else 0.0):
            if load.job.origin.generation != plan.generation:
                # It brought KV of other weights, or of before a reset.
                pages = [blocks.pages[blocks.present_pages :] for blocks in load.job.groups]
                end = replace(load.end, failed_block=0)
                load = replace(load, end=end, failed_pages=frozenset().union(*pages))
            self._report.loads.append(load.end)
            if not load.job.groups[0].pages:
                continue
            finished.received.add(load.job.request_id)
            if load.job.whole and load.failed_pages:
                finished.failed.add(load.job.request_id)
            else:
                self._invalid |= load.failed_pages
        return finished

    def metrics(self) -> dict[str, float] | None:
        return take_counts(self.counts)

    def take_invalid(self) -> set[int]:
        """Pages that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        report.adapters = self._loaded.take_fresh()
        return report or None

    def close(self) -> None:
        """Wait for transfers in progress, and release the depot's memory."""
        self.loader.close()
        self.saver.close()
        self.mover.close()

    def _register(self, origin: BlockOrigin) -> None:
        """Register namespaces: this worker's, or those of another number of shards."""
        groups = [
            [self._store.namespace(space) for space in spaces]
            for spaces in namespaces(self.facts, self._config, origin)
        ]
        spaces = [space for group in groups for space in group]
        if not origin.shards:
            number = self._store.audits.producer(producer_of(self.facts))
            for space in spaces:
                space.made_by(number)
        self._tags[origin] = [[space.tag for space in group] for group in groups]
        for space in spaces:
            _logger.info(
                "kvdepot: blocks of %d tokens, %s each, namespace %s; the depot has %d blocks",
                space.layout.block_tokens,
                format_bytes(space.block_bytes),
                space.tag.hex(),
                self._store.stats().get("blocks", 0),
            )

    def _targets(self, origin: BlockOrigin, blocks: GroupBlocks) -> list[BlockTarget]:
        """The blocks of one group of a load, with their pages; of other shards those parts that
        make up this worker's."""
        cache, targets = self.caches[blocks.group], []
        shard, ratio = cache.facts.shard, cache.facts.pages_per_block
        parts: list[HeadPart | None] = [None]
        if origin.shards and not shard.whole:
            parts = [*parts_of(shard, origin.shards)]
        keys = iter(self._keys(origin, blocks))
        for number in range(len(blocks.keys[0])):
            start = number * ratio
            pages = blocks.pages[max(start, blocks.present_pages) : start + ratio]
            place = cache.request_block(blocks.first_block + number)
            targets += [BlockTarget(next(keys, None), cache, place, pages, each) for each in parts]
        return targets

    def _keys(self, origin: BlockOrigin, blocks: GroupBlocks) -> Sequence[BlockKey]:
        """This worker's keys; of several shards the keys of each block one after another. Registers
        the namespaces if they are new. Empty if that fails, or if vLLM has loaded another LoRA
        since the keys were made: the load or save fails then."""
        try:
            if origin.adapter and not self._loaded.has(origin.adapter.rpartition(" ")[2]):
                raise ModelError("vLLM has loaded other weights as this LoRA")
            if origin not in self._tags:
                self._register(origin)
            by_tag = {keys[0][:TAG_BYTES]: keys for keys in blocks.keys if keys}
            tags = self._tags[origin][blocks.group]
            if len(tags) > 1:
                shard = self.facts.groups[blocks.group].shard
                tags = [tags[part.rank] for part in parts_of(shard, origin.shards)]
            if any(tag not in by_tag for tag in tags):
                raise ModelError("the scheduler has other namespaces than this worker")
        except KVDepotError as error:
            warn("blocks have no namespace in the depot", error)
            self.counts["depot_errors:register"] += 1
            return ()
        return [key for keys in zip(*(by_tag[tag] for tag in tags), strict=True) for key in keys]


def _served_groups(
    engine: Any, cache: Any, caches: Mapping[str, object], place: WorkerRank
) -> list[ServedGroup]:
    """The groups that have pages on this worker, each with its shard."""
    groups: list[ServedGroup] = []
    layout = str(getattr(cache, "kv_cache_layout", ""))
    for group in layer_groups(cache):
        for names, tensors in page_tensors(caches, group.layer_names, cache.num_blocks):
            first: Any = caches[names[0]]
            shard, reason = find_shard(
                engine,
                layout,
                group.layer_specs[names[0]],
                first,
                (place.rank, place.ranks, cache.num_blocks),
            )
            if reason:
                _logger.info(
                    "kvdepot: blocks of layer %s are read at this tensor-parallel size only: %s",
                    names[0],
                    reason,
                )
            groups.append((EngineGroup(group.rule, names, group.spec), tensors, shard))
    if not groups:
        raise ModelError("a pipeline stage has no layer with a KV cache that can be saved")
    return groups


class StepTimer:
    """Measures the computation of steps, as the device sees it. On CUDA results come some steps
    later. Pipeline stages are assumed to be alike: the first one's time stands for all."""

    def __init__(self, device: torch.device, stages: int = 1) -> None:
        self._stages = stages
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self._pending: list[tuple[Any, Any, int, float]] = []
        self._ended: list[StepTime] = []

    def start(self) -> None:
        self._started = self._now()

    def stop(self, tokens: int, attention: float) -> None:
        """The step has ended, or was handed to the device."""
        started, self._started = self._started, None
        if started is None or not tokens:
            return
        if self._cuda:
            self._pending.append((started, self._now(), tokens, attention))
        else:
            seconds = (self._now() - started) * self._stages
            self._ended.append(StepTime(tokens, attention, seconds))

    def take(self) -> list[StepTime]:
        """The steps that have ended since the last call."""
        while self._pending and self._pending[0][1].query():
            started, ended, tokens, attention = self._pending.pop(0)
            seconds = started.elapsed_time(ended) / 1e3 * self._stages
            self._ended.append(StepTime(tokens, attention, seconds))
        taken, self._ended = self._ended, []
        return taken

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
