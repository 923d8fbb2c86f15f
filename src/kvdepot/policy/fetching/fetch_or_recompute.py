"""How much of a matched prefix is worth fetching now; the engine recomputes the rest.

A pure function of facts: the paces of tiers and prefill, the queue, what the engine can do. The KV
of a block depends on the tokens before it, not on how their KV came to be there: prefill needs all
before it in place, but blocks behind it may be fetched meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

from kvdepot.policy.fetching.prefill_model import PrefillPace
from kvdepot.policy.fetching.split import Holes, Plan
from kvdepot.policy.fetching.tier_model import TierPace
from kvdepot.policy.fetching.timetable import Engine, Prompt, Queue, Run, Timetable, fetch_seconds

EXPLORE_SHARE: Final = 0.1
"""A tier of which nothing is known is given this share of the time that its blocks can save."""
EXPLORE_BYTES: Final = 1 << 30
"""And is asked for no more than this, or for one block."""
EXPLORE_S: Final = 0.25
"""How long we wait for such a tier while the speed of prefill is not known either."""
MARGIN_SPREADS: Final = 4.0
MARGIN_SHARE_MIN: Final = 0.5
"""A fetch may be late by so many spreads, or by this share of its time, before we give up."""


class Reason(Enum):
    """Why a decision is what it is."""

    NOTHING_MATCHED = "nothing matched"
    FETCH = "fetching all is faster"
    RECOMPUTE = "recomputing all is faster"
    CUT = "the tail does not pay"
    SPLIT = "one part is recomputed while another is fetched"
    EXPLORE = "a tier is not known yet"
    PREFILL_UNKNOWN = "the speed of prefill is not known yet"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to fetch, how long to wait for it, and what is expected of it.

    Of the matched blocks those before `cut_blocks` are fetched, but for `hole_blocks` from
    `hole_start` on, which the engine recomputes meanwhile. `deadline_s` and `fetch_s` count from
    now; what has not come by the deadline is recomputed too. Times to the first token:
    `predicted_s` of this decision, `fetch_all_s` of fetching all that can be asked for,
    `recompute_s` of fetching nothing; inf where the speed of prefill is not known.
    """

    cut_blocks: int
    hole_start: int
    hole_blocks: int
    by_run: tuple[int, ...]
    fetch_s: float
    deadline_s: float
    predicted_s: float
    fetch_all_s: float
    recompute_s: float
    reason: Reason

    @property
    def fetched_blocks(self) -> int:
        return self.cut_blocks - self.hole_blocks


def decide(
    prompt: Prompt,
    runs: Sequence[Run],
    prefill: PrefillPace | None,
    tiers: Mapping[str, TierPace | None],
    queue: Queue,
    engine: Engine,
) -> Decision:
    """The choice with the shortest predicted time to the first token; among equals, most fetched.

    `runs`: the matched blocks head first, from the first one that the engine does not have whole;
    each in the fastest tier that holds it. `tiers`: the pace of each tier; None for one of which
    nothing is known. Never predicts more than the better of fetching all and recomputing all.
    """
    asked = _askable(runs, tiers)
    blocks = sum(run.blocks for run in asked)
    if prefill is None:
        return _without_prefill(runs, asked, tiers)
    table = Timetable(prompt, blocks, prefill, queue, engine)
    paces = _paces(asked, tiers, EXPLORE_SHARE * table.saved_s)
    fetch_s = fetch_seconds(asked, paces)
    finish_s = table.finish_s(fetch_s)
    cut = blocks - int(finish_s[::-1].argmin())
    plan = Plan(cut, 0, 0, float(fetch_s[cut]), table.queue_s, float(finish_s[cut]))
    if engine.splits and blocks:
        plan = Holes(table, asked, paces, fetch_s).best({cut, blocks}, plan)
    by_run = _by_run(runs, plan)
    return Decision(
        cut_blocks=plan.cut,
        hole_start=plan.hole_start,
        hole_blocks=plan.hole_stop - plan.hole_start,
        by_run=by_run,
        fetch_s=plan.fetch_s,
        deadline_s=_deadline(plan, _margin(runs, by_run, tiers), table.recompute_s),
        predicted_s=plan.finish_s,
        fetch_all_s=float(finish_s[-1]),
        recompute_s=float(finish_s[0]),
        reason=_reason(plan, blocks, _explores(runs, by_run, tiers)),
    )


