"""The demo and the installed command, as a newcomer runs them."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

KVDEPOT = Path(sys.executable).with_name("kvdepot")
DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
LIMIT_S = 800


@pytest.mark.e2e
@pytest.mark.crash
def test_a_real_model_answers_the_same_with_and_without(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO, "--json", "--path", tmp_path],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    turns = result["turns"]
    parts = [turn["part"] for turn in turns]
    assert parts == ["with"] * 4 + ["restarted"] * 2 + ["damaged"]
    for turn in turns:
        assert turn["without"]["ids"] == turn["with_depot"]["ids"]
        assert turn["without"]["fetched"] == {}
    first, *later, damaged = (turn["with_depot"] for turn in turns)
    assert first["fetched"] == {}
    for answer in later:
        assert sum(answer["fetched"].values()) > 0.9 * answer["prompt_tokens"], answer
    restarted = later[-2]
    assert set(restarted["fetched"]) == {"ssd"}, "the memory of a killed process is gone"
    assert 0 < damaged["fetched"]["ssd"] < restarted["fetched"]["ssd"]
    assert result["recomputed_tokens"] == restarted["fetched"]["ssd"] - damaged["fetched"]["ssd"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_turns(demo: ModuleType) -> list[Any]:
    alone = demo.Answer(1000, [1, 2], "text", 2.0)
    sound = demo.Answer(1000, [1, 2], "text", 0.5, {"ssd": 900})
    damaged = demo.Answer(1000, [1, 2], "text", 1.0, {"ssd": 300})
    return [
        demo.Turn("with", "Ada", "one?", alone, alone),
        demo.Turn("restarted", "Ada", "two?", alone, sound),
        demo.Turn("damaged", "Ada", "two?", alone, damaged),
    ]


def test_demo_reports_an_answer_that_differs(demo: ModuleType) -> None:
    turns = make_turns(demo)
    assert demo.document(turns)["identical"] is True
    assert "All 3 answers are the same" in demo.summary(turns)
    other = replace(turns[1].with_depot, ids=[1, 3])
    turns[1] = replace(turns[1], with_depot=other)
    assert demo.document(turns)["identical"] is False
    said = demo.summary(turns)
    assert "Ada got another answer to: two?" in said
    assert "1 of 3 answers differ" in said


def test_demo_counts_what_the_damage_cost(demo: ModuleType) -> None:
    assert demo.recomputed_tokens(make_turns(demo)) == 600


def test_demo_flips_one_bit(demo: ModuleType, tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"segment-00000{number}.kvs").write_bytes(bytes(100))
    assert demo.flip_bit(tmp_path, 130) == "segment-000001.kvs"
    assert (tmp_path / "segment-000000.kvs").read_bytes() == bytes(100)
    assert (tmp_path / "segment-000001.kvs").read_bytes() == bytes(30) + b"\1" + bytes(69)


@pytest.mark.e2e
def test_bench_store_answers_scripts(tmp_path: Path) -> None:
    done = subprocess.run(
        [KVDEPOT, "bench", "store", "--quick", "--json", "--path", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"rows", "machine"} <= answer.keys()
    assert list(tmp_path.iterdir()) == []
