"""The tier model tells latency from bandwidth, and notices soon when a tier changes."""

import random
from dataclasses import replace
from math import exp, inf

import pytest

from kvdepot.policy.fetching.speed_models import (
    MEDIUM_PROFILES,
    TierModel,
    TierPace,
    TierProfile,
    Transfer,
    starting_profile,
)

MB = 1_000_000
BLOCK = 6 * MB
PROFILE = TierProfile(2e-3, 1000 * MB)


def seconds(size: float, latency_s: float = 2e-3, bandwidth: float = 1000 * MB) -> float:
    return latency_s + size / bandwidth


def transfer(blocks: int, took: float, outstanding: int = 0, late: int = 0) -> Transfer:
    return Transfer(blocks, blocks * BLOCK, took, outstanding, late)


def serve(
    model: TierModel, rng: random.Random, transfers: int, slower: float = 1.0, noise: float = 0.1
) -> None:
    for _ in range(transfers):
        blocks = rng.randint(4, 30)
        took = slower * seconds(blocks * BLOCK) * exp(rng.gauss(0.0, noise))
        model.observe(transfer(blocks, took))


def predicted(model: TierModel, size: int, outstanding: int = 0) -> float:
    pace = model.pace(outstanding)
    assert pace is not None
    return pace.wait_s + pace.byte_s * size


def test_nothing_is_claimed_of_an_unknown_tier() -> None:
    model = TierModel()
    assert not model.known
    assert model.pace(BLOCK) is None
    assert model.bandwidth_bytes_s == inf


def test_a_profile_is_believed_until_two_transfers_agree_on_something_else() -> None:
    model = TierModel(PROFILE)
    assert predicted(model, 100 * MB) == pytest.approx(seconds(100 * MB))
    model.observe(transfer(10, 5 * seconds(10 * BLOCK)))
    assert predicted(model, 10 * BLOCK) == pytest.approx(seconds(10 * BLOCK), rel=0.1)
    model.observe(transfer(10, 5 * seconds(10 * BLOCK)))
    assert predicted(model, 10 * BLOCK) == pytest.approx(5 * seconds(10 * BLOCK), rel=0.1)


@pytest.mark.parametrize("slower", [0.02, 0.5, 1.9, 5.0, 500.0])
def test_one_transfer_never_outweighs_the_profile(slower: float) -> None:
    model = TierModel(PROFILE)
    model.observe(transfer(10, slower * seconds(10 * BLOCK)))
    halfway = 1.0 + (slower - 1.0) / 2.0
    at = predicted(model, 10 * BLOCK) / seconds(10 * BLOCK)
    assert min(halfway, 1.0) - 0.1 <= at <= max(halfway, 1.0) + 0.1


def test_one_load_that_was_late_is_no_speed() -> None:
    """7 blocks of 6.6 MB, of which one came in time: it was believed to be 10.7 MB/s."""
    model = TierModel(PROFILE)
    model.observe(transfer(7, 0.8, late=6))
    assert model.bandwidth_bytes_s > 0.8 * PROFILE.bandwidth_bytes_s


def test_the_first_load_of_a_process_is_not_the_speed_of_its_tier() -> None:
    model = TierModel(PROFILE)
    for _ in range(4):
        model.observe(replace(transfer(10, 3 * seconds(10 * BLOCK)), cold=True))
    assert predicted(model, 10 * BLOCK) == pytest.approx(seconds(10 * BLOCK), rel=0.02)
    unknown = TierModel()
    unknown.observe(replace(transfer(10, seconds(10 * BLOCK)), cold=True))
    assert predicted(unknown, 10 * BLOCK) == pytest.approx(seconds(10 * BLOCK), rel=0.02)


@pytest.mark.parametrize(
    ("learnt", "measured", "expected"),
    [
        (700 * MB, 1000 * MB, 700 * MB),
        (10.7 * MB, 1000 * MB, 1000 * MB),
        (90_000 * MB, 1000 * MB, 1000 * MB),
        (None, 1000 * MB, 1000 * MB),
        (700 * MB, None, 700 * MB),
        (10.7 * MB, None, MEDIUM_PROFILES["ssd"].bandwidth_bytes_s),
        (None, None, MEDIUM_PROFILES["ssd"].bandwidth_bytes_s),
    ],
)
def test_what_was_learnt_before_is_believed_unless_it_is_absurd(
    learnt: float | None, measured: float | None, expected: float
) -> None:
    profiles = [None if one is None else TierProfile(1e-3, one) for one in (measured, learnt)]
    found = starting_profile("ssd", *profiles)
    assert found is not None
    assert found.bandwidth_bytes_s == expected


def test_batches_of_different_sizes_tell_latency_from_bandwidth() -> None:
    model = TierModel()
    for _ in range(4):
        for blocks in (1, 30, 4):
            model.observe(transfer(blocks, seconds(blocks * BLOCK, 0.02, 500 * MB)))
    assert model.latency_s == pytest.approx(0.02, rel=0.1)
    assert model.bandwidth_bytes_s == pytest.approx(500 * MB, rel=0.06)


