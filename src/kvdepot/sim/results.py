"""The results of a simulation: distributions, hits, bytes by tier."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

QUANTILES: Final = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: "Sequence[float] | npt.NDArray[np.float64]") -> "Spread | None":
        """None for no times."""
        if not len(seconds):
            return None
        p50, p95, p99 = np.percentile(seconds, QUANTILES).tolist()
        return cls(float(np.mean(seconds)), p50, p95, p99)


@dataclass(slots=True)
class ServedRequest:
    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    admitted_s: float = 0.0
    fetched_s: float = 0.0
    """End of the last fetch."""
    first_s: float = 0.0
    last_s: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)
    """Tokens by tier."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def end_to_end_s(self) -> float:
        return self.last_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class TierFlow:
    """Bytes read and written in a tier, of all nodes together."""

    tier: str
    tokens_hit: int
    bytes_read: float
    bytes_written: float
    blocks_dropped: int
    read_busy: float
    """Shares of the units' time: reads, and writes."""
    write_busy: float


@dataclass(frozen=True, slots=True)
class Findings:
    served: list[ServedRequest]
    refused: int
    """Requests that are too long for GPU memory."""
    duration_s: float
    """Time from the first arrival to the last answer."""
    tiers: list[TierFlow]
    gpu_busy: float
    gpu_prefill_busy: float
    """Shares of the GPUs' time: in all steps, and in steps with a prompt."""
    block_events: int

    @property
    def tokens_asked(self) -> int:
        return sum(one.input_tokens for one in self.served)

    @property
    def tokens_answered(self) -> int:
        return sum(one.output_tokens for one in self.served)

    def hit_ratio(self, tier: str | None = None) -> float:
        """Share of prompt tokens that were not computed."""
        hit = sum(
            sum(one.hits.values()) if tier is None else one.hits.get(tier, 0) for one in self.served
        )
        return hit / self.tokens_asked if self.tokens_asked else 0.0

    @property
    def ttft(self) -> Spread | None:
        return Spread.of([one.ttft_s for one in self.served])

    @property
    def end_to_end(self) -> Spread | None:
        return Spread.of([one.end_to_end_s for one in self.served])

    @property
    def fetch(self) -> Spread | None:
        """Fetch times of the requests that fetched."""
        fetches = [one for one in self.served if one.fetched_s > one.admitted_s]
        return Spread.of([one.fetched_s - one.admitted_s for one in fetches])
