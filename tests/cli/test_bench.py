"""`kvdepot bench` with tiny sizes: the shape of its answer, and that it leaves nothing behind."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from kvdepot.bench import raw, rounds, store
from kvdepot.bench.store import DiskStore
from kvdepot.cli.main import main

ROW_KEYS = {
    "tier",
    "op",
    "block_bytes",
    "bytes_per_s",
    "limit_bytes_per_s",
    "ratio",
    "ratio_min",
    "ratio_max",
}
MACHINE_KEYS = {
    "cpu",
    "cores",
    "memory_bytes",
    "kernel",
    "python",
    "numpy",
    "native",
    "date",
    "path",
    "filesystem",
}
TIERS = {"io": {"ssd", "dram"}, "store": {"ssd", "dram"}}
TINY = ["--rounds", "2", "--size", "4MiB", "--block", "128KiB"]


@pytest.fixture(autouse=True)
def small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "INDEXES", (1000, 2000))


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_rows_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {what: run_json(capsys, what, "--path", str(tmp_path), *TINY) for what in TIERS}
    assert list(tmp_path.iterdir()) == []
    for what, answer in answers.items():
        assert answer["machine"].keys() >= MACHINE_KEYS
        assert answer["machine"]["path"] == str(tmp_path)
        for row in answer["rows"]:
            assert row.keys() >= ROW_KEYS
            assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
            assert row["bytes_per_s"] > 0
            assert row["limit_bytes_per_s"] > 0
        assert {row["tier"] for row in answer["rows"]} == TIERS[what]
    answer = answers["store"]
    ops = {(row["tier"], row["op"]) for row in answer["rows"]}
    assert ops >= {("ssd", "put"), ("ssd", "get"), ("dram", "put_many"), ("dram", "get")}
    bars = {row["op"]: row["bar"] for row in answer["rows"] if row["tier"] == "ssd"}
    assert bars["get"] == 0.75
    (growth,) = answer["figures"]
    assert (growth["what"], growth["bar"]) == ("match+lease speed, 2000 blocks of few", 0.9)
    assert {latency["op"] for latency in answer["latencies"]} >= {
        "match+lease 512 blocks",
        "keys of 131072 tokens",
    }


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "io", "--path", str(tmp_path), *TINY]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tier")
    assert "bars met" in shown


@pytest.mark.parametrize("arguments", [[], ["--strict"]])
def test_only_strict_fails_on_a_missed_bar(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missed = rounds.Latency("match", 1, p50_us=2.0, p99_us=2.0, calls=1, bar_us=1.0)
    monkeypatch.setattr(store, "parts", lambda *_: [rounds.BenchPart("x", lambda: [missed])])
    status = main(["bench", "store", "--path", str(tmp_path), *arguments])
    assert status == (1 if arguments else 0)
    assert "MISSED" in capsys.readouterr().out


def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: DiskStore) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(DiskStore, "get_set", interrupted)
    assert main(["bench", "store", "--path", str(tmp_path), *TINY]) == 130
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_ratios_are_taken_round_by_round() -> None:
    limits = iter([1.0, 1.0, 2.0, 4.0])
    own = iter([9.0, 2.0, 4.0, 4.0])
    speeds = rounds.compare({"a": lambda: next(limits)}, {"s": lambda: next(own)}, 3)
    row = speeds["s"].row("ssd", "get", 4096, nbytes=8, bar=0.6)
    assert (row.ratio_min, row.ratio, row.ratio_max) == (0.5, 0.5, 1.0)
    assert (row.bytes_per_s, row.limit_bytes_per_s) == (2.0, 4.0)
    assert not row.ok


def test_limit_is_the_way_with_the_best_median() -> None:
    lucky = iter([9.0, 0.1, 9.0])
    assert rounds.fastest({"lucky": lambda: next(lucky), "steady": lambda: 1.0}) == "steady"


def test_a_copy_owns_the_memory_it_works_in() -> None:
    works = raw.memory_copies(
        raw.pieces(raw.filled(16 << 20), 1 << 20), raw.pieces(raw.filled(16 << 20), 1 << 20)
    )
    gc.collect()
    for name in list(works):
        assert works.pop(name)() > 0  # with freed memory this ends the process


def test_folders_are_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "a" / "b"
    assert main(["bench", "io", "--path", str(absent)]) == 2
    said = capsys.readouterr().err
    assert f"error: --path: {absent} does not exist\nhint: mkdir -p {absent}\n" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_object_rows_over_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    folder = tmp_path / "shared"
    answer = run_json(capsys, "object", "--url", f"file://{folder}", *TINY)
    assert {(row["tier"], row["op"]) for row in answer["rows"]} == {
        ("object", "put"),
        ("object", "get"),
    }
    for row in answer["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["bytes_per_s"] > 0
    prompt, first, again = (figure["value"] for figure in answer["figures"])
    assert prompt > 0 and first <= 8 and again == 0
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_object_of_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    asked = ["--url", "s3://none/x", "--set", "object.endpoint=http://127.0.0.1:9"]
    asked += ["--set", "object.region=r"]
    assert main(["bench", "object", *asked, *TINY]) == 2
    said = capsys.readouterr().err
    assert "error: object.url" in said and "hint: " in said


def test_object_needs_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "object", "--url", "bucket/prefix", *TINY]) != 0
    assert "object.url" in capsys.readouterr().err
