"""SIGKILL at hundreds of random instants. The same as in tests/crash, for longer."""

from pathlib import Path

import pytest
from tests.support.kill_judge import children, kill_at_random_instants

BATCHES = 6
RUNS = 50


@pytest.mark.slow(longest=True)
@pytest.mark.crash
@pytest.mark.stress
@pytest.mark.parametrize("batch", range(BATCHES))
def test_hundreds_of_kills(tmp_path: Path, seed: int, batch: int) -> None:
    with children() as forks:
        kill_at_random_instants(forks, tmp_path, seed + batch, RUNS)
