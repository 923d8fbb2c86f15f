"""Decides which blocks of a matched prefix to fetch; the engine recomputes the rest.

A pure function of the paces of tiers and prefill, the queue, and the features of the engine.
Prefill of a block needs the KV of all tokens before it, but later blocks may be fetched at the same
time. So a plan may have a hole: a head and a tail are fetched, and the blocks between them are
recomputed. The last blocks are the most expensive to recompute, because they attend to all before
them; of a slow run the first blocks are recomputed and the last ones fetched.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.speed_models import PrefillPace, TierPace

Floats = npt.NDArray[np.float64]

EXPLORE_SHARE: Final = 0.1
"""A fetch from a tier of unknown speed may take this share of the time that its blocks can save."""
EXPLORE_BYTES: Final = 1 << 30
"""The most bytes of such a fetch, unless one block is larger."""
EXPLORE_S: Final = 0.25
"""The time of such a fetch if the speed of prefill is not known either."""
MARGIN_SPREADS: Final = 4.0
MARGIN_SHARE_MIN: Final = 0.5
"""A fetch may be late by MARGIN_SPREADS spreads, and at least by this share of its time."""
PATIENCE_SHARE: Final = 0.25
"""A fetch has at least this share of the time of recomputing all."""
FIRST_LOAD_S: Final = 1.0
"""The shortest deadline of a fetch while the speed of prefill is not known."""


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Tokens of a prompt; the engine has the KV of the first `local_tokens`."""

    tokens: int
    block_tokens: int
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive matched blocks in one tier; `size_bytes` is their stored size."""

    tier: str
    blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """Work of the engine before and during the prefill of a prompt.

    `ahead_tokens`, `ahead_attention`: prefill before this prompt, with its attention work.
    `decodes`, `decode_context_tokens`: requests that take one token of every step, and the sum of
    their contexts. `busy_s`: the rest of the current step, which the other fields do not include.
    """

    ahead_tokens: int = 0
    ahead_attention: float = 0.0
    decodes: int = 0
    decode_context_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """Features of the engine.

    `chunk_tokens`: the most new tokens of one step.
    `loads_while_queued`: blocks of a waiting prompt can be fetched while others are computed.
    `layer_steps`: the number of layer ranges in which a fetch can overlap with the step that uses
    it. `splits`: blocks after a hole can be fetched while the hole is recomputed.
    """

    chunk_tokens: int = 2048
    loads_while_queued: bool = True
    layer_steps: int = 1
    splits: bool = False


class PrefillTimes:
    """Prefill times of one prompt; element i of an array is the time with i blocks in place."""

    def __init__(
        self,
        prompt: PromptLengths,
        blocks: int,
        pace: PrefillPace,
        queue: EngineQueue,
        engine: EngineFeatures,
    ) -> None:
        self.blocks = blocks
        self._engine = engine
        self._pace = pace
        # Requests that decode take their share of every step, in time and in tokens.
        self._step_s = pace.step_s + pace.token_s * queue.decodes
        self._step_s += pace.pair_s * queue.decode_context_tokens
        self._chunk = float(max(engine.chunk_tokens - queue.decodes, 1))
        self.queue_s = queue.busy_s + self._step_s * queue.ahead_tokens / self._chunk
        self.queue_s += pace.token_s * queue.ahead_tokens + pace.pair_s * queue.ahead_attention
        first = prompt.local_tokens // prompt.block_tokens * prompt.block_tokens
        # The engine computes at least the last token itself, for its logits.
        last = prompt.tokens - 1
        self.positions: Floats = np.arange(blocks + 1, dtype=np.float64)
        self.positions *= prompt.block_tokens
        self.positions += first
        np.maximum(self.positions, min(prompt.local_tokens, last), out=self.positions)
        np.minimum(self.positions, last, out=self.positions)
        rest = prompt.tokens - self.positions
        self.suffix_s: Floats = self._step_s * np.maximum(rest / self._chunk, 1.0)
        self.suffix_s += rest * (
            pace.token_s + 0.5 * pace.pair_s * (prompt.tokens + self.positions)
        )

    def saved_s(self, cut: int) -> float:
        """Prefill time saved by having the first `cut` blocks in place."""
        return float(self.suffix_s[0] - self.suffix_s[cut])

    def stretch_s(self, start: int, stop: int) -> float:
        """Time to recompute the blocks start..stop if all before them are in place."""
        begin, end = float(self.positions[start]), float(self.positions[stop])
        tokens = end - begin
        steps = max(tokens / self._chunk, 1.0) if tokens else 0.0
        pairs = tokens * (begin + end) / 2.0
        return self._step_s * steps + self._pace.token_s * tokens + self._pace.pair_s * pairs

    def finish_s(self, fetch_s: Floats) -> Floats:
        """The time to the first token if fetching the first i blocks takes fetch_s[i]."""
        hidden = self.queue_s if self._engine.loads_while_queued else 0.0
        lag: Floats = np.maximum(fetch_s - hidden, 0.0)
        finish: Floats = self.queue_s + lag + self.suffix_s
        if self._engine.layer_steps > 1:
            finish -= self._overlap_s(lag)
        return finish

    def _overlap_s(self, lag: Floats) -> Floats:
        """Time saved by fetching layer by layer: the fetch overlaps with the first step.

        Leaves out the step's attention to the context, so the result is never too large.
        """
        step_s = self._step_s + self._pace.token_s * self._chunk
        overlap: Floats = np.minimum(np.minimum(self.suffix_s, step_s), lag)
        saved: Floats = overlap * (1.0 - 1.0 / self._engine.layer_steps)
        return saved


def fetch_seconds(runs: Sequence[TierRun], paces: Mapping[str, TierPace]) -> Floats:
    """The time to fetch the first i blocks; tiers work in parallel, each in order."""
    seconds: Floats = np.arange(sum(run.blocks for run in runs) + 1, dtype=np.float64)
    until = dict.fromkeys(paces, 0.0)
    start = 0
    for run in runs:
        if not run.blocks:
            continue
        pace = paces[run.tier]
        begin = until[run.tier] or pace.wait_s
        others = max((end for tier, end in until.items() if tier != run.tier), default=0.0)
        until[run.tier] = begin + pace.byte_s * run.size_bytes
        ramp = seconds[start + 1 : start + run.blocks + 1]
        ramp -= start
        ramp *= pace.byte_s * run.size_bytes / run.blocks
        ramp += begin
        np.maximum(ramp, others, out=ramp)
        start += run.blocks
    return seconds


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Fetch the blocks before `cut` except those of the hole.

    `fetch_s`: the time until all are fetched; `busy_s`: the time until the engine has computed
    other prompts and the hole; `finish_s`: the time to the first token.
    """

    cut: int
    hole_start: int
    hole_stop: int
    fetch_s: float
    busy_s: float
    finish_s: float


