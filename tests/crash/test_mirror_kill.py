"""SIGKILL in the middle of mirroring: the books are right, and what was on two drives still is."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.aftermath import KILLED, Children, children, find, judge
from tests.support.aftermath import kill as kill_and_judge
from tests.support.crash_workload import BLOCK_TOKENS, FULL, ROOMY, Moment, Plan, Promises, register

from kvdepot.core.block import BlockKey
from kvdepot.store.open import assemble

pytestmark = pytest.mark.crash

MOMENTS: tuple[Moment, ...] = ("before", "torn", "after", "without")
LONG = 3 * BLOCK_TOKENS
QUICK_KILLS = 4


@pytest.fixture(scope="module")
def forks() -> Iterator[Children]:
    with children() as started:
        yield started


def mirrored(plan: Plan) -> set[BlockKey]:
    """Blocks of which the diary says that they were on two drives, and that were not removed."""
    found: set[BlockKey] = set()
    for line in plan.diary.read_text().splitlines() if plan.diary.exists() else ():
        fact = json.loads(line)
        keys = {BlockKey(bytes.fromhex(key)) for key in fact["keys"]}
        if fact["fact"] == "mirrored":
            found |= keys
        elif fact["fact"] in ("removing", "removed"):
            found -= keys
    return found


def judge_each_drive_alone(plan: Plan) -> int:
    """What was on two drives is on either, and what was removed is on neither."""
    safe, promises = mirrored(plan), Promises.read(plan.diary)
    for number, path in enumerate(plan.paths):
        alone = replace(plan, folder=f"{plan.folder}-without-{number}")
        shutil.copytree(plan.folder, alone.folder)
        shutil.rmtree(Path(alone.folder) / path.name, ignore_errors=True)
        with assemble(alone.config()) as store:
            register(store)
            present = find(store, promises.known)
            assert not safe - present, f"{len(safe - present)} blocks were on drive {number} only"
            assert not present & promises.gone, "a removed block came back"
            assert store.check().ok
        shutil.rmtree(alone.folder)
    return len(safe)


def kill(forks: Children, plan: Plan) -> tuple[bool, int]:
    """One child killed as planned, judged. How many blocks were known to be on two drives."""
    Path(plan.folder).mkdir()
    try:
        code = forks.run(plan)
        assert code in (KILLED, 0), f"exit code {code}"
        safe = judge_each_drive_alone(plan)
        judge(plan)
    except AssertionError as error:
        error.add_note(f"{plan}")
        raise
    shutil.rmtree(plan.folder)
    return code == KILLED, safe


@pytest.mark.parametrize(
    "kills", [QUICK_KILLS, pytest.param(5 * QUICK_KILLS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("segments", [4 * ROOMY, 2 * FULL], ids=["roomy", "full"])
def test_kill_in_the_middle_of_mirroring(
    forks: Children, tmp_path: Path, seed: int, segments: int, kills: int
) -> None:
    (tmp_path / "whole").mkdir()
    whole = Plan(str(tmp_path / "whole"), 4, segments, drives=2, mirror=LONG)
    assert forks.run(whole) == 0
    assert not whole.roomy or len(mirrored(whole)) > 20
    boundaries = judge(whole).boundaries
    assert boundaries > 150
    moments = [(at, moment) for at in range(20, boundaries) for moment in MOMENTS]
    plans = [
        replace(whole, folder=str(tmp_path / str(number)), boundary=at, moment=moment)
        for number, (at, moment) in enumerate(random.Random(seed).sample(moments, kills))
    ]
    outcomes = [kill(forks, plan) for plan in plans]
    assert sum(killed for killed, _ in outcomes) >= 0.5 * len(plans)
    assert not whole.roomy or max(safe for _, safe in outcomes) > 10


@pytest.mark.slow
def test_kill_while_a_mirrored_drive_is_drained(forks: Children, tmp_path: Path, seed: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = Plan(str(tmp_path / "whole"), 4, 4 * ROOMY, drives=3, drains=True, mirror=LONG)
    assert forks.run(whole) == 0
    boundaries = judge(whole).boundaries
    moments = [(at, moment) for at in range(boundaries // 2, boundaries) for moment in MOMENTS]
    plans = [
        replace(whole, folder=str(tmp_path / str(number)), boundary=at, moment=moment)
        for number, (at, moment) in enumerate(random.Random(seed).sample(moments, 12))
    ]
    assert sum(kill_and_judge(forks, plan) for plan in plans) >= 0.5 * len(plans)
