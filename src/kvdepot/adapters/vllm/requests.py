"""One request, as the scheduler's side follows it.

    QUEUED --load--> LOADING --landed--> QUEUED --scheduled--> COMPUTING --finish--> (gone)
                                           ^                       |
                                           +------(preempted)------+

vLLM asks for a match whenever a queued request has nothing computed: at first, after a preemption
and after a load that failed at its first block. `limit` makes sure that what failed once is not
asked for again by the same request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from kvdepot.adapters.vllm.chains import Chain
from kvdepot.adapters.vllm.messages import Load, Save

NULL_PAGE: Final = 0
"""vLLM's block that stands for those it does not keep: outside a sliding window."""


class Phase(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    COMPUTING = "computing"


class EngineRequest(Protocol):
    """What is used of vLLM's Request."""

    request_id: str
    num_computed_tokens: int
    cache_salt: str | None
    lora_request: Any
    skip_reading_prefix_cache: bool

    @property
    def all_token_ids(self) -> Sequence[int]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def mm_features(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A match beyond what vLLM has itself."""

    local_tokens: int
    """Of vLLM's own prefix cache, whole pages."""
    first_block: int
    """The first one that vLLM lacks, or has a part of."""
    tiers: tuple[str, ...]
    """Where the blocks from that one on are; the slowest shard's."""

    @property
    def stop_block(self) -> int:
        """Up to here the KV can be had, from vLLM or from us."""
        return self.first_block + len(self.tiers)


@dataclass(slots=True)
class Tracked:
    """A request that is served from the depot."""

    request: EngineRequest
    adapter: str
    chain: Chain
    phase: Phase = Phase.QUEUED
    stored: int = 0
    """Leading blocks that the depot has, or was given."""
    offered: int = 0
    """Leading blocks that were complete when saves were planned last."""
    limit: int | None = None
    """Leading blocks that may be loaded; None: all."""
    hit: Hit | None = None
    """The latest match."""
    load: Load | None = field(default=None, repr=False)
    saved: bool = False
    """A save was planned for it."""

    def found(self, hit: Hit, leading: int) -> None:
        """The depot has a hit, and so many leading blocks, which need not be saved again."""
        self.hit = hit
        self.stored = max(self.stored, leading)

    def begin_load(self, external_tokens: int, pages: Sequence[int], page_tokens: int) -> Load:
        """Load what the latest match found, `external_tokens` of it, into the request's pages."""
        assert self.hit is not None
        size = self.chain.block_tokens
        local = self.hit.local_tokens
        ratio = size // page_tokens
        stop = (local + external_tokens) // size
        begin = _skip_null(pages, local // page_tokens, stop * ratio)
        first = min(begin // ratio, stop - 1)
        self.load = Load(
            self.request.request_id,
            self.adapter,
            self.chain.keys(first, stop),
            tuple(pages[first * ratio : stop * ratio]),
            first,
            begin - first * ratio,
            whole=NULL_PAGE in pages[: stop * ratio],
        )
        self.phase = Phase.LOADING
        return self.load

    def landed(self, failed_block: int | None) -> None:
        """The load is over on a worker; from `failed_block` on nothing is there."""
        self.phase = Phase.QUEUED
        if failed_block is not None:
            self.forget(failed_block)
            self.offered = min(self.offered, failed_block)
            self.limit = min(failed_block, failed_block if self.limit is None else self.limit)

    def forget(self, block: int) -> None:
        """Blocks from this one on are not in the depot after all."""
        self.stored = min(self.stored, block)

    def plan_save(self, complete: int, pages: Sequence[int], page_tokens: int) -> Save | None:
        """Save what is complete and not in the depot, unless that was tried at this point."""
        if complete <= self.offered:
            return None
        ratio = self.chain.block_tokens // page_tokens
        start, self.offered = self.stored, complete
        start = -(-_skip_null(pages, start * ratio, complete * ratio) // ratio)
        if complete <= start:
            return None
        self.chain.grow(self.request.all_token_ids, complete)
        self.stored = complete
        self.saved = True
        return Save(
            self.request.request_id,
            self.adapter,
            self.chain.keys(start, complete),
            tuple(pages[start * ratio : complete * ratio]),
            start,
        )


def _skip_null(pages: Sequence[int], start: int, stop: int) -> int:
    """The first page from `start` on behind all that vLLM does not keep."""
    null = [at for at in range(start, stop) if pages[at] == NULL_PAGE]
    return null[-1] + 1 if null else start
