"""The keys that a volume may hold: none too few, also while keys come and go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.keys import Keys
from kvdepot.volumes.log.segments import HeldKeys

SLOTS, KEYS = 4, 12


def keys_of(numbers: list[int]) -> Keys:
    """Keys whose random words are far apart."""
    return np.array([[1, 2, number * 0x9E3779B97F4A7C15 % 2**64, 3] for number in numbers], "<u8")


NUMBERS = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, SLOTS - 1), NUMBERS),
        st.tuples(st.just("forget"), st.integers(0, SLOTS - 1), st.just([])),
        st.tuples(st.just("search"), st.just(0), st.just([])),
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 8))
def test_held_keys_are_found(steps: list[tuple[str, int, list[int]]], new_max: int) -> None:
    everything = keys_of(list(range(KEYS)))
    held, by_slot, ever = HeldKeys(new_max=new_max), [set[int]() for _ in range(SLOTS)], set[int]()
    for step, slot, numbers in [*steps, ("search", 0, [])]:
        if step == "add":
            held.add(slot, keys_of(numbers))
            by_slot[slot] |= set(numbers)
            ever |= set(numbers)
        elif step == "forget":
            held.forget([slot])
            by_slot[slot] = set()
        else:
            found = set(np.flatnonzero(held.search().may_hold(everything)).tolist())
            assert set[int]().union(*by_slot) <= found <= ever


def test_a_search_begun_earlier_is_of_its_moment() -> None:
    held = HeldKeys()
    held.add(0, keys_of([1]))
    search = held.search()
    held.forget([0])
    assert search.may_hold(keys_of([1, 2])).tolist() == [True, False]


def test_a_slot_of_unknown_content_may_hold_any_key() -> None:
    held = HeldKeys()
    held.unknown.add(3)
    assert held.search().may_hold(keys_of([1, 2])).all()
    held.forget([3])
    assert not held.search().may_hold(keys_of([1, 2])).any()
