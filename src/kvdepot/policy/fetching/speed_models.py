"""Models of the speed of prefill and of the tiers, fitted to measurements. Pure.

A duration is a sum of non-negative costs, fitted by least squares of the relative error. A few
recent samples of each size class count, so that many small samples do not outweigh the large ones.
If all samples have one size, the costs keep the proportions assumed or learnt before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, frexp, inf, isfinite, log, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

DEPTH: Final = 8
"""Maximum number of samples kept of each size class."""
CLASSES: Final = 24
CLASS_BITS: Final = 2
"""Sizes within a factor of four share a class."""
PRIOR_WEIGHT: Final = 0.3
"""The weight of the assumed proportions, in samples."""
ANCHOR_MIN: Final = 0.1
"""Lower bound of an assumed cost, as a share of the first assumption, so that it can rise again."""
CONSTANT_SHARE_MAX: Final = 0.5
"""The largest share of a duration that is assumed to be constant."""
DOUBTED: Final = 0.03
"""The weight of a surprising sample until others confirm it."""
ODD_SHARE_MAX: Final = 0.4
"""Outliers with at least this share of the weight are kept: the fit is wrong, not they."""
SPREAD_UNSEEN: Final = 0.5
"""The spread of an assumption before the first measurement."""
SPREAD_FIRST: Final = 0.15
SPREAD_GAIN: Final = 0.1
SPREAD_CLIP: Final = 4.0
"""Limit of one sample's squared error, in variances: stalls are not noise."""
MISFIT_MAX: Final = 2.0
"""A fit to old and new samples with a larger error, in variances, mixes two speeds."""
LIMIT_MIN: Final = 0.25
LIMIT_MAX: Final = 0.7
"""Relative errors (natural log) below LIMIT_MIN are never a surprise, above LIMIT_MAX always."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleWeighting:
    """The weights of old samples, and the number of surprises that make a change of speed.

    `fade`, `fade_any`: loss of weight (natural log) for each newer sample of the size class, and of
    any class. `confirm`: the number of consistent surprises that count as a change.
    `constant_stays`: a change affects the cost of the work, not the constant; otherwise all costs
    by the same factor.
    """

    fade: float
    fade_any: float
    confirm: int
    constant_stays: bool


class LinearFit:
    """seconds = costs · features; the features are (1, size, …), the costs never negative.

    `shape`: the assumed costs; without `to_scale` only their proportions count, and the first
    sample sets the scale. A surprise has little weight until it is confirmed; a confirmed one that
    contradicts the earlier samples removes them.
    """

    def __init__(
        self, shape: Sequence[float], memory: SampleWeighting, *, to_scale: bool = False
    ) -> None:
        rows = CLASSES * DEPTH
        self.costs: tuple[float, ...] = tuple(shape)
        self.samples = 0
        """Measured or assumed."""
        self._measured = 0
        self._memory = memory
        self._to_scale = to_scale
        self._first: Floats = np.array(shape, dtype=np.float64)
        self._anchor = self._first
        self._variance = SPREAD_FIRST**2
        self._features: Floats = np.zeros((rows, len(shape)))
        self._seconds: Floats = np.zeros(rows)
        self._trust: Floats = np.zeros(rows)
        self._stamp = np.zeros(rows, dtype=np.int64)
        self._turn = np.zeros(rows, dtype=np.int64)
        self._turns = np.zeros(CLASSES, dtype=np.int64)
        self._streak: list[tuple[int, float]] = []

    @property
    def doubting(self) -> bool:
        """True while recent surprises are neither confirmed nor contradicted."""
        return bool(self._streak)

    @property
    def spread_share(self) -> float:
        """Standard deviation of a measurement, relative to its estimate."""
        return sqrt(self._variance) if self._measured else SPREAD_UNSEEN

    @property
    def _limit(self) -> float:
        """Relative errors beyond this (natural log) are surprises."""
        return min(max(3.0 * self.spread_share, LIMIT_MIN), LIMIT_MAX)

    def assume(self, features: Sequence[float]) -> None:
        """Add the current estimate as a sample, which measurements must outweigh."""
        self._enter(features, self.value(features), 1.0)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; ignored unless positive and finite."""
        if not (seconds > 0.0 and isfinite(seconds)):
            return
        self._measured += 1
        if not self._to_scale:
            self._first = self._anchor = self._first * (seconds / self.value(features))
            self.costs = tuple(self._first.tolist())
            self._to_scale = True
        error = log(seconds / self.value(features)) if self.samples else 0.0
        surprise = abs(error) > self._limit
        row = self._enter(features, seconds, DOUBTED if surprise else 1.0)
        if self._measured > 1:
            seen = min(error**2, SPREAD_CLIP * self._variance)
            self._variance += SPREAD_GAIN * (seen - self._variance)
        if self._confirmed(row, error, surprise):
            self._accept_change()
        else:
            self._refit()

    def value(self, features: Sequence[float]) -> float:
        return sum(cost * feature for cost, feature in zip(self.costs, features, strict=True))

    def _enter(self, features: Sequence[float], seconds: float, trust: float) -> int:
        number = min(max(frexp(features[1])[1], 0) // CLASS_BITS, CLASSES - 1)
        row = number * DEPTH + int(self._turns[number]) % DEPTH
        self._streak = [entry for entry in self._streak if entry[0] != row]
        self._turns[number] += 1
        self.samples += 1
        self._features[row] = features
        self._seconds[row] = seconds
        self._trust[row] = trust
        self._stamp[row] = self.samples
        self._turn[row] = self._turns[number]
        return row

    def _confirmed(self, row: int, error: float, surprise: bool) -> bool:
        """True if there are enough surprises to count as a change.

        A sample that is not a surprise contradicts those of its size class; a surprise of the other
        sign contradicts all. Surprises far apart in time are not counted together.
        """
        oldest = self.samples - 3 * self._memory.confirm
        self._streak = [entry for entry in self._streak if self._stamp[entry[0]] > oldest]
        if surprise:
            self._streak = [entry for entry in self._streak if entry[1] * error > 0.0]
            self._streak.append((row, error))
        else:
            number = row // DEPTH
            self._streak = [entry for entry in self._streak if entry[0] // DEPTH != number]
        enough = len(self._agreeing()) >= self._memory.confirm
        return enough or len(self._streak) >= 2 * self._memory.confirm

    def _agreeing(self) -> list[int]:
        """Rows of the streak with about the same error as the last; stalls have a larger one."""
        if not self._streak:
            return []
        last = abs(self._streak[-1][1])
        near = ((row, sorted((abs(error), last))) for row, error in self._streak)
        return [row for row, (less, more) in near if more <= 2.0 * less + LIMIT_MIN]

    def _accept_change(self) -> None:
        """Trust the streak; drop the samples before it if one fit cannot explain both."""
        streak = self._agreeing()
        self._streak = []
        before = np.array(self.costs)
        self._trust[streak] = 1.0
        self._refit()
        if self._misfit() > MISFIT_MAX:
            self._trust[self._stamp < self._stamp[streak].min()] = 0.0
            self._anchor = self._between(before)
            self._refit()

    def _between(self, costs: Floats) -> Floats:
        """The new assumption: the geometric mean of the first assumption and these costs.

        The mean, because a cost with a small share in the samples is not known well.
        """
        scale = np.full(len(costs), costs[1] / self._first[1] if costs[1] > 0.0 else 1.0)
        if self._memory.constant_stays:
            scale[0] = 1.0
        first = self._first * scale
        halfway: Floats = np.maximum(np.sqrt(costs * first), ANCHOR_MIN * first)
        return halfway

    def _misfit(self) -> float:
        """Weighted mean squared error of the samples, in variances."""
        rows = np.flatnonzero(self._trust)
        weights = self._weights(rows)
        errors = np.log(self._seconds[rows] / (self._features[rows] @ self.costs))
        variance = min(self._variance, SPREAD_FIRST**2)
        return float(weights @ errors**2 / weights.sum()) / variance

    def _weights(self, rows: npt.NDArray[np.intp]) -> Floats:
        age = self._turns[rows // DEPTH] - self._turn[rows]
        age_any = self.samples - self._stamp[rows]
        fading = -self._memory.fade * age - self._memory.fade_any * age_any
        weights: Floats = self._trust[rows] * np.exp(fading)
        return weights

    def _refit(self) -> None:
        """Solve, then solve again with less weight on outliers."""
        rows = np.flatnonzero(self._trust)
        features, seconds, trust = self._features[rows], self._seconds[rows], self._trust[rows]
        weights = self._weights(rows)
        self._solve(features, seconds, weights, trust)
        odd = np.abs(np.log(seconds / (features @ self.costs))) > self._limit
        if odd.any() and float(weights[odd].sum()) < ODD_SHARE_MAX * float(weights.sum()):
            weights[odd] *= DOUBTED
            self._solve(features, seconds, weights, trust)

    def _solve(self, features: Floats, seconds: Floats, weights: Floats, trust: Floats) -> None:
        """Solve with each sample relative to its estimate, each cost as a share of a mean sample.

        In these units the assumption is as strong for small costs as for large ones, and all
        samples have equal weight.
        """
        estimates: Floats = features @ self.costs
        relative: Floats = features / estimates[:, None]
        ratios: Floats = seconds / estimates
        if trust.min() < 1.0:
            bounded = np.minimum(np.maximum(ratios, exp(-self._limit)), exp(self._limit))
            ratios = np.where(trust < 1.0, bounded, ratios)
        total = float(weights.sum())
        mean: Floats = weights @ relative / total
        shares: Floats = relative / mean
        weighted = shares.T * weights
        matrix: Floats = weighted @ shares
        matrix.flat[:: len(matrix) + 1] += PRIOR_WEIGHT
        assumed = self._assumed(mean, float(weights @ ratios) / total)
        target: Floats = weighted @ ratios + PRIOR_WEIGHT * assumed
        solved: Floats = np.linalg.inv(matrix).astype(np.float64, copy=False) @ target
        if solved.min() < 0.0:
            solved = _non_negative(matrix, target)
        self.costs = tuple((solved / mean).tolist())

    def _assumed(self, mean: Floats, whole: float) -> Floats:
        """The assumed shares of the costs in a mean sample."""
        assumed: Floats = self._anchor * mean
        if self._memory.constant_stays:
            assumed[0] = min(assumed[0], whole * CONSTANT_SHARE_MAX)
            assumed[1:] *= (whole - assumed[0]) / float(assumed[1:].sum())
        else:
            assumed *= whole / float(assumed.sum())
        return assumed


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with the costs that would be negative left out."""
    left = np.ones(len(target), dtype=bool)
    while True:
        units: Floats = np.zeros(len(target))
        units[left] = np.linalg.solve(matrix[np.ix_(left, left)], target[left])
        if units.min() >= 0.0:
            return units
        left &= units > 0.0


PREFILL_WEIGHTING: Final = SampleWeighting(
    fade=0.16, fade_any=0.004, confirm=3, constant_stays=False
)
"""Samples of each size count for long, because small steps do not predict large ones."""
STEP_TOKENS: Final = 16.0
"""The assumed constant cost of a step, in tokens."""
CROSSOVER_TOKENS: Final = 16384.0
"""The assumed context at which attention costs as much as the rest of the model."""


def attention_work(new_tokens: float, context_tokens: float) -> float:
    """Pairs of tokens that attend: each new token to the context and to the new ones before it."""
    return new_tokens * (context_tokens + new_tokens / 2.0)


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """seconds of a step = step_s + token_s · new tokens + pair_s · attention work."""

    step_s: float
    token_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if min(self.step_s, self.token_s, self.pair_s) < 0.0:
            raise ValueError(f"a prefill pace must not be negative: {self}")


class PrefillModel:
    """Prefill speed as a function of context, updated with each step of the engine.

    `crossover_tokens`: the context at which attention costs as much as the rest of the model; it
    matters only until steps with different contexts were measured.
    `known`: the pace that was learnt with the same engine before.
    """

    def __init__(
        self, crossover_tokens: float = CROSSOVER_TOKENS, known: PrefillPace | None = None
    ) -> None:
        shape = (STEP_TOKENS, 1.0, 1.0 / crossover_tokens)
        if known is not None:
            shape = (known.step_s, known.token_s, known.pair_s)
        self._fit = LinearFit(shape, PREFILL_WEIGHTING, to_scale=known is not None)
        self._known = known is not None

    def observe(self, new_tokens: int, attention: float, seconds: float) -> None:
        """Learn from one engine step. `new_tokens` includes one for each decoding request;
        `attention` is the sum of `attention_work` of its requests. Not needed for steps without
        prefill."""
        if new_tokens > 0:
            work = max(attention, attention_work(1, 0) * new_tokens)
            self._fit.observe((1.0, float(new_tokens), work), seconds)

    def pace(self) -> PrefillPace | None:
        """The current pace; None before the first step if no pace was given."""
        return PrefillPace(*self._fit.costs) if self._known or self._fit.samples else None


TIER_WEIGHTING: Final = SampleWeighting(fade=0.0, fade_any=0.16, confirm=2, constant_stays=True)
"""Only recent transfers count. With old transfers of other sizes, a lower bandwidth would look like
a higher latency when all recent transfers are small."""
LATENCY_BYTES: Final = 1 << 18
"""The assumed latency of a transfer, in bytes at its bandwidth."""
LATENCY_MIN_BYTES: Final = 1 << 14
"""The smallest assumed latency, in bytes: a latency of zero could never grow."""


PROFILE_BYTES: Final = (1 << 22, 1 << 26)
"""A profile counts as one transfer of each of these sizes, so no single transfer outweighs it."""
MEASURED_WITHIN: Final = 3.0
ASSUMED_WITHIN: Final = 10.0
"""The largest ratio between a learnt bandwidth and the measured or assumed one; beyond it the
learnt profile is ignored."""


@dataclass(frozen=True, slots=True)
class TierProfile:
    """Latency and bandwidth of a tier, measured or assumed."""

    latency_s: float
    bandwidth_bytes_s: float


MEDIUM_PROFILES: Final[Mapping[str, TierProfile]] = {
    "dram": TierProfile(1e-4, 12e9),
    "cxl": TierProfile(1e-4, 8e9),
    "ssd": TierProfile(2e-4, 5e9),
    "hdd": TierProfile(1.2e-2, 2e8),
    "plugin": TierProfile(5e-3, 1e9),
    "object": TierProfile(2e-2, 1e9),
}
"""The assumed profile of a tier that was not measured. Rather too fast than too slow: a fetch
corrects the assumption, a recompute does not."""


def starting_profile(
    tier: str, measured: TierProfile | None, learnt: TierProfile | None
) -> TierProfile | None:
    """The profile of a tier at a start: the learnt one if it is plausible, else the expected one.

    `measured`: the profile of its idle drives. Returns None for an unknown kind of tier without a
    measured or learnt profile.
    """
    expected = measured or MEDIUM_PROFILES.get(tier)
    if expected is None or learnt is None:
        return expected or learnt
    ratio = learnt.bandwidth_bytes_s / expected.bandwidth_bytes_s
    within = MEASURED_WITHIN if measured is not None else ASSUMED_WITHIN
    return learnt if 1.0 / within <= ratio <= within else expected


def drive_profiles(stats: Mapping[str, Any]) -> dict[str, TierProfile]:
    """Profiles of the tiers whose drives were measured with direct I/O, from `stats` of a depot.

    Bandwidths of drives add up; a drive that was not measured counts as the mean of the others.
    """
    profiles = {}
    for name, tier in stats.get("tiers", {}).items():
        drives = tier.get("drives", ())
        known = [each["profile"] for each in drives if each.get("profile")]
        known = [each for each in known if each["direct_io"] and each["read_bytes_per_s"] > 0]
        if known:
            mean = sum(each["read_bytes_per_s"] for each in known) / len(known)
            latency_s = max(each["read_latency_us"] for each in known) / 1e6
            profiles[name] = TierProfile(latency_s, mean * len(drives))
    return profiles


@dataclass(frozen=True, slots=True)
class Transfer:
    """A batch of blocks that was requested from a tier.

    `seconds`: from the request until the last block was ready for use, or until the timeout.
    `outstanding_bytes`: bytes requested from the tier before and still in flight at the request.
    `late_blocks`: the number of `blocks` that were missing at the timeout.
    `cold`: the first transfer of a process, which includes starting threads and mapping memory.
    """

    blocks: int
    size_bytes: int
    seconds: float
    outstanding_bytes: int = 0
    late_blocks: int = 0
    cold: bool = False


@dataclass(frozen=True, slots=True)
class TierPace:
    """The current speed of a tier: the next request takes wait_s + byte_s · bytes seconds.

    `wait_s`: the latency, plus the time of the requests in flight.
    """

    wait_s: float
    byte_s: float
    spread_share: float = SPREAD_UNSEEN

    def __post_init__(self) -> None:
        if min(self.wait_s, self.byte_s, self.spread_share) < 0.0:
            raise ValueError(f"the pace of a tier must not be negative: {self}")


class TierModel:
    """Latency and bandwidth of one tier; two surprising transfers in a row are a change of speed.

    The profile holds until enough transfers contradict it.
    """

    def __init__(self, profile: TierProfile | None = None) -> None:
        shape = (float(LATENCY_BYTES), 1.0)
        if profile is not None:
            byte_s = 1.0 / profile.bandwidth_bytes_s
            shape = (max(profile.latency_s, LATENCY_MIN_BYTES * byte_s), byte_s)
        self._fit = LinearFit(shape, TIER_WEIGHTING, to_scale=profile is not None)
        self._profile = profile
        if profile is not None:
            for size_bytes in PROFILE_BYTES:
                self._fit.assume((1.0, float(size_bytes)))

    @property
    def known(self) -> bool:
        return self._fit.samples > 0

    @property
    def doubting(self) -> bool:
        return self._fit.doubting

    @property
    def below_profile(self) -> bool:
        """True if the bandwidth is less than the profile's by more than MEASURED_WITHIN."""
        profile = self._profile
        if profile is None:
            return False
        return self.bandwidth_bytes_s * MEASURED_WITHIN < profile.bandwidth_bytes_s

    @property
    def latency_s(self) -> float:
        return self._fit.costs[0] if self.known else 0.0

    @property
    def bandwidth_bytes_s(self) -> float:
        return 1.0 / self._fit.costs[1] if self.known and self._fit.costs[1] > 0.0 else inf

    def observe(self, transfer: Transfer) -> None:
        """Learn from a transfer, complete or not.

        Transfers of 0 bytes are ignored, and cold ones that took longer than expected, because the
        time may not be the tier's.
        """
        if not transfer.size_bytes:
            return
        size_bytes = float(transfer.outstanding_bytes + transfer.size_bytes)
        features, seconds = (1.0, size_bytes), self._seconds(transfer, size_bytes)
        if transfer.cold and self.known and seconds > self._fit.value(features):
            return
        self._fit.observe(features, seconds)

    def _seconds(self, transfer: Transfer, size_bytes: float) -> float:
        """The estimated duration of the whole transfer, including its late blocks."""
        if not transfer.late_blocks:
            return transfer.seconds
        # The timeout fell somewhere between the last block that came and the next.
        late_bytes = transfer.size_bytes * (transfer.late_blocks - 0.5) / transfer.blocks
        moving_s = max(transfer.seconds - self.latency_s, transfer.seconds / 2.0)
        return transfer.seconds + moving_s * late_bytes / (size_bytes - late_bytes)

    def pace(self, outstanding_bytes: int = 0) -> TierPace | None:
        """The current pace; None for a tier without profile and transfers."""
        if not self.known:
            return None
        latency_s, byte_s = self._fit.costs
        wait_s = latency_s + byte_s * outstanding_bytes
        return TierPace(wait_s, byte_s, self._fit.spread_share)
