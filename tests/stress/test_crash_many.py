"""SIGKILL at hundreds of random instants. The same as in tests/crash, for longer."""

from pathlib import Path

import pytest
from tests.crash.aftermath import children, kill_at_random_instants

RUNS = 300


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.stress
def test_hundreds_of_kills(tmp_path: Path, seed: int) -> None:
    with children() as forks:
        kill_at_random_instants(forks, tmp_path, seed, RUNS)
