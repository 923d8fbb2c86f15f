"""When KV is asked for again, and so how often a tier of a given size still has it. Pure.

A tier that drops what was longest unused keeps everything younger than one age, its horizon. The
bytes younger than an age follow from how talks go on; a tier's size gives its horizon; the gaps
between turns give the share of turns that come before it (Che's approximation of LRU).
"""

import math
from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
NEVER_S: Final = 1e12
"""Longer than anybody keeps anything."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Log-normal times between turns: share of all, mean, and sigma of the logarithm."""

    share: float
    mean_s: float
    spread: float

    def before(self, age_s: float) -> float:
        """The chance that the next turn comes within `age_s`."""
        if age_s <= 0:
            return 0.0
        if self.spread <= 0:
            return 1.0 if age_s >= self.mean_s else 0.0
        return _normal((math.log(age_s / self.mean_s) + self.spread**2 / 2) / self.spread)

    def mean_within(self, age_s: float) -> float:
        """The mean of the gap or `age_s`, whichever is shorter."""
        if age_s <= 0:
            return 0.0
        if self.spread <= 0:
            return min(age_s, self.mean_s)
        early = _normal((math.log(age_s / self.mean_s) - self.spread**2 / 2) / self.spread)
        return self.mean_s * early + age_s * (1.0 - self.before(age_s))


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@dataclass(frozen=True, slots=True)
class Reuse:
    """How the talks of one node fill a tier."""

    requests_per_s: float
    turns: int
    gaps: tuple[Gap, ...]
    live_bytes: float
    """KV of a talk that goes on, on average."""

    final_bytes: float
    """KV of a talk at its end; it is kept until its age comes, for nothing."""

    busy_share: float = 1.0

    def hit_share(self, age_s: float) -> float:
        """The share of continued turns that come within `age_s` of the turn before."""
        return sum(gap.share * gap.before(age_s) for gap in self.gaps)

    def bytes_within(self, age_s: float) -> float:
        """Bytes that were used within the last `age_s`, at the end of a day's busy hours."""
        busy_s = min(age_s, self.busy_share * DAY_S)
        peak = self._bytes_a_request(busy_s)
        return self.requests_per_s * (
            peak + self.busy_share * (self._bytes_a_request(age_s) - peak)
        )

    def horizon_s(self, capacity_bytes: float) -> float:
        """The age up to which a tier of this size keeps everything."""
        if capacity_bytes <= 0:
            return 0.0
        low, high = 0.0, 1.0
        while self.bytes_within(high) < capacity_bytes:
            low, high = high, high * 4.0
            if high > NEVER_S:
                return NEVER_S
        while high - low > 1e-4 * high:
            middle = (low + high) / 2.0
            if self.bytes_within(middle) < capacity_bytes:
                low = middle
            else:
                high = middle
        return low

    def _bytes_a_request(self, age_s: float) -> float:
        """What a request leaves behind, summed over the ages at which nothing came after it."""
        ends = 1.0 / self.turns
        waiting = sum(gap.share * gap.mean_within(age_s) for gap in self.gaps)
        return ends * self.final_bytes * age_s + (1.0 - ends) * self.live_bytes * waiting
