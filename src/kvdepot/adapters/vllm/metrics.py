"""The connector's counters and gauges, and its warnings. Needs no vLLM."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvdepot.core.log import RateLimitedLog
from kvdepot.errors import KVDepotError

COUNTERS: Final = {
    "loaded_blocks": ("tier", "blocks that were loaded into vLLM's pages"),
    "loaded_bytes": ("tier", "bytes that were loaded into vLLM's pages"),
    "load_seconds": ("tier", "time from the start of each load to the last block of the tier"),
    "missed_blocks": ("reason", "blocks that were looked up and could not be loaded"),
    "saved_blocks": ("outcome", "blocks that were offered to the depot"),
    "audited_blocks": ("outcome", "blocks that were computed again: same, different, or unknown"),
    "depot_errors": ("call", "calls that the depot could not answer"),
    "unserved_requests": ("reason", "requests that the depot is not used for"),
    "hit_tokens": ("", "prompt tokens that were found in the depot and not in vLLM"),
    "resharded_tokens": ("", "hit tokens from blocks of another tensor-parallel size"),
    "failed_loads": ("", "loads of which a part was recomputed"),
    "failed_saves": ("", "saves that ended with an error"),
    "weight_changes": ("", "changes of the loaded weights, seen before a step"),
    "resets": ("outcome", "resets of the engine's cache in the depot: done, or failed"),
}
"""Name, label and meaning."""
GAUGES: Final = {
    "tier_latency_seconds": ("tier", "measured latency of a tier"),
    "tier_bytes_per_second": ("tier", "measured bandwidth of a tier"),
    "prediction_error": ("kind", "relative error of predicted times to the first token"),
    "decisions": ("reason", "decisions to fetch or to recompute, since the start"),
}
"""Current values, which are not added up."""
Counts = defaultdict[str, float]
"""Counts since they were taken last, for one thread. Names are `what` or `what:kind`, such as
`loaded_blocks:ssd` or `missed_blocks:late`."""
_LOGGER: Final = logging.getLogger("vllm.kvdepot")
_log = RateLimitedLog("vllm.kvdepot")


def warn(what: str, error: BaseException) -> None:
    """Log a failure; of each kind one line in 10 seconds. Thread-safe."""
    # As text: a handler that keeps the record would keep the error's frames, and their memory.
    _log.warning(f"kvdepot: {what}: %s", f"{type(error).__name__}: {error}")


@contextmanager
def errors_logged(logger: logging.Logger = _LOGGER) -> Iterator[None]:
    """Log an error in one line: an engine prints it among the traces of its processes."""
    try:
        yield
    except KVDepotError as error:
        hint = f"; hint: {error.hint}" if error.hint else ""
        logger.log(logging.ERROR, "kvdepot: %s%s", str(error), hint)
        raise


def take_counts(counts: Counts) -> dict[str, float] | None:
    """The counts since the last call. None if nothing was counted."""
    taken = dict(counts)
    counts.clear()
    return taken or None


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
    """All counts and the rate of each tier, for a line of a log."""
    rates = {
        f"{name.partition(':')[2]}_MB_s": round(
            counts.get(name.replace("load_seconds", "loaded_bytes"), 0) / seconds / 1e6, 1
        )
        for name, seconds in counts.items()
        if name.startswith("load_seconds:") and seconds > 0
    }
    return {**{name: round(counts[name], 4) for name in sorted(counts)}, **rates}
