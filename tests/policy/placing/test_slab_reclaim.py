"""Which stretch of memory is emptied for another size class."""

import random

import numpy as np
import pytest

from kvdepot.policy.placing.reclaim import FREE, HELD, coldest_stretch


def stretch(stamps: list[int], chunks: int) -> int | None:
    return coldest_stretch(np.array(stamps, dtype=np.int64), chunks)


def test_free_chunks_win() -> None:
    assert stretch([5, 5, FREE, FREE, 3], 2) == 2


def test_a_stretch_is_as_hot_as_its_hottest_chunk() -> None:
    assert stretch([1, 90, 1, 90, 40, 2], 2) == 4


def test_held_chunks_are_never_emptied() -> None:
    assert stretch([HELD, 7, HELD, 9, 9, HELD], 2) == 3
    assert stretch([HELD, 7, HELD, 9, HELD], 2) is None


@pytest.mark.parametrize("stamps", [[], [1], [1, 1]])
def test_an_arena_shorter_than_the_stretch_has_none(stamps: list[int]) -> None:
    assert stretch(stamps, 3) is None


def test_it_agrees_with_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        stamps = [rng.choice([FREE, HELD, rng.randrange(20)]) for _ in range(rng.randrange(1, 30))]
        chunks = rng.randrange(1, 6)
        hottest = {
            start: max(stamps[start : start + chunks]) for start in range(len(stamps) - chunks + 1)
        }
        start = stretch(stamps, chunks)
        possible = {at: heat for at, heat in hottest.items() if heat != HELD}
        if not possible:
            assert start is None
        else:
            assert start is not None
            assert hottest[start] == min(possible.values())