def _askable(runs: Sequence[Run], tiers: Mapping[str, TierPace | None]) -> list[Run]:
    """The runs up to where an unknown tier has been asked for enough."""
    asked: list[Run] = []
    left = EXPLORE_BYTES
    for run in runs:
        if tiers[run.tier] is None and run.size_bytes > left:
            blocks = max(run.blocks * left // run.size_bytes, 1 if left == EXPLORE_BYTES else 0)
            asked.append(Run(run.tier, blocks, run.size_bytes * blocks // run.blocks))
            break
        if tiers[run.tier] is None:
            left -= run.size_bytes
        asked.append(run)
    return asked


def _paces(
    runs: Sequence[Run], tiers: Mapping[str, TierPace | None], explore_s: float
) -> dict[str, TierPace]:
    """A tier of which nothing is known is taken to be just fast enough for its time."""
    paces: dict[str, TierPace] = {}
    for run in runs:
        pace = tiers[run.tier]
        if pace is None:
            size_bytes = sum(other.size_bytes for other in runs if other.tier == run.tier)
            pace = TierPace(0.0, explore_s / max(size_bytes, 1), 0.0)
        paces[run.tier] = pace
    return paces


def _by_run(runs: Sequence[Run], plan: Plan) -> tuple[int, ...]:
    fetched = []
    start = 0
    for run in runs:
        stop = start + run.blocks
        hole = max(min(stop, plan.hole_stop) - max(start, plan.hole_start), 0)
        fetched.append(max(min(stop, plan.cut) - start, 0) - hole)
        start = stop
    return tuple(fetched)


def _margin(
    runs: Sequence[Run], by_run: Sequence[int], tiers: Mapping[str, TierPace | None]
) -> float:
    """By which share of its time a fetch may be late; not at all where it explores."""
    known = [tiers[run.tier] for run, blocks in zip(runs, by_run, strict=True) if blocks]
    spreads = [pace.spread_share for pace in known if pace is not None]
    return max((max(MARGIN_SPREADS * spread, MARGIN_SHARE_MIN) for spread in spreads), default=0.0)


def _deadline(plan: Plan, margin: float, recompute_s: float) -> float:
    """Waiting is free while the engine is busy, and never longer than a recompute takes."""
    if not plan.cut:
        return 0.0
    return min(max(plan.fetch_s * (1.0 + margin), plan.busy_s), recompute_s)


def _explores(
    runs: Sequence[Run], by_run: Sequence[int], tiers: Mapping[str, TierPace | None]
) -> bool:
    return any(blocks and tiers[run.tier] is None for run, blocks in zip(runs, by_run, strict=True))


def _reason(plan: Plan, blocks: int, explores: bool) -> Reason:
    if not blocks:
        return Reason.NOTHING_MATCHED
    if explores:
        return Reason.EXPLORE
    if plan.hole_start < plan.hole_stop:
        return Reason.SPLIT
    if not plan.cut:
        return Reason.RECOMPUTE
    return Reason.FETCH if plan.cut == blocks else Reason.CUT


def _without_prefill(
    runs: Sequence[Run], asked: Sequence[Run], tiers: Mapping[str, TierPace | None]
) -> Decision:
    """Fetch: as long as no step was seen, a hit is taken to be worth its time."""
    blocks = sum(run.blocks for run in asked)
    fetch_s = float(fetch_seconds(asked, _paces(asked, tiers, EXPLORE_S))[-1])
    plan = Plan(blocks, 0, 0, fetch_s, 0.0, inf)
    by_run = _by_run(runs, plan)
    return Decision(
        cut_blocks=blocks,
        hole_start=0,
        hole_blocks=0,
        by_run=by_run,
        fetch_s=fetch_s,
        deadline_s=_deadline(plan, _margin(runs, by_run, tiers), inf),
        predicted_s=inf,
        fetch_all_s=inf,
        recompute_s=inf,
        reason=Reason.PREFILL_UNKNOWN if blocks else Reason.NOTHING_MATCHED,
    )
