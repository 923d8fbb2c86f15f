"""`kvdepot sim` as people and scripts use it."""

import json
from pathlib import Path

import pytest

from kvdepot.cli.main import main
from kvdepot.sim.hits_only import POLICIES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two users in turn; the second prompt of each continues the first."""
    prompts = [[0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_case_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "--trace", str(trace), "--capacity", "dram=1Mtok", "--policy", "lru"]
    assert main([*words, "--hits-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_hit_ratio"] == pytest.approx(8 / 14)
    assert found["token_hit_ratio_by_tier"] == {"dram": pytest.approx(8 / 14)}
    assert found["requests"] == 5


def test_all_policies_and_capacities_in_one_table(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.html"
    sizes = ["--capacity", "dram=2ktok", "--capacity", "dram=1Mtok"]
    words = ["sim", "--trace", str(trace), *sizes, "--policy", "all", "--report", str(plot)]
    assert main([*words, "--hits-only"]) == 0
    table = capsys.readouterr().out.partition("HITS BY CAPACITY\n")[2].splitlines()
    assert len(table) == 2 + 2 * len(POLICIES)
    page = plot.read_text()
    assert page.count('class="path ') == len(POLICIES), "a line between two points for each"
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "needs nothing else"


def test_two_tiers_are_told_apart(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "--trace", str(trace), "--capacity", "dram=2ktok,ssd=1Mtok"]
    assert main([*words, "--policy", "lru", "--hits-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tiers = found["token_hit_ratio_by_tier"]
    assert sum(tiers.values()) == pytest.approx(8 / 14)
    assert tiers["ssd"] > 0


def test_a_bad_line_stops_or_is_skipped(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + '{"timestamp": 9}\n')
    words = ["sim", "--trace", str(trace), "--capacity", "dram=1Mtok", "--hits-only", "--json"]
    assert main(words) == 2
    complaint = capsys.readouterr().err
    assert "line 6" in complaint and "--bad-lines skip" in complaint
    assert main([*words, "--bad-lines", "skip"]) == 0
    answer = capsys.readouterr()
    assert "line 6" in answer.err
    assert json.loads(answer.out)["requests"] == 5


def test_a_fleet_over_a_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["sim", "--trace", str(trace), "--model", "llama-3-8b", "--tiers", "dram=64GB,hdd=12"]
    assert main([*words, "--report", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 5
    assert found["ttft_s"]["mean"] <= found["ttft_s"]["p99"]
    assert set(found["token_hit_ratio_by_tier"]) == {"hbm", "dram", "hdd"}
    assert found["cost_per_million_tokens"] > 0
    text = page.read_text()
    assert "time to first token" in text and 'role="img"' in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "needs nothing else"


def test_a_run_stands_beside_one_without_kvdepot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["sim", "--workload", "multi-turn", "--users", "8", "--turns", "3"]
    words += ["--model", "llama-3-8b"]
    tiers = [*words, "--tiers", "dram=64GB"]
    assert main([*tiers, "--json", "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["baseline"] is None, "it is one"
    for name, value in found["baseline"].items():
        assert alone[name] == value, name
    assert found["baseline"]["token_hit_ratio"] <= found["token_hit_ratio"]
    assert "without kvdepot" in page.read_text()
    assert main(tiers) == 0
    assert "without kvdepot" in capsys.readouterr().out
    assert main([*tiers, "--no-baseline"]) == 0
    assert "without kvdepot" not in capsys.readouterr().out


def test_a_fleet_is_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "--workload", "multi-turn", "--users", "8", "--turns", "3"]
    words += ["--model", "llama-3-8b", "--nodes", "2", "--tiers", "ssd=1"]
    words += ["--set", "fleet.route=random", "--set", "traffic.poisson=true"]
    found = []
    for seed in ("3", "3", "4"):
        assert main([*words, "--seed", seed, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        for measured in ("elapsed_s", "block_events_per_s"):
            del document[measured]
        found.append(document)
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_prompts_longer_than_gpu_memory_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "traffic.history_tokens=600000", "--users", "2", "--turns", "2"]
    assert main(["sim", "--workload", "multi-turn", *words]) == 2
    said = capsys.readouterr().err
    assert "none of the 2 requests fits" in said or "none of the 4 requests fits" in said
    assert "hint: use more GPUs" in said


def test_an_overloaded_fleet_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    busy = ["sim", "--workload", "multi-turn", "--users", "20", "--turns", "2", "--qps", "1000"]
    assert main([*busy, "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "overloaded: the GPUs are busy" in note
    assert main(busy) == 0
    assert note in capsys.readouterr().err
    calm = ["--users", "2", "--turns", "2", "--qps", "0.01", "--json"]
    assert main(["sim", "--workload", "multi-turn", *calm]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_a_trace_in_which_nothing_returns_says_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text().splitlines()[0] + "\n")
    words = ["sim", "--trace", str(trace), "--capacity", "dram=1Mtok", "--hits-only"]
    assert main(words) == 0
    seen = capsys.readouterr()
    assert "no block of this trace is requested twice" in seen.err
    assert "1 request, 1,024 tokens, 2 blocks" in seen.out, "no plural"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"]
