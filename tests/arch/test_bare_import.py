"""The package needs numpy and the standard library, and nothing else."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

REFUSE_THIRD_PARTIES = """
import importlib, sys
sys.path.insert(0, {src!r})
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {{"kvdepot", "numpy"}}:
            raise ModuleNotFoundError(f"{{name}} is neither numpy nor standard library", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run_bare(code: str) -> subprocess.CompletedProcess[str]:
    script = REFUSE_THIRD_PARTIES.format(src=str(SRC)) + code
    command = [sys.executable, "-I", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def shipped_modules() -> list[str]:
    """Every module but the test kit, which needs pytest, the adapters, which need engines, and
    the daemon's HTTP and the events, which need extras.
    """
    paths = [path.relative_to(SRC).with_suffix("") for path in SRC.rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    names -= {f"kvdepot.store.announce.{name}" for name in ("announcer", "publisher")}
    left_out = ("kvdepot.testing", "kvdepot.adapters.", "kvdepot.__main__", "kvdepot.daemon.http.")
    return sorted(name for name in names if not name.startswith(left_out))


def test_every_module_imports_with_numpy_alone() -> None:
    modules = shipped_modules()
    assert "kvdepot.cli.main" in modules
    code = f"for name in {modules!r}:\n    importlib.import_module(name)\n"
    result = run_bare(code)
    assert result.returncode == 0, result.stderr


def test_the_refusal_works() -> None:
    result = run_bare("import pytest\n")
    assert result.returncode != 0
    assert "neither numpy nor standard library" in result.stderr


def test_help_does_not_load_numpy() -> None:
    code = (
        "from kvdepot.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'numpy' not in sys.modules, 'make the import lazy'\n"
    )
    result = run_bare(code)
    assert result.returncode == 0, result.stderr
    assert "doctor" in result.stdout


def test_metrics_without_their_extra_name_it_and_stats_do_not_need_it() -> None:
    code = (
        "import kvdepot\n"
        "from kvdepot.store.metrics import values\n"
        "with kvdepot.open(dram={'capacity': '2MiB', 'prefault': False}) as store:\n"
        "    assert values(store.stats())['kvdepot_blocks'] == 0\n"
        "    try:\n        kvdepot.metrics(store)\n"
        "    except kvdepot.ExtraMissingError as error:\n        print(error.hint)\n"
    )
    result = run_bare(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "pip install 'kvdepot[http]'\n"


def test_http_without_its_extra_names_it(tmp_path: Path) -> None:
    given = ["serve", "--socket", str(tmp_path / "s"), "--set", "dram=2MiB"]
    code = (
        "from kvdepot.cli.main import main\n"
        f"raise SystemExit(main({[*given, '--http', '127.0.0.1:0']!r}))\n"
    )
    result = run_bare(code)
    assert result.returncode == 2
    assert "hint: pip install 'kvdepot[http]'" in result.stderr


def test_the_proxy_without_its_extra_names_it(tmp_path: Path) -> None:
    given = ["proxy", "llama-server", "--slots", str(tmp_path / "slots")]
    result = run_bare(f"from kvdepot.cli.main import main\nraise SystemExit(main({given!r}))\n")
    assert result.returncode == 2
    assert "error: h11 is not installed" in result.stderr
    assert "hint: pip install 'kvdepot[llama]'" in result.stderr
    assert not (tmp_path / "slots").exists()