class SplitPlans:
    """Plans with a hole: a part is recomputed while the blocks after it are fetched."""

    def __init__(
        self,
        times: PrefillTimes,
        runs: Sequence[TierRun],
        paces: Mapping[str, TierPace],
        fetch_s: Floats,
    ) -> None:
        self._times = times
        self._fetch_s: list[float] = fetch_s.tolist()
        self._suffix_s: list[float] = times.suffix_s.tolist()
        self._parts: list[tuple[int, int, float, int]] = []
        tiers = list(dict.fromkeys(run.tier for run in runs))
        self._waits = [paces[tier].wait_s for tier in tiers]
        start = 0
        for run in runs:
            stop = start + run.blocks
            block_s = paces[run.tier].byte_s * run.size_bytes / max(run.blocks, 1)
            self._parts.append((start, stop, block_s, tiers.index(run.tier)))
            start = stop

    def best(self, cuts: Iterable[int], otherwise: FetchPlan) -> FetchPlan:
        """The fastest plan with one of these cuts and a hole that starts at a run.

        Returns `otherwise`, the fastest plan without a hole, if no plan is faster.
        """
        best = otherwise
        for cut in cuts:
            for start, *_ in self._parts:
                begin_s = max(self._times.queue_s, self._fetch_s[start])
                if start < cut and begin_s + self._suffix_s[cut] < best.finish_s:
                    best = min(best, self._balanced(start, cut), key=lambda plan: plan.finish_s)
        return best

    def _balanced(self, start: int, cut: int) -> FetchPlan:
        """The plan whose hole is recomputed in the time that the tail takes to fetch."""

        def computed_first(stop: int) -> bool:
            return self._busy_s(start, stop) >= self._tail_s(start, stop, cut)

        stop = bisect_left(range(start, cut), True, key=computed_first) + start
        plans = [self._plan(start, near, cut) for near in (stop - 1, stop) if start < near < cut]
        return min(plans, key=lambda plan: plan.finish_s, default=self._without(start))

    def _plan(self, start: int, stop: int, cut: int) -> FetchPlan:
        fetch_s, busy_s = self._tail_s(start, stop, cut), self._busy_s(start, stop)
        finish_s = max(fetch_s, busy_s) + self._suffix_s[cut]
        return FetchPlan(cut, start, stop, fetch_s, busy_s, finish_s)

    def _without(self, cut: int) -> FetchPlan:
        fetch_s, busy_s = self._fetch_s[cut], self._times.queue_s
        return FetchPlan(cut, 0, 0, fetch_s, busy_s, max(fetch_s, busy_s) + self._suffix_s[cut])

    def _busy_s(self, start: int, stop: int) -> float:
        begin_s = max(self._times.queue_s, self._fetch_s[start])
        return begin_s + self._times.stretch_s(start, stop)

    def _tail_s(self, start: int, stop: int, cut: int) -> float:
        """The time until the head before the hole and the tail after it are fetched."""
        until = [0.0] * len(self._waits)
        for first, last, block_s, tier in self._parts:
            blocks = last - first if last <= start else min(last, cut) - max(first, stop)
            if blocks > 0:
                until[tier] = (until[tier] or self._waits[tier]) + blocks * block_s
        return max(until)


