"""How long a tier takes to give blocks back, learnt from its transfers. Pure."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kvdepot.policy.fetching.linear_fit import SPREAD_UNSEEN, Estimate, LinearFit, Memory

MEMORY: Final = Memory(fade=0.0, fade_any=0.16, confirm=2, constant_stays=True)
"""A tier is what it was lately. Old transfers of other sizes would mistake less bandwidth for more
latency, when only small ones were made since."""
LATENCY_BYTES: Final = 1 << 18
"""Before anything is known: the latency of a transfer is worth this many bytes of it."""
LATENCY_MIN_BYTES: Final = 1 << 14
"""A latency of zero could never be learnt to be more: it is at least worth this many bytes."""


@dataclass(frozen=True, slots=True)
class TierProfile:
    """What a tier is said to do, or did when it was measured last."""

    latency_s: float
    bandwidth_bytes_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A batch of blocks that was asked of a tier.

    `seconds`: from the request until the last block was ready for use, or until we stopped waiting.
    `outstanding_bytes`: asked of the tier before, and not there yet when this was asked.
    `late_blocks`: those of `blocks` that had not come when we stopped waiting.
    """

    blocks: int
    size_bytes: int
    seconds: float
    outstanding_bytes: int = 0
    late_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TierPace:
    """How fast a tier is now: seconds = wait_s + byte_s · bytes, for what is asked of it next.

    `wait_s`: its latency, and the time that what is outstanding takes.
    """

    wait_s: float
    byte_s: float
    spread_share: float = SPREAD_UNSEEN

    def __post_init__(self) -> None:
        if min(self.wait_s, self.byte_s, self.spread_share) < 0.0:
            raise ValueError(f"a tier's pace is not negative: {self}")


class TierModel:
    """Latency and bandwidth of one tier; two surprising transfers in a row make it think again."""

    def __init__(self, profile: TierProfile | None = None) -> None:
        shape = (float(LATENCY_BYTES), 1.0)
        if profile is not None:
            byte_s = 1.0 / profile.bandwidth_bytes_s
            shape = (max(profile.latency_s, LATENCY_MIN_BYTES * byte_s), byte_s)
        self._fit = LinearFit(shape, MEMORY, to_scale=profile is not None)
        self._profiled = profile is not None

    @property
    def known(self) -> bool:
        return self._profiled or self._fit.samples > 0

    @property
    def transfers(self) -> int:
        """How many transfers were learnt from."""
        return self._fit.samples

    @property
    def doubting(self) -> bool:
        """Whether there were surprises lately that another transfer should confirm."""
        return self._fit.doubting

    @property
    def latency_s(self) -> float:
        return self._fit.costs[0] if self.known else 0.0

    @property
    def bandwidth_bytes_s(self) -> float:
        return 1.0 / self._fit.costs[1] if self.known and self._fit.costs[1] > 0.0 else inf

    def observe(self, transfer: Transfer) -> None:
        """Learn from a transfer, complete or not; one of nothing tells nothing."""
        if not transfer.size_bytes:
            return
        size_bytes = float(transfer.outstanding_bytes + transfer.size_bytes)
        self._fit.observe((1.0, size_bytes), self._seconds(transfer, size_bytes))

    def _seconds(self, transfer: Transfer, size_bytes: float) -> float:
        """How long the transfer would have taken, had we waited for the rest of it."""
        if not transfer.late_blocks:
            return transfer.seconds
        # We stopped somewhere between the last block that came and the next.
        late_bytes = transfer.size_bytes * (transfer.late_blocks - 0.5) / transfer.blocks
        moving_s = max(transfer.seconds - self.latency_s, transfer.seconds / 2.0)
        return transfer.seconds + moving_s * late_bytes / (size_bytes - late_bytes)

    def estimate(self, size_bytes: int, outstanding_bytes: int = 0) -> Estimate | None:
        """None for a tier of which nothing is known."""
        if not self.known:
            return None
        return self._fit.estimate((1.0, float(outstanding_bytes + size_bytes)))

    def pace(self, outstanding_bytes: int = 0) -> TierPace | None:
        """None for a tier of which nothing is known."""
        if not self.known:
            return None
        latency_s, byte_s = self._fit.costs
        wait_s = latency_s + byte_s * outstanding_bytes
        return TierPace(wait_s, byte_s, self._fit.spread_share)
