"""From where each turn's KV comes, and what that asks of a node's tiers. Pure.

Every tier holds what the faster ones hold (blocks are written down as they come), so a tier's size
alone says how far back it reaches. A turn's KV comes from the fastest tier that reaches back to the
turn before; it is computed where that takes less time, and where the tier has no time left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.planner.parts import TierSpeed
from kvdepot.planner.retention import ReuseModel
from kvdepot.planner.traffic import PlannedLoad, TurnKind

BUSY_MAX: Final = 0.9
"""Above this share of its time a tier is asked for no more; the rest is computed."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests that get their KV the same way."""

    share: float
    prefill_s: float
    hit_tokens: float
    tier: int | None = None
    """Which of the node's tiers delivers the context; None: GPU memory, or it is computed."""
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TierLoad:
    speed: TierSpeed
    horizon_s: float
    hit_share: float
    """Of continued turns, those that reach back no further than this tier, and further than all
    faster ones."""
    kept: float
    """The share of the wanted reads that it has time for."""
    writes_bytes_per_s: float
    useful: bool
    """Whether it delivers any turn's context sooner than computing it takes."""

    @property
    def write_busy(self) -> float:
        return self.writes_bytes_per_s / self.speed.write_bytes_per_s


def tier_loads(
    load: PlannedLoad,
    reuse: ReuseModel,
    speeds: Sequence[TierSpeed],
    horizon_s: Callable[[float], float],
    memory_s: float,
) -> tuple[TierLoad, ...]:
    """The node's tiers, the fastest first. `memory_s`: how far back GPU memory reaches."""
    ages = [horizon_s(speed.capacity_bytes) for speed in speeds]
    reached = [memory_s]
    for age in ages:
        reached.append(max(reached[-1], age))
    shares = [reuse.hit_share(age_s) for age_s in reached]
    flows: list[TierLoad] = []
    promoted = 0.0
    for number in reversed(range(len(speeds))):
        hit_share = shares[number + 1] - shares[number]
        writes = reuse.requests_per_s * load.new_bytes + promoted
        wanted = _wanted_bytes(load.turns, speeds[number])
        reads = reuse.requests_per_s * hit_share * wanted
        room = _room(speeds[number], writes)
        kept = min(1.0, room / reads) if reads > 0.0 else 1.0
        useful = wanted > 0.0 and room > 0.0
        flows.append(TierLoad(speeds[number], ages[number], hit_share, kept, writes, useful))
        promoted += reads * kept
    return tuple(reversed(flows))


def request_classes(
    load: PlannedLoad, reuse: ReuseModel, flows: Sequence[TierLoad], memory_s: float
) -> list[RequestClass]:
    """The classes of every turn; shares add up to 1."""
    head = load.scenario.traffic.system_tokens
    in_memory = reuse.hit_share(memory_s)
    classes = []
    for turn in load.turns:
        rest = turn.share
        if not turn.first:
            classes.append(RequestClass(turn.share * in_memory, turn.resume_s, turn.context_tokens))
            rest -= turn.share * in_memory
            for number, flow in enumerate(flows):
                if worth_fetching(turn, flow.speed):
                    share = turn.share * flow.hit_share * flow.kept
                    rest -= share
                    context, nbytes = turn.context_tokens, turn.context_bytes
                    classes.append(RequestClass(share, turn.resume_s, context, number, nbytes))
        classes.append(RequestClass(rest, turn.compute_s, head))
    return [kind for kind in classes if kind.share > 0.0]


def cold_classes(load: PlannedLoad) -> list[RequestClass]:
    return [RequestClass(turn.share, turn.cold_s, 0.0) for turn in load.turns]


def worth_fetching(turn: TurnKind, speed: TierSpeed) -> bool:
    """Whether an idle tier delivers the context sooner than an idle GPU computes it."""
    return speed.fetch_s(turn.context_bytes) + turn.resume_s < turn.compute_s


def _wanted_bytes(turns: Sequence[TurnKind], speed: TierSpeed) -> float:
    """What a tier that had everything would read for a request, on average."""
    return sum(
        turn.share * turn.context_bytes
        for turn in turns
        if not turn.first and worth_fetching(turn, speed)
    )


def _room(speed: TierSpeed, writes: float) -> float:
    """Bytes a second that a tier can read beside its writes."""
    return max(0.0, BUSY_MAX - writes / speed.write_bytes_per_s) * speed.read_bytes_per_s
