"""What the connector counts, what each count means, and rate-limited warnings. Needs no vLLM."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvdepot.adapters.vllm.messages import TierTime

WARN_EVERY_S: Final = 10.0
COUNTERS: Final = {
    "loaded_blocks": ("tier", "blocks that were loaded into vLLM's pages"),
    "loaded_bytes": ("tier", "their bytes"),
    "load_seconds": ("tier", "time from the start of each load to the last block of the tier"),
    "missed_blocks": ("reason", "blocks that were looked up and could not be loaded"),
    "saved_blocks": ("outcome", "blocks that were offered to the depot"),
    "audited_blocks": ("outcome", "blocks that were computed again: same, different, or unknown"),
    "depot_errors": ("call", "calls that the depot could not answer"),
    "unserved_requests": ("reason", "requests that the depot is not used for"),
    "hit_tokens": ("", "prompt tokens that were found in the depot and not in vLLM"),
    "resharded_tokens": ("", "of these, from blocks of another tensor-parallel size"),
    "failed_loads": ("", "loads of which a part was recomputed"),
    "failed_saves": ("", "saves that ended with an error"),
    "weight_changes": ("", "changes of the loaded weights, seen before a step"),
    "resets": ("outcome", "resets of the engine's cache in the depot: done, or failed"),
}
"""Name, label and meaning."""
GAUGES: Final = {
    "tier_latency_seconds": ("tier", "latency of a tier, as measured"),
    "tier_bytes_per_second": ("tier", "bandwidth of a tier, as measured"),
    "prediction_error": ("kind", "error of predicted times to the first token, relative"),
    "decisions": ("reason", "decisions to fetch or to recompute, since the start"),
}
"""Values as they are now, not counted up."""
_logger = logging.getLogger("vllm.kvdepot")


class ConnectorCounts:
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
        for one in times:
            self.add("loaded_blocks", one.blocks, one.tier)
            self.add("loaded_bytes", one.nbytes, one.tier)
            self.add("load_seconds", one.seconds, one.tier)

    def missed(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self.add("missed_blocks", 1, reason)

    def take(self) -> dict[str, float] | None:
        """What was counted since the last call; None if nothing was."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts) or None


def merged(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Two periods, or two workers, together: counters add up, of a gauge the later value holds."""
    latest = {**left, **right}
    return {
        name: latest[name]
        if name.partition(":")[0] in GAUGES
        else left.get(name, 0) + right.get(name, 0)
        for name in latest
    }


def summary(counts: Mapping[str, float]) -> dict[str, float]:
    """For a line in a log: all counts, and the rate of each tier."""
    rates = {
        f"{name.partition(':')[2]}_MB_s": round(
            counts.get(name.replace("load_seconds", "loaded_bytes"), 0) / seconds / 1e6, 1
        )
        for name, seconds in counts.items()
        if name.startswith("load_seconds:") and seconds > 0
    }
    return {**{name: round(counts[name], 4) for name in sorted(counts)}, **rates}


class RateLimitedWarnings:
    """Logs each kind of warning at most every WARN_EVERY_S seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}

    def warn(self, text: str, error: BaseException) -> bool:
        """Log `text` and the error, unless that was done lately. Whether it was logged."""
        now = self._clock()
        with self._lock:
            if now - self._logged_at.get(text, -WARN_EVERY_S) < WARN_EVERY_S:
                return False
            self._logged_at[text] = now
        # As text: a record that a handler keeps would keep the error's frames, and their memory.
        _logger.warning("kvdepot: %s: %s: %s", text, type(error).__name__, str(error))
        return True
