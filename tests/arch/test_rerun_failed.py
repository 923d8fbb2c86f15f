"""CI forgives a test that fails once and passes alone; wrong blocks, hangs and crashes it does not.

Each test here runs tests/support/rerun_failed.py on a small project of its own.
"""

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.failure_report import kind_of_error
from tests.support.failures import DataError, HangError

ROOT = Path(__file__).parents[2]
CONFTEST = """
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--seed", type=int, default=7)

    @pytest.fixture
    def seed(request):
        chosen = request.config.getoption("--seed")
        print(f"seed {chosen}; replay with: …")
        return chosen

    @pytest.fixture
    def first(request):
        mark = request.path.with_name(f"{request.node.name}.ran")
        is_first = not mark.exists()
        mark.touch()
        return is_first
"""


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    listed: list[list[str]]
    """The lines that were added to the list of unsteady tests, split at the tabs."""
    counts: str


def run_in_ci(folder: Path, tests: str, *options: str, known: str = "") -> Ended:
    """`known`: what the list of unsteady tests has already."""
    (folder / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    head = "import os, signal, subprocess, threading\nfrom tests.support.failures import *\n"
    (folder / "test_some.py").write_text(head + textwrap.dedent(tests))
    (folder / "pytest.ini").write_text("[pytest]\n")
    listed, counts = folder / "unsteady.txt", folder / "counts.txt"
    listed.write_text(known)
    command = [sys.executable, "-m", "tests.support.rerun_failed", "--name", "some tests"]
    command += ["--tests", "test_some.py", "--list", str(listed), "--counts", str(counts)]
    ended = subprocess.run(
        [*command, "--", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line.split("\t") for line in listed.read_text().splitlines()]
    return Ended(ended.returncode, ended.stdout, lines, counts.read_text())


def test_a_test_that_fails_once_is_forgiven_and_listed(tmp_path: Path) -> None:
    ended = run_in_ci(
        tmp_path,
        """
        def test_once(first, seed):
            print("seed in use:", seed)
            assert not first, "the first time"

        def test_good():
            pass
        """,
        *("-n", "2", "--seed", "23"),
    )
    assert ended.status == 0, ended.output
    ((name, date, line),) = ended.listed
    assert (name, line) == ("test_some.py::test_once", "AssertionError: the first time")
    assert len(date.split("-")) == 3
    assert "unsteady: test_some.py::test_once (seed 23)" in ended.output
    shown = ended.output.partition("its first failure:")[2]
    assert 'assert not first, "the first time"' in shown
    assert ended.counts == "some tests: 1 failed, 1 passed, 1 unsteady\n"


def test_a_test_that_is_listed_already_is_not_listed_twice(tmp_path: Path) -> None:
    known = "test_some.py::test_once\t2026-11-01\tAssertionError\n"
    ended = run_in_ci(tmp_path, "def test_once(first):\n    assert not first\n", known=known)
    assert ended.status == 0
    assert len(ended.listed) == 1
    assert "already in" in ended.output


def test_the_seed_of_the_failure_is_used_again(tmp_path: Path) -> None:
    ended = run_in_ci(
        tmp_path,
        """
        import pytest, random

        @pytest.fixture
        def seed(request):
            given = request.config.getoption("--seed")
            chosen = 1000 + os.getpid() if given == 7 else given
            print(f"seed {chosen}; replay with: …")
            return chosen

        def test_once(first, seed, tmp_path_factory):
            kept = __file__ + ".seed"
            if first:
                open(kept, "w").write(str(seed))
            assert not first
            assert open(kept).read() == str(seed)
        """,
    )
    assert ended.status == 0, ended.output


NEVER_FORGIVEN = """
    def eventually(true):
        return true

    def test_data(first):
        check_data(not first, "lost")

    def test_bytes(first):
        assert b"wrong" * first == b""

    def test_keys(first):
        assert {b"key"} <= ({b"other"} if first else {b"key"})

    def test_child(first):
        script = "from tests.support.failures import *; check_data(False, 'lost')" * first
        ended = subprocess.run(["python3", "-c", script], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr

    def test_hang(first):
        if first:
            raise HangError("it never happened")

    def test_eventually(first):
        assert eventually(not first)

    def test_crash(first):
        if first:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_timeout(first):
        if first:
            threading.Event().wait()
"""


def test_what_is_never_forgiven(tmp_path: Path) -> None:
    ended = run_in_ci(tmp_path, NEVER_FORGIVEN, "-n", "2", "--timeout=2", "--timeout-method=thread")
    assert ended.status == 1, ended.output
    refused = re.findall(r"^not forgiven: test_some.py::test_(\w+): (.*)$", ended.output, re.M)
    block, process = "a wrong, lost or returned block", "a crash or a timeout of the test's process"
    assert dict(refused) == {
        **dict.fromkeys(("data", "bytes", "keys", "child"), block),
        **dict.fromkeys(("hang", "eventually"), "a hang"),
        **dict.fromkeys(("crash", "timeout"), process),
    }
    assert "not forgiven: 8 tests failed, more than 3" in ended.output
    assert ended.listed == []


@pytest.mark.parametrize(
    ("line", "refusal"),
    [("check_data(not first, 'lost')", "a wrong, lost or returned block"), ("assert 0", "twice")],
)
def test_one_that_is_not_forgiven_is_enough(line: str, refusal: str, tmp_path: Path) -> None:
    ended = run_in_ci(tmp_path, f"def test_it(first):\n    {line}")
    assert ended.status == 1, ended.output
    (said,) = (line for line in ended.output.splitlines() if line.startswith("not forgiven"))
    assert refusal in said
    assert ended.listed == []


@pytest.mark.parametrize("end", ["threading.Event().wait()", "signal.raise_signal(11)"])
def test_a_run_that_does_not_come_to_its_end_fails(end: str, tmp_path: Path) -> None:
    """Without xdist a timeout or a crash ends pytest itself."""
    tests = f"def test_it(first):\n    if first:\n        {end}\n"
    ended = run_in_ci(tmp_path, tests, "--timeout=2", "--timeout-method=thread")
    assert ended.status != 0
    assert ended.listed == []


def test_an_error_of_collection_fails(tmp_path: Path) -> None:
    ended = run_in_ci(tmp_path, "def test_it():\n    pass\nraise OSError(7)\n", "-n", "2")
    assert ended.status != 0


def test_a_part_without_tests_fails(tmp_path: Path) -> None:
    assert run_in_ci(tmp_path, "").status != 0


def test_the_worst_kind_counts() -> None:
    hang = HangError("while it was looked for")
    hang.__context__ = DataError("lost")
    assert kind_of_error(hang) == "data"
    group = ExceptionGroup("both", [ValueError(1), subprocess.CalledProcessError(-11, "a")])
    assert kind_of_error(group) == "crash"
    assert kind_of_error(ValueError(1)) == "ordinary"


def test_the_list_names_tests_that_exist() -> None:
    """A test is in the file that the list names, or in a suite that the file inherits."""
    suites = "".join(path.read_text() for path in (ROOT / "src/kvdepot/testing").glob("*.py"))
    for line in (ROOT / "tests/unsteady.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, _ = line.split("\t")
            path, *parts = name.partition("[")[0].split("::")
            text = suites + (ROOT / path).read_text()
            assert f"def {parts[-1]}(" in text, f"delete the line of {name}"
