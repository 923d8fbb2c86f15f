"""A pytest plugin that writes the failures of a run, each with its kind, into a JSON file.

    python -m pytest -p tests.support.failure_report --failure-report FILE …

The file is written at the end of the run. If pytest is killed, or ends before its summary, there is
no file.
"""

import json
import re
import subprocess
from collections.abc import Collection, Generator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.failures import DataError, HangError

Kind = Literal["ordinary", "data", "hang", "crash"]
KINDS: tuple[Kind, ...] = ("ordinary", "data", "hang", "crash")

BYTES = (bytes, bytearray, memoryview)
ELEMENTS_SEEN = 8
"""How many elements of a collection are looked at to see whether it holds keys or payloads."""
SEED = re.compile(r"^seed (\d+);", re.MULTILINE)
IN_TEXT: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("data", re.compile(r"\bDataError: ")),  # in the output of a child process
    ("hang", re.compile(r"where False = eventually\(|^(?:E +)?Failed: Timeout", re.MULTILINE)),
    ("crash", re.compile(r"Fatal Python error|Segmentation fault|core dumped")),
)
KIND = "kind of failure"
"""The property of a report that holds the kind."""
COUNTED = ("failed", "error", "passed", "skipped", "xfailed")


@dataclass(frozen=True, slots=True)
class Failure:
    """One phase (setup, call or teardown) of a test that failed."""

    test: str
    kind: Kind
    line: str
    """The first line of the error."""
    text: str
    """The stack of the failure and what the test printed."""
    seed: int | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """The failures and the counts of one run of pytest."""

    failures: list[Failure]
    counts: dict[str, int]

    def is_complete(self) -> bool:
        """Whether each failure that pytest counted is known; errors of collection are not."""
        return len(self.failures) == self.counts.get("failed", 0) + self.counts.get("error", 0)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "RunReport":
        tree = json.loads(path.read_text())
        return RunReport([Failure(**one) for one in tree["failures"]], tree["counts"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failure-report", type=Path, help="write failures to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(KindPlugin())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReportPlugin(config.getoption("--failure-report")))


class KindPlugin:
    """Adds the kind of the failure to each report, in the process that runs the test."""

    def __init__(self) -> None:
        self._bytes_differed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._bytes_differed = False

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """A failed comparison of bytes, or of collections of bytes, is one of blocks or keys."""
        if op in ("in", "not in"):
            self._bytes_differed |= _holds_bytes(right)
        else:
            self._bytes_differed |= any(
                isinstance(side, BYTES) or _holds_bytes(side) for side in (left, right)
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            kind = "data" if self._bytes_differed else kind_of_error(call.excinfo.value)
            report.user_properties.append((KIND, kind))
        return report


class ReportPlugin:
    """Collects the failures of all processes and writes them at the end of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: list[Failure] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        text = "\n".join([report.longreprtext, *(part for _, part in report.sections)])
        # The report of a test whose process died is made by xdist and has no kind.
        known = [kind for kind in KINDS if (KIND, kind) in report.user_properties]
        kind: Kind = known[0] if known else "crash"
        if kind == "ordinary":
            kind = next((kind for kind, words in IN_TEXT if words.search(text)), kind)
        seed = SEED.search(report.capstdout)
        self._failures.append(
            Failure(report.nodeid, kind, _first_line(report), text, int(seed[1]) if seed else None)
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        counts = {name: len(stats[name]) for name in COUNTED if stats.get(name)}
        RunReport(self._failures, counts).write(self._path)


def kind_of_error(error: BaseException) -> Kind:
    """The worst kind among an exception, its causes and the members of its groups."""
    seen: set[int] = set()
    waiting = [error]
    kinds: set[Kind] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, DataError):
            kinds.add("data")
        elif isinstance(one, HangError | TimeoutError | subprocess.TimeoutExpired):
            kinds.add("hang")
        elif isinstance(one, subprocess.CalledProcessError) and one.returncode < 0:
            kinds.add("crash")
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
    order: tuple[Kind, ...] = ("data", "crash", "hang")
    return next((kind for kind in order if kind in kinds), "ordinary")


def _holds_bytes(value: object) -> bool:
    if isinstance(value, (str, *BYTES)) or not isinstance(value, Collection):
        return False
    return any(isinstance(element, BYTES) for element in islice(value, ELEMENTS_SEEN))


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return str(text).strip().partition("\n")[0]
