"""What the documents tell people to type works, and what they link to exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.cli.main import COMMANDS, UsageError, build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`((?:src/kvdepot/)?[a-z_]+/[a-z_/]+\.py)[:`]")
VAGUE = re.compile(r"(?<!\")\b(?:somebody|nobody|whoever|anybody|everybody|someone|anyone)\b", re.I)
INLINE = re.compile(r"(?<!`)`kvdepot ([^`]+)`")
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


def typed_commands(text: str) -> Iterator[list[str]]:
    """The words of each `kvdepot …` in fenced text, as a reader would type it."""
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(\$|sudo(?: -u \w+)?) ", "", line.strip())
            if re.match(r"(\S*/)?kvdepot \S", line):
                words = shlex.split(line, comments=True)
                ends = [at for at, word in enumerate(words) if re.match(r"[|>&]|2>", word)]
                yield words[1 : min(ends, default=len(words))]


def inline_commands(text: str) -> Iterator[list[str]]:
    """The words of each `kvdepot …` within a sentence that has an option or a place to name."""
    for command in INLINE.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        words = shlex.split(command.partition(" >")[0])
        if not re.search(r"[…|[]", command) and words[0] in COMMANDS and words[1:]:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_typed_as_printed(page: Path) -> None:
    """Within a sentence what a command needs may be left out: it is named there, not typed."""
    text = page.read_text()
    typed = list(typed_commands(text))
    for words in (*typed, *inline_commands(text)):
        try:
            build_parser({words[0]})[0].parse_args(words)
        except UsageError as error:
            if words not in typed and re.search(r" (?:are|is) required|expected one", str(error)):
                continue
            raise AssertionError(f"kvdepot {shlex.join(words)}: {error}") from error
        except SystemExit as end:  # --help, --version
            assert end.code == 0, words


def test_a_command_that_cannot_be_typed_is_noticed() -> None:
    page = "```\n$ kvdepot sim --trace a \\\n  --bogus > x  # no\n```\n"
    (words,) = typed_commands(page)
    assert words == ["sim", "--trace", "a", "--bogus"]


def test_commands_within_sentences_are_found() -> None:
    page = "Say `kvdepot tiers list --json`, `kvdepot stats`, `kvdepot bench …`.\n"
    page += "```\n`kvdepot top --x`\n```\n"
    assert list(inline_commands(page)) == [["tiers", "list", "--json"]]


def test_messages_in_the_troubleshooting_tables_are_ours() -> None:
    """What on-call staff compare with what they see is what the program says."""
    page = (ROOT / "docs" / "troubleshoot.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    first_cells = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    messages = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 8
    for message in messages:
        for part in filter(None, map(str.strip, message.split("…"))):
            assert part in source, part
