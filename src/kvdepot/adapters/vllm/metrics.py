"""The connector's figures in vLLM's log and on its metrics page. Needs vLLM."""

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvdepot.adapters.vllm.stats import added, summary

LABELLED: Final = {
    "loaded_blocks": ("tier", "blocks that were loaded into vLLM's pages"),
    "loaded_bytes": ("tier", "their bytes"),
    "load_seconds": ("tier", "time from the start of each load to the last block of the tier"),
    "missed_blocks": ("reason", "blocks that were looked up and could not be loaded"),
    "saved_blocks": ("outcome", "blocks that were offered to the depot"),
    "depot_errors": ("call", "calls that the depot could not answer"),
    "unserved_requests": ("reason", "requests that the depot is not used for"),
}
GAUGED: Final = {
    "tier_latency_seconds": ("tier", "latency of a tier, as measured"),
    "tier_bytes_per_second": ("tier", "bandwidth of a tier, as measured"),
    "prediction_error": ("kind", "error of predicted times to the first token, relative"),
    "decisions": ("reason", "decisions to fetch or to recompute, since the start"),
}
PLAIN: Final = {
    "hit_tokens": "prompt tokens that were found in the depot and not in vLLM",
    "failed_loads": "loads of which a part was recomputed",
    "failed_saves": "saves that ended with an error",
}


class DepotStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one period; `data` is what `Tally.take` returns."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> "DepotStats":
        return DepotStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return dict(summary(self.data))

    def is_empty(self) -> bool:
        return not self.data


class DepotMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvdepot_…` counters."""

    def __init__(self, config: Any, types: Any, names: list[str], values: Any) -> None:
        super().__init__(config, types, names, values)
        self._counters = {
            what: self._counter_cls(
                name=f"vllm:kvdepot_{what}",
                documentation=f"kvdepot: {text}.",
                labelnames=[*names, label],
            )
            for what, (label, text) in LABELLED.items()
        } | {
            what: self._counter_cls(
                name=f"vllm:kvdepot_{what}", documentation=f"kvdepot: {text}.", labelnames=names
            )
            for what, text in PLAIN.items()
        }

        self._gauges = {
            what: self._gauge_cls(
                name=f"vllm:kvdepot_{what}",
                documentation=f"kvdepot: {text}.",
                labelnames=[*names, label],
            )
            for what, (label, text) in GAUGED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, kind = name.partition(":")
            if what in self._gauges:
                self._gauges[what].labels(*labels, kind).set(count)
            elif what in self._counters:
                values = [*labels, kind] if what in LABELLED else labels
                self._counters[what].labels(*values).inc(count)
