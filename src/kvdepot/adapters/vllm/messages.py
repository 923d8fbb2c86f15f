"""Values that the scheduler and the workers exchange: ids, keys and figures, no bytes of blocks.

vLLM pickles these values at every step.
"""

from dataclasses import dataclass, field
from typing import Final

from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.weights import WeightsSource
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout

DRIVES: Final = frozenset({"ssd", "hdd"})
"""Tiers on which several loads at a time are no faster than one after the other."""
ShardKeys = tuple[tuple[BlockKey, ...], ...]
"""The keys of the same blocks, for each shard of each pipeline stage."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The weights and the last reset of an engine. Blocks of two generations have other keys."""

    weights: str = ""
    """Names the weights that are loaded. Empty: those of the start."""
    reset: str = ""
    """Names the time since the engine's last reset. Empty: there was none."""


START: Final = Generation()


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """The origin of blocks. Together with the facts of a worker it names their namespaces."""

    adapter: str = ""
    """Name and digest of a LoRA. Empty: none."""
    generation: Generation = START
    shards: int = 0
    """The number of shards of each layer. 0: as many as in this engine."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Consecutive blocks of one KV group of a request, and the pages that they fill."""

    group: int
    """Index in `ShardFacts.groups`."""
    keys: ShardKeys
    pages: tuple[int, ...]
    """vLLM's block ids, the same number for each key. Empty: the blocks are only read."""
    first_block: int
    """The place of the first key among the group's blocks."""
    present_pages: int = 0
    """This many leading pages hold their content already, may be in use, and are not written."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to be copied into the pages of a request."""

    request_id: str
    origin: BlockOrigin
    groups: tuple[GroupBlocks, ...]
    timeout_s: float = 0.0
    recompute_s: float = 0.0
    """The time to compute all blocks. At the deadline, late blocks are waited for if they are
    expected within this time."""
    whole: bool = False
    """True if the load is useless as soon as one block fails."""
    next_queued: bool = False
    """True if the job reads from drives; it begins after the earlier jobs that do."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks that are complete when the step has ended."""

    request_id: str
    origin: BlockOrigin
    blocks: GroupBlocks
    tokens: bytes = b""
    """Their token ids as u32. Empty if the token ids alone do not determine the blocks."""
    is_audit: bool = False
    """The depot has the block: it is compared, not saved."""


@dataclass(slots=True)
class StepPlan:
    """The work of the workers during one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    """Finished requests whose pages are kept until no save reads them."""
    probes: list[LoadJob] = field(default_factory=list)
    """Blocks that are read into memory only to measure the time."""
    idle: bool = False
    """The step computes nothing."""
    generation: Generation = START
    """The generation of the step. Loads of another one that end in this step have failed."""
    preempted: bool = False
    """True if pages were taken from requests that continue later. The step may write to them."""
    new_tokens: int = 0
    """Tokens of a step whose time is measured. 0: the step is not measured."""
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class TierTime:
    """The blocks that one load read from one tier, and the time."""

    tier: str
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time that the computation of a step took."""

    tokens: int
    attention: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load on one worker. Block numbers are those of the request."""

    request_id: str
    failed_block: int | None
    """The first block that was not loaded."""
    times: tuple[TierTime, ...] = ()
    late_blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StepReport:
    """A worker's report after a step."""

    loads: list[LoadEnd] = field(default_factory=list)
    unsaved: dict[str, int] = field(default_factory=dict)
    """The first block without room in the depot, by request."""
    steps: list[StepTime] = field(default_factory=list)
    adapters: dict[int, str] = field(default_factory=dict)
    """Digests of the LoRAs that vLLM has loaded, by its number. Empty if the workers differ."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.unsaved or self.steps or self.adapters)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """The reports of two workers as one. Where they differ, the worse one counts."""
        unsaved = dict(self.unsaved)
        for request_id, block in other.unsaved.items():
            unsaved[request_id] = min(block, unsaved.get(request_id, block))
        adapters = {**self.adapters, **other.adapters}
        for number in self.adapters.keys() & other.adapters.keys():
            if self.adapters[number] != other.adapters[number]:
                adapters[number] = ""
        return StepReport(self.loads + other.loads, unsaved, self.steps + other.steps, adapters)


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """A worker's place in its engine."""

    rank: int
    """Among the workers that divide each layer's heads."""
    ranks: int
    engine: str
    """vLLM and its version: the content of a page may depend on it."""
    stage: int = 0
    """Among the workers that divide the layers (pipeline parallelism)."""
    stages: int = 1


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts that name the namespace of one group's blocks, besides the model."""

    rule: GroupRule
    layout: KVLayout
    pages_per_block: int
    extra: tuple[tuple[str, str], ...]
    shard: WorkerShard


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The facts that name the namespaces of one worker's blocks."""

    model: str
    config: str
    """A digest of the model's configuration."""
    weights: WeightsSource
    place: WorkerRank
    groups: tuple[GroupFacts, ...]
    """Groups of full attention come first."""
    grain: int
    """Tokens of a block of full attention. A prompt is restored up to a multiple of it."""
    saves_settle_at_once: bool
    """A save has read its pages when the step has ended."""
    draft: str = ""
    """Names the draft model whose layers have KV. Empty: there is none."""
    draft_weights: WeightsSource | None = None
    """None: they are the model's, or there are none."""
