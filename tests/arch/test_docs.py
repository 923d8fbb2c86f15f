"""What the documents tell people to type works, and what they link to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`((?:src/kvdepot/)?[a-z_]+/[a-z_/]+\.py)[:`]")
VAGUE = re.compile(r"(?<!\")\b(?:somebody|nobody|whoever|anybody|everybody|someone|anyone)\b", re.I)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_examples_run(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    examples = PYTHON.findall((ROOT / page).read_text())
    assert examples
    for code in examples:
        promised = re.findall(r"print\(.*\)\s+# (.*)", code)
        exec(compile(code, page, "exec"), {})
        printed = capsys.readouterr().out.splitlines()
        assert printed == promised


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{target} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_keep_nothing_where_all_users_may_write(page: Path) -> None:
    assert re.findall(r"(?<![\w/])(?:/var)?/tmp/\S*", page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_it_names_exist(page: Path) -> None:
    for name in FILE.findall(page.read_text()):
        places = (ROOT / name, ROOT / "src" / "kvdepot" / name)
        assert any(place.is_file() for place in places), f"{name} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_actors_are_named(page: Path) -> None:
    assert VAGUE.findall(page.read_text()) == []
