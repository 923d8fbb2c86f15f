"""`kvdepot sim --hits-only`: hits by tier, if every request is served at once.

A request hits its longest prefix of which each block is in some tier, and a block counts for the
fastest tier that has it. Then all of its blocks are in every tier with room for them
(write-through), the head as the most recently used. A block counts with its tokens: the last block
of a prompt may be partly filled; it needs the room of a whole block.

The offline optimum is Belady's MIN: the block with the farthest next use is evicted, and a block
that is never used again is not stored. A prefix is used whenever its continuation is, so its next
use is never later; of equal ones the deeper block is evicted. So whole prefixes stay, and MIN is
optimal in blocks with this rule too. In tokens the optimum may be slightly higher, because MIN
ignores that the last block of a prompt may be partly filled.
"""

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.policy.eviction import ORDERS, order_named
from kvdepot.policy.eviction.prefill_value import CROSSOVER_TOKENS
from kvdepot.sim.tiers import NOWHERE, BlockIndex, SimulatedTier, fastest_tier, leading
from kvdepot.sim.workload import NO_PARENT, Ints, PromptRequest, Workload

OPTIMAL: Final = "optimal"
POLICIES: Final = (*ORDERS, OPTIMAL)
TIERS: Final = ("dram", "cxl", "ssd", "hdd")
"""Fastest first."""
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TOKENS: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([kmgt]?)tok", re.IGNORECASE)
_HINT: Final = "--capacity dram=3Mtok,ssd=50Mtok (k, M, G, T are powers of 1000), or dram=inf"
_REPORT_REQUESTS: Final = 256
_NEVER: Final = np.iinfo(np.int64).max
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of each tier in tokens, fastest tier first; None is unlimited."""

    tokens: Mapping[str, int | None]
    text: str

    @property
    def total_tokens(self) -> int | None:
        """Capacity of the largest tier; with write-through every tier has every block."""
        sizes = list(self.tokens.values())
        return None if None in sizes else max(size for size in sizes if size is not None)

    def blocks(self, tier: str, block_tokens: int, unlimited: int) -> int:
        tokens = self.tokens[tier]
        return unlimited if tokens is None else tokens // block_tokens


def parse_capacity(text: str) -> Capacity:
    """Raises ConfigError unless `text` is a list of tiers and tokens."""
    found: dict[str, int | None] = {}
    for part in text.split(","):
        tier, _, size = part.strip().partition("=")
        if tier not in TIERS or tier in found:
            reason = "named twice" if tier in found else f"not a tier (expected {', '.join(TIERS)})"
            raise ConfigError("--capacity", f"{tier!r} is {reason}", hint=_HINT)
        found[tier] = _tokens(size)
    return Capacity({tier: found[tier] for tier in TIERS if tier in found}, text)


def _tokens(size: str) -> int | None:
    if size == "inf":
        return None
    match = _TOKENS.fullmatch(size)
    if match is None:
        raise ConfigError("--capacity", f"{size!r} is not a number of tokens", hint=_HINT)
    tokens = int(Decimal(match[1]) * _FACTORS[match[2].lower()])
    if not tokens:
        raise ConfigError("--capacity", f"{size!r} is less than one token", hint=_HINT)
    return tokens


@dataclass(frozen=True, slots=True)
class HitCounts:
    tokens_asked: int
    tokens_hit: dict[str, int]
    """Hit tokens by tier, fastest first."""
    blocks_asked: int
    blocks_entered: int
    blocks_evicted: int
    prefill_saved_ratio: float
    """Share of the GPU time for all prompts that hits save."""

    @property
    def token_hit_ratio(self) -> float:
        return sum(self.tokens_hit.values()) / self.tokens_asked if self.tokens_asked else 0.0

    @property
    def by_tier(self) -> dict[str, float]:
        return {
            tier: tokens / self.tokens_asked if self.tokens_asked else 0.0
            for tier, tokens in self.tokens_hit.items()
        }

    @property
    def events(self) -> int:
        """Blocks requested, inserted and evicted."""
        return self.blocks_asked + self.blocks_entered + self.blocks_evicted


def optimum(workload: Workload, tier: str, capacity_blocks: int, progress: Progress) -> HitCounts:
    """The best possible hits of one tier of this size."""
    following = _next_uses(workload)
    next_use = np.full(workload.block_count, _NEVER, dtype=np.int64)
    here = np.zeros(workload.block_count, dtype=bool)
    depth = _depths(workload)
    line: list[tuple[int, int, int]] = []
    held = asked = entered = evicted = hit_tokens = 0
    saved = 0.0
    size = workload.block_tokens
    for number, (request, following_use) in enumerate(zip(workload, following, strict=True)):
        blocks = request.blocks
        hit = leading(here[blocks])
        hit_tokens += min(hit * size, request.input_tokens)
        saved += prefill_work(min(hit * size, request.input_tokens))
        asked += len(blocks)
        next_use[blocks] = following_use
        wanted = blocks[following_use != _NEVER]
        entered += int((~here[wanted]).sum())
        held += int((~here[wanted]).sum()) - int(here[blocks[following_use == _NEVER]].sum())
        here[blocks[following_use == _NEVER]] = False
        here[wanted] = True
        for use, deep, block in zip(
            (-next_use[wanted]).tolist(), (-depth[wanted]).tolist(), wanted.tolist(), strict=True
        ):
            heapq.heappush(line, (use, deep, block))
        while held > capacity_blocks:
            use, _, block = heapq.heappop(line)
            if here[block] and next_use[block] == -use:
                here[block] = False
                held -= 1
                evicted += 1
        if number % 256 == 0:
            progress(number)
    hits = {tier: hit_tokens}
    share = _share_of_all(saved, workload)
    return HitCounts(workload.tokens_asked, hits, asked, entered, evicted, share)


def prefill_work(tokens: float) -> float:
    """Prefill time of a prompt's first tokens; the unit is one token without context."""
    return tokens + tokens * tokens / 2.0 / CROSSOVER_TOKENS


