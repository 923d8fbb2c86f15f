"""The installed command, as a newcomer types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KVDEPOT = Path(sys.executable).with_name("kvdepot")
LIMIT_S = 800

pytestmark = pytest.mark.e2e


def kvdepot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVDEPOT, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.crash
def test_a_real_model_answers_the_same_with_and_without(tmp_path: Path) -> None:
    scratch, report = tmp_path / "scratch", tmp_path / "demo.html"
    scratch.mkdir()
    places = ("--path", str(scratch), "--report", str(report))
    done = kvdepot("demo", "--users", "2", "--turns", "2", "--json", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["identical"] is True
    assert [turn["pass"] for turn in answer["turns"]] == ["with"] * 4 + ["returned"] * 2 + [
        "damaged"
    ]
    assert answer["setting"]["model"] == "SmolLM2-135M-Instruct"
    first, *later = answer["turns"]
    assert first["computed_tokens"] == first["prompt_tokens"]
    for turn in later[:-1]:
        assert turn["computed_tokens"] < 0.1 * turn["prompt_tokens"], turn
    assert answer["after_restart"]["fetched"]["dram"] == 0
    assert answer["damage"]["recomputed_tokens"] > 0
    assert 0 < later[-1]["fetched"]["ssd"] < later[-2]["fetched"]["ssd"]
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert list(scratch.iterdir()) == []


def test_bench_store_answers_scripts(tmp_path: Path) -> None:
    done = kvdepot("bench", "store", "--quick", "--json", "--path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"rows", "machine"} <= answer.keys()
    assert list(tmp_path.iterdir()) == []