def test_what_is_outstanding_comes_first() -> None:
    model = TierModel(PROFILE)
    assert predicted(model, BLOCK, 1000 * MB) == pytest.approx(seconds(1000 * MB + BLOCK))
    pace = model.pace(1000 * MB)
    assert pace is not None
    assert pace.wait_s == pytest.approx(seconds(1000 * MB))


def test_a_queue_does_not_make_the_tier_look_slow() -> None:
    model = TierModel(PROFILE)
    for _ in range(5):
        model.observe(transfer(1, seconds(BLOCK + 200 * MB), outstanding=200 * MB))
    assert predicted(model, 200 * MB) == pytest.approx(seconds(200 * MB), rel=0.05)


@pytest.mark.parametrize(
    ("slower", "within"), [(10.0, 0.4), (0.1, 0.4), (1000.0, 0.4), (0.01, 1.0)]
)
def test_a_change_of_speed_is_followed_within_five_transfers(
    seed: int, slower: float, within: float
) -> None:
    model, rng = TierModel(), random.Random(seed)
    serve(model, rng, 30)
    assert predicted(model, 10 * BLOCK) == pytest.approx(seconds(10 * BLOCK), rel=0.3)
    serve(model, rng, 5, slower=slower)
    assert predicted(model, 10 * BLOCK) == pytest.approx(slower * seconds(10 * BLOCK), rel=within)


def test_one_hiccup_is_doubted_and_changes_little(seed: int) -> None:
    model, rng = TierModel(), random.Random(seed)
    serve(model, rng, 30, noise=0.05)
    before = predicted(model, 10 * BLOCK)
    model.observe(transfer(10, 40 * seconds(10 * BLOCK)))
    assert model.doubting
    assert predicted(model, 10 * BLOCK) == pytest.approx(before, rel=0.15)
    serve(model, rng, 8, noise=0.05)
    assert predicted(model, 10 * BLOCK) == pytest.approx(before, rel=0.15)


def test_small_transfers_alone_tell_of_lost_bandwidth_too(seed: int) -> None:
    """What used to come in large batches is not expected fast because it once was."""
    model, rng = TierModel(PROFILE), random.Random(seed)
    serve(model, rng, 20)
    for _ in range(8):
        took = seconds(BLOCK, bandwidth=10 * MB) * exp(rng.gauss(0.0, 0.1))
        model.observe(transfer(1, took))
    assert predicted(model, 20 * BLOCK) > 0.5 * seconds(20 * BLOCK, bandwidth=10 * MB)


def test_bandwidth_can_change_and_latency_stay(seed: int) -> None:
    """A large batch after small ones, and small after large, must not upset each other."""
    model, rng = TierModel(TierProfile(0.05, 1000 * MB)), random.Random(seed)
    for bandwidth in (1000 * MB, 100 * MB):
        for _ in range(6):
            for blocks in (20, 20, 1, 1):
                took = seconds(blocks * BLOCK, 0.05, bandwidth) * exp(rng.gauss(0.0, 0.03))
                model.observe(transfer(blocks, took))
    assert predicted(model, BLOCK) == pytest.approx(seconds(BLOCK, 0.05, 100 * MB), rel=0.2)
    assert predicted(model, 20 * BLOCK) == pytest.approx(
        seconds(20 * BLOCK, 0.05, 100 * MB), rel=0.2
    )


def test_a_late_transfer_tells_how_long_it_would_have_taken() -> None:
    model = TierModel()
    model.observe(transfer(20, 1.0, late=15))
    assert predicted(model, 20 * BLOCK) == pytest.approx(1.0 * 20 / 5.5, rel=0.05)


def test_a_transfer_of_which_nothing_came_is_the_worst() -> None:
    some, none = TierModel(), TierModel()
    some.observe(transfer(20, 1.0, late=15))
    none.observe(transfer(20, 1.0, late=20))
    assert predicted(none, 20 * BLOCK) > 5 * predicted(some, 20 * BLOCK)


def test_the_spread_is_that_of_the_transfers(seed: int) -> None:
    calm, wild, rng = TierModel(), TierModel(), random.Random(seed)
    serve(calm, rng, 60, noise=0.02)
    serve(wild, rng, 60, noise=0.3)
    steady, unsteady = calm.pace(), wild.pace()
    assert steady is not None and unsteady is not None
    assert steady.spread_share < 0.08 < 0.15 < unsteady.spread_share


def test_a_latency_that_was_thought_to_be_nothing_is_found() -> None:
    model = TierModel(TierProfile(0.0, 1000 * MB))
    for _ in range(10):
        for blocks in (1, 30):
            model.observe(transfer(blocks, seconds(blocks * BLOCK, 0.1)))
    assert model.latency_s == pytest.approx(0.1, rel=0.1)


def test_a_negative_pace_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        TierPace(-1.0, 1e-9)
