"""The rule of what is mirrored and where it is read, and the books of second copies."""

import numpy as np
import pytest

from kvdepot.core.block import BlockKey
from kvdepot.core.config import load
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.paths import path_blocks
from kvdepot.index.table import NONE
from kvdepot.policy.placing.extra_copies import MirrorFacts, PlaceFacts, nearer, worth_mirroring
from kvdepot.store.state.lower_tier import SecondCopies


def key(parent: int, own: int) -> BlockKey:
    words = (7, parent, own, own)
    return BlockKey(b"".join(word.to_bytes(8, "little") for word in words))


def catalog_of(*links: tuple[int, int]) -> tuple[Catalog, dict[int, int]]:
    """A catalog with blocks (parent, own), 0 for no parent; and their rows."""
    catalog = Catalog()
    return catalog, {own: catalog.ensure(key(parent, own), 100) for parent, own in links}


def test_long_prompts_are_worth_a_second_drive_if_it_is_their_only_hope() -> None:
    facts = MirrorFacts(
        prompt_tokens=np.array([1023, 1024, 1024, 1024, 9000]),
        below=np.array([False, False, True, False, False]),
        closed=np.array([False, False, False, True, False]),
    )
    assert worth_mirroring(facts, 1024).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("places", "slack", "chosen"),
    [
        ([PlaceFacts(True, 5), PlaceFacts(True, 5)], 0, 0),
        ([PlaceFacts(True, 6), PlaceFacts(True, 5)], 0, 1),
        ([PlaceFacts(False, 0), PlaceFacts(True, 500)], 0, 1),
        ([PlaceFacts(True, 500), PlaceFacts(False, 0)], 0, 0),
        ([PlaceFacts(True, 5, slowdown=3.0), PlaceFacts(True, 10)], 0, 1),
        ([PlaceFacts(True, 5), PlaceFacts(True, 8, running_on=True)], 4, 1),
        ([PlaceFacts(True, 5), PlaceFacts(True, 10, running_on=True)], 4, 0),
    ],
)
def test_the_drive_that_works_and_has_less_to_do_is_read(
    places: list[PlaceFacts], slack: int, chosen: int
) -> None:
    assert nearer(places, slack) == chosen


def test_a_path_counts_from_its_head_to_its_farthest_end() -> None:
    """
    1 - 2 - 3 - 4     5 - 6
         \\- 7
    """
    catalog, rows = catalog_of((0, 1), (1, 2), (2, 3), (3, 4), (0, 5), (5, 6), (2, 7))
    found = path_blocks(catalog.tree, rows.values(), 100)
    expected = {1: 4, 2: 4, 3: 4, 4: 4, 5: 2, 6: 2, 7: 3}
    assert {own: found[row] for own, row in rows.items()} == expected


def test_a_path_is_counted_no_farther_than_asked_and_brings_its_heads() -> None:
    catalog, rows = catalog_of(*((own - 1, own) for own in range(1, 51)))
    assert path_blocks(catalog.tree, [rows[1]], 10) == {rows[1]: 10}
    found = path_blocks(catalog.tree, [rows[40]], 30)
    assert found == {rows[own]: 30 for own in range(1, 41)}
    assert path_blocks(catalog.tree, [rows[20]], 100)[rows[20]] == 50
    assert path_blocks(catalog.tree, [], 5) == {}


def placed(places: dict[int, int]) -> tuple[Catalog, SecondCopies, dict[int, int]]:
    """Blocks with a first copy on a drive each."""
    catalog, rows = catalog_of(*((0, own) for own in places))
    for own, drive in places.items():
        catalog.disk.reserve(rows[own], drive << 56)
        catalog.disk.seal(rows[own])
    return catalog, SecondCopies(catalog, catalog.disk), rows


def test_a_second_place_is_given_up_once() -> None:
    _, mirrors, rows = placed({1: 0})
    mirrors.enter(rows[1], 1 << 56)
    assert (mirrors.count, mirrors.location[rows[1]]) == (1, 1 << 56)
    for _ in range(2):
        mirrors.leave(rows[1])
        assert (mirrors.count, mirrors.location[rows[1]]) == (0, NONE)


def test_a_lost_drive_takes_one_of_two_copies() -> None:
    catalog, mirrors, rows = placed({1: 0, 2: 1, 3: 2, 4: 0})
    mirrors.check_all = False
    for own, drive in ((1, 1), (2, 0), (3, 1)):
        mirrors.enter(rows[own], drive << 56)
    mirrors.forget_drive(0)
    first = [catalog.disk.location[rows[own]] >> 56 for own in (1, 2, 3, 4)]
    assert first == [1, 1, 2, 0], "who has no second place is left to the caller"
    assert [mirrors.location[rows[own]] for own in (1, 2, 3)] == [NONE, NONE, 1 << 56]
    assert (mirrors.count, mirrors.check_all) == (1, True)


def test_copies_that_are_found_again_are_second_ones_on_other_drives_only() -> None:
    catalog, mirrors, rows = placed({1: 0, 2: 1, 3: 0})
    (absent,) = [catalog.ensure(key(0, 9), 100)]
    mirrors.enter(rows[3], 1 << 56)
    asked = np.array([rows[1], rows[2], rows[3], absent])
    taken = mirrors.take_in(asked, np.array([1, 1, 2, 0]) << 56)
    assert taken.tolist() == [0]
    assert mirrors.location[rows[1]] == 1 << 56
    assert mirrors.count == 2


@pytest.mark.parametrize("tokens", [-1, 1 << 63])
def test_tokens_must_make_sense(tokens: int) -> None:
    table = {"path": ["/a", "/b"], "capacity": "1GiB", "mirror": tokens}
    with pytest.raises(ConfigError, match=r"ssd\.mirror"):
        load(overrides={"ssd": table})


def test_one_path_has_no_mirror() -> None:
    table = {"path": ["/a"], "capacity": "1GiB", "mirror": 4096}
    with pytest.raises(ConfigError, match=r"hdd\.mirror: there is one path only"):
        load(overrides={"hdd": table})
