"""Retention and hits of a tier. Pure.

A tier that evicts the least recently used blocks keeps all blocks younger than one age, its
horizon. The bytes younger than an age follow from the turns of conversations; the size of a tier
gives its horizon; the gaps between turns give the share of turns within the horizon (Che's
approximation of LRU).
"""

import math
from dataclasses import dataclass
from typing import Final

from kvdepot.errors import ConfigError

DAY_S: Final = 86_400.0
NEVER_S: Final = 1e12
"""An age without a limit."""


@dataclass(frozen=True, slots=True)
class TurnGap:
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
class ReuseModel:
    """The conversations of one node, and the bytes that they use in a tier."""

    requests_per_s: float
    turns: int
    gaps: tuple[TurnGap, ...]
    live_bytes: float
    """Average KV of a conversation that continues."""
    final_bytes: float
    """KV of a conversation at its end; it is kept, without use, until its age is reached."""
    busy_share: float = 1.0

    def hit_share(self, age_s: float) -> float:
        """Share of continued turns within `age_s` of the turn before."""
        return sum(gap.share * gap.before(age_s) for gap in self.gaps)

    def bytes_within(self, age_s: float) -> float:
        """Bytes that were used within the last `age_s`, at the end of the busy hours of a day."""
        busy_s = min(age_s, self.busy_share * DAY_S)
        peak = self._bytes_a_request(busy_s)
        return self.requests_per_s * (
            peak + self.busy_share * (self._bytes_a_request(age_s) - peak)
        )

    def horizon_s(self, capacity_bytes: float) -> float:
        """The age up to which a tier of this size keeps all blocks."""
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
        """Bytes of a request times the seconds, up to `age_s`, until the next turn."""
        ends = 1.0 / self.turns
        waiting = sum(gap.share * gap.mean_within(age_s) for gap in self.gaps)
        return ends * self.final_bytes * age_s + (1.0 - ends) * self.live_bytes * waiting


SEED_TOKENS_PER_S: Final = 1_100_000 / 72
"""One GPU's share of 1.1 million tokens a second on 72 (hybrid storage paper, line 26)."""
SEED_TIERS: Final[dict[str, int]] = {
    "hbm": 80 * 10**9,
    "dram": 10**12,
    "cxl": 4 * 10**12,
    "ssd": 4 * 3_840 * 10**9,
    "hdd": 12 * 30 * 10**12,
}
"""HBM and DRAM of the hybrid storage paper's example, SSDs and hard drives of its test bed; the
papers give no CXL size: 4 TB is an example."""


def retention(
    tier: str, capacity_bytes: int, bytes_per_token: float, tokens_per_s: float
) -> dict[str, str | int | float]:
    """The age at which a tier that is filled at a steady rate evicts an unused byte. Raises
    ConfigError unless all are positive."""
    if min(capacity_bytes, bytes_per_token, tokens_per_s) <= 0:
        raise ConfigError(tier, "a capacity and a token rate must be more than 0")
    seconds = capacity_bytes / (bytes_per_token * tokens_per_s)
    return {
        "tier": tier,
        "capacity_bytes": capacity_bytes,
        "tokens": int(capacity_bytes / bytes_per_token),
        "seconds": seconds,
        "minutes": seconds / 60,
        "hours": seconds / 3600,
        "days": seconds / DAY_S,
    }
