"""Speeds on a noisy machine: limit and subject run in turn, and each round gives a ratio.

A limit can be reached in several ways (threads, a batch, ...). Each is tried a few times first, and
the one with the best median is the limit of all rounds. The best of each round would compare the
luckiest of many runs with one run of the subject.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

Work = Callable[[], float]
"""Does a fixed amount of work and returns its seconds, without preparations."""
_TRIALS: Final = 3


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One speed and its limit. `ratio` is the median of the ratios of all rounds."""

    tier: str
    op: str
    block_bytes: int
    bytes_per_s: float
    limit_bytes_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    limit_by: str
    """The way that reached the limit."""
    rounds: int
    bar: float | None = None
    """The least good ratio; None without a promise."""

    @property
    def ok(self) -> bool:
        return self.bar is None or self.ratio >= self.bar


@dataclass(frozen=True, slots=True)
class Latency:
    op: str
    index_blocks: int
    p50_us: float
    p99_us: float
    calls: int
    bar_us: float | None = None
    """The largest good p50."""

    @property
    def ok(self) -> bool:
        return self.bar_us is None or self.p50_us <= self.bar_us


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number that is neither a speed nor a latency."""

    what: str
    value: float
    unit: str
    low: float
    high: float
    bar: float | None = None
    """The largest good value, or the smallest if `bar_is_least`."""
    bar_is_least: bool = False

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.bar_is_least else self.value <= self.bar


Result = SpeedRow | Latency | Figure


@dataclass(frozen=True, slots=True)
class BenchPart:
    """A part of a benchmark; `label` is shown while it runs."""

    label: str
    run: Callable[[], list[Result]]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The sizes and rounds of a benchmark."""

    blocks_bytes: Sequence[int]
    total_bytes: int
    """Moved in each run."""
    rounds: int
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """A subject's seconds and its limit's, round by round."""

    seconds: tuple[float, ...]
    limit_seconds: tuple[float, ...]
    limit_by: str

    def ratios(self) -> list[float]:
        return [limit / own for own, limit in zip(self.seconds, self.limit_seconds, strict=True)]

    def row(
        self, tier: str, op: str, block_bytes: int, nbytes: int, bar: float | None = None
    ) -> SpeedRow:
        """The row of a table, if each run moved `nbytes`."""
        ratios = self.ratios()
        return SpeedRow(
            tier=tier,
            op=op,
            block_bytes=block_bytes,
            bytes_per_s=nbytes / median(self.seconds),
            limit_bytes_per_s=nbytes / median(self.limit_seconds),
            ratio=median(ratios),
            ratio_min=min(ratios),
            ratio_max=max(ratios),
            limit_by=self.limit_by,
            rounds=len(ratios),
            bar=bar,
        )


def stopwatch(work: Callable[[], object]) -> Work:
    """`work` as a Work whose whole run is timed."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return timed


def fastest(ways: Mapping[str, Work], trials: int = _TRIALS) -> str:
    """The name of the way with the best median; all ways are tried in turn."""
    if len(ways) == 1:
        return next(iter(ways))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(trials):
        for name, work in ways.items():
            taken[name].append(work())
    return min(taken, key=lambda name: median(taken[name]))


def compare(
    limits: Mapping[str, Work], subjects: Mapping[str, Work], rounds: int
) -> dict[str, Timings]:
    """Run the best limit and every subject `rounds` times, in turn, in alternating order."""
    limit_by = fastest(limits, min(_TRIALS, rounds))
    works: dict[str, Work] = {"": limits[limit_by], **subjects}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for number in range(rounds):
        for name in list(works) if number % 2 == 0 else reversed(works):
            seconds[name].append(works[name]())
    limit_seconds = tuple(seconds.pop(""))
    return {name: Timings(tuple(taken), limit_seconds, limit_by) for name, taken in seconds.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(what: str, values: Sequence[float], unit: str, bar: float | None = None) -> Figure:
    """Median and extremes of repeated measurements; `bar` is the largest good value."""
    return Figure(what, median(values), unit, min(values), max(values), bar)
