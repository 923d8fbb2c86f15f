"""The parts of the analytic model, each against arithmetic or another way to the same number."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.planner.analytic import NO_WAIT, Wait, wait_for, waits_longer
from kvdepot.planner.models import find_model
from kvdepot.planner.outcome import life_years
from kvdepot.planner.parts import DataPath, load_parts, tier_speed
from kvdepot.planner.retention import NEVER_S, ReuseModel, TurnGap
from kvdepot.planner.traffic import Weights, model_on_gpus

PARTS = load_parts()
LINE = DataPath(contiguous_bytes=32e6, links=55e9, link=55e9, network=25e9)


def test_prefill_is_what_was_measured_on_an_h200() -> None:
    """shared/facts/machine.md: a Llama-8B shape, 4,096 tokens 122 ms, 21,000 tokens 781 ms."""
    weights = Weights(8.03e9, 8.03e9, 2.0)
    engine = model_on_gpus(find_model("llama-3-8b"), weights, PARTS.gpu("h200"), 1, 0.0)
    assert engine.prefill_s(4_096, 0) == pytest.approx(0.122, rel=0.03)
    assert engine.prefill_s(21_000, 0) == pytest.approx(0.781, rel=0.03)


@given(st.integers(1, 50_000), st.integers(0, 50_000))
def test_prefill_in_two_steps_takes_as_long_as_in_one(first: int, second: int) -> None:
    weights = Weights(8.03e9, 8.03e9, 2.0)
    engine = model_on_gpus(find_model("llama-3-8b"), weights, PARTS.gpu("h100"), 1, 0.0)
    whole = engine.prefill_s(first + second, 0)
    assert engine.prefill_s(first, 0) + engine.prefill_s(second, first) == pytest.approx(whole)


def test_windows_make_prefill_linear() -> None:
    weights = Weights(7.24e9, 7.24e9, 2.0)
    engine = model_on_gpus(find_model("mistral-7b"), weights, PARTS.gpu("h100"), 1, 0.0)
    assert engine.prefill_s(20_000, 0) == pytest.approx(2 * engine.prefill_s(10_000, 0))


def test_gaps_are_lognormal() -> None:
    """Against 200,000 drawn ones, seed 7."""
    gap = TurnGap(1.0, 30.0, 1.2)
    source = random.Random(7)
    drawn = [source.lognormvariate(math.log(30.0) - 0.72, 1.2) for _ in range(200_000)]
    for age in (5.0, 30.0, 120.0):
        assert gap.before(age) == pytest.approx(sum(x < age for x in drawn) / len(drawn), abs=0.005)
        shorter = sum(min(x, age) for x in drawn) / len(drawn)
        assert gap.mean_within(age) == pytest.approx(shorter, rel=0.01)


def test_bytes_without_reuse_are_rate_times_age() -> None:
    talks = ReuseModel(
        2.0, turns=1, gaps=(TurnGap(1.0, 10.0, 1.0),), live_bytes=5.0, final_bytes=7.0
    )
    assert talks.bytes_within(100.0) == pytest.approx(2.0 * 7.0 * 100.0)
    assert talks.horizon_s(1400.0) == pytest.approx(100.0, rel=1e-3)


def test_nights_do_not_write() -> None:
    """A third of the day is busy: ten days hold a third of what ten busy days would, and a bit."""
    gaps = (TurnGap(1.0, 10.0, 1.0),)
    busy = ReuseModel(1.0, 1, gaps, 1.0, 1.0, busy_share=1.0)
    part = ReuseModel(1.0, 1, gaps, 1.0, 1.0, busy_share=1 / 3)
    eight_hours = 8 * 3600.0
    assert part.bytes_within(eight_hours) == busy.bytes_within(eight_hours)
    assert part.bytes_within(864_000.0) == pytest.approx(28_800 + (864_000 - 28_800) / 3)


def test_horizon_against_a_played_lru() -> None:
    """1,500 requests of talks with gaps, played through an LRU of whole talks, seed 11."""
    turns, rate, size, kept = 8, 1.0, 1.0, 60
    gap = TurnGap(1.0, 60.0, 1.0)
    talks = ReuseModel(rate, turns, (gap,), size, size)
    source = random.Random(11)
    events = []
    for talk in range(2_000):
        at = talk * turns / rate
        for turn in range(turns):
            events.append((at, talk, turn))
            at += source.lognormvariate(math.log(60.0) - 0.5, 1.0)
    recent: dict[int, None] = {}
    hits = asked = 0
    for at, talk, turn in sorted(events):
        if at > 2_000 and turn:
            asked += 1
            hits += talk in recent
        recent.pop(talk, None)
        recent[talk] = None
        while len(recent) > kept:
            del recent[next(iter(recent))]
    expected = talks.hit_share(talks.horizon_s(kept * size))
    assert hits / asked == pytest.approx(expected, abs=0.03)


def test_a_tier_without_end() -> None:
    talks = ReuseModel(1.0, 2, (TurnGap(1.0, 10.0, 1.0),), 1.0, 1.0)
    assert talks.horizon_s(1e18) == NEVER_S
    assert talks.horizon_s(0.0) == 0.0


def test_waiting_for_constant_service() -> None:
    """M/D/1 at half load: the mean wait is half a service time."""
    found = wait_for(0.5, 1.0, 1.0)
    assert found is not None
    assert found.mean_s == pytest.approx(0.5)
    assert wait_for(1.0, 1.0, 1.0) is None
    assert wait_for(0.0, 1.0, 1.0) == NO_WAIT


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Wait(0.5, 1.0), Wait(0.3, 0.2)),
        (Wait(0.5, 1.0), Wait(0.5, 1.0)),
        (Wait(0.7, 2.0), NO_WAIT),
        (NO_WAIT, NO_WAIT),
    ],
)
def test_two_waits_add_up(first: Wait, second: Wait) -> None:
    """The area under the tail is the mean of the sum; nobody waits less than no time."""
    times = np.linspace(0.0, 60.0, 60_001)
    tail = waits_longer(first, second, times)
    area = float(tail.sum() * 0.001)
    assert area == pytest.approx(first.mean_s + second.mean_s, abs=2e-3)
    assert waits_longer(first, second, np.array([-1.0]))[0] == 1.0
    assert (np.diff(tail) <= 1e-12).all()


def test_twelve_drives_are_three_times_four_until_the_network() -> None:
    """Hybrid storage paper, line 92: 4, 8, 12 drives are 1, 2, 3 times; then a cap of 25 GB/s."""
    hdd = PARTS.tiers["hdd"]
    rates = {n: tier_speed("hdd", hdd, n, LINE).read_bytes_per_s for n in (4, 8, 12, 1000)}
    assert rates[8] == pytest.approx(2 * rates[4])
    assert rates[12] == pytest.approx(3 * rates[4])
    assert rates[1000] == 25e9
    assert tier_speed("hdd", hdd, 1000, LINE).limited_by == "network"


def test_seeks_cost_where_blocks_are_small() -> None:
    """275 MB/s and 12 ms a seek: 128 KiB runs reach 10.5 MB/s, 32 MB runs 249 MB/s."""
    hdd = PARTS.tiers["hdd"]
    small = DataPath(contiguous_bytes=131_072, links=55e9, link=55e9, network=25e9)
    assert tier_speed("hdd", hdd, 1, small).read_bytes_per_s == pytest.approx(10.5e6, rel=0.01)
    assert tier_speed("hdd", hdd, 1, LINE).read_bytes_per_s == pytest.approx(249e6, rel=0.01)


def test_four_ssds_fill_a_gpus_link() -> None:
    """Hybrid storage paper, line 51: four in parallel reach a PCIe 5.0 x16 GPU's limit."""
    ssd = PARTS.tiers["ssd"]
    assert tier_speed("ssd", ssd, 4, LINE).limited_by == "GPU link"
    assert tier_speed("ssd", ssd, 3, LINE).limited_by == "units"


def test_drives_wear_out() -> None:
    ssd = PARTS.tiers["ssd"]
    assert life_years(ssd, 4, 4 * ssd.unit) == pytest.approx(5.0)
    assert life_years(ssd, 4, 8 * ssd.unit) == pytest.approx(2.5)
    assert life_years(PARTS.tiers["hdd"], 4, 1e15) is None