@dataclass(frozen=True, slots=True)
class Decision:
    """The blocks to fetch, the deadline, and the predicted times.

    The matched blocks before `cut_blocks` are fetched, except `hole_blocks` from `hole_start` on,
    which the engine recomputes meanwhile. `deadline_s` and `fetch_s` count from now. Blocks that
    are late at the deadline are recomputed too; all of them together take `saved_s`.
    `backoff_s`: prefill that remains after the fetch. Times to the first token: `predicted_s` of
    this decision, `fetch_all_s` of fetching as much as possible, `recompute_s` of fetching nothing;
    inf if the speed of prefill is not known.
    """

    cut_blocks: int
    hole_start: int
    hole_blocks: int
    by_run: tuple[int, ...]
    fetch_s: float
    deadline_s: float
    saved_s: float
    backoff_s: float
    predicted_s: float
    fetch_all_s: float
    recompute_s: float
    reason: Reason

    @property
    def fetched_blocks(self) -> int:
        return self.cut_blocks - self.hole_blocks


def decide(
    prompt: PromptLengths,
    runs: Sequence[TierRun],
    prefill: PrefillPace | None,
    tiers: Mapping[str, TierPace | None],
    queue: EngineQueue,
    engine: EngineFeatures,
) -> Decision:
    """The plan with the shortest predicted time to the first token; of equals, the longest fetch.

    `runs`: the matched blocks in order, from the first one that the engine does not have in full,
    each in the fastest tier that has it. `tiers`: the pace of each tier; None if it is unknown.
    The predicted time is never longer than the better of fetching all and recomputing all.
    """
    asked = _askable(runs, tiers)
    blocks = sum(run.blocks for run in asked)
    if prefill is not None:
        times = PrefillTimes(prompt, blocks, prefill, queue, engine)
        plan, fetch_all_s, recompute_s = _fastest(times, asked, tiers, splits=engine.splits)
        saved_s, backoff_s = times.saved_s(plan.cut), float(times.suffix_s[plan.cut])
    else:
        # Before the first step was measured, all hits are fetched.
        fetch_s = float(fetch_seconds(asked, _paces(asked, tiers, EXPLORE_S))[-1])
        plan, fetch_all_s, recompute_s = FetchPlan(blocks, 0, 0, fetch_s, 0.0, inf), inf, inf
        saved_s, backoff_s = inf, 0.0
    by_run = split_by_run(runs, plan)
    used = [tiers[run.tier] for run, count in zip(runs, by_run, strict=True) if count]
    return Decision(
        cut_blocks=plan.cut,
        hole_start=plan.hole_start,
        hole_blocks=plan.hole_stop - plan.hole_start,
        by_run=by_run,
        fetch_s=plan.fetch_s,
        deadline_s=deadline_of(plan, used, recompute_s),
        saved_s=saved_s,
        backoff_s=backoff_s,
        predicted_s=plan.finish_s,
        fetch_all_s=fetch_all_s,
        recompute_s=recompute_s,
        reason=_reason(plan, blocks, prefill_known=prefill is not None, explores=None in used),
    )