def _share_of_all(saved: float, workload: Workload) -> float:
    every = sum(map(prefill_work, workload.input_tokens))
    return saved / every if every else 0.0


def _next_uses(workload: Workload) -> Iterator[Ints]:
    """The number of the next request for each block of each request, or _NEVER.

    Kept as runs, because the blocks of a prompt are mostly used together.
    """
    coming = np.full(workload.block_count, _NEVER, dtype=np.int64)
    runs: list[tuple[Ints, Ints]] = []
    for number, request in zip(range(len(workload) - 1, -1, -1), workload.backwards(), strict=True):
        uses = coming[request.blocks]
        starts = np.flatnonzero(np.diff(uses, prepend=-1))
        runs.append((uses[starts], np.diff(starts, append=len(uses))))
        coming[request.blocks] = number
    while runs:
        yield np.repeat(*runs.pop())


def _depths(workload: Workload) -> Ints:
    depths = np.zeros(workload.block_count, dtype=np.int64)
    for block, parent in enumerate(workload.parents):
        if parent != NO_PARENT:
            depths[block] = depths[parent] + 1
    return depths


@dataclass(frozen=True, slots=True)
class Case:
    """One policy, used in every tier, at one capacity."""

    policy: str
    capacity: Capacity


def check_case(case: Case, block_tokens: int) -> None:
    """Raises ConfigError for a case that cannot be simulated."""
    if case.policy == OPTIMAL and len(case.capacity.tokens) > 1:
        raise ConfigError("--policy", "the optimum is known for one tier", hint="one --capacity")
    for tier in case.capacity.tokens:
        if not case.capacity.blocks(tier, block_tokens, 1):
            raise ConfigError("--capacity", f"{tier} is less than a block of {block_tokens} tokens")


def play(workload: Workload, case: Case, progress: Progress) -> HitCounts:
    size, unlimited = workload.block_tokens, workload.block_count
    names = list(case.capacity.tokens)
    if case.policy == OPTIMAL:
        blocks = case.capacity.blocks(names[0], size, unlimited)
        return optimum(workload, names[0], blocks, progress)
    index = BlockIndex.of(workload)
    tiers = [
        SimulatedTier(
            name, case.capacity.blocks(name, size, unlimited), index, order_named(case.policy, size)
        )
        for name in names
    ]
    tokens_hit = dict.fromkeys(names, 0)
    blocks_asked, saved = 0, 0.0
    for number, request in enumerate(workload):
        blocks_asked += len(request.blocks)
        hit = _serve(request, tiers, index, size)
        for name, tokens in hit.items():
            tokens_hit[name] += tokens
        saved += prefill_work(sum(hit.values()))
        if number % _REPORT_REQUESTS == 0:
            progress(number)
    entered, evicted = sum(tier.entered for tier in tiers), sum(tier.evicted for tier in tiers)
    share = _share_of_all(saved, workload)
    return HitCounts(workload.tokens_asked, tokens_hit, blocks_asked, entered, evicted, share)


def _serve(
    request: PromptRequest, tiers: Sequence[SimulatedTier], index: BlockIndex, block_tokens: int
) -> dict[str, int]:
    """Hit the blocks that are present, then insert all. Returns the tokens hit by tier."""
    rows = request.blocks
    if not len(rows):
        return {}
    where = fastest_tier(tiers, rows)
    hit = leading(where != NOWHERE)
    tokens = np.full(len(rows), block_tokens, dtype=np.int64)
    tokens[-1] = min(block_tokens, request.input_tokens - block_tokens * (len(rows) - 1))
    prompt = rows.tolist()
    _use(index, tiers, prompt[:hit], hit=True)
    for tier in tiers:
        tier.leaves.hold_all(prompt)
        tier.insert(rows)
    _use(index, tiers, prompt, hit=False)
    for tier in tiers:
        tier.leaves.release_all(prompt)
    return {
        tier.name: int(tokens[:hit][where[:hit] == number].sum())
        for number, tier in enumerate(tiers)
    }


def _use(index: BlockIndex, tiers: Sequence[SimulatedTier], rows: list[int], *, hit: bool) -> None:
    if rows:
        index.tree.use(rows, hit=hit)
        for tier in tiers:
            tier.leaves.used(rows, hit=hit)
