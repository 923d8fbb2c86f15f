"""Power cuts at any write, with reclaim, demotion, drains and removals under way.

After each cut what a flush had acknowledged is there unless it was evicted, what was removed before
a flush is not, and every byte is right. kvdepot.testing.power says what a cut may take.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.failures import DataError, check_data
from tests.support.power_cuts import SETUPS, Lives, Setup, Verdict

pytestmark = pytest.mark.crash

SLOWER = ("demotion", "through")


def cut(name: str, folder: Path, seed: int, cuts: int) -> Verdict:
    verdict = Lives(SETUPS[name], folder, seed).run(cuts)
    verdict.check()
    return verdict


@pytest.mark.parametrize("name", SETUPS)
def test_a_power_cut(name: str, tmp_path: Path, seed: int) -> None:
    cut(name, tmp_path, seed, 2 if name in SLOWER else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_many_power_cuts(name: str, tmp_path: Path, seed: int) -> None:
    for part in range(4):
        (tmp_path / str(part)).mkdir()
        assert cut(name, tmp_path / str(part), seed + part, 14).checked


@pytest.mark.parametrize(
    "setup",
    [
        replace(SETUPS["demotion"], seams=frozenset({"sync_directory"})),
        replace(SETUPS["demotion"], seams=frozenset({"sync"})),
        replace(SETUPS["demotion"], fsync="never"),
    ],
    ids=["sync does nothing", "directories are not synced", "fsync is never"],
)
def test_these_cuts_see_what_is_not_synced(setup: Setup, tmp_path: Path) -> None:
    """Without one of the syncs flushed blocks are lost, or the drive is refused because it lacks
    what was removed; wrong bytes are never served.
    """
    lives, refused = Lives(setup, tmp_path, 1), False
    while not (lives.verdict.lost or refused) and lives.verdict.cuts < 30:
        try:
            lives.run(1)
        except DataError as error:
            refused = "metadata is damaged" in str(error.__cause__)
            if not refused:
                raise
    assert lives.verdict.lost or refused
    check_data(not lives.verdict.wrong, lives.verdict)
