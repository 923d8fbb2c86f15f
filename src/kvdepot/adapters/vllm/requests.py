"""One request as the scheduler follows it, and the keys of its blocks.

    QUEUED --load--> LOADING --load ended--> QUEUED --scheduled--> COMPUTING --finish--> (gone)
                                               ^                       |
                                               +------(preempted)------+

vLLM asks for a match whenever a queued request has nothing computed: at first, after a preemption
and after a load that failed at its first block. `limit` keeps the same request from asking again
for what failed once.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np

from kvdepot.adapters.vllm.groups import GroupRule, pages_per_block
from kvdepot.adapters.vllm.messages import START, Generation, LoadJob, SaveJob, ShardKeys
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Match, NamespaceHandle
from kvdepot.core.keys import encode, token_bytes, without_link

NULL_PAGE: Final = 0
"""vLLM's block that stands for those it does not keep: outside a window, states but the last."""
StateOffer = tuple[int, int, int]
"""vLLM's KV group, the page of a state, and the tokens before it."""
PageTables = Sequence[Sequence[int]]
"""vLLM's block ids of a request, one list for each of its own KV groups."""
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
    """The keys of one request's leading blocks of one KV group, for each shard; grows with its
    tokens.

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
        *,
        chained: bool = True,
    ) -> None:
        self._spaces = spaces
        self._chained = chained
        self._salt = encode(("salt", salt)) if salt else b""
        self._marks = marks
        self._keys: list[list[BlockKey]] = [[] for _ in spaces]
        self.block_tokens = spaces[0].layout.block_tokens

    @classmethod
    def of(
        cls, spaces: Sequence[NamespaceHandle], request: Any, *, chained: bool = True
    ) -> "RequestKeys":
        block_tokens = spaces[0].layout.block_tokens
        marks = _multimodal_marks(request.mm_features, block_tokens)
        return cls(spaces, request.cache_salt, marks, chained=chained)

    def __len__(self) -> int:
        return len(self._keys[0])

    @property
    def say_all(self) -> bool:
        """Whether token ids alone say what a block is: no salt, no image."""
        return not self._salt and not self._marks

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
        if not self._chained:
            return tuple(tuple(map(without_link, keys[start:stop])) for keys in self._keys)
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
    """A match beyond what vLLM has itself. Its blocks are those of full attention."""

    local_tokens: int
    """Of vLLM's own prefix cache, whole pages."""
    first_block: int
    """The first one that vLLM lacks, or has a part of."""
    tiers: tuple[str, ...]
    """Where the blocks from that one on are; the slowest shard's, and the slowest group's."""

    shards: int = 0
    """The depot has it from so many shards; 0: as many as there are here."""

    @property
    def stop_block(self) -> int:
        """Blocks before this one are in vLLM or in the depot."""
        return self.first_block + len(self.tiers)


@dataclass(frozen=True, slots=True)
class RequestGroups:
    """The KV groups of a model as its requests see them."""

    rules: tuple[GroupRule, ...]
    block_tokens: int
    """Of a block of full attention; a request is restored up to a multiple of it."""
    checkpoint_blocks: int
    """Windows and states are saved every so many blocks of a prompt."""
    ahead_blocks: int = 0
    """A prompt is restored up to so many blocks before the last one that the depot has."""

    @property
    def all_full(self) -> bool:
        return all(rule.kind == "full" for rule in self.rules)

    def span(self, group: int, keys: RequestKeys, start_token: int, stop: int) -> tuple[int, int]:
        """The blocks of a group that are needed from `start_token` on to go on from block `stop`
        of the request."""
        end = stop * self.block_tokens
        first = max(start_token, self.rules[group].first_token(end))
        return first // keys.block_tokens, end // keys.block_tokens


@dataclass(slots=True)
class AwaitedBlocks:
    """Blocks of a request that another machine is about to commit."""

    until_s: float
    look_s: float = 0.0
    """When to look again."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Of each shard the leading blocks that have come."""


