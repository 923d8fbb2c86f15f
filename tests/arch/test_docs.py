"""What the documents tell people to type works, and what they link to exists."""

import re
import shlex
from pathlib import Path

import pytest
from tests.support.documents import PAGES, ROOT, inline_commands, typed_commands

from kvdepot.cli.main import UsageError, build_parser

FILE = re.compile(r"`((?:src/kvdepot/)?[a-z_]+/[a-z_/]+\.py)[:`]")
VAGUE = re.compile(r"(?<!\")\b(?:somebody|nobody|whoever|anybody|everybody|someone|anyone)\b", re.I)
WORD_ROW = re.compile(r"^\| (?!word \|)([^|`]+) \| ", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_typed_as_printed(page: Path) -> None:
    """Within a sentence what a command needs may be left out: it is named there, not typed."""
    text = page.read_text()
    typed = list(typed_commands(text))
    for words in (*typed, *inline_commands(text)):
        try:
            build_parser({words[0]}).parse_args(words)
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


def words_of(glossary: str) -> list[str]:
    """The words that the glossary defines; a row may define several, separated by commas."""
    rows = WORD_ROW.findall(glossary)
    return [word.strip() for row in rows for word in row.split(",")]


def test_words_of_the_glossary_are_used_in_the_source() -> None:
    """In code, comments or messages. `write back` is also write_back, write-back and WriteBack."""
    paths = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".c", ".h")]
    source = plain_words("".join(path.read_text() for path in paths))
    words = words_of((ROOT / "docs" / "glossary.md").read_text())
    assert len(words) > 60
    assert [word for word in words if f" {plain_words(word)}" not in source] == []


def plain_words(text: str) -> str:
    """Lower-case words with one space between them; the parts of names are words."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", text)
    return re.sub(r" +", " ", apart).lower().strip()


def test_words_of_a_glossary_are_found() -> None:
    text = "| word | meaning |\n|---|---|\n| head, tail | the first, the last |\n| KV cache | a |\n"
    assert words_of(text) == ["head", "tail", "KV cache"]