def _fastest(
    times: PrefillTimes,
    runs: Sequence[TierRun],
    tiers: Mapping[str, TierPace | None],
    *,
    splits: bool,
) -> tuple[FetchPlan, float, float]:
    """The fastest plan, the time of fetching all, and the time of recomputing all."""
    blocks = times.blocks
    paces = _paces(runs, tiers, EXPLORE_SHARE * times.saved_s(blocks))
    fetch_s = fetch_seconds(runs, paces)
    finish_s = times.finish_s(fetch_s)
    cut = blocks - int(finish_s[::-1].argmin())
    plan = FetchPlan(cut, 0, 0, float(fetch_s[cut]), times.queue_s, float(finish_s[cut]))
    if splits and blocks:
        plan = SplitPlans(times, runs, paces, fetch_s).best({cut, blocks}, plan)
    return plan, float(finish_s[-1]), float(finish_s[0])


def _askable(runs: Sequence[TierRun], tiers: Mapping[str, TierPace | None]) -> list[TierRun]:
    """The runs, cut after EXPLORE_BYTES from tiers of unknown speed."""
    asked: list[TierRun] = []
    left = EXPLORE_BYTES
    for run in runs:
        if tiers[run.tier] is None and run.size_bytes > left:
            blocks = max(run.blocks * left // run.size_bytes, 1 if left == EXPLORE_BYTES else 0)
            asked.append(TierRun(run.tier, blocks, run.size_bytes * blocks // run.blocks))
            break
        if tiers[run.tier] is None:
            left -= run.size_bytes
        asked.append(run)
    return asked


def _paces(
    runs: Sequence[TierRun], tiers: Mapping[str, TierPace | None], explore_s: float
) -> dict[str, TierPace]:
    """The pace of each tier; a tier of unknown speed is assumed to take `explore_s`."""
    paces: dict[str, TierPace] = {}
    for run in runs:
        pace = tiers[run.tier]
        if pace is None:
            size_bytes = sum(other.size_bytes for other in runs if other.tier == run.tier)
            pace = TierPace(0.0, explore_s / max(size_bytes, 1), 0.0)
        paces[run.tier] = pace
    return paces


def split_by_run(runs: Sequence[TierRun], plan: FetchPlan) -> tuple[int, ...]:
    fetched = []
    start = 0
    for run in runs:
        stop = start + run.blocks
        hole = max(min(stop, plan.hole_stop) - max(start, plan.hole_start), 0)
        fetched.append(max(min(stop, plan.cut) - start, 0) - hole)
        start = stop
    return tuple(fetched)


def deadline_of(plan: FetchPlan, used: Sequence[TierPace | None], recompute_s: float) -> float:
    """The deadline of a fetch: its time with a margin, at least until the engine is free.

    Never more than `recompute_s`. Without margin if the speed of all used tiers is unknown.
    """
    if not plan.cut:
        return 0.0
    spreads = [pace.spread_share for pace in used if pace is not None]
    margin = max((max(MARGIN_SPREADS * one, MARGIN_SHARE_MIN) for one in spreads), default=0.0)
    patience_s = PATIENCE_SHARE * recompute_s if recompute_s < inf else FIRST_LOAD_S
    wait_s = max(plan.fetch_s * (1.0 + margin), patience_s if spreads else 0.0)
    return min(max(wait_s, plan.busy_s), recompute_s)


def worth_waiting_s(came: int, late: int, elapsed_s: float, recompute_s: float) -> float:
    """The time to wait for late blocks of a fetch after its deadline; 0: give up.

    Assumes that the late blocks come as fast as the others did, and waits if that is sooner than
    recomputing them, their share of `recompute_s`. All blocks count alike, so the result is right
    for the tail of a fetch and too short for its head.
    """
    if not came or not late:
        return 0.0
    backoff_s = elapsed_s * late / came
    limit_s = recompute_s * late / (came + late)
    return min(backoff_s * (1.0 + MARGIN_SHARE_MIN), limit_s) if backoff_s < limit_s else 0.0


def _reason(plan: FetchPlan, blocks: int, *, prefill_known: bool, explores: bool) -> Reason:
    if not blocks:
        return Reason.NOTHING_MATCHED
    if not prefill_known:
        return Reason.PREFILL_UNKNOWN
    if explores:
        return Reason.EXPLORE
    if plan.hole_start < plan.hole_stop:
        return Reason.SPLIT
    if not plan.cut:
        return Reason.RECOMPUTE
    return Reason.FETCH if plan.cut == blocks else Reason.CUT
