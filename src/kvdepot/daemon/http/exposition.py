"""Writes the metrics of a store as Prometheus text, by prometheus-client."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvdepot.store.metrics import METRICS, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS: Final = range(4, 27, 2)
"""Powers of two of microseconds at which the buckets end: 16 µs to 67 s."""
_FAMILIES: Final[
    dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]]
] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class StatsCollector(Collector):
    """The metrics of one result of `stats`."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
            if isinstance(family, HistogramMetricFamily):
                for labels, counts, total in metric.read(self._stats):
                    family.add_metric(labels, _buckets(counts), total)
            else:
                for labels, value in metric.read(self._stats):
                    family.add_metric(labels, value)
            if family.samples:
                yield family


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative counts, by the end of each bucket in seconds."""
    sums = list(accumulate(counts))
    return [*((str(2**power / 1e6), sums[power]) for power in _BOUNDS), ("+Inf", sums[-1])]


def render(stats: Stats) -> str:
    """Render a result of `stats` as Prometheus text."""
    return generate_latest(StatsCollector(stats)).decode()
