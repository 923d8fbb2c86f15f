"""One request as the scheduler follows it: the keys of its blocks, its load, and its saves.

    QUEUED --load--> LOADING --load ended--> QUEUED --scheduled--> COMPUTING --finish--> (gone)
                                               ^                       |
                                               +------(preempted)------+

vLLM asks for a match whenever a queued request has nothing computed: at first, after a preemption,
and after a load that failed at its first block. `limit` prevents a second load of blocks that
failed once.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from kvdepot.adapters.vllm.groups import GroupRule, KVGroups
from kvdepot.adapters.vllm.messages import BlockOrigin, GroupBlocks, LoadJob, SaveJob, ShardKeys
from kvdepot.core.block import BlockKey
from kvdepot.core.block_wait import BlockWait
from kvdepot.core.depot import Match, NamespaceHandle
from kvdepot.core.keys import encode, token_bytes, without_link
from kvdepot.policy.fetching.fetch_or_recompute import Decision

EngineRequest = Any
"""vLLM's Request. `releases.NEEDED` lists the attributes that are used."""
NULL_PAGE: Final = 0
"""vLLM's block for positions that it does not keep: outside a window, earlier states."""
StateOffer = tuple[int, int, int]
"""vLLM's KV group, the page of a state, and the number of tokens before it."""
PageTables = Sequence[Sequence[int]]
"""vLLM's block ids of a request, one list for each of vLLM's KV groups."""
_DIGEST_BYTES: Final = 64
_WORD_BYTES: Final = 4


class RequestKeys:
    """The keys of one request's leading blocks, for all KV groups and shards.

    Keys are made of token ids, not of vLLM's block hashes, which leave out model, dtype and layout.
    A cache salt counts as a block before the first one, and the hashes of multimodal inputs as
    blocks before each block that they reach into. Such a block is only a parent: nothing is stored
    for it.
    """

    def __init__(
        self,
        request: EngineRequest,
        groups: KVGroups,
        spaces: Sequence[Sequence[NamespaceHandle]],
        origin: BlockOrigin,
    ) -> None:
        """`spaces`: for each group the namespaces of its shards."""
        self.groups = groups
        self.origin = origin
        self._request = request
        self._spaces = spaces
        self._keys: list[list[list[BlockKey]]] = [[[] for _ in shards] for shards in spaces]

    def grow(self, blocks: int) -> None:
        """Compute the keys of all groups up to the end of this many blocks of the request."""
        tokens = self._request.all_token_ids
        for group, shards in enumerate(self._spaces):
            size = self.block_tokens(group)
            stop = blocks * self.groups.grain // size
            if len(self._keys[group][0]) >= stop:
                continue
            marks = _marks(self._request, size)
            for keys, space in zip(self._keys[group], shards, strict=True):
                while (first := len(keys)) < stop:
                    end = min((block for block in marks if first < block < stop), default=stop)
                    parent = keys[-1] if keys else None
                    if first in marks:
                        parent = space.keys(_words(marks[first], size), parent=parent)[0]
                    keys += space.keys(tokens[first * size : end * size], parent=parent)

    def block_tokens(self, group: int) -> int:
        return self.groups.rules[group].block_tokens(self.groups.grain)

    def of(self, group: int, start: int, stop: int) -> ShardKeys:
        """The keys of the group's blocks start <= i < stop, by shard."""
        chains = [keys[start:stop] for keys in self._keys[group]]
        if self.groups.rules[group].kind != "full":  # its blocks are of use without those before
            return tuple(tuple(map(without_link, keys)) for keys in chains)
        return tuple(map(tuple, chains))

    def token_bytes(self, group: int, start: int, stop: int) -> bytes:
        """Token ids of blocks of the first group, for routers, which follow one group only. Empty
        for other groups, and if the token ids alone do not determine the blocks."""
        request, size = self._request, self.block_tokens(group)
        is_followed = not group and self.groups.rules[group].kind == "full"
        if not is_followed or request.cache_salt or request.mm_features:
            return b""
        return bytes(token_bytes(request.all_token_ids[start * size : stop * size]))


