"""CI fails where it cannot do what it says, and what is left out says how to run it."""

import re
from pathlib import Path

import pytest
from tests.support.order_of_tests import longest_first

ROOT = Path(__file__).resolve().parents[2]


def test_no_step_of_ci_may_be_left_out() -> None:
    script = (ROOT / "dev").read_text()
    ci = script[script.index("\nci() {") : script.index("\n}", script.index("\nci() {"))]
    steps = re.findall(r'^ *part "(?:.*\\\n)*.*$', ci, re.MULTILINE)
    assert any("vllm_connector.py" in step for step in steps)
    for step in steps:
        assert "optional" not in step and "||" not in step, step
    assert re.search(r'part\(\) { step "\$@" \|\| failed\+=\("\$1"\); }', ci)
    assert re.search(r'\$\{#failed\[@\]\}" -ne 0 .*?return 1', ci, re.DOTALL)
    assert "SKIPPED" not in (ROOT / "tests/e2e/vllm_connector.py").read_text()


def test_what_needs_a_device_says_how_to_run_it() -> None:
    reasons = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__) and "pytest.mark.gpu" in text:
            reasons += re.findall(r'"no CUDA device[^"]*"', text) or [f"none in {path}"]
    assert reasons
    assert all("python -m pytest" in reason for reason in reasons), reasons


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_each_process_begins_with_tests_that_take_long(processes: int) -> None:
    tests = list(range(30))
    order = longest_first(tests, lambda number: number >= 25, processes)
    assert sorted(order) == tests
    assert [number for number in order if number < 25] == tests[:25]
    left, starts = len(order), []
    for number in range(processes):  # xdist's worksteal
        starts.append(len(order) - left)
        left -= left // (processes - number)
    begins = [order[start] for start in starts if start < len(order)]
    assert sum(number >= 25 for number in begins) == min(processes, 5)


def test_the_workflow_runs_what_ci_runs() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["ci"]["steps"]]
    assert "sudo .ci/run" in commands


def test_the_hooks_before_a_commit_are_the_checks_of_dev() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"] for repository in config["repos"] for hook in repository["hooks"]}
    script = (ROOT / "dev").read_text()
    check = script[script.index("\ncheck() {") : script.index("\n}", script.index("\ncheck() {"))]
    assert hooks == set(re.findall(r'step "([a-z]+)"', check))
