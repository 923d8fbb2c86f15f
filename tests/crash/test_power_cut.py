"""Power cuts at any write, of stores of every mix of tiers, with reclaim, demotion, drains, late
writes and removals under way: rounds of `kvdepot torture`, which says what a cut must not do.

kvdepot.testing.power says what a cut may take. That cuts show what was not synced, and rounds what
is broken: tests/testing/test_torture.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.failures import check_data

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_power_cuts(tmp_path: Path, seed: int, rounds: int) -> None:
    """In a process of their own: a fork of this one has what other tests have left open."""
    command = [sys.executable, "-m", "kvdepot", "torture", str(tmp_path), "--only", "cuts"]
    command += ["--seed", str(seed), "--rounds", str(rounds), "--for", "10m", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seen = json.loads(done.stdout)
    check_data(done.returncode == 0, seen["failed"])
    assert seen["cuts"] > 5 * rounds
