"""A real vLLM with a real model: the same text cold, from memory, and from disk after kill -9."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

E2E = Path(__file__).with_name("e2e.py")
PYTHONS = (Path.home() / ".cache/kvdepot/vllm/bin/python", Path("/opt/vllm/bin/python"))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(
    not any(python.exists() for python in PYTHONS), reason="no vLLM here: tests/vllm/e2e.py"
)
def test_restarts(tmp_path: Path) -> None:
    command = [sys.executable, str(E2E), "--json", "--folder", str(tmp_path), "restarts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [point for point in seen["points"] if not point["ok"]] == []
    assert len(seen["points"]) == 7
