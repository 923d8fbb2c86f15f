"""docs/plugins.md, typed as printed, ends with blocks on a medium of somebody else."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvdepot

DOCUMENT = Path(__file__).parents[2] / "docs" / "plugins.md"
SOURCES = Path(kvdepot.__file__).parents[1]
WAIT_S = 300.0
LINES_MAX = 90
EXAMPLES = """
from hypothesis import settings
settings.register_profile("few", max_examples=10, deadline=None)
settings.load_profile("few")
"""
"""It is the document that is tested; the contract's own tests have more."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder on the path with the document's package, as pip would leave it."""
    volume, contract, program = blocks("python")
    (tmp_path / "kvdepot_folder.py").write_text(volume)
    (tmp_path / "test_folder.py").write_text(contract)
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "conftest.py").write_text(EXAMPLES)
    project = tomllib.loads(blocks("toml")[0])["project"]
    info = tmp_path / "kvdepot_folder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def run(folder: Path, *command: str) -> str:
    env = {**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_is_short_and_typed(package: Path) -> None:
    assert len((package / "kvdepot_folder.py").read_text().splitlines()) <= LINES_MAX
    run(package, "-m", "mypy", "--strict", "kvdepot_folder.py", "test_folder.py")


@pytest.mark.slow
def test_the_volume_passes_the_contract(package: Path) -> None:
    assert " passed" in run(
        package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_folder.py"
    )


def test_the_program_ends_with_blocks_in_the_volume(package: Path) -> None:
    (expected,) = blocks("text")
    assert run(package, "program.py") == expected
    assert len(list((package / "blocks").glob("record-*.value"))) == 3
