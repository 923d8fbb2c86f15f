"""What the connector counts, as plain numbers that can be added up and sent anywhere."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from kvdepot.adapters.vllm.messages import TierTime

PER_TIER: Final = ("loaded_blocks", "loaded_bytes", "load_seconds")
GAUGES: Final = (
    "tier_latency_seconds",
    "tier_bytes_per_second",
    "prediction_error",
    "decisions",
)
"""What is told as it is now, and not counted up."""
Figures = dict[str, float]


class Tally:
    """Counts since they were taken last. Thread-safe.

    Names are `what` or `what:kind`, as in `loaded_blocks:ssd` or `missed_blocks:late`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, what: str, count: float = 1, kind: str = "") -> None:
        with self._lock:
            self._counts[f"{what}:{kind}" if kind else what] += count  # type: ignore[assignment]

    def loaded(self, times: Iterable[TierTime]) -> None:
        for time in times:
            for what, count in zip(PER_TIER, (time.blocks, time.nbytes, time.seconds), strict=True):
                self.add(what, count, time.tier)

    def missed(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self.add("missed_blocks", 1, reason)

    def take(self) -> Figures | None:
        """What was counted since the last call; None if nothing was."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts) or None


def added(left: Mapping[str, float], right: Mapping[str, float]) -> Figures:
    """Two periods, or two workers, together."""
    sums = {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
    latest = {**left, **right}
    return sums | {name: latest[name] for name in latest if name.partition(":")[0] in GAUGES}


def summary(figures: Mapping[str, float]) -> Figures:
    """For a line in a log: all counts, and the rate of each tier."""
    rates = {
        f"{name.partition(':')[2]}_MB_s": round(
            figures.get(name.replace("load_seconds", "loaded_bytes"), 0) / seconds / 1e6, 1
        )
        for name, seconds in figures.items()
        if name.startswith("load_seconds:") and seconds > 0
    }
    return {**{name: round(figures[name], 4) for name in sorted(figures)}, **rates}
