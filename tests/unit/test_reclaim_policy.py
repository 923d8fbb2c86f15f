"""Which segment makes room on disk, and which of its blocks are written again."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvdepot.policy.reclaim import KEEP_SHARE_MAX, SegmentFacts, coldest, keep

CAPACITY = 1000


def segment(
    sizes: Sequence[int], stamps: Sequence[int], hits: Sequence[int], orphaned_bytes: int = 0
) -> SegmentFacts:
    def column(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    return SegmentFacts(CAPACITY, column(sizes), column(stamps), column(hits), orphaned_bytes)


def full(stamp: int, hit_share: float = 0.0, orphaned_bytes: int = 0) -> SegmentFacts:
    """Ten blocks of a hundred bytes, last used at `stamp`."""
    hits = [1 if index < 10 * hit_share else 0 for index in range(10)]
    return segment([100] * 10, [stamp] * 10, hits, orphaned_bytes)


def kept(facts: SegmentFacts, forced: Sequence[bool] | None = None) -> list[int]:
    flags = np.array(forced if forced is not None else [False] * len(facts.sizes), dtype=bool)
    before = flags.copy()
    result = keep(facts, flags)
    assert flags.tolist() == before.tolist(), "the caller's array is left alone"
    return np.flatnonzero(result).tolist()


class TestColdest:
    def test_an_empty_segment_goes_before_everything(self) -> None:
        assert coldest([full(1), segment([], [], []), full(2)], now=100) == 1

    def test_the_segment_unused_for_longest_goes(self) -> None:
        assert coldest([full(50), full(10), full(90)], now=100) == 1

    def test_of_equally_old_ones_that_with_less_to_write_again(self) -> None:
        assert coldest([full(10, 0.4), full(10, 0.0), full(10, 0.2)], now=100) == 1

    def test_of_equally_old_ones_that_whose_loss_takes_less_with_it(self) -> None:
        assert coldest([full(10, orphaned_bytes=5000), full(10, orphaned_bytes=100)], now=100) == 1

    def test_much_younger_tails_go_before_old_heads_that_carry_a_lot(self) -> None:
        """A prompt that outgrows the drive: dropping its head would drop everything."""
        assert coldest([full(10, orphaned_bytes=50 * CAPACITY), full(90)], now=100) == 1

    def test_one_segment_is_the_coldest_of_one(self) -> None:
        assert coldest([full(100, 1.0)], now=100) == 0


class TestKeep:
    def test_blocks_never_used_since_they_were_written_are_dropped(self) -> None:
        assert kept(full(5)) == []

    def test_used_ones_are_kept_warmest_first_within_the_budget(self) -> None:
        facts = segment([200] * 5, [5, 9, 1, 7, 3], [1, 1, 1, 1, 0])
        assert kept(facts) == [1, 3], "two of 200 fit into half of 1000, a third does not"

    def test_a_budget_filled_exactly_is_filled(self) -> None:
        facts = segment([250] * 4, [1, 2, 3, 4], [1, 1, 1, 1])
        assert kept(facts) == [2, 3]

    def test_forced_blocks_are_kept_whatever_they_take(self) -> None:
        facts = segment([200] * 5, [1, 2, 3, 4, 5], [0, 0, 0, 0, 9])
        assert kept(facts, [True, True, True, False, False]) == [0, 1, 2]

    def test_forced_blocks_count_against_the_budget_of_the_others(self) -> None:
        facts = segment([200] * 4, [1, 2, 3, 4], [0, 1, 1, 1])
        assert kept(facts, [True, False, False, False]) == [0, 3]

    def test_nothing_is_kept_of_nothing(self) -> None:
        assert kept(segment([], [], [])) == []

    def test_reclaiming_always_gains_room_unless_leases_forbid_it(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            count = rng.randrange(1, 12)
            facts = segment(
                [rng.randrange(1, 1 + 2 * CAPACITY // count) for _ in range(count)],
                [rng.randrange(100) for _ in range(count)],
                [rng.randrange(3) for _ in range(count)],
            )
            forced = [rng.random() < 0.2 for _ in range(count)]
            chosen = kept(facts, forced)
            assert set(np.flatnonzero(forced)) <= set(chosen)
            mine = [index for index in chosen if not forced[index]]
            assert all(facts.hits[index] > 0 for index in mine)
            if mine:
                assert facts.sizes[chosen].sum() <= KEEP_SHARE_MAX * CAPACITY
            left = [i for i in range(count) if facts.hits[i] > 0 and i not in chosen]
            if left and mine:
                newest_left = max(facts.stamps[left])
                assert newest_left <= min(facts.stamps[mine]), "warmest first"


@pytest.mark.parametrize(
    ("hits", "warm_bytes"), [([0, 0, 0], 0), ([1, 0, 7], 400), ([1, 1, 1], 600)]
)
def test_warm_bytes_are_those_of_blocks_used_again(hits: list[int], warm_bytes: int) -> None:
    assert segment([100, 200, 300], [1, 1, 1], hits).warm_bytes == warm_bytes
