"""The prefill model finds the engine's speed in its steps, and follows it."""

import random
from math import exp, nan

import pytest

from kvdepot.policy.fetching.speed_models import PrefillModel, PrefillPace, attention_work

PACE = PrefillPace(0.06, 2.2e-3, 5e-7)
LONG = (2000, 2000)
"""New tokens and context that no test shows the model."""


def seconds(tokens: int, context: int, pace: PrefillPace = PACE) -> float:
    work = attention_work(tokens, context)
    return pace.step_s + pace.token_s * tokens + pace.pair_s * work


def teach(
    model: PrefillModel, rng: random.Random, steps: int, noise: float = 0.05, slower: float = 1.0
) -> None:
    """Steps of 16 to 2,048 tokens, spread over all sizes, every third of them on a context: ten
    steps that are all short and without one cannot tell of a long prompt."""
    order = rng.sample(range(steps), steps)
    for at, place in enumerate(order):
        tokens = int(2 ** (4 + 7 * (place + rng.random()) / steps))
        context = rng.randrange(1000, 4000) if at % 3 == 2 else 0
        took = slower * seconds(tokens, context) * exp(rng.gauss(0.0, noise))
        model.observe(tokens, attention_work(tokens, context), took)


def predicted(model: PrefillModel, tokens: int, context: int) -> float:
    pace = model.pace()
    assert pace is not None
    work = attention_work(tokens, context)
    return pace.step_s + pace.token_s * tokens + pace.pair_s * work


def test_attention_work_does_not_depend_on_how_a_prompt_is_cut_into_steps() -> None:
    whole = attention_work(1000, 300)
    assert attention_work(400, 300) + attention_work(600, 700) == whole


def test_nothing_is_claimed_before_the_first_step() -> None:
    model = PrefillModel()
    assert model.pace() is None


def test_one_step_is_enough_for_steps_like_it() -> None:
    model = PrefillModel()
    model.observe(512, attention_work(512, 0), 2.0)
    assert predicted(model, 512, 0) == pytest.approx(2.0)
    assert 3.0 < predicted(model, 1024, 0) < 5.0


def test_exact_steps_give_the_exact_pace() -> None:
    model = PrefillModel()
    for _ in range(4):
        for tokens, context in [(16, 0), (128, 0), (1024, 0), (2048, 0), (512, 4000), (64, 6000)]:
            model.observe(tokens, attention_work(tokens, context), seconds(tokens, context))
    assert predicted(model, *LONG) == pytest.approx(seconds(*LONG), rel=0.03)
    pace = model.pace()
    assert pace is not None
    assert pace.token_s == pytest.approx(PACE.token_s, rel=0.03)
    assert pace.pair_s == pytest.approx(PACE.pair_s, rel=0.1)


def test_noisy_steps_give_nearly_the_pace(seed: int) -> None:
    model = PrefillModel()
    teach(model, random.Random(seed), 60)
    assert predicted(model, *LONG) == pytest.approx(seconds(*LONG), rel=0.2)


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_change_of_speed_is_followed_within_ten_steps(seed: int, slower: float) -> None:
    model, rng = PrefillModel(), random.Random(seed)
    teach(model, rng, 60)
    teach(model, rng, 10, slower=slower)
    assert predicted(model, *LONG) == pytest.approx(slower * seconds(*LONG), rel=0.5)


def test_a_stall_is_not_a_change_of_speed(seed: int) -> None:
    model, rng = PrefillModel(), random.Random(seed)
    teach(model, rng, 60)
    before = predicted(model, *LONG)
    model.observe(512, attention_work(512, 0), 50 * seconds(512, 0))
    assert predicted(model, *LONG) == pytest.approx(before, rel=0.1)


def test_a_slow_first_step_is_forgotten_soon() -> None:
    """Engines compile and warm up on their first step."""
    model = PrefillModel()
    model.observe(512, attention_work(512, 0), 60.0)
    for _ in range(6):
        model.observe(512, attention_work(512, 0), seconds(512, 0))
    assert predicted(model, 512, 0) == pytest.approx(seconds(512, 0), rel=0.1)


def test_steps_all_of_one_size_leave_the_proportions_as_assumed(seed: int) -> None:
    model, rng = PrefillModel(), random.Random(seed)
    for _ in range(50):
        took = seconds(256, 0) * exp(rng.gauss(0.0, 0.05))
        model.observe(256, attention_work(256, 0), took)
    assert predicted(model, 256, 0) == pytest.approx(seconds(256, 0), rel=0.1)
    assert 2.0 < predicted(model, 1024, 0) / predicted(model, 256, 0) < 5.0
    pace = model.pace()
    assert pace is not None
    assert min(pace.step_s, pace.token_s, pace.pair_s) >= 0.0


def test_many_small_steps_do_not_wash_out_the_large_ones(seed: int) -> None:
    model, rng = PrefillModel(), random.Random(seed)
    teach(model, rng, 60)
    for _ in range(300):
        took = seconds(4, 500) * exp(rng.gauss(0.0, 0.05))
        model.observe(4, attention_work(4, 500), took)
    assert predicted(model, *LONG) == pytest.approx(seconds(*LONG), rel=0.25)


@pytest.mark.parametrize("unreal", [0.0, -1.0, nan, float("inf")])
def test_what_no_clock_can_measure_is_ignored(unreal: float) -> None:
    model = PrefillModel()
    model.observe(512, attention_work(512, 0), unreal)
    assert model.pace() is None
    model.observe(0, 0.0, 1.0)
    assert model.pace() is None


def test_a_negative_pace_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        PrefillPace(0.1, -1e-3, 0.0)
