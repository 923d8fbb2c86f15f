"""One request as the scheduler follows it, and the keys of its blocks.

    QUEUED --load--> LOADING --load ended--> QUEUED --scheduled--> COMPUTING --finish--> (gone)
                                               ^                       |
                                               +------(preempted)------+

vLLM asks for a match whenever a queued request has nothing computed: at first, after a preemption
and after a load that failed at its first block. `limit` keeps the same request from asking again
for what failed once.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np

from kvdepot.adapters.vllm.messages import LoadJob, SaveJob, ShardKeys
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Match, NamespaceHandle
from kvdepot.core.keys import encode

NULL_PAGE: Final = 0
"""vLLM's block that stands for those it does not keep: outside a sliding window."""
_DIGEST_BYTES: Final = 64
_WORD_BYTES: Final = 4


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


class RequestKeys:
    """The keys of one request's leading blocks, for each shard; grows with its tokens.

    Keys are our own, not vLLM's block hashes: these leave out model, dtype and layout. A LoRA
    adapter has its own namespace. A cache salt comes before the first block, and the hashes of
    multimodal inputs (`marks`) before each block that they reach into, as if they were a block of
    the prompt. Such a block is only ever a parent; nothing is stored for it.
    """

    def __init__(
        self,
        spaces: Sequence[NamespaceHandle],
        salt: str | None = None,
        marks: Mapping[int, bytes] = {},
    ) -> None:
        self._spaces = spaces
        self._salt = encode(("salt", salt)) if salt else b""
        self._marks = marks
        self._keys: list[list[BlockKey]] = [[] for _ in spaces]
        self.block_tokens = spaces[0].layout.block_tokens

    @classmethod
    def of(cls, spaces: Sequence[NamespaceHandle], request: Any) -> "RequestKeys":
        block_tokens = spaces[0].layout.block_tokens
        marks = _multimodal_marks(request.mm_features, block_tokens)
        return cls(spaces, request.cache_salt, marks)

    def __len__(self) -> int:
        return len(self._keys[0])

    def grow(self, tokens: Sequence[int], blocks: int) -> None:
        """Compute the keys of at least `blocks` blocks; `tokens` has all of theirs."""
        while len(self) < blocks:
            first = len(self)
            stop = min((block for block in self._marks if first < block < blocks), default=blocks)
            part = tokens[first * self.block_tokens : stop * self.block_tokens]
            mark = (self._salt if first == 0 else b"") + self._marks.get(first, b"")
            for keys, space in zip(self._keys, self._spaces, strict=True):
                parent = keys[-1] if keys else None
                if mark:
                    parent = space.keys(_words(mark, self.block_tokens), parent=parent)[0]
                keys += space.keys(part, parent=parent)

    def keys(self, start: int, stop: int) -> ShardKeys:
        """For each shard the keys of blocks start <= i < stop."""
        return tuple(tuple(keys[start:stop]) for keys in self._keys)


