"""Counts add up, over periods and over workers; what is a state does not."""

import pytest

pytest.importorskip("torch")

from kvdepot.adapters.vllm.messages import LoadEnd, StepReport, StepTime, TierTime
from kvdepot.adapters.vllm.metrics import ConnectorCounts, merged, summary


def test_a_tally_is_taken_once() -> None:
    tally = ConnectorCounts()
    assert tally.take() is None
    tally.add("hit_tokens", 5)
    tally.missed(["late", "late", "corrupt"])
    tally.loaded([TierTime("ssd", 2, 4000, 0.5)])
    assert tally.take() == {
        "hit_tokens": 5,
        "missed_blocks:late": 2,
        "missed_blocks:corrupt": 1,
        "loaded_blocks:ssd": 2,
        "loaded_bytes:ssd": 4000,
        "load_seconds:ssd": 0.5,
    }
    assert tally.take() is None


def test_counts_add_up_and_states_are_replaced() -> None:
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


def test_reports_of_workers_join_to_the_worse() -> None:
    end, step = LoadEnd("r", 3), StepTime(8, 1.0, 0.1)
    one = StepReport([end], {"a": 4, "b": 7}, [step])
    both = one.aggregate(StepReport([], {"a": 2, "c": 1}))
    assert both == StepReport([end], {"a": 2, "b": 7, "c": 1}, [step])
    assert not StepReport()
    assert both
