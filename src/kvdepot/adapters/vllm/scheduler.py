"""The connector in vLLM's scheduler: looks prompts up in the depot, plans loads and saves.

`match` looks a prompt up and asks `fetch_decision` how much of it to fetch: up to the last boundary
from which all KV groups can go on. `allocated` plans the load; `plan` plans the saves of a step.
Never touches bytes. Learns of the workers when they have registered their pages (`set_workers`),
before the first request.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Protocol

from kvdepot.adapters.audit import HitChooser
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.fetch_decision import (
    FetchDecider,
    speeds_file,
    step_work,
)
from kvdepot.adapters.vllm.groups import checkpoint_tokens
from kvdepot.adapters.vllm.identity import (
    adapter_of,
    check_workers,
    known_weights,
    namespaces_at,
    namespaces_of,
)
from kvdepot.adapters.vllm.loaded_weights import WatchedWeights
from kvdepot.adapters.vllm.messages import (
    DRIVES,
    START,
    Generation,
    LoadJob,
    ShardFacts,
    StepPlan,
    StepReport,
)
from kvdepot.adapters.vllm.metrics import ConnectorCounts, RateLimitedWarnings
from kvdepot.adapters.vllm.queue_hints import QueueHints
from kvdepot.adapters.vllm.requests import (
    AwaitedBlocks,
    DepotHit,
    EngineRequest,
    PageTables,
    Phase,
    RequestGroups,
    RequestKeys,
    TrackedRequest,
)
from kvdepot.adapters.vllm.shards import other_sizes
from kvdepot.adapters.vllm.shared_depot import SharedDepot
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Match, NamespaceHandle
from kvdepot.core.first_token import FirstToken
from kvdepot.core.namespace import Namespace
from kvdepot.errors import KVDepotError
from kvdepot.policy.fetching.speed_models import PrefillPace, drive_profiles

_logger = logging.getLogger("vllm.kvdepot")
_SLOWEST_FIRST: Final = ("object", "plugin", "hdd", "ssd", "cxl", "dram")
_FASTEST: Final = "dram"
_LOOK_S: Final = 0.02
"""How often blocks that are to come are looked for."""
PROBE: Final = "probe "
"""Before a request's id: a load that only measures."""


class StepOutput(Protocol):
    """What is used of vLLM's SchedulerOutput."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def kv_connector_block_state(self) -> Any: ...

    @property
    def preempted_req_ids(self) -> set[str] | None: ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """How vLLM was set up."""

    chunk_tokens: int
    """The most tokens of one step."""
    shares_pages: bool
    """What one request has loaded, others find in vLLM's own prefix cache."""
    drafts_ahead: bool = False
    """KV of draft layers (EAGLE, MTP) depends on the token after it: the last block before a hit's
    end is right only if the next one is the same too."""


