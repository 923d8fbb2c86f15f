"""Counts add up, over periods and over workers; gauges keep the last value."""

import pytest

pytest.importorskip("torch")

from collections import defaultdict

from kvdepot.adapters.vllm.messages import LoadEnd, StepReport, StepTime
from kvdepot.adapters.vllm.metrics import merged, summary, take_counts


def test_counts_are_taken_once() -> None:
    counts: defaultdict[str, float] = defaultdict(float)
    assert take_counts(counts) is None
    counts["hit_tokens"] += 5
    assert take_counts(counts) == {"hit_tokens": 5}
    assert take_counts(counts) is None


def test_counts_add_up_and_gauges_are_replaced() -> None:
    left = {"hit_tokens": 5.0, "tier_bytes_per_second:ssd": 10.0, "failed_loads": 1.0}
    right = {"hit_tokens": 2.0, "tier_bytes_per_second:ssd": 30.0}
    assert merged(left, right) == {
        "hit_tokens": 7.0,
        "tier_bytes_per_second:ssd": 30.0,
        "failed_loads": 1.0,
    }


def test_a_summary_has_rates() -> None:
    figures = {"loaded_bytes:ssd": 3e9, "load_seconds:ssd": 1.5, "loaded_bytes:dram": 0.0}
    assert summary(figures)["ssd_MB_s"] == 2000.0


def test_of_two_workers_reports_the_worse_counts() -> None:
    end, step = LoadEnd("r", 3), StepTime(8, 1.0, 0.1)
    one = StepReport([end], {"a": 4, "b": 7}, [step])
    both = one.aggregate(StepReport([], {"a": 2, "c": 1}))
    assert both == StepReport([end], {"a": 2, "b": 7, "c": 1}, [step])
    assert both and not StepReport()
