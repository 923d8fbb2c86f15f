"""benchmarks/hybrid_paper.py: a row for each figure, and a reason for what does not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_figure_of_the_hybrid_paper_has_a_row() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "hybrid_paper.py"), "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["rows"]
    assert {row["figure"] for row in rows} == {str(number) for number in range(12, 23)}
    assert all(row["why"] for row in rows if row["fits"] == "no"), "what does not fit says why"
