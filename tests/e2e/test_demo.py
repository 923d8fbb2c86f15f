"""The installed command, as a newcomer types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KVDEPOT = Path(sys.executable).with_name("kvdepot")
LIMIT_S = 300

pytestmark = pytest.mark.e2e


def kvdepot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVDEPOT, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.crash
def test_demo_shows_a_table_and_cleans_up(tmp_path: Path) -> None:
    done = kvdepot("demo", "--path", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("step")
    assert "every byte was right" in done.stdout
    assert "WRONG" not in done.stdout
    assert str(tmp_path) in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bench_store_answers_scripts(tmp_path: Path) -> None:
    done = kvdepot("bench", "store", "--quick", "--json", "--path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"rows", "machine"} <= answer.keys()
    assert list(tmp_path.iterdir()) == []
