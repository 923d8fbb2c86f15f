"""The first engine: what is hit, and where, if every request is served at once.

A request hits its longest prefix of which each block is in some tier, and a block counts for the
fastest tier that has it. Afterwards all of its blocks are in every tier that has room for them
(write-through), the head as the most recently used. A block counts with the tokens it holds: the
last one of a prompt may be partly filled, takes a whole place, and counts with its few tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvdepot.sim.requests import Request, Workload
from kvdepot.sim.tiers import Index, Tier

Progress = Callable[[int], None]
_REPORT_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class HitCounts:
    """What a workload hit."""

    tokens_asked: int
    tokens_hit: dict[str, int]
    """By tier, fastest first."""
    blocks_asked: int
    blocks_entered: int
    blocks_evicted: int

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
        """Blocks asked for, brought in and evicted."""
        return self.blocks_asked + self.blocks_entered + self.blocks_evicted


class HitsOnly:
    """Requests against tiers, without time."""

    def __init__(self, index: Index, tiers: Sequence[Tier], block_tokens: int) -> None:
        self._tree = index.tree
        self._tiers = list(tiers)
        self._block_tokens = block_tokens
        self._tokens_hit = {tier.name: 0 for tier in tiers}
        self._blocks_asked = 0

    def run(self, workload: Workload, progress: Progress) -> HitCounts:
        for number, request in enumerate(workload):
            self.serve(request)
            if number % _REPORT_REQUESTS == 0:
                progress(number)
        return HitCounts(
            workload.tokens_asked,
            self._tokens_hit,
            self._blocks_asked,
            sum(tier.entered for tier in self._tiers),
            sum(tier.evicted for tier in self._tiers),
        )

    def serve(self, request: Request) -> None:
        rows = request.blocks
        self._blocks_asked += len(rows)
        hit = self._count_hits(request)
        self._use(rows[:hit].tolist(), hit=True)
        everyone = rows.tolist()
        for tier in self._tiers:
            tier.leaves.hold_all(everyone)
            tier.take_in(rows)
        self._use(everyone, hit=False)
        for tier in self._tiers:
            tier.leaves.release_all(everyone)

    def _use(self, rows: list[int], *, hit: bool) -> None:
        if rows:
            self._tree.use(rows, hit=hit)
            for tier in self._tiers:
                tier.leaves.used(rows, hit=hit)

    def _count_hits(self, request: Request) -> int:
        """How many leading blocks are there; their tokens are counted for their tiers."""
        size, rows = self._block_tokens, request.blocks
        tokens = np.full(len(rows), size, dtype=np.int64)
        if len(rows):
            tokens[-1] = min(size, request.input_tokens - size * (len(rows) - 1))
        where = np.full(len(rows), len(self._tiers), dtype=np.int64)
        for number in range(len(self._tiers) - 1, -1, -1):
            where[self._tiers[number].has(rows)] = number
        missing = np.flatnonzero(where == len(self._tiers))
        hit = int(missing[0]) if len(missing) else len(rows)
        for number, tier in enumerate(self._tiers):
            self._tokens_hit[tier.name] += int(tokens[:hit][where[:hit] == number].sum())
        return hit
