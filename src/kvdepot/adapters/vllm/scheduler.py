"""The connector in vLLM's scheduler: looks prompts up in the depot, plans loads and saves.

`match` looks a prompt up and asks `fetch_decision` how much of it to fetch; `allocated` plans the
load; `plan` plans the saves of a step. Never touches bytes of blocks. The workers are known when
they have registered their pages (`set_workers`), before the first request.
"""

import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.adapters.audit import HitChooser
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.fetch_decision import FetchDecider, speeds_file
from kvdepot.adapters.vllm.loaded_weights import WatchedWeights
from kvdepot.adapters.vllm.lookup import PrefixLookup
from kvdepot.adapters.vllm.messages import (
    DRIVES,
    BlockOrigin,
    Generation,
    GroupBlocks,
    LoadJob,
    ShardFacts,
    StepPlan,
    StepReport,
)
from kvdepot.adapters.vllm.metrics import Counts, take_counts, warn
from kvdepot.adapters.vllm.namespaces import EngineNamespaces
from kvdepot.adapters.vllm.queue_hints import QueueHints
from kvdepot.adapters.vllm.requests import (
    DepotHit,
    EngineRequest,
    PageTables,
    Phase,
    TrackedRequest,
)
from kvdepot.core.block import BlockKey
from kvdepot.core.block_wait import BlockWait
from kvdepot.core.first_token import FirstToken
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillPace, drive_profiles

_logger = logging.getLogger("vllm.kvdepot")
_PROBE: Final = "probe "
"""Prefix of the request id of a load that only measures."""
_IDLE_S: Final = 0.005
"""The longest pause of a step that computes nothing while requests wait for another machine."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The configuration of the engine, as far as it matters here."""

    chunk_tokens: int
    """The most tokens of one step."""
    shares_pages: bool
    """Blocks that one request has loaded are found by others in vLLM's own prefix cache."""
    drafts_ahead: bool = False
    """The KV of draft layers (EAGLE, MTP) depends on the token after it: the last block before the
    end of a hit is right only if the next token is the same too."""
    loads: bool = True
    saves: bool = True


