"""docs/nodes.md, typed as printed: a decode process gets what a prefill process commits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvdepot

pytest.importorskip("obstore", reason="the extra s3 is not installed")
DOCUMENT = Path(__file__).parents[2] / "docs" / "nodes.md"
SOURCES = Path(kvdepot.__file__).parents[1]
WAIT_S = 300.0


@pytest.mark.slow
def test_two_processes_over_one_folder(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    settings = (
        '[dram]\ncapacity = "16MiB"\nprefault = false\n'
        f'[object]\nurl = "file://{tmp_path}/shared"\ncapacity = "64MiB"\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    started = []
    for name, program in zip(("prefill", "decode"), programs, strict=True):
        (tmp_path / f"{name}.py").write_text(program)
        (tmp_path / f"{name}.toml").write_text(settings)
        command = [sys.executable, f"{name}.py", f"{name}.toml"]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=WAIT_S)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[1] == "10 of 10 blocks came from the other machine\n"
