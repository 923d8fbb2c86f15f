"""What `import kvdepot` offers."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvdepot
from kvdepot import errors

SRC = Path(kvdepot.__file__).parents[1]


def test_every_error_can_be_caught_by_its_name() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, kvdepot.KVDepotError)
    }
    assert found <= set(kvdepot.__all__) and found <= set(dir(kvdepot))
    for name in found:
        assert getattr(kvdepot, name) is getattr(errors, name)


def test_every_public_name_is_there() -> None:
    for name in kvdepot.__all__:
        assert getattr(kvdepot, name) is not None


def test_a_store_tells_what_it_is(tmp_path: Path) -> None:
    ssd = {"path": tmp_path / "kv", "capacity": "16MiB"}
    store = kvdepot.open(dram="2MiB", ssd=ssd)
    assert repr(store) == "<kvdepot.Store, dram 2MiB, ssd 16MiB: 0 blocks>"
    store.close()
    assert repr(store) == "<kvdepot.Store, closed>"


@pytest.mark.slow
def test_type_checkers_find_a_name_that_is_not_there(tmp_path: Path) -> None:
    code = tmp_path / "typo.py"
    code.write_text("import kvdepot\nkvdepot.opne()\nkvdepot.open()\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(code)]
    command += ["--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"MYPYPATH": str(SRC)}, timeout=300
    )
    assert 'Module has no attribute "opne"' in done.stdout
    assert "Found 1 error" in done.stdout
