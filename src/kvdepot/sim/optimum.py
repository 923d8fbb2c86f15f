"""The offline optimum: what a tier could hit if it knew the future.

When room is needed, the block leaves whose next use is farthest away (Belady's MIN), and a block
that is never used again does not come in at all. A prefix is used whenever what continues it is, so
its next use is never later; with equal ones the deeper block leaves. What stays is therefore always
a set of whole prefixes, and MIN, which is optimal in blocks without that rule, is with it too. It
is the optimum in blocks; in tokens a partly filled last block counts for less than its place, which
MIN does not see, so the optimum in tokens may be higher by less than those blocks' hits.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from kvdepot.sim.hits import HitCounts, Progress
from kvdepot.sim.requests import NO_PARENT, Ints, Workload

_NEVER = np.iinfo(np.int64).max


def optimum(workload: Workload, tier: str, capacity_blocks: int, progress: Progress) -> HitCounts:
    """What one tier of this size hits at best."""
    following = _next_uses(workload)
    next_use = np.full(workload.block_count, _NEVER, dtype=np.int64)
    here = np.zeros(workload.block_count, dtype=bool)
    depth = _depths(workload)
    line: list[tuple[int, int, int]] = []
    held = asked = entered = evicted = hit_tokens = 0
    size = workload.block_tokens
    for number, (request, following_use) in enumerate(zip(workload, following, strict=True)):
        blocks = request.blocks
        absent = np.flatnonzero(~here[blocks])
        hit = int(absent[0]) if len(absent) else len(blocks)
        hit_tokens += min(hit * size, request.input_tokens)
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
    return HitCounts(workload.tokens_asked, {tier: hit_tokens}, asked, entered, evicted)


def _next_uses(workload: Workload) -> Iterator[Ints]:
    """For each request and block the number of the next request for it, or _NEVER.

    Kept as runs meanwhile: a prompt's blocks are mostly used again together.
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
    """How many blocks come before each one."""
    depths = np.zeros(workload.block_count, dtype=np.int64)
    for block, parent in enumerate(workload.parents):
        if parent != NO_PARENT:
            depths[block] = depths[parent] + 1
    return depths
