"""Which segment makes room on disk, and which of its blocks are written again."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvdepot.errors import ConfigError
from kvdepot.policy.placing.reclaim import (
    KEEP_SHARE_MAX,
    RULES,
    SegmentFacts,
    abandoned,
    coldest,
    keep,
    rule_named,
)

CAPACITY = 1000
NOW = 100


def column(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def segment(
    sizes: Sequence[int], stamps: Sequence[int], hits: Sequence[int], below: Sequence[int] = ()
) -> SegmentFacts:
    rest = list(below) or [0] * len(sizes)
    return SegmentFacts(CAPACITY, column(sizes), column(stamps), column(hits), column(rest))


def full(stamp: int, hit_share: float = 0.0, below_each: int = 0) -> SegmentFacts:
    """Ten blocks of a hundred bytes, last used at `stamp`."""
    hits = [1 if index < 10 * hit_share else 0 for index in range(10)]
    return segment([100] * 10, [stamp] * 10, hits, [below_each] * 10)


def kept(
    facts: SegmentFacts, forced: Sequence[bool] | None = None, others: Sequence[SegmentFacts] = ()
) -> list[int]:
    flags = np.array(forced if forced is not None else [False] * len(facts.sizes), dtype=bool)
    before = flags.copy()
    result = keep(facts, flags, others)
    assert flags.tolist() == before.tolist(), "the caller's array is left alone"
    return np.flatnonzero(result).tolist()


USED = segment([100] * 10, [90] * 10, [9] * 5 + [0] * 5, [50 * CAPACITY] * 5 + [0] * 5)
"""Half of it was used and moves on, with all that continues it."""


@pytest.mark.parametrize(
    ("segments", "goes"),
    [
        pytest.param([full(50), full(10), full(90)], 0, id="the oldest, which is the first"),
        pytest.param([USED, full(50)], 0, id="what hangs on blocks that move on does not count"),
        # A prompt that outgrows the drive: dropping its head would drop everything.
        pytest.param([full(10, below_each=5 * CAPACITY), full(90)], 1, id="tails before heads"),
        pytest.param(
            [full(10, below_each=each * CAPACITY) for each in (9, 2, 5)],
            1,
            id="that which carries least, if all carry a lot",
        ),
        pytest.param([segment([], [], []), full(2)], 0, id="an empty one"),
        pytest.param([full(100, 1.0)], 0, id="the only one"),
    ],
)
def test_the_coldest_goes(segments: list[SegmentFacts], goes: int) -> None:
    assert coldest(segments) == goes


class TestKeep:
    def test_used_ones_are_kept_whatever_there_is_elsewhere(self) -> None:
        facts = segment([100] * 4, [10, 10, 90, 90], [1, 1, 1, 0])
        assert kept(facts, others=[full(95, 1.0)]) == [0, 1, 2]

    def test_a_budget_filled_exactly_is_filled(self) -> None:
        facts = segment([250] * 4, [1, 2, 3, 4], [1, 1, 1, 1])
        assert kept(facts) == [2, 3]

    def test_forced_blocks_count_against_the_budget_of_the_others(self) -> None:
        facts = segment([200] * 4, [1, 2, 3, 4], [0, 1, 1, 1])
        assert kept(facts, [True, False, False, False]) == [0, 3]

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
            for out, stays in itertools.product(left, mine):
                assert facts.stamps[out] <= facts.stamps[stays], "the latest first"


class TestRulesByName:
    """Three segments, oldest first: often used long ago, used once lately, never used."""

    OFTEN = segment([100] * 4, [10, 10, 10, 80], [9, 9, 9, 9])
    LATELY = segment([100] * 4, [90, 90, 90, 90], [1, 1, 0, 0])
    NEVER = segment([100] * 4, [50, 50, 50, 50], [0, 0, 0, 0])
    ALL = (OFTEN, LATELY, NEVER)

    @pytest.mark.parametrize(
        ("name", "goes", "stays"),
        [
            ("fifo", 0, []),
            ("lru", 0, [3]),
            ("lfu", 2, []),
            ("s3fifo", 0, [0, 1, 2, 3]),
        ],
    )
    def test_who_goes_and_what_moves_on(self, name: str, goes: int, stays: list[int]) -> None:
        rule = rule_named(name)
        at = rule.coldest(self.ALL)
        assert at == goes
        facts = self.ALL[at]
        others = [other for other in self.ALL if other is not facts]
        moved = rule.keep(facts, np.zeros(4, dtype=bool), others)
        assert np.flatnonzero(moved).tolist() == stays

    @pytest.mark.parametrize("name", RULES)
    def test_every_rule_gains_room_and_keeps_what_it_must(self, name: str, seed: int) -> None:
        rng, rule = random.Random(seed), rule_named(name)
        for _ in range(100):
            segments = [drawn(rng) for _ in range(rng.randrange(1, 6))]
            at = rule.coldest(segments)
            assert 0 <= at < len(segments)
            facts = segments[at]
            forced = np.array([rng.random() < 0.2 for _ in facts.sizes], dtype=bool)
            moved = rule.keep(facts, forced, segments[:at] + segments[at + 1 :])
            assert (moved >= forced).all()
            if (moved & ~forced).any():
                assert facts.sizes[moved].sum() <= KEEP_SHARE_MAX * CAPACITY

    def test_an_empty_segment_is_no_trouble(self) -> None:
        nothing = segment([], [], [])
        for rule in RULES.values():
            assert rule.coldest([nothing, nothing]) in (0, 1)
            assert not len(rule.keep(nothing, np.zeros(0, dtype=bool), [nothing]))

    def test_a_name_that_is_none_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="mru"):
            rule_named("mru")


def drawn(rng: random.Random) -> SegmentFacts:
    count = rng.randrange(0, 12)
    return segment(
        [rng.randrange(1, 1 + CAPACITY // (count or 1)) for _ in range(count)],
        [rng.randrange(NOW) for _ in range(count)],
        [rng.randrange(3) for _ in range(count)],
        [rng.randrange(3 * CAPACITY) for _ in range(count)],
    )


def test_what_hardly_anybody_comes_back_for_goes_before_its_turn() -> None:
    """Segments of 1000 bytes: one with half of it closed, one with nearly all, one with less."""
    closed = [replace(full(50), closed_bytes=size) for size in (0, 500, 900, 800)]
    assert abandoned(closed) == 2
    assert abandoned(closed[:2]) is None, "half is not enough: others would go too"
    assert abandoned([segment([], [], [])]) is None
    assert abandoned([]) is None
