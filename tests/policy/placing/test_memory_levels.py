"""Who has the faster place, and when blocks are expected back."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog
from kvdepot.policy.placing.memory_levels import (
    PROMOTE_MARGIN,
    ExpectedReuse,
    ReturnTimes,
    is_kept,
    is_promoted,
    middle,
    octave,
)

INF = float("inf")


def test_who_is_expected_sooner_has_the_place() -> None:
    soon, late = ExpectedReuse(1.0, 100.0), ExpectedReuse(1.0, 10_000.0)
    assert is_kept(soon, late) and not is_kept(late, soon)
    assert is_promoted(soon, late) and not is_promoted(late, soon)


def test_a_doubtful_return_is_worth_as_much_less() -> None:
    """One that comes back every other time, as soon, is worth half."""
    assert is_kept(ExpectedReuse(0.5, 100.0), ExpectedReuse(1.0, 200.0))
    assert not is_kept(ExpectedReuse(0.5, 100.0), ExpectedReuse(1.0, 199.0))


def test_moving_up_takes_more_than_a_tie() -> None:
    incumbent = ExpectedReuse(1.0, 100.0)
    assert not is_promoted(ExpectedReuse(1.0, 100.0 / PROMOTE_MARGIN), incumbent)
    assert is_promoted(ExpectedReuse(1.0, 99.0 / PROMOTE_MARGIN), incumbent)


def test_where_nothing_is_known_the_last_used_stays_and_nothing_moves_up() -> None:
    never = ExpectedReuse(0.0, INF)
    assert is_kept(never, never)
    assert not is_promoted(never, never)
    assert is_promoted(ExpectedReuse(0.1, 1e6), never)


@given(st.floats(0.0, 1.0), st.floats(1.0, 1e9), st.floats(0.0, 1.0), st.floats(1.0, 1e9))
def test_two_blocks_never_both_push_the_other_out(a: float, x: float, b: float, y: float) -> None:
    one, two = ExpectedReuse(a, x), ExpectedReuse(b, y)
    assert not (is_promoted(one, two) and is_promoted(two, one))
    assert not (is_promoted(one, two) and is_kept(two, one)), "up, and down again"


@given(st.integers(0, 1 << 40))
def test_an_octave_holds_its_gaps(gap: int) -> None:
    number = octave(gap)
    assert (1 << number) > gap >= (1 << number) // 2
    assert middle(number) < (1 << number)


class Uses:
    """Prompts of four blocks in a catalog with two memories."""

    def __init__(self) -> None:
        self.return_times = ReturnTimes()
        self.catalog = Catalog(memories=("dram", "cxl"), below=self.return_times)
        self._made = 0

    def make(self, blocks: int = 4, parent: int | None = None) -> list[int]:
        """New blocks, one behind the other."""
        link = self.catalog.table.digest(parent) if parent is not None else 0
        rows = []
        for _ in range(blocks):
            self._made += 1
            digest = self._made << 32 | 1
            words = (7, link, digest, digest)
            key = BlockKey(b"".join(word.to_bytes(8, "little") for word in words))
            rows.append(self.catalog.ensure(key, 4096))
            link = digest
        self.catalog.use(rows, hit=False)
        return rows

    def use(self, rows: Sequence[int]) -> None:
        self.catalog.use(rows)

    def pass_by(self, uses: int, blocks: int = 1) -> None:
        """So many uses of others, among them blocks that are made and never used again."""
        self.make(blocks)
        self.catalog.tree.now += uses


@pytest.fixture
def uses() -> Uses:
    return Uses()


def test_a_block_is_expected_as_it_came(uses: Uses) -> None:
    often, seldom = uses.make(), uses.make()
    for turn in range(32):
        uses.pass_by(100)
        uses.use(often)
        if turn % 8 == 7:
            uses.use(seldom)
    fast, slow = uses.return_times.expect(often[-1]), uses.return_times.expect(seldom[-1])
    assert 50 < fast.interval < 400, "every hundred uses"
    assert slow.interval > 2 * fast.interval
    assert fast.rate > 2 * slow.rate


def test_what_never_came_back_is_expected_less_than_what_did(uses: Uses) -> None:
    returning = uses.make()
    for _ in range(8):
        uses.pass_by(100, blocks=20)
        uses.use(returning)
    fresh = uses.make()
    assert uses.return_times.expect(fresh[0]).rate < uses.return_times.expect(returning[0]).rate
    assert 0.0 < uses.return_times.expect(fresh[0]).chance < 0.5


def test_a_new_block_has_the_rhythm_of_the_prompt_it_continues(uses: Uses) -> None:
    head = uses.make()
    for _ in range(8):
        uses.pass_by(100)
        uses.use(head)
    tail, other = uses.make(parent=head[-1]), uses.make()
    assert uses.return_times.expect(tail[-1]).rate > uses.return_times.expect(other[-1]).rate


def test_a_gap_that_has_passed_is_not_expected_any_more(uses: Uses) -> None:
    rows = uses.make()
    for _ in range(8):
        uses.pass_by(100)
        uses.use(rows)
    before = uses.return_times.expect(rows[0]).rate
    uses.pass_by(20_000)
    assert uses.return_times.expect(rows[0]).rate < before / 10


def test_a_lease_and_its_delivery_are_one_use(uses: Uses) -> None:
    rows = uses.make()
    for _ in range(8):
        uses.pass_by(1000)
        uses.use(rows)
        uses.use(rows)
    assert uses.return_times.expect(rows[0]).interval > 300


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=60))
def test_expectations_make_sense_whatever_happens(turns: list[tuple[int, int]]) -> None:
    uses = Uses()
    prompts = [uses.make() for _ in range(6)]
    for which, gap in turns:
        uses.pass_by(gap)
        uses.use(prompts[which])
    for rows in prompts:
        for row in rows:
            outlook = uses.return_times.expect(row)
            assert 0.0 <= outlook.chance <= 1.0
            assert outlook.interval > 0.0
            assert 0.0 <= outlook.rate <= 1.0
