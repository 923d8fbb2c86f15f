"""`kvdepot torture`: what it prints, what it leaves behind, and how it exits."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvdepot.cli import torture as command
from kvdepot.cli.main import main
from kvdepot.testing.torture.rounds import KINDS, Kind, RoundOutcome

Seen = pytest.CaptureFixture[str]
LAST = [
    "ok", "cuts", "kills", "damages", "nodes", "clients", "seaweedfs", "wrong", "foreign", "lost",
    "back", "late_calls", "leaked_fds",
]  # fmt: skip


def lost_two(
    folder: Path, seed: int, kinds: Sequence[Kind], *, more: Callable[[int], bool], **_: Any
) -> Iterator[RoundOutcome]:
    """The second round of three loses blocks."""
    assert [more(begun) for begun in range(4)] == [True, True, True, False]
    assert os.stat(folder).st_mode & 0o777 == 0o700
    (folder / "something").touch()
    yield RoundOutcome("kills", seed, 10)
    yield RoundOutcome(
        "kills", seed + 1, 7, "dram", Counter(lost=2), ["lost: block 1", "lost: block 2"]
    )
    yield RoundOutcome("damages", seed + 2, 150)


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "torture", lost_two)


@pytest.mark.usefixtures("losing")
def test_a_broken_promise_is_counted_and_told_how_to_repeat(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "new"
    assert main(["torture", str(path), "--seed", "5", "--rounds", "3", "--json"]) == 1
    seen = json.loads(capsys.readouterr().out)
    assert list(seen)[-len(LAST) :] == LAST
    assert (seen["ok"], seen["kills"], seen["damages"], seen["lost"]) == (False, 17, 150, 2)
    (failed,) = seen["failed"]
    again = f"kvdepot torture {path} --seed 6 --rounds 1 --only kills --keep"
    assert failed["again"] == again
    assert not path.exists()


@pytest.mark.usefixtures("losing")
def test_the_table(tmp_path: Path, capsys: Seen) -> None:
    assert main(["torture", str(tmp_path), "--seed", "5", "--rounds", "3"]) == 1
    seen = capsys.readouterr()
    assert "1 rounds failed" in seen.out
    assert "--seed 6 --rounds 1 --only kills" in seen.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: Seen) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["torture", str(tmp_path), "--rounds", "1"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.crash
def test_a_share_of_all_kinds(tmp_path: Path, seed: int) -> None:
    """In a process of its own: a fork of this one has what other tests have left open."""
    rounds = str(2 * len(KINDS))  # they take turns; the time only ends a hang
    command = [sys.executable, "-m", "kvdepot", "torture", str(tmp_path), "--seed", str(seed)]
    command += ["--for", "10m", "--rounds", rounds, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seen = json.loads(done.stdout)
    assert done.returncode == 0, seen["failed"]
    assert all(seen[kind] > 0 for kind in KINDS)
    assert list(tmp_path.iterdir()) == []
