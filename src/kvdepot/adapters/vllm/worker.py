"""The worker's side: pages on one hand, the depot on the other."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvdepot.adapters.tensors import BlockMover, open_mover
from kvdepot.adapters.vllm.complaints import Complaints
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.depot import Depot
from kvdepot.adapters.vllm.identity import Seat, check_groups, namespace_of, shard_facts
from kvdepot.adapters.vllm.loader import Loader, Target
from kvdepot.adapters.vllm.messages import Job, ShardFacts, StepPlan, StepReport
from kvdepot.adapters.vllm.pages import page_tensors
from kvdepot.adapters.vllm.saver import Saver
from kvdepot.adapters.vllm.stats import Figures, Tally
from kvdepot.adapters.vllm.steptimer import StepTimer
from kvdepot.core.units import format_bytes
from kvdepot.errors import KVDepotError, ModelError

_logger = logging.getLogger("vllm.kvdepot")
_IDLE_WAIT_S: Final = 0.005
"""How long a step without work waits for a load: vLLM would only ask again at once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests by what is over for them."""

    sent: set[str]
    """Their pages are not read any more."""
    received: set[str] = field(default_factory=set)
    """Their loads are over."""
    failed: set[str] = field(default_factory=set)
    """Of these the ones that have nothing of their loads."""


class Worker:
    """Carries out step plans. Belongs to the engine's thread."""

    def __init__(self, engine: Any, cache: Any, config: ConnectorConfig, depot: Depot) -> None:
        check_groups(cache)
        self._engine = engine
        self._cache = cache
        self._config = config
        self._depot = depot
        self.tally = Tally()
        self._complaints = Complaints()
        self._adapters: set[str] = set()
        self._facts: ShardFacts | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._timer: StepTimer | None = None
        self._mover: BlockMover | None = None
        self._drops_pages = False
        self._invalid: set[int] = set()
        self._awaited: set[str] = set()
        self._report = StepReport()

    @property
    def facts(self) -> ShardFacts:
        if self._facts is None:
            raise ModelError("vLLM has not registered its KV caches")
        return self._facts

    def register(self, caches: Mapping[str, object], seat: Seat) -> None:
        """Take the pages over. ModelError or ConfigError if they cannot be served."""
        group = check_groups(self._cache)
        tensors = page_tensors(caches, group.layer_names, self._cache.num_blocks)
        self._facts = shard_facts(self._engine, self._cache, tensors, self._config, seat)
        store = self._depot.store
        space = store.register(namespace_of(self._facts, self._config, ""))
        self._adapters.add("")
        _logger.info(
            "kvdepot: blocks of %d tokens, %s each, namespace %s; the depot has %d blocks",
            space.layout.block_tokens,
            format_bytes(space.block_bytes),
            space.tag.hex(),
            store.stats().get("blocks", 0),
        )
        self._mover = open_mover(store.memory, tensors.device)
        self._drops_pages = bool(getattr(group.kv_cache_spec, "sliding_window", None))
        target = Target(tensors, self._mover, self._facts.pages_per_block)
        self._loader = Loader(store, target, self.tally, self._config.load_threads)
        self._saver = Saver(store, target, self.tally)
        if not self._facts.shard_rank:
            self._timer = StepTimer(tensors.device)

    def preempt(self, plan: StepPlan) -> None:
        """Before anything of the step: pages that vLLM has taken back may be written to in it.

        It waits for `awaited` ones itself, but not for those of preempted requests, nor for those
        that fell out of a window.
        """
        if self._saver is not None and (plan.preempted or self._drops_pages):
            self._saver.yield_pages()

    def begin(self, plan: StepPlan) -> None:
        """The step's computation comes next; loads go on beside it.

        They are of requests that wait, and probes, which nobody waits for.
        """
        assert self._loader is not None
        if plan.loads:
            self._loader.mark()
        for load in (*plan.loads, *plan.probes):
            self._loader.submit(load, self._keys(load))
        if self._timer is not None and plan.new_tokens:
            self._timer.start()

    def save(self, plan: StepPlan) -> None:
        """After the step's computation: its complete blocks go to the depot."""
        assert self._saver is not None
        if self._timer is not None:
            self._timer.stop(plan.new_tokens, plan.attention)
            self._report.steps += self._timer.take()
        for save in plan.saves:
            unsaved = self._saver.save(save, self._keys(save))
            if unsaved is not None:
                self._report.unsaved[save.request_id] = unsaved
        self._awaited.update(plan.awaited)

    def finished(self, plan: StepPlan) -> Finished:
        """What is over since the last step."""
        assert self._loader is not None
        finished = Finished(self._sent())
        for one in self._loader.take(_IDLE_WAIT_S if plan.idle else 0.0):
            self._report.loads.append(one.end)
            if not one.load.pages:
                continue
            finished.received.add(one.load.request_id)
            if one.load.whole and one.failed_pages:
                finished.failed.add(one.load.request_id)
            else:
                self._invalid |= one.failed_pages
        return finished

    def figures(self) -> Figures | None:
        """What was counted since the last call."""
        return self.tally.take()

    def take_invalid(self) -> set[int]:
        """Pages that were to be loaded and are not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report or None

    def close(self) -> None:
        """Finish what is under way and let go of the depot."""
        for part in (self._loader, self._saver, self._mover):
            if part is not None:
                part.close()
        self._depot.close()

    def _sent(self) -> set[str]:
        if not self._awaited:
            return set()
        assert self._saver is not None
        busy = () if self.facts.saves_settle_at_once else self._saver.busy()
        sent = {name for name in self._awaited if name not in busy}
        self._awaited -= sent
        return sent

    def _keys(self, job: Job) -> Any:
        self._know(job.adapter)
        return job.keys[self.facts.shard_rank if len(job.keys) > 1 else 0]

    def _know(self, adapter: str) -> None:
        """Have the namespace of an adapter; without it its loads and saves fail one by one."""
        if adapter in self._adapters:
            return
        try:
            self._depot.store.register(namespace_of(self.facts, self._config, adapter))
        except KVDepotError as error:
            self._complaints.say("an adapter has no place in the depot", error)
            self.tally.add("depot_errors", 1, "register")
            return
        self._adapters.add(adapter)
