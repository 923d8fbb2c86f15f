"""Decides which blocks of a matched prefix to fetch; the engine recomputes the rest.

A pure function of the paces of tiers and prefill, the queue, and the steps of the engine.
Prefill of a block needs the KV of all tokens before it, so a plan is a cut: the blocks before it
are fetched, those after it are recomputed. Blocks can be fetched while the engine computes others.
"""

from collections.abc import Mapping, Sequence
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


class PrefillTimes:
    """Prefill times of one prompt; element i of an array is the time with i blocks in place."""

    def __init__(
        self,
        prompt: PromptLengths,
        blocks: int,
        pace: PrefillPace,
        queue: EngineQueue,
        chunk_tokens: int,
    ) -> None:
        """`chunk_tokens`: the most new tokens of one step of the engine."""
        self.blocks = blocks
        # Requests that decode take their share of every step, in time and in tokens.
        step_s = pace.step_s + pace.token_s * queue.decodes
        step_s += pace.pair_s * queue.decode_context_tokens
        chunk = float(max(chunk_tokens - queue.decodes, 1))
        self.queue_s = queue.busy_s + step_s * queue.ahead_tokens / chunk
        self.queue_s += pace.token_s * queue.ahead_tokens + pace.pair_s * queue.ahead_attention
        first = prompt.local_tokens // prompt.block_tokens * prompt.block_tokens
        # The engine computes at least the last token itself, for its logits.
        last = prompt.tokens - 1
        positions: Floats = np.arange(blocks + 1, dtype=np.float64)
        positions *= prompt.block_tokens
        positions += first
        np.maximum(positions, min(prompt.local_tokens, last), out=positions)
        np.minimum(positions, last, out=positions)
        rest = prompt.tokens - positions
        self.suffix_s: Floats = step_s * np.maximum(rest / chunk, 1.0)
        self.suffix_s += rest * (pace.token_s + 0.5 * pace.pair_s * (prompt.tokens + positions))

    def saved_s(self, cut: int) -> float:
        """Prefill time saved by having the first `cut` blocks in place."""
        return float(self.suffix_s[0] - self.suffix_s[cut])

    def finish_s(self, fetch_s: Floats) -> Floats:
        """The time to the first token if fetching the first i blocks takes fetch_s[i]."""
        finish: Floats = np.maximum(fetch_s, self.queue_s) + self.suffix_s
        return finish


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
    """Fetch the blocks before `cut`.

    `fetch_s`: the time until all are fetched; `busy_s`: the time until the engine has computed
    other prompts; `finish_s`: the time to the first token.
    """

    cut: int
    fetch_s: float
    busy_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The blocks to fetch, the deadline, and the predicted times.

    The matched blocks before `cut_blocks` are fetched. `deadline_s` and `fetch_s` count from now.
    Blocks that are late at the deadline are recomputed too; all of them together take `saved_s`.
    `backoff_s`: prefill that remains after the fetch. Times to the first token: `predicted_s` of
    this decision, `recompute_s` of fetching nothing; inf if the speed of prefill is not known.
    """

    cut_blocks: int
    by_run: tuple[int, ...]
    fetch_s: float
    deadline_s: float
    saved_s: float
    backoff_s: float
    predicted_s: float
    recompute_s: float
    reason: Reason


def decide(
    prompt: PromptLengths,
    runs: Sequence[TierRun],
    prefill: PrefillPace | None,
    tiers: Mapping[str, TierPace | None],
    queue: EngineQueue,
    chunk_tokens: int,
) -> Decision:
    """The plan with the shortest predicted time to the first token; of equals, the longest fetch.

    `runs`: the matched blocks in order, from the first one that the engine does not have in full,
    each in the fastest tier that has it. `tiers`: the pace of each tier; None if it is unknown.
    `chunk_tokens`: the most new tokens of one step of the engine.
    The predicted time is never longer than the better of fetching all and recomputing all.
    """
    asked = _askable(runs, tiers)
    blocks = sum(run.blocks for run in asked)
    if prefill is not None:
        times = PrefillTimes(prompt, blocks, prefill, queue, chunk_tokens)
        paces = _paces(asked, tiers, EXPLORE_SHARE * times.saved_s(blocks))
        fetch_s = fetch_seconds(asked, paces)
        finish_s = times.finish_s(fetch_s)
        cut = blocks - int(finish_s[::-1].argmin())
        plan = FetchPlan(cut, float(fetch_s[cut]), times.queue_s, float(finish_s[cut]))
        recompute_s = float(finish_s[0])
        saved_s, backoff_s = times.saved_s(cut), float(times.suffix_s[cut])
    else:
        # Before the first step was measured, all hits are fetched.
        all_s = float(fetch_seconds(asked, _paces(asked, tiers, EXPLORE_S))[-1])
        plan = FetchPlan(blocks, all_s, 0.0, inf)
        recompute_s, saved_s, backoff_s = inf, inf, 0.0
    by_run = split_by_run(runs, plan.cut)
    used = [tiers[run.tier] for run, count in zip(runs, by_run, strict=True) if count]
    return Decision(
        cut_blocks=plan.cut,
        by_run=by_run,
        fetch_s=plan.fetch_s,
        deadline_s=deadline_of(plan, used, recompute_s),
        saved_s=saved_s,
        backoff_s=backoff_s,
        predicted_s=plan.finish_s,
        recompute_s=recompute_s,
        reason=_reason(plan, blocks, prefill_known=prefill is not None, explores=None in used),
    )


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


def split_by_run(runs: Sequence[TierRun], cut: int) -> tuple[int, ...]:
    """The number of blocks before `cut` in each run."""
    fetched = []
    for run in runs:
        fetched.append(min(run.blocks, cut))
        cut -= fetched[-1]
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
    if not plan.cut:
        return Reason.RECOMPUTE
    return Reason.FETCH if plan.cut == blocks else Reason.CUT
