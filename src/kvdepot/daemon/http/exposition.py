"""Writes the metrics of a store as Prometheus text, by prometheus-client."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


class MetricsPage:
    """The metrics, rendered in a thread of their own. Used by one event loop.

    A request gets a text that was rendered after it came, together with the others that came
    meanwhile. Beyond the rate that `allows` permits it gets the latest text.
    """

    def __init__(self, render: Callable[[], str], allows: Callable[[], bool]) -> None:
        self._render = render
        self._allows = allows
        self._thread = ThreadPoolExecutor(1, "kvdepot-http-metrics")
        self._turn = asyncio.Lock()
        self._begun = 0
        self._latest = ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def text(self) -> str:
        seen = self._begun
        if self._latest and not self._allows():
            return self._latest
        async with self._turn:
            if self._begun == seen:
                self._begun += 1
                loop = asyncio.get_running_loop()
                self._latest = await loop.run_in_executor(self._thread, self._render)
        return self._latest
