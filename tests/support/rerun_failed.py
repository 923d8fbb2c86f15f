"""Runs pytest, and each test that failed once more, alone. CI runs the tests through this.

    python -m tests.support.rerun_failed --name "quick tests" [--tests PATH …] -- pytest's options

A test that passes the second time is unsteady: it is printed with its seed and the stack of its
first failure, and added to tests/unsteady.txt. The run then counts as passed. It fails if a test
fails twice, if more than UNSTEADY_MAX tests failed, if pytest did not come to its end, or if a
failure is a wrong, lost or returned block, a hang or a crash (tests/support/failure_report.py).
"""

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.failure_report import Failure, RunReport

UNSTEADY_MAX = 3
LIST = Path("tests/unsteady.txt")
PASSED, FAILED = 0, 1
NEVER_FORGIVEN = {
    "data": "a wrong, lost or returned block",
    "hang": "a hang",
    "crash": "a crash or a timeout of the test's process",
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True, help="what this part of CI is called")
    parser.add_argument("--tests", nargs="*", default=[], help="files or folders of tests")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of unsteady tests")
    parser.add_argument("--counts", type=Path, help="append a line with the counts to this file")
    parser.add_argument("options", nargs="*", help="options of pytest")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "failures.json")
        status = run_pytest([*given.options, *given.tests], path)
        report = RunReport.read(path) if path.exists() else None
    unsteady: list[Failure] = []
    if status == FAILED and report is not None and report.is_complete():
        unsteady = forgiven(report.failures, given.options)
        if unsteady:
            status = PASSED
            record(unsteady, given.list)
    counts = report.counts if report is not None else {}
    words = [f"{count} {name}" for name, count in counts.items()]
    words += [f"{len(unsteady)} unsteady"] if unsteady else []
    line = f"{given.name}: {', '.join(words) or 'no tests were counted'}"
    print(line, flush=True)
    if given.counts is not None:
        with given.counts.open("a") as file:
            file.write(f"{line}\n")
    return status


def run_pytest(arguments: Sequence[str], report: Path) -> int:
    """Returns pytest's exit status."""
    plugin = ["-p", "tests.support.failure_report", f"--failure-report={report}"]
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    return subprocess.run(command, check=False).returncode


def forgiven(failures: Sequence[Failure], options: Sequence[str]) -> list[Failure]:
    """Run each failed test again. Returns the first failure of each, or nothing if one counts."""
    for failure in failures:
        if failure.kind != "ordinary":
            print(f"not forgiven: {failure.test}: {NEVER_FORGIVEN[failure.kind]}", flush=True)
    first = {failure.test: failure for failure in reversed(failures)}
    if len(first) > UNSTEADY_MAX:
        print(f"not forgiven: {len(first)} tests failed, more than {UNSTEADY_MAX}", flush=True)
    if len(first) > UNSTEADY_MAX or any(failure.kind != "ordinary" for failure in failures):
        return []
    for failure in first.values():
        print(f"== once more, alone: {failure.test}", flush=True)
        if not passes_alone(failure, options):
            print(f"not forgiven: {failure.test} failed twice", flush=True)
            return []
    return list(first.values())


def passes_alone(failure: Failure, options: Sequence[str]) -> bool:
    """Whether the test passes in a process of its own, with the seed it failed with."""
    seed = [] if failure.seed is None else ["--seed", str(failure.seed)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "failures.json")
        status = run_pytest([*options, "-n", "0", *seed, failure.test], path)
        return status == PASSED and RunReport.read(path).counts.get("passed") == 1


def record(unsteady: Sequence[Failure], path: Path) -> None:
    """Print the unsteady tests and add those that are new to the list."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    known = path.read_text() if path.exists() else ""
    for failure in unsteady:
        seed = "no seed" if failure.seed is None else f"seed {failure.seed}"
        print(f"== unsteady: {failure.test} ({seed}); its first failure:\n{failure.text}")
        line = f"{failure.test}\t{today}\t{failure.line}\n"
        if f"\n{failure.test}\t" in f"\n{known}":
            print(f"already in {path}: {failure.test}")
            continue
        print(f"added to {path}; commit this line, then find out why:\n{line}", end="", flush=True)
        known += line
    path.write_text(known)


if __name__ == "__main__":
    sys.exit(main())
