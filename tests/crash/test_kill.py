"""SIGKILL at every write boundary and at any instant: nothing acknowledged is lost or wrong."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.crash_workload import FULL, ROOMY, Moment, PinnedRows, Plan
from tests.support.kill_judge import (
    KILLED,
    Children,
    children,
    judge,
    judge_residency,
    kill,
    kill_at_random_instants,
)
from tests.support.phases import Phase

pytestmark = pytest.mark.crash

MOMENTS: tuple[Moment, ...] = ("before", "torn", "after", "without")
QUICK_KILLS = 6
KILLS = 15
BIRTH = 3
"""Boundaries at which a store comes to be: its superblock, its first segment, that one's header."""
WORKLOAD_SEED = 4


@pytest.fixture(scope="module")
def forks() -> Iterator[Children]:
    with children() as started:
        yield started


def uninterrupted(forks: Children, folder: Path, segments: int) -> PinnedRows:
    """What the workload does when nobody kills it."""
    folder.mkdir()
    plan = Plan(str(folder), WORKLOAD_SEED, segments)
    assert forks.run(plan) == 0
    promises = judge(plan)
    assert promises.finished
    return promises


def all_kills(boundaries: int) -> list[tuple[int, Moment]]:
    return [(number, moment) for number in range(1, boundaries + 1) for moment in MOMENTS]


@pytest.mark.parametrize("segments", [ROOMY, FULL], ids=["roomy", "full"])
def test_kill_at_some_write_boundaries(
    forks: Children, tmp_path: Path, seed: int, segments: int
) -> None:
    boundaries = uninterrupted(forks, tmp_path / "whole", segments).boundaries
    assert boundaries > 100
    chosen = random.Random(seed).sample(all_kills(boundaries), QUICK_KILLS)
    if segments == ROOMY:  # a store that will be full is born like any other
        chosen += all_kills(BIRTH)
    plans = [
        Plan(str(tmp_path / str(number)), WORKLOAD_SEED, segments, boundary=at, moment=moment)
        for number, (at, moment) in enumerate(chosen)
    ]
    killed = [kill(forks, plan) for plan in plans]
    assert sum(killed) >= 0.8 * len(plans)


@pytest.mark.slow(longest=True)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("segments", [ROOMY, FULL], ids=["roomy", "full"])
def test_kill_at_every_write_boundary(
    forks: Children, tmp_path: Path, segments: int, moment: Moment
) -> None:
    boundaries = uninterrupted(forks, tmp_path / "whole", segments).boundaries
    plans = [
        Plan(str(tmp_path / str(at)), WORKLOAD_SEED, segments, boundary=at, moment=moment)
        for at in range(1, boundaries + 1)
    ]
    killed = [kill(forks, plan) for plan in plans]
    assert sum(killed) >= 0.9 * len(plans)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["write-back", "write-through", "pass-through"])
def test_kill_in_the_middle_of_demotion_and_promotion(
    forks: Children, tmp_path: Path, seed: int, mode: str
) -> None:
    (tmp_path / "whole").mkdir()
    whole = Plan(str(tmp_path / "whole"), WORKLOAD_SEED, FULL, below=mode)
    assert forks.run(whole) == 0
    boundaries = judge(whole).boundaries
    chosen = random.Random(seed).sample(all_kills(boundaries), KILLS)
    plans = [
        replace(whole, folder=str(tmp_path / str(number)), boundary=at, moment=moment)
        for number, (at, moment) in enumerate(chosen)
    ]
    killed = [kill(forks, plan) for plan in plans]
    assert sum(killed) >= 0.7 * len(plans)


@pytest.mark.slow
def test_kill_in_the_middle_of_a_drain(forks: Children, tmp_path: Path, seed: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = Plan(str(tmp_path / "whole"), WORKLOAD_SEED, 2 * ROOMY, drives=2, drains=True)
    assert forks.run(whole) == 0
    boundaries = judge(whole).boundaries
    second = [(at, moment) for at, moment in all_kills(boundaries) if at > boundaries // 2]
    plans = [
        replace(whole, folder=str(tmp_path / str(number)), boundary=at, moment=moment)
        for number, (at, moment) in enumerate(random.Random(seed).sample(second, KILLS))
    ]
    killed = [kill(forks, plan) for plan in plans]
    assert sum(killed) >= 0.7 * len(plans)


PHASE_KILLS = 4
PHASE_PLANS: dict[Phase, dict[str, Any]] = {
    "promotion": {"segments": FULL, "below": "write-through"},
    "demotion": {"segments": FULL, "below": "write-back"},
    "reclaim": {"segments": FULL},
    "drain": {"segments": 2 * ROOMY, "drives": 2, "drains": True},
}


@pytest.mark.parametrize(
    "phase", [pytest.param("promotion", marks=pytest.mark.slow), "demotion", "reclaim", "drain"]
)
def test_kill_in_the_middle_of_each_phase(
    forks: Children, tmp_path: Path, seed: int, phase: Phase
) -> None:
    """The diary proves it: the write that was the last one was a write of that phase."""
    (tmp_path / "whole").mkdir()
    plan = {"seed": WORKLOAD_SEED, "phase": phase, **PHASE_PLANS[phase]}
    whole = Plan(str(tmp_path / "whole"), **plan)
    assert forks.run(whole) == 0
    count = judge(whole).in_phase
    assert count > 0, "the workload never gets there"
    chance = random.Random(seed)
    killed = 0
    for number in range(PHASE_KILLS):
        at, moment = chance.randint(1, max(1, count // 2)), chance.choice(MOMENTS)
        doomed = replace(whole, folder=str(tmp_path / str(number)), boundary=at, moment=moment)
        Path(doomed.folder).mkdir()
        died = forks.run(doomed) == KILLED
        promises = judge(doomed)
        assert died == (promises.died_in == phase), doomed
        killed += died
        judge_residency(doomed, promises)
    assert killed >= PHASE_KILLS // 2


def test_kill_at_random_instants(forks: Children, tmp_path: Path, seed: int) -> None:
    """`kvdepot torture --only kills`: hundreds of them."""
    kill_at_random_instants(forks, tmp_path, seed, 3)
