"""Which stretch of memory is emptied for another size class."""

import random

import numpy as np

from kvdepot.policy.placing.reclaim import FREE, HELD, coldest_stretch


def stretch(stamps: list[int], chunks: int) -> int | None:
    return coldest_stretch(np.array(stamps, dtype=np.int64), chunks)


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
