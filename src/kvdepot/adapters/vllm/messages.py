"""What the scheduler and the workers send each other: ids, keys and figures, never bytes.

vLLM pickles these at every step.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.core.block import BlockKey

DRIVES: Final = frozenset({"ssd", "hdd"})
"""Tiers that are no faster for several loads side by side than for one after the other."""
ShardKeys = tuple[tuple[BlockKey, ...], ...]
"""For each shard of each pipeline stage the keys of the same blocks."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine computes blocks with, beside what it was started with. Blocks of different
    generations are never taken for each other."""

    weights: str = ""
    """What names the weights that are loaded; empty: they are those of the start."""
    reset: str = ""
    """What names the time since the engine's last reset; empty: there was none."""


START: Final = Generation()


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Consecutive blocks of one KV group of a request, and the pages that they fill."""

    request_id: str
    adapter: str
    """Of the namespace that the keys belong to."""
    keys: ShardKeys
    pages: tuple[int, ...]
    """vLLM's block ids, a fixed number of them for each key."""
    first_block: int
    """Which block of the group the first key is."""
    group: int = 0
    """Which of the groups in ShardFacts."""
    generation: Generation = field(default=START, kw_only=True)
    """Of the namespace that the keys belong to."""


@dataclass(frozen=True, slots=True)
class LoadJob(TransferJob):
    """Blocks to be brought into pages. One load may consist of several, one for each group."""

    present_pages: int = 0
    """So many leading pages hold their content already and may be in use: they are left alone."""
    timeout_s: float = 0.0
    recompute_s: float = 0.0
    """Of all of it: what is late then is waited for if it is expected sooner than recomputed."""
    whole: bool = False
    """A part of it is of no use: vLLM could not go on from there, for want of earlier pages or of
    other groups."""
    jobs: int = 1
    """So many make up the load of the request."""
    shards: int = 0
    """The blocks were saved by so many shards; 0: as many as there are here."""
    next_queued: bool = False
    """It reads drives, after the loads that were asked of them before."""


@dataclass(frozen=True, slots=True)
class SaveJob(TransferJob):
    """Blocks that are complete when the step is over."""

    tokens: bytes = b""
    """Their token ids, as u32; empty where these alone do not say what the blocks are."""
    audit: bool = False
    """The depot has them: they are compared with what it has."""


@dataclass(slots=True)
class StepPlan:
    """What the workers do besides one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    """Requests that are over, and whose pages are kept until no save reads them."""
    probes: list[LoadJob] = field(default_factory=list)
    """Blocks to be brought into memory only to measure how long it takes."""
    idle: bool = False
    """The step computes nothing."""
    generation: Generation = START
    """That of the step. Loads of an earlier one that end now have failed."""
    preempted: bool = False
    """Pages were taken from requests that go on later; the step may write to them."""
    new_tokens: int = 0
    """Of a step to be timed; 0: it need not be."""
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class TierTime:
    """What one load got from one tier."""

    tier: str
    blocks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long the computation of a step took."""

    tokens: int
    attention: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """How a load ended on one worker."""

    request_id: str
    failed_block: int | None
    """The first block that was not loaded: of the group, or of the request where jobs are
    joined."""
    times: tuple[TierTime, ...] = ()
    late_blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StepReport:
    """What a worker reports after a step."""

    loads: list[LoadEnd] = field(default_factory=list)
    unsaved: dict[str, int] = field(default_factory=dict)
    """For requests that were throttled, the first block that is not in the depot."""
    steps: list[StepTime] = field(default_factory=list)
    adapters: dict[int, str] = field(default_factory=dict)
    """Digests of LoRAs that vLLM has loaded, by its number; empty where workers differ."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.unsaved or self.steps or self.adapters)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """Two workers' reports as one; the worse of both."""
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
    """Among those that divide each layer's heads."""
    ranks: int
    engine: str
    """vLLM and its version: the content of a page may change with it."""
    stage: int = 0
    """Among those that divide the layers (pipeline parallelism)."""
    stages: int = 1


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the namespace of one group's blocks has beside the model's."""

    rule: GroupRule
    layout: dict[str, Any]
    extra: tuple[tuple[str, str], ...]
    shard: WorkerShard


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The fields of one worker's namespaces, as plain values."""

    model: str
    config: str
    """A digest of the model's config."""
    weights: str
    """What names the weights; empty where their files have to be read first."""
    weights_folder: str
    place: WorkerRank
    groups: tuple[GroupFacts, ...]
    """Those with full attention first."""
    grain: int
    """Tokens of a block of full attention; a prompt is restored up to a multiple of it."""
    saves_settle_at_once: bool
    """A save has read its pages when the step is over."""
    draft: str = ""
    """What the KV of a draft model's layers depends on beside the model; empty without them."""
    draft_folder: str = ""
    """Where its weights are; empty where they need not be read."""
