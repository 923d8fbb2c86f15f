"""The namespaces of an engine's blocks, from the facts of its workers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import KVGroups, checkpoint_tokens
from kvdepot.adapters.vllm.messages import (
    START,
    BlockOrigin,
    Generation,
    ShardFacts,
)
from kvdepot.adapters.vllm.requests import EngineRequest, RequestKeys
from kvdepot.adapters.vllm.shards import other_sizes
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.namespace import Namespace, fingerprint
from kvdepot.depot import Depot
from kvdepot.errors import ModelError


class EngineNamespaces:
    """The namespaces that the scheduler of one engine looks blocks up in."""

    def __init__(self, config: ConnectorConfig, store: Depot) -> None:
        self._config = config
        self._store = store
        self.workers: list[ShardFacts] = []
        """Facts of the workers, in the order of their places. Empty before `set_workers`."""
        self.groups = KVGroups()
        self.adapters: dict[int, str] = {}
        """Digests of the LoRAs that the workers have loaded, by vLLM's number."""
        self.generation = START
        self._spaces: dict[BlockOrigin, list[list[NamespaceHandle]]] = {}

    def set_workers(self, workers: Iterable[ShardFacts], *, drafts_ahead: bool) -> None:
        """ModelError if the workers do not make up one model."""
        facts = sorted(workers, key=lambda each: (each.place.stage, each.place.rank))
        check_workers(facts)
        self.workers, grain = facts, facts[0].grain
        rules = tuple(group.rule for group in facts[0].groups)
        every = checkpoint_tokens(rules, grain, self._config) // grain
        self.groups = KVGroups(rules, grain, every, int(drafts_ahead))

    def begin(self, generation: Generation) -> None:
        """Blocks belong to this generation from now on."""
        self.generation = generation
        self._spaces.clear()

    def are_known(self) -> bool:
        """True if the workers and their weights are known. Does not block."""
        if not self.workers:
            return False
        return bool(known_weights(self.workers[0], self._config, self.generation))

    def keys_of(self, request: EngineRequest) -> RequestKeys:
        """The keys of a request in this generation. ModelError if its LoRA is not known yet."""
        origin = BlockOrigin(adapter_of(request.lora_request, self.adapters), self.generation)
        return RequestKeys(request, self.groups, self.spaces(origin), origin)

    def other_keys(self, request: EngineRequest, keys: RequestKeys) -> dict[int, RequestKeys]:
        """The same for each other number of shards whose blocks this engine can read."""
        sizes = other_sizes([group.shard for group in self.workers[0].groups])
        origins = [replace(keys.origin, shards=size) for size in sizes]
        return {
            origin.shards: RequestKeys(request, self.groups, self.spaces(origin), origin)
            for origin in origins
        }

    def spaces(self, origin: BlockOrigin) -> list[list[NamespaceHandle]]:
        """The namespaces of the shards of each group, in all pipeline stages. ModelError while the
        weights are not known. Namespaces of other numbers of shards are not registered: the depot
        knows them, or has none of their blocks."""
        if origin not in self._spaces:
            workers = [each for each in self.workers if not origin.shards or not each.place.rank]
            by_worker = [namespaces(each, self._config, origin) for each in workers]
            handle = NamespaceHandle if origin.shards else self._store.namespace
            self._spaces[origin] = []
            for group in zip(*by_worker, strict=True):
                distinct = {space.tag: space for spaces in group for space in spaces}
                self._spaces[origin].append([handle(space) for space in distinct.values()])
        return self._spaces[origin]

    def registered(self) -> list[list[NamespaceHandle]]:
        """The namespaces of the first group, for each LoRA in use."""
        own = [groups for origin, groups in self._spaces.items() if not origin.shards]
        return [groups[0] for groups in own]


def namespaces(
    facts: ShardFacts, config: ConnectorConfig, origin: BlockOrigin
) -> list[list[Namespace]]:
    """The namespaces of a worker's blocks by group: its own, or those of all shards if `origin` has
    another number of shards. ModelError while the weights are not known."""
    weights = known_weights(facts, config, origin.generation)
    if not weights:
        sources = (facts.weights, facts.draft_weights)
        reasons = [source.reason(config.weights) for source in sources if source is not None]
        raise ModelError(f"the weights are not known: {', '.join(filter(None, reasons))}")
    found = []
    for group in facts.groups:
        shard, layout, extra = group.shard, group.layout, dict(group.extra)
        places = [(shard.rank, shard.size)]
        if origin.shards and not shard.whole:
            places = [(rank, origin.shards) for rank in range(origin.shards)]
            axis, heads = shard.axis, shard.heads_of(origin.shards)
            if axis is not None:
                row_items = axis.rows * heads * axis.head_bytes // axis.item_bytes
                extra["page_shape"] = str((1, 1, row_items))
                state_bytes = layout.state_bytes // len(shard.heads) * heads
                layout = replace(layout, state_bytes=state_bytes)
        found.append(
            [
                Namespace(
                    model=facts.model,
                    layout=layout,
                    fingerprint=fingerprint({"config": facts.config}, weights),
                    shard_rank=rank,
                    shard_size=size,
                    adapter=origin.adapter,
                    tenant=config.tenant,
                    secret=config.secret(),
                    extra=tuple(extra.items()),
                )
                for rank, size in places
            ]
        )
    return found


def known_weights(
    facts: ShardFacts, config: ConnectorConfig, generation: Generation = START
) -> str:
    """The name of the weights, the draft model's too, and of the last reset. Empty while weights
    are being read. Does not block."""
    weights = generation.weights or facts.weights.known(config.weights)
    if not weights:
        return ""
    if facts.draft:
        weights = f"{weights}, {facts.draft}"
        if not generation.weights and facts.draft_weights is not None:
            drafted = facts.draft_weights.known(config.weights)
            if not drafted:
                return ""
            weights = f"{weights} {drafted}"
    return f"{weights}, reset {generation.reset}" if generation.reset else weights


def adapter_of(lora: Any, loaded: Mapping[int, str]) -> str:
    """The name and digest of a LoRA; empty for none. `loaded`: digests by vLLM's number. ModelError
    while it is not known what vLLM has loaded, such as before its first use."""
    if lora is None:
        return ""
    digest = loaded.get(lora.lora_int_id, "")
    if not digest:
        raise ModelError(f"vLLM has not reported what it loads as LoRA {lora.lora_name}")
    return f"{lora.lora_name} {digest}"


def check_workers(workers: Sequence[ShardFacts]) -> None:
    """ModelError if the workers, in the order of their places, do not make up one model."""
    ranks, stages = workers[0].place.ranks, workers[0].place.stages
    places = [(each.place.stage, each.place.rank) for each in workers]
    wanted = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    if places != wanted:
        lacking = sorted(set(wanted) - set(places))
        raise ModelError(f"workers have no pages: (stage, rank) {lacking or places}")
    for each in workers[1:]:
        pairs: list[tuple[object, object, str]] = [
            (workers[0], each, name) for name in ("model", "config", "weights", "grain")
        ]
        if [group.rule for group in each.groups] != [group.rule for group in workers[0].groups]:
            raise ModelError(
                "pipeline stages have different KV groups",
                hint="divide the layers so that each stage has all kinds: VLLM_PP_LAYER_PARTITION",
            )
        first = workers[each.place.stage * ranks]
        for one, other in zip(first.groups, each.groups, strict=True):
            pairs += [(one, other, "layout"), (one, other, "extra")]
        unlike = [name for one, other, name in pairs if getattr(one, name) != getattr(other, name)]
        if unlike:
            raise ModelError(f"workers differ in {', '.join(unlike)}")
