"""How long a tier keeps what is written to it."""

from dataclasses import dataclass
from typing import Final

from kvdepot.errors import ConfigError

DAY_S: Final = 86_400.0
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


@dataclass(frozen=True, slots=True)
class Retention:
    """One tier filled at a steady rate: the age at which a byte that nobody asks for leaves."""

    tier: str
    capacity_bytes: int
    tokens: int
    seconds: float
    minutes: float
    hours: float
    days: float


def retention(
    tier: str, capacity_bytes: int, bytes_per_token: float, tokens_per_s: float
) -> Retention:
    """Raises ConfigError unless all are positive."""
    if min(capacity_bytes, bytes_per_token, tokens_per_s) <= 0:
        raise ConfigError(tier, "a capacity and a token rate must be more than 0")
    seconds = capacity_bytes / (bytes_per_token * tokens_per_s)
    return Retention(
        tier=tier,
        capacity_bytes=capacity_bytes,
        tokens=int(capacity_bytes / bytes_per_token),
        seconds=seconds,
        minutes=seconds / 60,
        hours=seconds / 3600,
        days=seconds / DAY_S,
    )
