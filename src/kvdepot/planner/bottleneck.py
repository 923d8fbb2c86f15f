"""Where a plan's time goes, and what limits it."""

from dataclasses import dataclass

from kvdepot.planner.outcome import Outcome, TierUse


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What takes the largest part of the mean time to first token."""

    name: str
    share: float
    reason: str


def bottleneck(outcome: Outcome) -> Bottleneck:
    """Names it, and says why it is so."""
    if outcome.ttft_mean_s is None:
        reason = f"{outcome.gpu_busy:.0%} of their time is asked for; only hits or more GPUs help"
        return Bottleneck("GPUs", 1.0, reason)
    name = max(outcome.where, key=lambda part: outcome.where[part])
    share = outcome.where[name] / outcome.ttft_mean_s
    return Bottleneck(name, share, _reason(name, outcome))


def _reason(name: str, outcome: Outcome) -> str:
    computed = f"{1 - outcome.hit_share:.0%} of the prompt tokens"
    match name:
        case "prefill":
            return f"{computed} are new or no longer kept, and have to be computed"
        case "GPU queue":
            return f"the GPUs are busy {outcome.gpu_busy:.0%} of the time, with {computed}"
        case "first step":
            return "all weights pass through the GPU once for a token: faster GPU memory helps"
    slowest = max(outcome.tiers, key=lambda use: (use.read_busy + use.write_busy, use.hit_share))
    return _tier_reason(slowest)


def _tier_reason(use: TierUse) -> str:
    what = {"units": f"its {use.units} units", "network": "the node's network"}
    limit = what.get(use.limited_by, "the links into the GPUs")
    return (
        f"{use.tier} reads {use.read_busy:.0%} and writes {use.write_busy:.0%} of the time; "
        f"{limit} set its speed"
    )
