"""Blocks go down the tiers when room is made, and come up when they are asked for."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.stores import blocks_in, counter, settings
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.errors import ConfigError
from kvdepot.format.record import PAGE, record_bytes
from kvdepot.policy.placing.demotion import DemotionFacts, worth_demoting
from kvdepot.policy.placing.write_mode import WriteMode, promotes, targets
from kvdepot.store.store import Store

BACK, THROUGH, SELECTIVE, PASS = WriteMode
PAGES = record_bytes(BLOCK_BYTES) // PAGE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvdepot.open(**settings(tmp_path)) as opened:
        yield opened
        assert opened.admin.check().ok


def fill(store: Store, prompts: int, blocks: int = 10) -> list[list[BlockKey]]:
    """Put prompts block by block, six users in turns at any time."""
    space = space_of(store)
    keys = [prompt(space, 100 + number, blocks) for number in range(prompts)]
    for first in range(0, prompts, 6):
        for step in range(blocks):
            for one in keys[first : first + 6]:
                assert all(put(store, one[step : step + 1]))
    assert store.flush()
    return keys


def places(store: Store, keys: list[BlockKey]) -> list[int]:
    """Where blocks lie on the hard drives."""
    catalog = store.inspect().catalog
    return [store.inspect().lower(1).copies.location[row] for row in catalog.rows(keys)]


class TestDown:
    def test_nothing_is_lost_while_the_tier_below_has_room(self, tmp_path: Path) -> None:
        """Forty prompts of ten blocks are 16 MB: four times the ssd, half the hdd."""
        with kvdepot.open(**settings(tmp_path)) as store:
            everything = fill(store, 40)
            assert counter(store, "demoted") > 200
        with kvdepot.open(**settings(tmp_path)) as store:
            space_of(store)
            for keys in everything:
                assert len(store.match(keys)) == len(keys)
                assert None not in tiers(store, keys)
            assert counter(store, "get_hdd") > 200
            assert store.admin.check().ok

    def test_a_prompt_lies_in_one_piece_however_it_came(self, store: Store) -> None:
        everything = fill(store, 40)
        steps = 0
        adjacent = 0
        for keys in everything:
            there = [place for place in places(store, keys) if place >= 0]
            steps += max(0, len(there) - 1)
            adjacent += sum(later - earlier == PAGES for earlier, later in pairwise(there))
        assert steps > 150
        assert adjacent / steps > 0.9

    def test_what_will_leave_next_is_copied_before_room_is_needed(self, store: Store) -> None:
        fill(store, 7)
        assert counter(store, "reclaimed_segments") == 0
        assert blocks_in(store, "ssd") == 70
        assert eventually(lambda: blocks_in(store, "hdd") > 0)
        assert blocks_in(store, "ssd") == 70, "it stays where it is until then"

    def test_removed_blocks_do_not_come_back_from_below(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path)) as store:
            everything = fill(store, 30)
            for keys in everything[::2]:
                store.remove(keys)
        with kvdepot.open(**settings(tmp_path)) as store:
            assert all(not len(store.match(keys)) for keys in everything[::2])
            assert all(len(store.match(keys)) == len(keys) for keys in everything[1::2])

    def test_a_full_tier_below_drops_its_oldest(self, tmp_path: Path) -> None:
        small = settings(tmp_path, hdd={"capacity": "6MiB"})
        with kvdepot.open(**small) as store:
            everything = fill(store, 60)
            assert counter(store, "evicted_hdd") > 0
            assert store.admin.check().ok
            whole = [len(store.match(keys)) == len(keys) for keys in everything]
            assert sum(whole) > 10
            store.volumes.set_write_mode("hdd", "pass-through")  # what is read pushes nothing out
            assert all(None not in tiers(store, everything[n]) for n in np.flatnonzero(whole))


class TestUp:
    def test_a_block_read_from_below_enters_memory_and_the_ssd(self, store: Store) -> None:
        store.volumes.set_write_mode("hdd", "pass-through")
        keys = prompt(space_of(store), 1, 10)
        assert all(put(store, keys))
        assert store.flush()
        assert (blocks_in(store, "ssd"), blocks_in(store, "hdd")) == (0, 10)
        store.inspect().drop_from_memory()
        store.volumes.set_write_mode("hdd", "write-back")
        assert tiers(store, keys) == ["hdd"] * 10
        assert store.flush()
        assert (blocks_in(store, "ssd"), blocks_in(store, "hdd")) == (10, 10)
        store.inspect().drop_from_memory()
        assert tiers(store, keys) == ["ssd"] * 10

    def test_in_pass_through_it_does_not_enter_the_ssd(self, store: Store) -> None:
        store.volumes.set_write_mode("hdd", "pass-through")
        keys = prompt(space_of(store), 1, 10)
        assert all(put(store, keys))
        assert store.flush()
        store.inspect().drop_from_memory()
        assert tiers(store, keys) == ["hdd"] * 10
        assert store.flush()
        assert blocks_in(store, "ssd") == 0


class TestWriteModes:
    @pytest.mark.parametrize(
        ("modes", "touched", "expected"),
        [
            ([BACK], False, [0]),
            ([BACK, BACK], False, [0]),
            ([BACK, BACK], True, [0]),
            ([BACK, THROUGH], False, [0, 1]),
            ([BACK, SELECTIVE], False, [0]),
            ([BACK, SELECTIVE], True, [0, 1]),
            ([BACK, PASS], False, [1]),
            ([SELECTIVE, BACK], False, []),
            ([SELECTIVE, BACK], True, [0]),
            ([THROUGH, PASS, THROUGH], False, [1, 2]),
        ],
    )
    def test_targets(self, modes: list[WriteMode], touched: bool, expected: list[int]) -> None:
        assert targets(modes, touched=touched) == expected

    def test_promotion_ends_below_a_tier_that_is_passed(self) -> None:
        assert promotes([BACK, BACK, BACK], 2) == [1, 0]
        assert promotes([BACK, BACK, PASS], 2) == []
        assert promotes([BACK, PASS, BACK], 2) == [1]
        assert promotes([BACK], 0) == []

    def test_write_through_has_both(self, store: Store) -> None:
        store.volumes.set_write_mode("hdd", "write-through")
        assert all(put(store, prompt(space_of(store), 1, 10)))
        assert store.flush()
        assert (blocks_in(store, "ssd"), blocks_in(store, "hdd")) == (10, 10)

    def test_selective_has_what_was_asked_for_again(self, store: Store) -> None:
        store.volumes.set_write_mode("hdd", "write-through-selective")
        keys = prompt(space_of(store), 1, 10)
        assert all(put(store, keys))
        assert tiers(store, keys[:4]) == ["dram"] * 4
        assert store.flush()
        assert (blocks_in(store, "ssd"), blocks_in(store, "hdd")) == (10, 4)

    def test_through_to_the_ssd_is_there_when_put_returns(self, store: Store) -> None:
        store.volumes.set_write_mode("ssd", "write-through")
        assert all(put(store, prompt(space_of(store), 1, 10)))
        assert blocks_in(store, "ssd") == 10

    def test_unknown_modes_and_tiers_are_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="write-back, write-through"):
            store.volumes.set_write_mode("hdd", "often")
        with pytest.raises(ConfigError, match="no such tier"):
            store.volumes.set_write_mode("dram", "write-back")


def test_single_blocks_that_nobody_asked_for_and_closed_sessions_are_not_worth_a_seek() -> None:
    facts = DemotionFacts(
        below=np.array([False, False, False, False, True, False]),
        hits=np.array([0, 1, 0, 0, 3, 3]),
        continues=np.array([False, False, True, False, True, True]),
        continued=np.array([False, False, False, True, True, True]),
        closed=np.array([False, False, False, False, False, True]),
    )
    assert worth_demoting(facts).tolist() == [False, True, True, True, False, False]
