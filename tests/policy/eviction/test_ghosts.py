"""Ghosts, the LRU shadow and the counts of reuse by age."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.eviction.ghosts import Ghosts
from kvdepot.policy.eviction.reuse_density import AGES, LruShadow, ReuseRates, bucket, buckets

Digests = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(Digests, st.booleans()), max_size=200))
def test_a_ghost_is_what_was_remembered_or_nobody(steps: list[tuple[int, bool]]) -> None:
    ghosts, model = Ghosts(1.0), dict[int, int]()
    for stamp, (digest, recall) in enumerate(steps):
        if recall:
            found = ghosts.recall(digest)
            if found is not None:
                assert found.stamp == model.pop(digest)
        else:
            ghosts.remember(digest, stamp, 7)
            model[digest] = stamp


def test_ghosts_are_bounded_and_survive_growth() -> None:
    ghosts = Ghosts(2.0)
    for number in range(1000):
        ghosts.remember(number, number, number % 9)
    ghosts.fit(4000)
    assert ghosts.places == 8192
    found = [ghosts.recall(number) for number in range(1000)]
    assert [(ghost.stamp, ghost.note) for ghost in found if ghost] == [
        (number, number % 9) for number in range(1000)
    ]
    assert ghosts.recall(5) is None, "it was recalled"


@given(st.lists(st.integers(0, 40), max_size=300), st.integers(1, 20))
def test_a_shadow_of_everything_is_lru(keys: list[int], capacity: int) -> None:
    shadow = LruShadow()
    shadow.fit(capacity)
    model: OrderedDict[int, None] = OrderedDict()
    for key in keys:
        assert shadow.touch([key]) == (key in model)
        model[key] = None
        model.move_to_end(key)
        if len(model) > capacity:
            model.popitem(last=False)


def test_a_sample_has_its_share_of_the_keys_and_of_the_room() -> None:
    shadow = LruShadow()
    shadow.fit(2048 * 16)
    assert shadow.bits == 4
    assert shadow.capacity == 2048
    digests = np.arange(1024, dtype=np.uint64) << np.uint64(54)
    chosen = shadow.sampled(digests)
    assert len(chosen) == 64
    assert all(shadow.has(digest) == (digest in chosen) for digest in digests.tolist())


@given(st.integers(0, 2**40))
def test_ages_fall_into_their_bucket(age: int) -> None:
    at = bucket(age)
    assert AGES[at] <= age
    assert at == len(AGES) - 1 or age < AGES[at + 1]
    assert buckets(np.array([age]))[0] == at


def test_density_is_reuses_per_time_where_reuse_is_steady() -> None:
    """One kind reused at a constant rate at all ages: its density is that rate."""
    hazard = ReuseRates(2)
    rate = 1e-3
    ages = np.array(AGES[:20])
    hazard.exposed(np.zeros(20, dtype=np.int64), ages, 1e9)
    for age in AGES[:20]:
        hazard._reuses[0, bucket(age)] += rate * 1e9
    hazard.refresh(AGES[19], 1.0, [1, 1])
    assert hazard.density[0][0] == pytest.approx(rate, rel=1e-3)
    assert hazard.density[0][15] == pytest.approx(rate, rel=1e-3)


def test_density_looks_ahead_to_the_age_at_which_reuse_comes() -> None:
    """Nothing is reused young, much at one later age: the young ones promise more as they near it,
    and those past it promise nothing."""
    hazard = ReuseRates(1)
    ages = np.array(AGES[:30])
    hazard.exposed(np.zeros(30, dtype=np.int64), ages, 1e6)
    hazard._reuses[0, 20] = 1e4
    hazard.refresh(AGES[29], 1.0, [1])
    density = hazard.density[0]
    assert 0 < density[2] < density[12] < density[20]
    assert density[21] == 0
