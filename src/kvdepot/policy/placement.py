"""Which tier a block belongs in: the one whose latency matches its expected reuse interval.

The rule of chapter 9.7 of the seed guide, for each block: what comes back soon belongs where a
fetch is short, what comes back late where a byte is cheap; "one tier too low for the reuse rate"
is its first mistake on the list. Keeping a block costs its price for the time until it is used;
fetching it costs waiting. The cheapest sum wins. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.policy.reuse import Expectation


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What the choice depends on, in any one currency."""

    name: str
    fetch_s: float
    """To have a block back, from here."""
    keep_cost_per_s: float
    """What a place for one block costs per second, in the time of a waiting engine (s/s)."""


DROP: Final = "drop"


def place(tiers: Sequence[TierFacts], expected: Expectation, recompute_s: float) -> str:
    """The tier to keep a block in until its next use, or DROP if none is worth it.

    `recompute_s` is what its absence would cost. A block that may not come back at all is worth
    that much less.
    """
    best, best_gain = DROP, 0.0
    for tier in tiers:
        saved = expected.chance * (recompute_s - tier.fetch_s)
        gain = saved - tier.keep_cost_per_s * _kept_s(expected) if expected.chance else 0.0
        if gain > best_gain:
            best, best_gain = tier.name, gain
    return best


def _kept_s(expected: Expectation) -> float:
    """How long a place is taken: until the reuse, or as long again when it does not come."""
    return expected.interval_s * (2.0 - expected.chance)


def break_even_s(fast: TierFacts, slow: TierFacts) -> float:
    """The reuse interval up to which the faster tier is the better one, if reuse is certain."""
    dearer = fast.keep_cost_per_s - slow.keep_cost_per_s
    return (slow.fetch_s - fast.fetch_s) / dearer if dearer > 0 else float("inf")
