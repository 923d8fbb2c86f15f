"""The experiments in `benchmarks/`, as a person runs them, with small sizes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def play(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the page that a script writes; its scratch directory is empty afterwards."""
    page, scratch = folder / "page.html", folder / "scratch"
    scratch.mkdir()
    arguments = ["--quick", "--json", "--path", str(scratch), "--html", str(page)]
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    assert list(scratch.iterdir()) == []
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer, page.read_text()


@pytest.mark.slow
def test_modes_are_compared_on_the_same_requests(
    tmp_path: Path,
) -> None:
    answer, page = play("modes", tmp_path)
    assert answer["emulated"] is True
    cells = {(cell["mode"], cell["order"]): cell for cell in answer["cells"]}
    orders = {"default", "lru", "fifo", "lfu", "s3fifo"}
    modes = {mode["name"] for mode in answer["modes"]}
    assert cells.keys() == {(mode, order) for mode in modes for order in orders}
    for (mode, _), cell in cells.items():
        assert 0 < cell["hits"]["dram"] < cell["hit_ratio"] <= 1
        few = cell["ssd_written_bytes"] < 32 << 10  # notes, no block
        assert few == (mode == "pass-through")
        assert cell["ttft_s"] > 0
    for order in orders:
        written = {mode: cells[mode, order]["ssd_written_bytes"] for mode in modes}
        assert written["selective"] < written["write-back"]
    assert len(answer["figures"]) == 4 * 4
    assert "<svg" in page and "emulated" in page


@pytest.mark.slow
def test_hybrid_says_that_its_drives_are_emulated(
    tmp_path: Path,
) -> None:
    answer, page = play("hybrid", tmp_path)
    assert answer["emulated"] is True
    assert answer["gap_by_turns"].keys() == {"1", "2", "5"}
    assert answer["gap_by_turns"]["5"] < 0.5 * answer["gap_by_turns"]["1"]
    assert answer["drive_scaling"].keys() == {"4", "8", "12"}
    assert answer["arrival_order_ratio"] < answer["sequential_ratio"] <= 1.0
    assert answer["retained_ratio"] > 5
    assert "<svg" in page and "emulated" in page


@pytest.mark.slow
def test_scale_reports_every_promise(tmp_path: Path) -> None:
    small = ["--path", str(tmp_path), "--blocks", "2000", "--rounds", "1"]
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "--json", *small]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    assert list(tmp_path.iterdir()) == []
    found = [figure["what"] for figure in json.loads(done.stdout)["figures"]]
    for what in ("index", "reopen after a kill", "reopen after a clean stop", "eviction from disk"):
        assert any(text.startswith(what) for text in found), what


@pytest.mark.slow
def test_routing_by_what_nodes_have_computes_less_than_at_random() -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("uvicorn")
    small = ["--sessions", "6", "--turns", "4", "--json"]
    command = [sys.executable, str(BENCHMARKS / "routed_nodes.py"), *small]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    arms = {row["arm"]: row for row in json.loads(done.stdout)["arms"]}
    assert {row["tokens"] for row in arms.values()} == {arms["random"]["tokens"]}
    assert arms["prefix"]["computed_tokens"] < arms["random"]["computed_tokens"]
    assert not any(row["wrong_bytes"] for row in arms.values())


@pytest.mark.slow
def test_every_figure_of_the_hybrid_paper_has_a_row() -> None:
    command = [sys.executable, str(BENCHMARKS / "hybrid_paper.py"), "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["rows"]
    assert {row["figure"] for row in rows} == {str(number) for number in range(12, 23)}
    assert all(row["why"] for row in rows if row["fits"] == "no"), "what does not fit says why"