def _multimodal_marks(features: Sequence[Any], block_tokens: int) -> dict[int, bytes]:
    """For each block that multimodal inputs reach into: which inputs, and where they begin."""
    marks: dict[int, bytes] = {}
    for feature in features:
        place = feature.mm_position
        last = place.offset + max(place.length, 1) - 1
        for block in range(place.offset // block_tokens, last // block_tokens + 1):
            where = place.offset - block * block_tokens
            mark = encode(("mm", str(feature.identifier), where))
            marks[block] = marks.get(block, b"") + mark
    return marks


def _words(mark: bytes, count: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """`count` token ids that stand for `mark`."""
    size = min(_DIGEST_BYTES, count * _WORD_BYTES)
    digest = hashlib.blake2b(mark, digest_size=size, person=b"kvdepot-mark-v1").digest()
    return np.resize(np.frombuffer(digest, "<u4"), count)


class Phase(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    COMPUTING = "computing"


@dataclass(frozen=True, slots=True)
class DepotHit:
    """A match beyond what vLLM has itself."""

    local_tokens: int
    """Of vLLM's own prefix cache, whole pages."""
    first_block: int
    """The first one that vLLM lacks, or has a part of."""
    tiers: tuple[str, ...]
    """Where the blocks from that one on are; the slowest shard's."""

    @property
    def stop_block(self) -> int:
        """Blocks before this one are in vLLM or in the depot."""
        return self.first_block + len(self.tiers)


@dataclass(slots=True)
class TrackedRequest:
    """A request that is served from the depot."""

    request: EngineRequest
    adapter: str
    block_keys: RequestKeys
    phase: Phase = Phase.QUEUED
    stored: int = 0
    """Leading blocks that need not be saved: the depot's memory has them or was given them, or they
    come from vLLM or the depot and are not computed."""
    offered: int = 0
    """Leading blocks that were complete when saves were planned last."""
    limit: int | None = None
    """Leading blocks that may be loaded; None: all."""
    hit: DepotHit | None = None
    """The latest match."""
    loaded: int = 0
    """Leading blocks that need not be saved when the latest load is over; 0 where blocks before it
    are missing in the depot."""
    saved: bool = False
    """A save was planned for it."""

    def found(self, hit: DepotHit, leading: Match) -> None:
        """The depot has a hit, and these leading blocks.

        What is on disk only, and is computed rather than fetched, is worth saving to memory.
        """
        self.hit = hit
        local = min(hit.first_block, len(leading))
        kept = local + Match(leading.tiers[local:]).blocks_in_memory
        self.stored = max(self.stored, kept)

    def begin_load(self, external_tokens: int, pages: Sequence[int], page_tokens: int) -> LoadJob:
        """Load what the latest match found, `external_tokens` of it, into the request's pages."""
        assert self.hit is not None
        size, local = self.block_keys.block_tokens, self.hit.local_tokens
        ratio, stop = size // page_tokens, (local + external_tokens) // size
        begin = _skip_null(pages, local // page_tokens, stop * ratio)
        first = min(begin // ratio, stop - 1)
        self.phase = Phase.LOADING
        self.loaded = stop if self.stored >= self.hit.first_block else 0
        return LoadJob(
            self.request.request_id,
            self.adapter,
            self.block_keys.keys(first, stop),
            tuple(pages[first * ratio : stop * ratio]),
            first,
            begin - first * ratio,
            whole=NULL_PAGE in pages[: stop * ratio],
        )

    def load_ended(self, failed_block: int | None) -> None:
        """The load is over on a worker; blocks from `failed_block` on were not loaded."""
        self.phase = Phase.QUEUED
        if failed_block is not None:
            self.loaded = min(self.loaded, failed_block)
        self.stored = max(self.stored, self.loaded)
        if failed_block is not None:
            self.forget(failed_block)
            self.offered = min(self.offered, failed_block)
            self.limit = min(failed_block, failed_block if self.limit is None else self.limit)

    def forget(self, block: int) -> None:
        """Blocks from this one on are not in the depot after all."""
        self.stored = min(self.stored, block)

    def plan_save(self, complete: int, pages: Sequence[int], page_tokens: int) -> SaveJob | None:
        """Save what is complete and not in the depot, unless that was tried at this point."""
        if complete <= self.offered:
            return None
        ratio = self.block_keys.block_tokens // page_tokens
        start, self.offered = self.stored, complete
        start = -(-_skip_null(pages, start * ratio, complete * ratio) // ratio)
        if complete <= start:
            return None
        self.block_keys.grow(self.request.all_token_ids, complete)
        self.stored = complete
        self.saved = True
        return SaveJob(
            self.request.request_id,
            self.adapter,
            self.block_keys.keys(start, complete),
            tuple(pages[start * ratio : complete * ratio]),
            start,
        )


def _skip_null(pages: Sequence[int], start: int, stop: int) -> int:
    """The first page from `start` on behind all that vLLM does not keep."""
    null = [at for at in range(start, stop) if pages[at] == NULL_PAGE]
    return null[-1] + 1 if null else start