class ConnectorScheduler:
    """Follows the requests of one engine. Belongs to the scheduler's thread."""

    def __init__(self, config: ConnectorConfig, store: Depot, engine: EngineFacts) -> None:
        self._config = config
        self._store = store
        self.engine = replace(engine, saves=engine.saves and config.save != "none")
        self.counts: Counts = defaultdict(float)
        self.weights = WatchedWeights()
        self.names = EngineNamespaces(config, store)
        self._lookup = PrefixLookup(store, self.names, self.counts)
        self.decider: FetchDecider | None = None
        """None: everything is fetched, or the weights are not known yet."""
        self._chooser = HitChooser(config.audit)
        self.hints = QueueHints(store, config.hint if engine.loads else 0.0)
        self._tracked: dict[str, TrackedRequest] = {}
        self._unplaced: dict[str, EngineRequest] = {}
        """Requests that have computed nothing, and whose generation is not known yet."""
        self._left: set[str] = set()
        """Requests that are not served any more, and whose pages saves may still read."""
        self._loading: dict[str, frozenset[BlockKey]] = {}
        """Requests that are being loaded, with the keys of their first group and shard."""
        self._plan = StepPlan()

    def set_workers(self, workers: Iterable[ShardFacts]) -> None:
        """ModelError if the workers do not make up one model."""
        self.names.set_workers(workers, drafts_ahead=self.engine.drafts_ahead)
        self.is_ready()

    def is_ready(self) -> bool:
        """True if requests can be served: the workers and their weights are known."""
        if not self.names.are_known():
            return False
        if self._config.decide and self.decider is None:
            groups = self.names.groups
            spaces = self.names.spaces(BlockOrigin(generation=self.names.generation))
            counted = [spaces[group] for group in groups.full] or spaces
            self.decider = FetchDecider(
                groups.grain,
                sum(space.block_bytes for group in counted for space in group),
                self.engine.chunk_tokens,
                speeds_path=speeds_file(self._config.speeds, spaces[0][0].tag),
                drives=drive_profiles(self._store.stats()),
                report=self.report,
            )
        return True

    def report(self, measured: PrefillPace | FirstToken) -> None:
        """Report what was measured to the depot, for its ledger, dashboard and metrics."""
        if isinstance(measured, FirstToken):
            try:
                self._store.admin.report_first_token(measured)
            except (KVDepotError, OSError) as error:
                warn("the time to a first token could not be reported to the depot", error)
            return
        spaces = self.names.registered()
        if self.names.groups.full and spaces:
            # Each worker loads its shard of the first group's blocks, and all shards together
            # stand for the tokens once.
            share = spaces[0][0].namespace.shard_size / len(self.names.workers)
            token_s = measured.token_s + measured.step_s / max(1, self.engine.chunk_tokens)
            tags = [space.tag for group in spaces for space in group]
            self.hints.prefill.report(tags, share * token_s, share * measured.pair_s)

    def add(self, request: EngineRequest) -> None:
        """A new request. One that cannot be served is left to vLLM, and counted."""
        if getattr(request, "prompt_embeds", None) is not None:
            self.counts["unserved_requests:prompt_embeds"] += 1
        elif getattr(request, "resumable", False):
            self.counts["unserved_requests:streaming_input"] += 1
        elif not self.names.workers:
            self.counts["unserved_requests:no_pages"] += 1
        elif self.weights.in_question:
            self._unplaced[request.request_id] = request
        else:
            self._place(request)

    def _place(self, request: EngineRequest) -> None:
        """Follow a request that has computed nothing, in the current generation."""
        reason = "weights_unknown"
        try:
            if self.weights.name is not None and self.weights.cache_stale:
                reason = "stale_prefix_cache"
            elif self.weights.name is not None and self.is_ready():
                tracked = TrackedRequest(request, self.names.keys_of(request))
                if self.engine.loads and self._config.wait and self.names.groups.full:
                    limits = self._config.wait, self._config.wait_idle
                    tracked.wait = BlockWait(time.monotonic(), *limits)
                self._tracked[request.request_id] = tracked
                self.hints.queued(tracked)
                return
        except (KVDepotError, OSError) as error:
            warn("a LoRA cannot be served", error)
            reason = "adapter"
        self.counts[f"unserved_requests:{reason}"] += 1

    def match(self, request: EngineRequest, local_tokens: int) -> int | None:
        """The number of tokens beyond vLLM's own that are to be loaded. Changes nothing in the
        depot. None, to be asked again: another request is loading the same blocks, which vLLM will
        find then; or another machine is about to commit some (setting `wait`)."""
        self._settle()
        if request.request_id in self._unplaced:
            self._place(self._unplaced.pop(request.request_id))
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self.engine.loads or request.skip_reading_prefix_cache:
            return 0
        groups, grain = self.names.groups, self.names.groups.grain
        # vLLM always computes the last token of a prompt, from the state or the window before it.
        blocks = (request.num_tokens - (1 if groups.others else 0)) // grain
        if tracked.limit is not None:
            blocks = min(blocks, tracked.limit)
        tracked.keys.grow(blocks)
        if self._is_loading(tracked, local_tokens // grain, blocks):
            self.hints.begun(request.request_id)
            return None
        if tracked.wait is not None and time.monotonic() < tracked.wait.look_s:
            return None
        hit = self._lookup.find(tracked, local_tokens, blocks)
        if tracked.wait is not None and self._awaits(tracked, tracked.wait, hit, blocks):
            return None
        stop = hit.stop_block
        if self.decider is not None and stop * grain > local_tokens:
            decided = self.decider.decide(tracked, hit, self._tracked.values()).stop_block
            if decided < stop:
                keys = tracked.keys_at(hit.shards)
                stop = self._lookup.last_boundary(keys, local_tokens, decided)
        if stop * grain > local_tokens and not hit.shards:
            stop = self._without_audited(tracked, local_tokens, stop)
        return max(0, stop * grain - local_tokens)

    def _without_audited(self, tracked: TrackedRequest, local_tokens: int, stop: int) -> int:
        """The end of a hit: without its last block, if that one is chosen to be computed again."""
        if tracked.may_audit and self.engine.saves and self.names.groups.full:
            tracked.may_audit = False
            key = tracked.keys.of(0, stop - 1, stop)[0][0]
            if self._chooser.choose(key, busy=len(self._tracked) > 1):
                tracked.saves.audited = stop - 1
        audited = tracked.saves.audited
        if audited is None or stop <= audited:
            return stop
        return self._lookup.last_boundary(tracked.keys, local_tokens, audited)

    def _awaits(self, tracked: TrackedRequest, wait: BlockWait, hit: DepotHit, blocks: int) -> bool:
        """True if blocks that another machine is about to commit may still arrive in time. Those
        that have arrived are read into memory."""
        now_s, before, stop = time.monotonic(), wait.found, hit.stop_block
        first = before if wait.note(now_s, stop) and before is not None else stop
        if stop < blocks and wait.left_s(now_s) > 0:
            try:
                hints = [
                    self._store.prefetch(keys, wait.until_s - now_s)
                    for keys in tracked.keys.of(0, first, stop + 1)
                ]
            except KVDepotError as error:
                warn("the depot accepts no hints", error)
            else:
                if all(hint.may_come for hint in hints):
                    return True
        tracked.wait = None
        return False

    def _rest(self) -> None:
        """Leave the processor to others while requests wait for another machine, which vLLM asks
        for again and again."""
        looks = [one.wait.look_s for one in self._tracked.values() if one.wait is not None]
        if looks:
            time.sleep(max(0.0, min(min(looks) - time.monotonic(), _IDLE_S)))

    def _is_loading(self, tracked: TrackedRequest, first: int, blocks: int) -> bool:
        """True if another request loads the next blocks, which vLLM will share."""
        is_shared = self.engine.shares_pages and self.names.groups.full
        if not (is_shared and self._loading) or first >= blocks:
            return False
        key = tracked.keys.of(0, first, first + 1)[0][0]
        return any(key in keys for keys in self._loading.values())

    def allocated(self, request_id: str, tables: PageTables, external_tokens: int) -> None:
        """vLLM has given a request its pages, also for the external tokens."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not external_tokens:
            return
        self.hints.begun(request_id)
        job, hit = tracked.begin_load(external_tokens, tables), tracked.hit
        assert hit is not None
        stop = (hit.local_tokens + external_tokens) // self.names.groups.grain
        tiers = hit.tiers[: stop - hit.first_block]
        timeout_s, recompute_s = self._config.load_timeout, 0.0
        decision = tracked.decided.decision if tracked.decided is not None else None
        if self.decider is not None:
            self.decider.load_started(request_id, tiers, decision)
        if decision is not None:
            timeout_s = min(timeout_s, decision.deadline_s)
            recompute_s = min(self._config.load_timeout - timeout_s, decision.saved_s)
        from_drives = not DRIVES.isdisjoint(tiers)
        self._plan.loads.append(
            replace(job, timeout_s=timeout_s, recompute_s=recompute_s, next_queued=from_drives)
        )
        part = job.groups[0]
        end = part.first_block + len(part.keys[0])
        self._loading[request_id] = frozenset(tracked.keys.of(part.group, part.first_block, end)[0])
        self.counts["hit_tokens"] += external_tokens
        if hit.shards:
            self.counts["resharded_tokens"] += external_tokens

    def sources(self, request_id: str, external_tokens: int) -> Counter[str]:
        """The external tokens of a request by the tier that they come from."""
        counts: Counter[str] = Counter()
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.hit is None:
            return counts
        hit, grain = tracked.hit, self.names.groups.grain
        stop = hit.local_tokens + external_tokens
        for block, tier in enumerate(hit.tiers, hit.first_block):
            start = max(block * grain, hit.local_tokens)
            counts[tier] += max(0, min((block + 1) * grain, stop) - start)
        return +counts

    def _settle(self) -> None:
        """Begin a new generation if vLLM has loaded other weights; call before it computes."""
        weights = self.weights
        if not (weights.in_question and weights.settle()):
            return
        name = "unknown" if weights.name is None else weights.name
        self._begin(replace(self.names.generation, weights=name))
        if weights.name is None:
            return
        self.counts["weight_changes"] += 1
        if weights.cache_stale:
            _logger.warning(
                "kvdepot: nothing is served or saved before reset_prefix_cache(): vLLM's own prefix"
                " cache may have KV that other weights have computed"
            )

    def _begin(self, generation: Generation) -> None:
        """Blocks belong to this generation from now on. Requests that have computed something are
        not served any more: what they compute next depends on it."""
        self.names.begin(generation)
        for name, tracked in self._tracked.items():
            self.hints.begun(name)
            tracked.decided = None
            if name not in self._loading and not tracked.request.num_computed_tokens:
                self._unplaced[name] = tracked.request
            if tracked.saves.planned:
                self._left.add(name)
        self._tracked.clear()

    def plan(self, output: Any) -> StepPlan:
        """Plan the work of the workers in the step of `output`, vLLM's SchedulerOutput."""
        self._settle()
        plan, self._plan = self._plan, StepPlan()
        scheduled = output.num_scheduled_tokens
        plan.generation = self.names.generation
        plan.idle = not scheduled
        if plan.idle:
            self._rest()
        plan.preempted = bool(output.preempted_req_ids)
        if scheduled and self.engine.shares_pages:
            self.weights.cache_used = True
        step = [
            (self._tracked[name], scheduled[name]) for name in scheduled if name in self._tracked
        ]
        for tracked, tokens in step:
            name = tracked.request.request_id
            if tracked.phase is not Phase.COMPUTING:
                self.hints.begun(name)
            tracked.phase = Phase.COMPUTING
            complete = self._complete(tracked, tokens)
            if self.engine.saves and complete > tracked.saves.offered:
                state = output.kv_connector_block_state
                offers = state.boundary_state_offloads.get(name, ())
                plan.saves += tracked.saves.plan(complete, state.get_block_ids(name), offers)
        if self.decider is not None:
            plan.new_tokens, plan.attention = self.decider.step_planned(step)
            self._plan_probes(plan, self.decider)
        self.hints.after_schedule()
        return plan

    def _plan_probes(self, plan: StepPlan, decider: FetchDecider) -> None:
        """Measure tiers that are passed over, with blocks of full attention."""
        probes, decider.probes = decider.probes, []
        for tracked, first, stop in probes:
            hit, name = tracked.hit, tracked.request.request_id
            is_followed = self._tracked.get(name) is tracked
            if not is_followed or hit is None or hit.shards or not self.names.groups.full:
                continue
            tiers = hit.tiers[first - hit.first_block : stop - hit.first_block]
            decider.load_started(f"{_PROBE}{name}", tiers)
            blocks = GroupBlocks(0, tracked.keys.of(0, first, stop), (), first)
            job = LoadJob(
                f"{_PROBE}{name}", tracked.keys.origin, (blocks,), self._config.load_timeout
            )
            plan.probes.append(replace(job, next_queued=not DRIVES.isdisjoint(tiers)))

    def _complete(self, tracked: TrackedRequest, scheduled: int) -> int:
        """The number of blocks that are complete after the step, and whose tokens are known. vLLM
        may have scheduled tokens that are not sampled yet, or drafts that may be refused."""
        request, known = tracked.request, int(tracked.request.num_tokens)
        if self._config.save == "prompt":
            known = min(known, request.num_prompt_tokens)
        complete = min(int(request.num_computed_tokens) + scheduled, known)
        return complete // self.names.groups.grain

    def step_ended(
        self, report: StepReport | None, loaded: Iterable[str] = (), saved: Iterable[str] = ()
    ) -> None:
        """The workers' report of a step, and the requests whose loads and saves have ended on all
        workers."""
        for request_id in loaded:
            self._loading.pop(request_id, None)
        self.hints.saved(saved)
        if report is None:
            return
        self.names.adapters.update(report.adapters)
        if self.decider is not None:
            self.decider.step_ended(report.steps)
        for end in report.loads:
            if self.decider is not None:
                self.decider.load_ended(end)
            tracked = self._tracked.get(end.request_id)
            if tracked is not None:
                tracked.load_ended(end.failed_block)
            if end.failed_block is not None:
                self.counts["failed_loads"] += 1
        for request_id, block in report.unsaved.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.saves.forget(block)

    def metrics(self) -> dict[str, float] | None:
        """The counts since the last call, and current estimates. None if nothing was counted."""
        counts = take_counts(self.counts)
        if counts is None or self.decider is None:
            return counts
        return counts | self.decider.metrics()

    def finish(self, request: EngineRequest, tables: PageTables) -> bool:
        """A request has ended. Returns whether its pages are kept until the workers report it as
        sent: saves still read them."""
        name = request.request_id
        self._unplaced.pop(name, None)
        tracked = self._tracked.pop(name, None)
        reads_later = not all(each.saves_settle_at_once for each in self.names.workers)
        awaited = name in self._left and reads_later
        self._left.discard(name)
        if tracked is not None:
            if self.decider is not None and request.num_tokens > request.num_prompt_tokens:
                self.decider.answered(tracked)
            is_saving = False
            if self.engine.saves and tracked.phase is Phase.COMPUTING:
                saves = tracked.saves.plan(self._complete(tracked, 0), tables)
                self._plan.saves += saves
                is_saving = bool(saves) or (tracked.saves.planned and reads_later)
            self.hints.finished(request, tracked, is_saving=is_saving)
            awaited = awaited or is_saving
        if awaited:
            self._plan.awaited.append(name)
        return awaited

    def reset(self) -> bool:
        """Use no block any more that is in the depot now, and leave the blocks to other engines.
        False: the depot does not answer, so it is not known what it does with them."""
        self._begin(replace(self.names.generation, reset=uuid.uuid4().hex))
        try:
            self._store.audits.list()
        except KVDepotError as error:
            self.counts["resets:failed"] += 1
            _logger.warning("kvdepot: a reset was not confirmed: %s", str(error))
            return False
        self.counts["resets:done"] += 1
        _logger.info(
            "kvdepot: reset: this engine uses no block from before, and shares none with other "
            "engines until it is started again; `kvdepot remove` deletes blocks for all"
        )
        return True

    def close(self) -> None:
        if self.decider is not None:
            self.decider.write_speeds()
        self.hints.close()