@dataclass(slots=True)
class TrackedRequest:
    """A request that is served from the depot."""

    request: EngineRequest
    adapter: str
    groups: RequestGroups
    group_keys: tuple[RequestKeys, ...]
    other_keys: dict[int, tuple[RequestKeys, ...]] | None = None
    """The same for other numbers of shards, where the depot has its beginning from them; None: it
    was not asked yet."""
    phase: Phase = Phase.QUEUED
    stored: int = 0
    """Leading blocks of full attention that need not be saved: the depot's memory has them or was
    given them, or they come from vLLM or the depot and are not computed."""
    given: dict[int, set[int]] = field(default_factory=dict)
    """Of each other group the blocks that the depot has, or was given."""
    checkpoint: int = 0
    """The last block at whose end states were saved."""
    shared: int = 0
    """So many leading blocks the depot has of full attention, but not of the other groups: where
    prompts part, to be saved now."""
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
    may_audit: bool = True
    """It was not decided yet whether its hit is computed again."""
    audited: int | None = None
    """The block that is computed though the depot has it."""
    awaited: "AwaitedBlocks | None" = None
    """What another machine is to commit; None: nothing is waited for, or no more."""
    made: dict[int, set[int]] = field(default_factory=dict)
    """Of each group of windows or states the blocks that were saved, not loaded."""
    generation: Generation = START
    """What its keys are of."""

    @property
    def block_keys(self) -> RequestKeys:
        """Of the first group, one with full attention if there is any."""
        return self.group_keys[0]

    @property
    def block_tokens(self) -> int:
        return self.groups.block_tokens

    def keys_of(self, shards: int) -> tuple[RequestKeys, ...]:
        """The keys of blocks from so many shards; 0: as many as there are here."""
        return self.other_keys[shards] if shards and self.other_keys else self.group_keys

    def grow(self, blocks: int, shards: int = 0) -> None:
        """Compute the keys of all groups up to the end of this many blocks of the request."""
        tokens = self.request.all_token_ids
        for keys in self.keys_of(shards):
            keys.grow(tokens, blocks * self.block_tokens // keys.block_tokens)

    def found(self, hit: DepotHit, leading: Match, shared: int) -> None:
        """The depot has a hit, and these leading blocks of full attention.

        What is on disk only, and is computed rather than fetched, is worth saving to memory.
        """
        self.hit = hit
        local = min(hit.first_block, len(leading))
        kept = local + Match(leading.tiers[local:]).blocks_in_memory
        self.stored = max(self.stored, kept)
        self.shared = shared if shared > hit.stop_block else 0

    def begin_load(self, external_tokens: int, tables: PageTables) -> list[LoadJob]:
        """Load what the latest match found, `external_tokens` of it, into the request's pages.

        What comes from another number of shards is saved again, in the form that it has here.
        """
        assert self.hit is not None
        local = self.hit.local_tokens
        stop = (local + external_tokens) // self.block_tokens
        self.phase = Phase.LOADING
        known = self.stored >= self.hit.first_block and not self.hit.shards
        self.loaded = stop if known else 0
        jobs = [self._load(group, tables, local, stop) for group in range(len(self.group_keys))]
        whole = len(jobs) > 1 or not self.groups.all_full
        found = [job for job in jobs if job is not None]
        return [replace(job, whole=whole, jobs=len(found)) for job in found]

    def _load(self, group: int, tables: PageTables, local: int, stop: int) -> LoadJob | None:
        """The part of one group; none where vLLM has all that it needs."""
        shards = self.hit.shards if self.hit is not None else 0
        rule, keys = self.groups.rules[group], self.keys_of(shards)[group]
        pages, ratio = tables[rule.table], pages_per_block(rule, self.block_tokens)
        first, end = self.groups.span(group, keys, local, stop)
        if rule.kind == "state":
            wanted, present = [pages[_state_page(rule, end * keys.block_tokens)]], 0
        else:
            begin = _skip_null(pages, max(first * ratio, local // rule.page_tokens), end * ratio)
            first = min(begin // ratio, end - 1)
            wanted, present = list(pages[first * ratio : end * ratio]), begin - first * ratio
        if present >= len(wanted):
            return None
        if rule.kind != "full" and not shards:
            self.given.setdefault(group, set()).update(range(first, end))
        return LoadJob(
            self.request.request_id,
            self.adapter,
            keys.keys(first, end),
            tuple(wanted),
            first,
            group,
            present,
            shards=shards,
            generation=self.generation,
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
        self.checkpoint = min(self.checkpoint, block)
        for group, blocks in self.given.items():
            first = block * self.block_tokens // self.group_keys[group].block_tokens
            blocks.difference_update([one for one in blocks if one >= first])
            self.made.get(group, set()).intersection_update(blocks)

    def superseded(self) -> list[BlockKey]:
        """Windows and states inside the answer that nothing goes on from, now that it is over: the
        next turn goes on from its end, and who asks the same again from the end of the prompt."""
        others = [at for at, rule in enumerate(self.groups.rules) if rule.kind != "full"]
        ends = [
            (max(self.made.get(at, ()), default=-1) + 1) * self.group_keys[at].block_tokens
            for at in others
        ]
        last = min(ends, default=0) // self.block_tokens
        found: list[BlockKey] = []
        for at in others:
            keys, made = self.group_keys[at], self.made.get(at, ())
            needed, _ = self.groups.span(at, keys, 0, last)
            for block in range(self.request.num_prompt_tokens // keys.block_tokens, needed):
                if block in made:
                    found += [key for (key,) in keys.keys(block, block + 1)]
        return found

    def plan_save(
        self, complete: int, tables: PageTables, states: Iterable[StateOffer] = ()
    ) -> list[SaveJob]:
        """Save what is complete and not in the depot, unless that was tried at this point.

        Of full attention all blocks; of the other groups what is needed to go on from certain
        boundaries. `states` are those that vLLM hands over after this step.
        """
        if complete <= self.offered:
            return []
        self.grow(complete)
        ends = [end for end in range(self.offered + 1, complete + 1) if self._is_kept(end)]
        offers = [offer for offer in states if self._is_state_kept(offer, complete)]
        jobs = self._audits(complete, tables)
        for group, rule in enumerate(self.groups.rules):
            pages = tables[rule.table]
            if rule.kind == "full":
                jobs += self._save(group, self._full_blocks(rule, pages, complete))
            elif rule.kind == "state":
                mine = [offer for offer in offers if offer[0] == rule.table]
                jobs += self._save(group, self._states(rule, pages, ends, mine))
            else:
                jobs += self._save(group, self._window_blocks(group, pages, ends))
        blocks = [tokens // self.block_tokens for _, _, tokens in offers]
        self.checkpoint = max([self.checkpoint, *blocks])
        self.stored, self.offered = max(self.stored, complete), complete
        self.saved = self.saved or bool(jobs)
        return jobs

    def _audits(self, complete: int, tables: PageTables) -> list[SaveJob]:
        """Have the audited block compared once it is complete, and the windows at its end."""
        at = self.audited
        if at is None or not self.offered <= at < complete:
            return []
        jobs = []
        for group, rule in enumerate(self.groups.rules):
            ratio, keys = pages_per_block(rule, self.block_tokens), self.group_keys[group]
            blocks = range(at, at + 1)
            if rule.kind != "full":
                # The hit went up to the end of this block, so the depot has its last window.
                start, end = self.groups.span(group, keys, 0, at + 1)
                first = at * self.block_tokens // keys.block_tokens
                blocks = range(max(start, first), start if rule.kind == "state" else end)
                self.given.setdefault(group, set()).update(blocks)
            for block in blocks:
                pages = tuple(tables[rule.table][block * ratio : (block + 1) * ratio])
                if NULL_PAGE not in pages:
                    mine = keys.keys(block, block + 1)
                    jobs.append(self._save_job(mine, pages, block, group, audit=True))
        return jobs

    def _is_kept(self, end: int) -> bool:
        """Whether windows are saved at the end of this many blocks."""
        return end % self.groups.checkpoint_blocks == 0 or self._is_useful(end)

    def _is_state_kept(self, offer: StateOffer, complete: int) -> bool:
        """States are not everywhere: the first one behind each checkpoint is saved."""
        end, rest = divmod(offer[2], self.block_tokens)
        if rest or not 0 < end <= complete:
            return False
        every = self.groups.checkpoint_blocks
        return end // every > self.checkpoint // every or self._is_useful(end)

    def _is_useful(self, end: int) -> bool:
        """The prompt ends there, or parts from others, or it is in the answer."""
        prompt, size = self.request.num_prompt_tokens, self.block_tokens
        ahead = self.groups.ahead_blocks
        ends = (prompt // size - ahead, (prompt - 1) // size - ahead, self.shared)
        return end * size > prompt or end in ends

    def _full_blocks(
        self, rule: GroupRule, pages: Sequence[int], complete: int
    ) -> dict[int, Sequence[int]]:
        ratio = pages_per_block(rule, self.block_tokens)
        start = -(-_skip_null(pages, self.stored * ratio, complete * ratio) // ratio)
        # What is compared must not be replaced meanwhile.
        blocks = (at for at in range(start, complete) if at != self.audited)
        return {at: pages[at * ratio : (at + 1) * ratio] for at in blocks}

    def _window_blocks(
        self, group: int, pages: Sequence[int], ends: Iterable[int]
    ) -> dict[int, Sequence[int]]:
        """The blocks that are needed at these boundaries, where vLLM still has all of them."""
        found: dict[int, Sequence[int]] = {}
        given = self.given.setdefault(group, set())
        for end in ends:
            span = range(*self.groups.span(group, self.group_keys[group], 0, end))
            new = {at: pages[at : at + 1] for at in span if at not in given}
            if all(page and page[0] != NULL_PAGE for page in new.values()):
                found |= new
        return found

    def _states(
        self,
        rule: GroupRule,
        pages: Sequence[int],
        ends: Iterable[int],
        offers: Iterable[StateOffer],
    ) -> dict[int, Sequence[int]]:
        if rule.handed_over:
            return {tokens // self.block_tokens - 1: [page] for _, page, tokens in offers}
        places = {end - 1: _state_page(rule, end * self.block_tokens) for end in ends}
        return {
            at: [pages[place]]
            for at, place in places.items()
            if place < len(pages) and pages[place] != NULL_PAGE
        }

    def _save(self, group: int, blocks: Mapping[int, Sequence[int]]) -> list[SaveJob]:
        """Jobs for blocks and their pages; each has consecutive ones."""
        given = self.given.setdefault(group, set())
        if self.groups.rules[group].kind != "full":
            blocks = {at: blocks[at] for at in sorted(blocks) if at not in given}
            given.update(blocks)
            self.made.setdefault(group, set()).update(blocks)
        starts = [at for at in blocks if at - 1 not in blocks]
        jobs = []
        for first in starts:
            end = first
            while end in blocks:
                end += 1
            pages = tuple(page for at in range(first, end) for page in blocks[at])
            keys = self.group_keys[group].keys(first, end)
            jobs.append(
                self._save_job(keys, pages, first, group, tokens=self._tokens(group, first, end))
            )
        return jobs

    def _save_job(
        self, keys: ShardKeys, pages: tuple[int, ...], first: int, group: int, **more: Any
    ) -> SaveJob:
        name, of = self.request.request_id, self.generation
        return SaveJob(name, self.adapter, keys, pages, first, group, generation=of, **more)

    def _tokens(self, group: int, first: int, end: int) -> bytes:
        """Token ids of blocks of the first group, for routers: they follow one group alone."""
        keys = self.group_keys[group]
        if group or not keys.say_all or self.groups.rules[group].kind != "full":
            return b""
        size = keys.block_tokens
        return bytes(token_bytes(self.request.all_token_ids[first * size : end * size]))


def _state_page(rule: GroupRule, tokens: int) -> int:
    """Where in vLLM's list the state behind this many tokens is."""
    return tokens // rule.page_tokens - 1


def _skip_null(pages: Sequence[int], start: int, stop: int) -> int:
    """The first page from `start` on behind all that vLLM does not keep."""
    null = [at for at in range(start, stop) if pages[at] == NULL_PAGE]
    return null[-1] + 1 if null else start