class ConnectorScheduler:
    """Follows the requests of one engine. Belongs to the scheduler's thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        depot: SharedDepot,
        engine: EngineFacts,
        *,
        loads: bool,
        saves: bool,
    ) -> None:
        self._config = config
        self._depot = depot
        self._engine = engine
        self._decider: FetchDecider | None = None
        self._loads = loads
        self._saves = saves and config.save != "none"
        self.counts = ConnectorCounts()
        self._warnings = RateLimitedWarnings()
        self._chooser = HitChooser(config.audit)
        self._queue_hints = QueueHints(depot, self._warnings, config.hint if loads else 0.0)
        self._facts: list[ShardFacts] = []
        self._groups = RequestGroups((), 0, 1)
        self._spaces: dict[str, list[NamespaceHandle]] = {}
        """For each adapter those of the first group's shards, then the second's, and so on."""
        self._shards: list[int] = []
        """How many each group has, in all pipeline stages."""
        self._other_spaces: dict[tuple[str, int], list[list[NamespaceHandle]]] = {}
        """For each adapter and other number of shards those of each group."""
        self._adapters: dict[int, str] = {}
        """Digests of the LoRAs that the workers have loaded, by vLLM's number."""
        self._tracked: dict[str, TrackedRequest] = {}
        self._plan = StepPlan()
        self._answered: list[str] = []
        self._loading: dict[str, frozenset[BlockKey]] = {}
        self._block_tokens = 0
        self.weights = WatchedWeights()
        self._generation = START
        self._unplaced: dict[str, EngineRequest] = {}
        """Requests that have computed nothing, and whose generation is not known yet."""
        self._left: set[str] = set()
        """Requests that are served no more, and whose pages may still be read by saves."""
        self._computed = False
        """vLLM's own prefix cache may have something."""
        self._stale = False
        """It may have what other weights computed."""

    def set_workers(self, workers: Iterable[ShardFacts]) -> None:
        """ModelError if the workers do not make up one model."""
        facts = sorted(workers, key=lambda each: (each.place.stage, each.place.rank))
        check_workers(facts)
        self._facts = facts
        self._block_tokens = grain = facts[0].grain
        rules = tuple(group.rule for group in facts[0].groups)
        every = checkpoint_tokens(rules, grain, self._config) // grain
        self._groups = RequestGroups(rules, grain, every, int(self._engine.drafts_ahead))
        self._is_ready()

    def _is_ready(self) -> bool:
        """Whether the weights are known, so that there is a namespace for them."""
        if "" in self._spaces:
            return True
        if not self._facts:
            return False
        if not known_weights(self._facts[0], self._config, self._generation):
            return False
        spaces = self._spaces_of("")
        if self._config.decide and self._decider is None:
            kinds = zip(self._groups.rules, self._shards, strict=True)
            full = sum(shards for rule, shards in kinds if rule.kind == "full")
            size = sum(space.block_bytes for space in spaces[: full or None])
            self._decider = FetchDecider(
                self._block_tokens,
                size,
                self._engine.chunk_tokens,
                speeds_path=speeds_file(self._config.speeds, spaces[0].tag),
                drives=drive_profiles(self._depot.store.stats()),
                measured=self._tell_prefill,
            )
        return True

    def _tell_prefill(self, pace: PrefillPace) -> None:
        """Let the depot's ledger know the prefill speed, by the blocks of the first group: each
        worker loads its shard of them, and all together stand for the tokens once.
        """
        if self._groups.rules[0].kind != "full":
            return
        spaces = [each[: self._shards[0]] for each in self._spaces.values()]
        if not spaces:
            return
        share = spaces[0][0].namespace.shard_size / len(self._facts)
        token_s = pace.token_s + pace.step_s / max(1, self._engine.chunk_tokens)
        tags = [space.tag for group in spaces for space in group]
        self._queue_hints.prefill.tell(tags, share * token_s, share * pace.pair_s)

    def add(self, request: EngineRequest) -> None:
        """A new request; one that cannot be served is left to vLLM, and counted."""
        reason = _unserved(request)
        if reason or not self._facts:
            self.counts.add("unserved_requests", 1, reason or "no_pages")
        elif self.weights.in_question:
            self._unplaced[request.request_id] = request
        else:
            self._place(request)

    def _place(self, request: EngineRequest) -> None:
        """Follow a request that has computed nothing, in the current generation."""
        if self.weights.name is None or self._stale:
            reason = "stale_prefix_cache" if self._stale else "weights_unknown"
            self.counts.add("unserved_requests", 1, reason)
            return
        try:
            if not self._is_ready():
                self.counts.add("unserved_requests", 1, "weights_unknown")
                return
            adapter = adapter_of(request.lora_request, self._adapters)
            spaces = self._spaces_of(adapter)
        except (KVDepotError, OSError) as error:
            self._warnings.warn("an adapter has no place in the depot", error)
            self.counts.add("unserved_requests", 1, "adapter")
            return
        left = iter(spaces)
        keys = [
            RequestKeys.of(list(islice(left, count)), request, chained=rule.kind == "full")
            for count, rule in zip(self._shards, self._groups.rules, strict=True)
        ]
        of = self._generation
        tracked = TrackedRequest(request, adapter, self._groups, tuple(keys), generation=of)
        if self._config.wait and self._loads and self._groups.rules[0].kind == "full":
            tracked.awaited = AwaitedBlocks(time.monotonic() + self._config.wait)
        self._tracked[request.request_id] = tracked
        self._queue_hints.queued(tracked)

    def match(self, request: EngineRequest, local_tokens: int) -> int | None:
        """How many tokens beyond vLLM's own the depot has. Changes nothing in the depot.

        None: another request is loading the same blocks, to be found in vLLM soon; or another
        machine is about to commit some (`wait` of the settings).
        """
        self._settle()
        if request.request_id in self._unplaced:
            self._place(self._unplaced.pop(request.request_id))
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0
        # vLLM computes the last token of a prompt that is all there once more, from the state or
        # the window before it.
        tokens = request.num_tokens - (0 if self._groups.all_full else 1)
        blocks = tokens // self._block_tokens
        if tracked.limit is not None:
            blocks = min(blocks, tracked.limit)
        tracked.grow(blocks)
        first = min(local_tokens // self._block_tokens, blocks)
        if self._is_loading(tracked, first, blocks):
            self._queue_hints.begun(request.request_id)
            return None
        if tracked.awaited is not None and self._is_coming(tracked, tracked.awaited, first, blocks):
            return None
        hit = self._look_up(tracked, local_tokens, first, blocks)
        if hit.stop_block < blocks:
            hit = tracked.hit = self._look_elsewhere(tracked, hit, blocks)
        stop = hit.stop_block
        if self._decider is not None and stop * self._block_tokens > local_tokens:
            decided = self._decider.decide(tracked, hit, self._tracked.values()).stop_block
            if decided < stop:
                keys = tracked.keys_of(hit.shards)
                stop, _ = self._restorable(keys, local_tokens, decided)
        if stop * self._block_tokens > local_tokens and not hit.shards:
            stop = self._audited(tracked, local_tokens, stop)
        return max(0, stop * self._block_tokens - local_tokens)

    def _audited(self, tracked: TrackedRequest, local_tokens: int, stop: int) -> int:
        """The end of a hit: without its last block where that is to be computed again."""
        if tracked.may_audit and self._saves and self._groups.rules[0].kind == "full":
            tracked.may_audit = False
            key = tracked.block_keys.keys(stop - 1, stop)[0][0]
            if self._chooser.choose(key, busy=len(self._tracked) > 1):
                tracked.audited = stop - 1
        if tracked.audited is None or stop <= tracked.audited:
            return stop
        stop, _ = self._restorable(tracked.group_keys, local_tokens, tracked.audited)
        return stop

    def _is_coming(
        self, tracked: TrackedRequest, awaited: AwaitedBlocks, first: int, blocks: int
    ) -> bool:
        """Whether blocks may still come in time. Those that have come are brought to memory."""
        now_s = time.monotonic()
        if now_s < awaited.look_s:
            return True
        left_s, lacking = awaited.until_s - now_s, False
        try:
            for shard, keys in enumerate(tracked.block_keys.keys(first, blocks)):
                arrived = max(first, awaited.arrived.get(shard, 0))
                if left_s > 0 and arrived < blocks:
                    arrived += self._depot.store.hint(keys[arrived - first :], left_s).resident
                    awaited.arrived[shard] = arrived
                lacking = lacking or arrived < blocks
        except KVDepotError as error:
            self._warnings.warn("the depot takes no hints", error)
            lacking = False
        if not lacking or left_s <= 0:
            tracked.awaited = None
            return False
        awaited.look_s = now_s + _LOOK_S
        return True

    def _is_loading(self, tracked: TrackedRequest, first: int, blocks: int) -> bool:
        """Whether another request loads what comes next, for vLLM to find."""
        shared = self._engine.shares_pages and self._groups.rules[0].kind == "full"
        if not (shared and self._loading) or first >= blocks:
            return False
        key = tracked.block_keys.keys(first, first + 1)[0][0]
        return any(key in keys for keys in self._loading.values())

    def _look_up(
        self, tracked: TrackedRequest, local_tokens: int, first: int, blocks: int
    ) -> DepotHit:
        """The longest prefix from which all groups can go on."""
        leading: tuple[str, ...] = ()
        tiers = (_FASTEST,) * (blocks - first)
        full, keys = self._full_groups, tracked.group_keys
        if full:
            leading = self._resident(keys, full, 0, blocks)
            tiers = leading[first:] or self._resident(keys, full, first, blocks)
        if self._engine.drafts_ahead:
            tiers = tiers[:-1]
        hit = self._hit(keys, local_tokens, first, tiers)
        tracked.found(hit, Match(leading), first + len(tiers) if full else 0)
        return hit

    def _hit(
        self,
        keys: Sequence[RequestKeys],
        local_tokens: int,
        first: int,
        tiers: Sequence[str],
        shards: int = 0,
    ) -> DepotHit:
        """What all groups can go on from, where those of full attention have the blocks from
        `first` on in these tiers."""
        stop, slower = self._restorable(keys, local_tokens, first + len(tiers))
        found = [_slowest(tier, slower.get(first + at)) for at, tier in enumerate(tiers)]
        return DepotHit(local_tokens, first, tuple(found[: max(0, stop - first)]), shards)

    @property
    def _full_groups(self) -> list[int]:
        return [at for at, rule in enumerate(self._groups.rules) if rule.kind == "full"]

    def _look_elsewhere(self, tracked: TrackedRequest, hit: DepotHit, blocks: int) -> DepotHit:
        """The longest hit: this one, or one in blocks from other numbers of shards."""
        if tracked.other_keys is None:
            tracked.other_keys = self._other_keys(tracked)
        first, local_tokens = hit.first_block, hit.local_tokens
        for shards, keys in tracked.other_keys.items():
            tracked.grow(blocks, shards)
            tiers: Sequence[str] = (_FASTEST,) * (blocks - first)
            if self._full_groups:
                tiers = self._resident(keys, self._full_groups, first, blocks)
            found = self._hit(keys, local_tokens, first, tiers, shards)
            hit = found if found.stop_block > hit.stop_block else hit
        return hit

    def _other_keys(self, tracked: TrackedRequest) -> dict[int, tuple[RequestKeys, ...]]:
        """Keys of a request for other numbers of shards, where the depot has its first block from
        them."""
        found = {}
        for shards in other_sizes([group.shard for group in self._facts[0].groups]):
            spaces = self._spaces_at(tracked.adapter, shards)
            rules = self._groups.rules
            keys = tuple(
                RequestKeys.of(group, tracked.request, chained=rule.kind == "full")
                for group, rule in zip(spaces, rules, strict=True)
            )
            keys[0].grow(tracked.request.all_token_ids, 1)
            if not self._full_groups or self._resident(keys, [0], 0, 1):
                found[shards] = keys
        return found

    def _restorable(
        self, group_keys: Sequence[RequestKeys], local_tokens: int, stop: int
    ) -> tuple[int, dict[int, str]]:
        """The last boundary up to `stop` from which windows and states can go on, in blocks of the
        request, and the tiers of what they need, by such blocks."""
        groups = self._groups
        others = [at for at, rule in enumerate(groups.rules) if rule.kind != "full"]
        found: dict[int, str] = {}
        while stop * self._block_tokens > local_tokens:
            found, lowered, needed = {}, stop, len(others) < len(groups.rules)
            for group in others:
                keys = group_keys[group]
                start, end = groups.span(group, keys, local_tokens, stop)
                tiers = self._resident(group_keys, [group], start, end)
                needed = needed or start < end
                if len(tiers) < end - start:
                    lacking = (start + len(tiers)) * keys.block_tokens
                    lowered = min(lowered, lacking // self._block_tokens)
                for at, tier in enumerate(tiers, start):
                    block = at * keys.block_tokens // self._block_tokens
                    found[block] = _slowest(tier, found.get(block))
            if lowered == stop and needed:
                return stop, found
            stop = min(lowered, stop - 1)
        return min(stop, local_tokens // self._block_tokens), {}

    def allocated(self, request_id: str, tables: PageTables, external_tokens: int) -> None:
        """vLLM has given a request its pages, the external tokens' among them."""
        tracked = self._tracked.get(request_id)
        if tracked is None or not external_tokens:
            return
        self._queue_hints.begun(request_id)
        loads = tracked.begin_load(external_tokens, tables)
        timeout_s = limit_s = self._config.load_timeout
        recompute_s = 0.0
        tiers: Sequence[str] = ()
        if tracked.hit is not None:
            stop = (tracked.hit.local_tokens + external_tokens) // self._block_tokens
            tiers = tracked.hit.tiers[: stop - tracked.hit.first_block]
            decider = self._decider
            decision = decider.load_started(request_id, tiers) if decider is not None else None
            if decision is not None:
                timeout_s = min(limit_s, decision.deadline_s)
                recompute_s = min(limit_s - timeout_s, decision.saved_s)
        self._plan.loads += [
            replace(
                load,
                timeout_s=timeout_s,
                recompute_s=recompute_s,
                next_queued=not DRIVES.isdisjoint(tiers),
            )
            for load in loads
        ]
        end = loads[0].first_block + len(loads[0].keys[0])
        keys = tracked.group_keys[loads[0].group].keys(loads[0].first_block, end)
        self._loading[request_id] = frozenset(keys[0])
        self.counts.add("hit_tokens", external_tokens)
        if loads[0].shards:
            self.counts.add("resharded_tokens", external_tokens)

    def sources(self, request_id: str, external_tokens: int) -> Counter[str]:
        """The external tokens of a request by the tier that they come from."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.hit is None:
            return Counter()
        counts: Counter[str] = Counter()
        at = tracked.hit.local_tokens
        stop = at + external_tokens
        while at < stop:
            block = at // self._block_tokens
            end = min(stop, (block + 1) * self._block_tokens)
            counts[tracked.hit.tiers[block - tracked.hit.first_block]] += end - at
            at = end
        return counts

    def _settle(self) -> None:
        """Before vLLM computes: take the weights that it has loaded for those of the generation."""
        if not self.weights.in_question:
            return
        before, weights = self.weights.name, self.weights.settle()
        if weights == before:
            return
        if weights is None:
            self._begin_generation(replace(self._generation, weights="unknown"))
            return
        self._begin_generation(replace(self._generation, weights=weights))
        self.counts.add("weight_changes")
        self._stale = self._engine.shares_pages and self._computed
        if self._stale:
            _logger.warning(
                "kvdepot: nothing is served or saved before reset_prefix_cache(): vLLM's own prefix"
                " cache may have what other weights computed"
            )

    def _begin_generation(self, generation: Generation) -> None:
        """From now on blocks are of this one. Requests that have computed something are served no
        more: what they compute next depends on it."""
        self._generation = generation
        self._spaces.clear()
        self._other_spaces.clear()
        for name, tracked in list(self._tracked.items()):
            self._queue_hints.begun(name)
            if self._decider is not None:
                self._decider.forget(name)
            if name not in self._loading and not tracked.request.num_computed_tokens:
                self._unplaced[name] = tracked.request
            if tracked.saved:
                self._left.add(name)
        self._tracked.clear()

    def prefix_cache_was_reset(self) -> None:
        """vLLM has nothing left in its own prefix cache."""
        self._computed = self._stale = False

    def plan(self, output: StepOutput) -> StepPlan:
        self._settle()
        plan, self._plan = self._plan, StepPlan()
        plan.generation = self._generation
        plan.idle = not output.num_scheduled_tokens
        self._computed = self._computed or not plan.idle
        plan.preempted = bool(output.preempted_req_ids)
        scheduled = output.num_scheduled_tokens
        step = [
            (self._tracked[name], scheduled[name]) for name in scheduled if name in self._tracked
        ]
        for tracked, tokens in step:
            if tracked.phase is not Phase.COMPUTING:
                self._queue_hints.begun(tracked.request.request_id)
            tracked.phase = Phase.COMPUTING
            if self._saves:
                complete = self._complete(tracked, tokens)
                if complete > tracked.offered:
                    state, name = output.kv_connector_block_state, tracked.request.request_id
                    states = state.boundary_state_offloads.get(name, ())
                    plan.saves += tracked.plan_save(complete, state.get_block_ids(name), states)
        if self._decider is not None:
            self._plan_measuring(plan, step, self._decider)
        self._queue_hints.after_schedule()
        return plan

    def handle_report(self, report: StepReport | None) -> None:
        if report is None:
            return
        self._adapters.update(report.adapters)
        if self._decider is not None:
            self._decider.observe_steps(report.steps)
            for name in self._answered:
                self._tell_first_token(self._decider.answered(name))
            self._answered.clear()
        for end in report.loads:
            if self._decider is not None:
                self._decider.load_ended(end)
            tracked = self._tracked.get(end.request_id)
            if tracked is not None:
                tracked.load_ended(end.failed_block)
            if end.failed_block is not None:
                self.counts.add("failed_loads")
        for request_id, block in report.unsaved.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.forget(block)

    def _tell_first_token(self, first: FirstToken | None) -> None:
        """For the depot's dashboard and metrics; lost where it cannot be told."""
        if first is None:
            return
        try:
            self._depot.store.report_first_token(first)
        except (KVDepotError, OSError) as error:
            self._warnings.warn("a first token was not told to the depot", error)

    def metrics(self) -> dict[str, float] | None:
        """What was counted since the last call, and the current estimates."""
        counts = self.counts.take()
        if counts is None or self._decider is None:
            return counts
        return counts | self._decider.metrics()

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._loading.pop(request_id, None)

    def finish(self, request: EngineRequest, tables: PageTables) -> bool:
        """A request is over. True: its pages are kept until the workers report it sent."""
        self._unplaced.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if self._decider is not None and request.num_tokens > request.num_prompt_tokens:
            self._tell_first_token(self._decider.answered(request.request_id))
        elif self._decider is not None:
            self._decider.forget(request.request_id)
        left = request.request_id in self._left and not self._facts[0].saves_settle_at_once
        self._left.discard(request.request_id)
        awaited = tracked is not None and self._plan_last_save(tracked, tables)
        if left and not awaited:
            self._plan.awaited.append(request.request_id)
        if tracked is not None:
            self._queue_hints.finished(request, tracked, awaited=awaited)
        return awaited or left

    def saves_ended(self, request_ids: Iterable[str]) -> None:
        """Saves of these requests are over on all workers."""
        self._queue_hints.saved(request_ids)

    def reset(self) -> bool:
        """Use nothing any more that is in the depot now, and leave it to the other engines. False:
        the depot does not answer, so that it is not known what it does with the blocks."""
        self._begin_generation(replace(self._generation, reset=uuid.uuid4().hex))
        try:
            self._depot.store.audits.known()
        except KVDepotError as error:
            self.counts.add("resets", 1, "failed")
            _logger.warning("kvdepot: a reset was not confirmed: %s", str(error))
            return False
        self.counts.add("resets", 1, "done")
        _logger.info(
            "kvdepot: reset: this engine uses no block from before, and shares none with other"
            " engines until it is started again; theirs are left alone (kvdepot remove)"
        )
        return True

    def close(self) -> None:
        if self._decider is not None:
            self._decider.write_speeds()
        self._queue_hints.close()
        self._depot.close()

    def _plan_last_save(self, tracked: TrackedRequest, tables: PageTables) -> bool:
        """For a request that is over. True: its pages are read after this."""
        if not self._saves or tracked.phase is not Phase.COMPUTING:
            return False
        saves = tracked.plan_save(self._complete(tracked, 0), tables)
        self._plan.saves += saves
        settles = self._facts[0].saves_settle_at_once
        if not saves and (settles or not tracked.saved):
            return False
        self._plan.awaited.append(tracked.request.request_id)
        return True

    def _resident(
        self, group_keys: Sequence[RequestKeys], groups: Sequence[int], first: int, stop: int
    ) -> tuple[str, ...]:
        """The tier of each block from `first` on that all shards of these groups have: the slowest
        of them."""
        store = self._depot.store
        lists = [keys for group in groups for keys in group_keys[group].keys(first, stop)]
        try:
            found = [store.match(keys).tiers for keys in lists if keys]
        except KVDepotError as error:
            self._warnings.warn("the depot cannot be asked", error)
            self.counts.add("depot_errors", 1, "match")
            return ()
        if len(found) <= 1:
            return tuple(found[0]) if found else ()
        return tuple(
            next(tier for tier in _SLOWEST_FIRST if tier in tiers)
            for tiers in zip(*found, strict=False)
        )

    def _plan_measuring(
        self, plan: StepPlan, step: Sequence[tuple[TrackedRequest, int]], decider: FetchDecider
    ) -> None:
        """Have the step timed, close decisions whose request is answered by it, and probe."""
        tokens, attention, prefill = step_work(step)
        decider.step_planned(tokens, attention)
        if prefill:
            plan.new_tokens, plan.attention = tokens, attention
        for tracked, count in step:
            request = tracked.request
            if request.num_computed_tokens + count == request.num_prompt_tokens:
                self._answered.append(request.request_id)
        for name, first, blocks in decider.probes:
            tracked_one = self._tracked.get(name)
            counted = self._groups.rules[0].kind == "full"
            hit = tracked_one.hit if tracked_one is not None else None
            if counted and tracked_one is not None and hit is not None and not hit.shards:
                plan.probes.append(self._probe(tracked_one, first, blocks, decider))
        decider.probes.clear()

    def _probe(
        self, tracked: TrackedRequest, first: int, blocks: int, decider: FetchDecider
    ) -> LoadJob:
        assert tracked.hit is not None
        name = f"{PROBE}{tracked.request.request_id}"
        start = first - tracked.hit.first_block
        tiers = tracked.hit.tiers[start : start + blocks]
        decider.load_started(name, tiers)
        keys = tracked.block_keys.keys(first, first + blocks)
        return LoadJob(
            name,
            tracked.adapter,
            keys,
            (),
            first,
            timeout_s=self._config.load_timeout,
            next_queued=not DRIVES.isdisjoint(tiers),
            generation=tracked.generation,
        )

    def _complete(self, tracked: TrackedRequest, scheduled: int) -> int:
        """Blocks that are complete after the step, and whose tokens are known.

        vLLM may have scheduled tokens that are not sampled yet, or drafts that may be refused.
        """
        request = tracked.request
        known = request.num_tokens
        if self._config.save == "prompt":
            known = min(known, request.num_prompt_tokens)
        return min(request.num_computed_tokens + scheduled, known) // self._block_tokens

    def _spaces_of(self, adapter: str) -> list[NamespaceHandle]:
        if adapter not in self._spaces:
            config, of = self._config, self._generation
            workers = [namespaces_of(each, config, adapter, of) for each in self._facts]
            groups = [_distinct(spaces) for spaces in zip(*workers, strict=True)]
            handles = [self._depot.store.register(space) for group in groups for space in group]
            self._shards = [len(group) for group in groups]
            self._spaces[adapter] = handles
        return self._spaces[adapter]

    def _spaces_at(self, adapter: str, shards: int) -> list[list[NamespaceHandle]]:
        """For each group the namespaces of so many shards, in all pipeline stages. Not registered:
        the depot has them, or has nothing of them."""
        if (adapter, shards) not in self._other_spaces:
            stages = [
                namespaces_at(each, self._config, adapter, shards, self._generation)
                for each in self._facts
                if each.place.rank == 0
            ]
            self._other_spaces[adapter, shards] = [
                [NamespaceHandle(space) for stage in group for space in stage]
                for group in zip(*stages, strict=True)
            ]
        return self._other_spaces[adapter, shards]


def _distinct(spaces: Sequence[Namespace]) -> list[Namespace]:
    """Each namespace once: workers may have the same."""
    return list({space.tag: space for space in spaces}.values())


def _slowest(tier: str, other: str | None) -> str:
    return tier if other is None else min(tier, other, key=_SLOWEST_FIRST.index)


def _unserved(request: Any) -> str:
    """Why a request is none of ours; empty if it is."""
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streaming_input"
    return ""