def _marks(request: EngineRequest, block_tokens: int) -> dict[int, bytes]:
    """The facts that a key depends on besides tokens, by block: the salt, and the multimodal inputs
    that reach into the block, with their starts."""
    marks = {0: encode(("salt", request.cache_salt))} if request.cache_salt else {}
    for feature in request.mm_features:
        place = feature.mm_position
        last = place.offset + max(place.length, 1) - 1
        for block in range(place.offset // block_tokens, last // block_tokens + 1):
            offset = place.offset - block * block_tokens
            mark = encode(("mm", str(feature.identifier), offset))
            marks[block] = marks.get(block, b"") + mark
    return marks


def _words(mark: bytes, count: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """`count` token ids that stand for `mark`."""
    size = min(_DIGEST_BYTES, count * _WORD_BYTES)
    digest = hashlib.blake2b(mark, digest_size=size, person=b"kvdepot-mark-v1").digest()
    return np.resize(np.frombuffer(digest, "<u4"), count)


@dataclass(frozen=True, slots=True)
class DepotHit:
    """A match beyond what vLLM has itself. Its blocks are those of full attention."""

    local_tokens: int
    """Tokens that vLLM's own prefix cache has: whole pages."""
    first_block: int
    """The first block that vLLM lacks, or has only a part of."""
    tiers: tuple[str, ...]
    """The slowest tier among shards and groups, for each block from `first_block` on."""
    shards: int = 0
    """The number of shards that saved the blocks. 0: as many as in this engine."""

    @property
    def stop_block(self) -> int:
        """Blocks before this one are in vLLM or in the depot."""
        return self.first_block + len(self.tiers)


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """The decision of `fetch_decision` for one hit."""

    decision: Decision
    hit: DepotHit
    decided_s: float
    prompt_tokens: int

    @property
    def stop_block(self) -> int:
        """Blocks of the request before this one are to be used."""
        return self.hit.first_block + self.decision.cut_blocks


class Phase(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    COMPUTING = "computing"


class TrackedRequest:
    """A request that is served from the depot."""

    def __init__(self, request: EngineRequest, keys: RequestKeys) -> None:
        self.request = request
        self.keys = keys
        self.other_keys: dict[int, RequestKeys] | None = None
        """Keys for other numbers of shards, if the depot has the request's beginning from them.
        None: the depot was not asked yet."""
        self.saves = RequestSaves(request, keys)
        self.phase = Phase.QUEUED
        self.limit: int | None = None
        """Leading blocks that may be loaded. None: all."""
        self.hit: DepotHit | None = None
        """The latest match."""
        self.decided: FetchDecision | None = None
        """The latest decision. None: there is none, or the request has its first token."""
        self.may_audit = True
        """It was not decided yet whether the hit is audited."""
        self.wait: BlockWait | None = None
        """The wait for blocks that another machine commits. None: there is none, or it is over."""
        self._loaded = 0
        """Leading blocks that need not be saved when the load has ended. 0: blocks before the load
        are missing in the depot."""

    def keys_at(self, shards: int) -> RequestKeys:
        """The keys of blocks from this many shards. 0: as many as in this engine."""
        return self.other_keys[shards] if shards and self.other_keys else self.keys

    def begin_load(self, external_tokens: int, tables: PageTables) -> LoadJob:
        """Load the latest match, `external_tokens` of it, into the request's pages. Blocks from
        another number of shards are saved again, in the form that they have here."""
        assert self.hit is not None
        groups, local, shards = self.keys.groups, self.hit.local_tokens, self.hit.shards
        stop = (local + external_tokens) // groups.grain
        self.phase = Phase.LOADING
        self._loaded = stop if self.saves.stored >= self.hit.first_block and not shards else 0
        keys, parts = self.keys_at(shards), []
        for group, rule in enumerate(groups.rules):
            pages, ratio = tables[rule.table], rule.pages_per_block(groups.grain)
            first, end = groups.span(group, local, stop)
            present = 0
            if rule.kind == "state":
                wanted = [pages[_state_page(rule, stop * groups.grain)]]
            else:
                begin = max(first * ratio, local // rule.page_tokens)
                begin = _skip_null(pages, begin, end * ratio)
                first = min(begin // ratio, end - 1)
                wanted, present = list(pages[first * ratio : end * ratio]), begin - first * ratio
            if present >= len(wanted):
                continue  # vLLM has all that the group needs
            own = keys.of(group, first, end)
            parts.append(GroupBlocks(group, own, tuple(wanted), first, present))
            if rule.kind != "full" and not shards:
                self.saves.given[group].update(range(first, end))
        whole = len(groups.rules) > 1 or not groups.full
        return LoadJob(self.request.request_id, keys.origin, tuple(parts), whole=whole)

    def load_ended(self, failed_block: int | None) -> None:
        """The load has ended on a worker; blocks from `failed_block` on were not loaded."""
        self.phase = Phase.QUEUED
        if failed_block is not None:
            self._loaded = min(self._loaded, failed_block)
        self.saves.stored = max(self.saves.stored, self._loaded)
        if failed_block is not None:
            self.saves.forget(failed_block)
            self.saves.offered = min(self.saves.offered, failed_block)
            self.limit = min(failed_block, failed_block if self.limit is None else self.limit)


class RequestSaves:
    """Plans the saves of a request: knows the blocks that the depot has, or was given."""

    def __init__(self, request: EngineRequest, keys: RequestKeys) -> None:
        self._request = request
        self._keys = keys
        self._groups = keys.groups
        self.stored = 0
        """Leading blocks of full attention that need not be saved: they are in the depot's memory,
        or were given to it, or come from vLLM or the depot and were not computed."""
        self.given: list[set[int]] = [set() for _ in self._groups.rules]
        """The blocks that the depot has or was given, for each other group."""
        self.made: list[set[int]] = [set() for _ in self._groups.rules]
        """The blocks among `given` that were saved, not loaded."""
        self.checkpoint = 0
        """The last block at whose end states were saved."""
        self.shared = 0
        """The depot has this many leading blocks of full attention, but not of the other groups:
        prompts part there, so windows and states are saved there now."""
        self.offered = 0
        """Leading blocks that were complete when saves were planned last."""
        self.audited: int | None = None
        """The block that is computed though the depot has it."""
        self.planned = False
        """True after the first planned save."""

    def found(self, hit: DepotHit, leading: Match, shared: int) -> None:
        """The depot has a hit, the leading blocks of full attention `leading`, and `shared` blocks
        of full attention in all. A block that is on a drive only, and is
        computed, is saved to memory."""
        local = min(hit.first_block, len(leading))
        in_memory = Match(leading.tiers[local:]).blocks_in_memory
        self.stored = max(self.stored, local + in_memory)
        self.shared = shared if shared > hit.stop_block else 0

    def forget(self, block: int) -> None:
        """Blocks from this one on are not in the depot after all."""
        self.stored = min(self.stored, block)
        self.checkpoint = min(self.checkpoint, block)
        for group, given in enumerate(self.given):
            first = block * self._groups.grain // self._keys.block_tokens(group)
            lost = {number for number in given if number >= first}
            given -= lost
            self.made[group] -= lost

    def superseded(self) -> list[BlockKey]:
        """Windows and states inside the answer that no request will continue from, now that it has
        ended: the next turn continues from its end, the same prompt from the prompt's end."""
        keys, others = self._keys, self._groups.others
        ends = [(max(self.made[each], default=-1) + 1) * keys.block_tokens(each) for each in others]
        last = min(ends, default=0) // self._groups.grain
        superseded: list[BlockKey] = []
        for group in others:
            needed, _ = self._groups.span(group, 0, last)
            prompt_end = self._request.num_prompt_tokens // keys.block_tokens(group)
            for block in range(prompt_end, needed):
                if block in self.made[group]:
                    superseded += [key for (key,) in keys.of(group, block, block + 1)]
        return superseded

    def plan(
        self, complete: int, tables: PageTables, states: Iterable[StateOffer] = ()
    ) -> list[SaveJob]:
        """Jobs for the blocks that are complete and not in the depot; none if this was called for
        as many blocks before.

        All blocks of full attention; of other groups those that are needed to continue from certain
        boundaries. `states`: the states that vLLM hands over after this step.
        """
        if complete <= self.offered:
            return []
        self._keys.grow(complete)
        groups, grain, prompt = self._groups, self._groups.grain, self._request.num_prompt_tokens
        every, ahead = groups.checkpoint_blocks, groups.ahead_blocks

        def is_useful(end: int) -> bool:
            """The prompt ends or parts from others there, or it is inside the answer."""
            ends = (prompt // grain - ahead, (prompt - 1) // grain - ahead, self.shared)
            return end * grain > prompt or end in ends

        steps = range(self.offered + 1, complete + 1)
        ends = [end for end in steps if end % every == 0 or is_useful(end)]
        # vLLM does not have states everywhere: the first one after each checkpoint is saved.
        offers = [
            (table, page, tokens // grain)
            for table, page, tokens in states
            if tokens % grain == 0
            and 0 < tokens // grain <= complete
            and (tokens // grain // every > self.checkpoint // every or is_useful(tokens // grain))
        ]
        jobs = self._audits(complete, tables)
        for group, rule in enumerate(groups.rules):
            pages, ratio = tables[rule.table], rule.pages_per_block(grain)
            blocks: dict[int, Sequence[int]] = {}
            if rule.kind == "full":
                start = -(-_skip_null(pages, self.stored * ratio, complete * ratio) // ratio)
                for block in range(start, complete):
                    if block != self.audited:  # it must not be replaced before it is compared
                        blocks[block] = pages[block * ratio : (block + 1) * ratio]
            elif rule.handed_over:
                blocks = {end - 1: [page] for table, page, end in offers if table == rule.table}
            elif rule.kind == "state":
                for end in ends:
                    place = _state_page(rule, end * grain)
                    if place < len(pages) and pages[place] != NULL_PAGE:
                        blocks[end - 1] = [pages[place]]
            else:
                for end in ends:
                    span = range(*groups.span(group, 0, end))
                    fresh = {at: pages[at : at + 1] for at in span if at not in self.given[group]}
                    if all(page and page[0] != NULL_PAGE for page in fresh.values()):
                        blocks |= fresh
            jobs += self._save(group, blocks)
        self.checkpoint = max([self.checkpoint, *(end for _, _, end in offers)])
        self.stored, self.offered = max(self.stored, complete), complete
        self.planned = self.planned or bool(jobs)
        return jobs

    def _audits(self, complete: int, tables: PageTables) -> list[SaveJob]:
        """Compare the audited block once it is complete, and the windows at its end."""
        audited, jobs = self.audited, []
        if audited is None or not self.offered <= audited < complete:
            return []
        for group, rule in enumerate(self._groups.rules):
            ratio, pages = rule.pages_per_block(self._groups.grain), tables[rule.table]
            blocks = range(audited, audited + 1)
            if rule.kind != "full":
                # The hit went up to the end of this block, so the depot has its last window.
                start, end = self._groups.span(group, 0, audited + 1)
                first = audited * self._groups.grain // self._keys.block_tokens(group)
                blocks = range(max(start, first), start if rule.kind == "state" else end)
                self.given[group].update(blocks)
            for block in blocks:
                own = tuple(pages[block * ratio : (block + 1) * ratio])
                if NULL_PAGE not in own:
                    jobs.append(self._job(group, block, block + 1, own, is_audit=True))
        return jobs

    def _save(self, group: int, blocks: Mapping[int, Sequence[int]]) -> list[SaveJob]:
        """Jobs for blocks and their pages; each job has consecutive blocks."""
        if self._groups.rules[group].kind != "full":
            blocks = {at: blocks[at] for at in sorted(blocks) if at not in self.given[group]}
            self.given[group].update(blocks)
            self.made[group].update(blocks)
        jobs = []
        for first in (block for block in blocks if block - 1 not in blocks):
            stop = first + 1
            while stop in blocks:
                stop += 1
            pages = tuple(page for block in range(first, stop) for page in blocks[block])
            tokens = self._keys.token_bytes(group, first, stop)
            jobs.append(self._job(group, first, stop, pages, tokens=tokens))
        return jobs

    def _job(
        self, group: int, first: int, stop: int, pages: tuple[int, ...], **more: Any
    ) -> SaveJob:
        blocks = GroupBlocks(group, self._keys.of(group, first, stop), pages, first)
        return SaveJob(self._request.request_id, self._keys.origin, blocks, **more)


def _state_page(rule: GroupRule, tokens: int) -> int:
    """The index in vLLM's list of the state after this many tokens."""
    return tokens // rule.page_tokens - 1


def _skip_null(pages: Sequence[int], start: int, stop: int) -> int:
    """The first page from `start` on after all pages that vLLM does not keep."""
    null = [index for index in range(start, stop) if pages[index] == NULL_PAGE]
    return null[-1] + 1 if null else start
